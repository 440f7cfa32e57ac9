"""Optimizers that train other weights than those to evaluate with, such as schedule-free ones."""

import os
import signal

import pytest
import torch
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.ema import EMA
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.seams.training import BOUND, EVERY, MAKE_STRATEGY, Layers, batches, difference, samples, trained
from trainkit import Callback, Data, Trainer, session
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import Stopped, UserError

REFUSED = {"fusion_sharded": "Averaging may need full parameters", "fsdp": "Averaging may need full parameters"}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Averaging(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2024): trains between the average and a faster sequence."""

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": False})

    def _swap(self, *, training):
        for group in self.param_groups:
            if group["train_mode"] != training:
                weight = 1 - group["beta"] if training else 1 - 1 / group["beta"]
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.data.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = training

    def train(self):
        self._swap(training=True)

    def eval(self):
        self._swap(training=False)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer is not in train mode")
            weight = 1 / (group["k"] + 1)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                z = state.setdefault("z", parameter.clone())
                parameter.lerp_(z, weight)
                parameter.add_(parameter.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])
            group["k"] += 1


class WithModes(Layers):
    def configure_optimizers(self):
        return Averaging(self.parameters(), lr=0.1)


class Measured(Callback):
    def on_evaluation_end(self, run, stage, metrics):
        self.losses = [*getattr(self, "losses", []), metrics["validation/loss"]]


def data():
    return Data(train=samples(), validation=samples(8), batch_size=8, shuffle=False)


def plain_loop():
    task, losses = WithModes(), []
    optimizer = task.configure_optimizers()
    optimizer.train()
    for step, batch in enumerate(batches(), start=1):
        task.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            optimizer.eval()
            losses.append(task.validation_step(samples(8).tensors).item())
            optimizer.train()
    optimizer.eval()
    return task.state_dict(), losses


@pytest.mark.parametrize("strategy", EVERY)
def test_evaluations_checkpoints_and_the_end_have_the_weights_to_evaluate_with(strategy, tmp_path):
    reference, losses = plain_loop()
    saving = Checkpoint(every="2step", save_last_k=None, save_at_end=False)
    settings = {"data": data(), "evaluate_every": "2step", "run_dir": "run"}
    if strategy in REFUSED:
        with pytest.raises(UserError, match=REFUSED[strategy]):
            trained(strategy, WithModes(), saving, Measured(), **settings)
        return
    assert difference(trained(strategy, WithModes(), saving, Measured(), **settings), reference) < BOUND
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert [entry.metrics["validation/loss"] for entry in store.entries()] == pytest.approx(losses, rel=1e-6)
    assert difference(dict(store.load(store.entries()[-1])["task"]), reference) < BOUND
    resumed = WithModes()
    defaults = {"max_duration": "1epoch", "loggers": [], "evaluate_every": "2step", "callbacks": [saving]}
    trainer = Trainer(MAKE_STRATEGY[strategy](), run_dir="run", **defaults)
    trainer.fit(resumed, data(), resume=store.entries()[0].path)
    assert difference(resumed.state_dict(), reference) < BOUND


class Interrupt(WithModes):
    """Its second validation is interrupted by a signal."""

    calls = 0

    def validation_step(self, batch):
        self.calls += 1
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().validation_step(batch)


def test_an_evaluation_that_a_signal_interrupts_leaves_the_weights_to_evaluate_with(tmp_path):
    saving = Checkpoint(every=None)
    with pytest.raises(Stopped):
        trained("single", Interrupt(), saving, data=data(), evaluate_every="2step", run_dir="run")
    resumed = WithModes()
    trainer = Trainer("single", max_duration="1epoch", loggers=[], evaluate_every="2step", callbacks=[saving])
    trainer.fit(resumed, data(), resume="run")
    assert difference(resumed.state_dict(), plain_loop()[0]) < BOUND


def test_a_session_evaluates_and_ends_with_the_weights_to_evaluate_with():
    reference, losses = plain_loop()
    with session("single", WithModes(), data()) as s:
        measured = []
        for batch in s.step_batches():
            s.step(batch)
            if s.state.step % 2 == 0:
                measured.append(s.evaluate()["validation/loss"])
    assert measured == pytest.approx(losses, rel=1e-6)
    assert difference(s.task.state_dict(), reference) < BOUND


def test_a_second_average_and_divided_optimizers_are_refused(monkeypatch):
    with pytest.raises(UserError, match="EMA and Averaging both evaluate with an average"):
        trained("single", WithModes(), EMA())
    for name, make_strategy in (
        ("optimizer_in_backward", lambda: DDPStrategy(device="cpu", devices=2, optimizer_in_backward=True)),
        ("shard_optimizer", lambda: PipelineStrategy(device="cpu", stages=1, replicas=2, shard_optimizer=True)),
    ):
        monkeypatch.setitem(MAKE_STRATEGY, name, make_strategy)
        with pytest.raises(UserError, match=f"Averaging .*Set strategy.{name}=false"):
            trained(name, WithModes())
