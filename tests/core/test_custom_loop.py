import gc
import multiprocessing
from functools import partial

import pytest
import torch
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Regression, adamw, data, fit, flat
from trainkit import Callback, Data, LRSchedule, UserError, session


def adamw_and_steps(task):
    optimizer = adamw(task)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def regression():
    return Regression(adamw_and_steps, hidden=8)


def trained_by_a_trainer():
    task = regression()
    settings = {"max_duration": "5step", "max_grad_norm": 0.5, "evaluate_every": None, "run_dir": "trainer"}
    fit("single", task, data(22, 7), **settings)
    return flat(task)


def train(strategy, *, steps=5, run_dir=None, resume=None):
    """A plain training loop."""
    task, losses = regression(), []
    settings = {"max_duration": f"{steps}step", "max_grad_norm": 0.5, "run_dir": run_dir, "resume": resume}
    with session(strategy, task, data(22, 7), **settings) as s:
        for batch in s.step_batches():
            outputs = s.step(batch)
            losses.append(s.mean(outputs)["loss"])
        metrics = s.evaluate()
        if run_dir is not None:
            s.save()
    return flat(task), losses, metrics


@pytest.fixture(autouse=True)
def in_a_private_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_plain_loop_over_a_session_gives_the_weights_of_the_trainer():
    found, losses, metrics = train(SingleStrategy())
    assert torch.equal(found, trained_by_a_trainer())
    assert len(losses) == 5
    assert set(metrics) == {"validation/loss", "validation/absolute"}


def test_a_plain_loop_under_ddp_gives_the_same_weights_and_means():
    alone, losses, metrics = train(SingleStrategy())
    strategy = DDPStrategy(devices=2)
    found, losses_of_two, metrics_of_two = strategy.launch(partial(train, strategy))
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-6)
    assert losses_of_two == pytest.approx(losses, abs=1e-6)
    assert metrics_of_two == pytest.approx(metrics, abs=1e-6)


def test_a_session_resumes_from_the_checkpoint_of_another(tmp_path):
    whole, _, _ = train(SingleStrategy(), steps=5)
    train(SingleStrategy(), steps=2, run_dir=tmp_path / "mine")
    found, losses, _ = train(SingleStrategy(), steps=5, resume=tmp_path / "mine")
    assert torch.equal(found, whole)
    assert len(losses) == 3


def test_a_session_leaves_no_folder_behind_that_was_not_asked_for(tmp_path):
    train(SingleStrategy())
    assert list(tmp_path.iterdir()) == []


def test_a_strategy_that_would_start_ranks_is_rejected_with_the_remedy():
    with (
        pytest.raises(UserError, match=r"strategy\.launch\(partial"),
        session(DDPStrategy(devices=2), regression(), data(22, 7)),
    ):
        pass


def test_a_step_batch_without_a_step_is_an_error():
    with session("single", regression(), data(22, 7)) as s, pytest.raises(UserError, match=r"call session\.step"):
        for _ in s.step_batches():
            pass


def test_saving_without_a_folder_is_an_error():
    with session("single", regression(), data(22, 7)) as s, pytest.raises(UserError, match="run_dir="):
        s.save()


class Noting(Callback):
    def __init__(self):
        self.moments = []

    def on_fit_start(self, run):
        self.moments.append("fit start")

    def on_epoch_start(self, run):
        self.moments.append("epoch start")

    def on_step_end(self, run):
        self.moments.append(f"step {run.state.step}")

    def on_epoch_end(self, run):
        self.moments.append(f"epoch end {run.state.epoch}")

    def on_fit_end(self, run):
        self.moments.append("fit end")

    def on_evaluation_start(self, run, stage):
        self.moments.append(f"start {stage}")

    def on_evaluation_end(self, run, stage, metrics):
        self.moments.append(f"end {stage} {len(metrics)}")


class WithCallback(Regression):
    def __init__(self):
        super().__init__(adamw_and_steps, hidden=8)
        self.noting = Noting()

    def configure_callbacks(self):
        return [self.noting]


class OnPlateau(WithCallback):
    """Halves the learning rate after a validation that does not improve on the best one."""

    def validation_step(self, batch):
        return {"loss": torch.ones(())}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return optimizer, LRSchedule(plateau, every="metric", metric="validation/loss")


def test_schedules_and_callbacks_see_the_evaluations_of_a_session():
    task = OnPlateau()
    with session("single", task, data(22, 7), max_duration="4step") as s:
        for batch in s.step_batches():
            s.step(batch)
            s.evaluate()
        assert s.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**3)
    evaluations = [moment for moment in task.noting.moments if "validation" in moment]
    assert evaluations == ["start validation", "end validation 1"] * 4


def test_a_session_calls_the_hooks_of_epochs_and_steps_as_the_trainer_does():
    task, trained = WithCallback(), WithCallback()
    with session("single", task, data(22, 7), max_duration="4step") as s:
        for batch in s.step_batches():
            s.step(batch)
    fit("single", trained, data(22, 7), max_duration="4step", evaluate_every=None, run_dir="trainer")
    assert task.noting.moments == trained.noting.moments
    first_epoch = ["epoch start", "step 1", "step 2", "step 3", "epoch end 1"]
    assert task.noting.moments == ["fit start", *first_epoch, "epoch start", "step 4", "fit end"]


def test_a_session_keeps_the_workers_of_its_evaluations_from_one_to_the_next():
    gc.collect()  # which ends data workers of other tests
    generator = torch.Generator().manual_seed(1)
    samples = [(torch.randn(4, generator=generator), torch.zeros(1)) for _ in range(6)]
    read = Data(train=samples, validation=samples, batch_size=2, num_workers=1)
    with session("single", regression(), read) as s:
        s.evaluate()
        workers = {child.pid for child in multiprocessing.active_children()}
        for _ in range(3):
            s.evaluate()
        assert {child.pid for child in multiprocessing.active_children()} == workers
        assert len(workers) == 1
