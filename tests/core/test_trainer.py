"""The Trainer's settings, each seen in what a run does."""

import gc
import inspect
import os
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from trainkit.strategies.single import SingleStrategy

from tests.tasks import (
    AtStep,
    EachStep,
    MemoryLogger,
    Recorder,
    Regression,
    RegressionStream,
    Seen,
    assert_same_bits,
    regression_data,
    weights,
)
from trainkit import Callback, Data, TaskModule, Trainer, UserError, registry
from trainkit.trainer import Launch


def data(num_samples=18, **settings):
    return Data(train=regression_data(num_samples), batch_size=4, **settings)


# ---- How long


@pytest.mark.parametrize(
    ("max_duration", "steps", "reason"),
    [
        ("7step", 7, "7step"),
        ("2epoch", 10, "2epoch"),
        ("0.4epoch", 2, "0.4epoch"),
        ("1.5epoch", 8, "1.5epoch"),
        ("12sample", 3, "12sample"),
        ("13sample", 4, "13sample"),
        ("20sample", 6, "20sample"),
        ("3epoch,7step", 7, "7step"),
        (["7step", "20sample"], 6, "20sample"),
        ("1epoch,1h", 5, "1epoch"),
    ],
)
def test_training_ends_with_the_first_duration_that_is_reached(make_trainer, max_duration, steps, reason):
    result = make_trainer(max_duration=max_duration).fit(Regression(), data())
    assert result.steps == steps
    assert result.exit_reason == f"reached max_duration={reason}"


class Clock(Callback):
    """Stands in for the clock of training: every step takes a tenth of a second."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("trainkit.state.time", SimpleNamespace(monotonic=lambda: self.now))

    def on_step_end(self, run):
        self.now += 0.1


@pytest.mark.parametrize("max_duration", ["0.55second", "0.55s", "9epoch,0.55s"])
def test_training_ends_after_its_seconds(make_trainer, monkeypatch, max_duration):
    trainer = make_trainer(max_duration=max_duration, callbacks=[Clock(monkeypatch)])
    result = trainer.fit(Regression(), data())
    # The clock is read before on_step_end, so the sixth tenth is seen after the seventh step.
    assert result.steps == 7
    assert result.seconds == pytest.approx(0.7)
    assert result.exit_reason == "reached max_duration=0.55second"


def test_epochs_of_a_stream_end_with_the_stream(make_trainer):
    stream = Data(train=RegressionStream(10), batch_size=4)
    result = make_trainer(max_duration="2epoch").fit(Regression(), stream)
    assert (result.steps, result.samples, result.epochs) == (6, 20, 2)


@pytest.mark.parametrize(
    ("max_duration", "settings"),
    [
        ("7step", {}),
        ("2epoch", {}),
        ("1.5epoch", {}),
        ("0.75epoch", {}),
        ("20sample", {}),
        ("40sample", {}),
        ("3epoch,20sample", {}),
        ("2epoch", {"limit_train_batches": 2}),
        ("2epoch", {"overfit_batches": 3}),
        ("10sample", {"limit_train_batches": 1}),
    ],
)
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_optimizer_gets_the_number_of_steps_of_the_run(make_trainer, max_duration, settings, drop_last):
    class NeedsTotalSteps(Regression):
        def configure_optimizers(self, total_steps):
            self.total_steps = total_steps
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total_steps + 1)

    task = NeedsTotalSteps()
    result = make_trainer(max_duration=max_duration, **settings).fit(task, data(drop_last=drop_last))
    assert task.total_steps == result.steps


@pytest.mark.parametrize("max_duration", ["1h", "1epoch"])
def test_an_optimizer_that_needs_total_steps_is_refused_if_they_are_unknown(make_trainer, max_duration):
    class NeedsTotalSteps(Regression):
        def configure_optimizers(self, total_steps):
            raise AssertionError

    stream = Data(train=RegressionStream(10), batch_size=4)
    with pytest.raises(UserError, match=r"asks for total_steps.*set max_duration in steps, samples, or epochs"):
        make_trainer(max_duration=max_duration).fit(NeedsTotalSteps(), stream)


# ---- How much of the data


def test_a_limit_on_training_batches_makes_an_epoch(make_trainer):
    result = make_trainer(max_duration="3epoch", limit_train_batches=2).fit(Regression(), data())
    assert (result.steps, result.samples, result.epochs) == (6, 24, 3)


def targets(task):
    """Return the targets of each batch, which name its samples."""
    return [batch[1].flatten().tolist() for batch in task.trained]


@pytest.mark.parametrize("made", ["dataset", "stream", "ready"])
def test_overfitting_trains_on_the_same_first_batches_in_every_epoch(make_trainer, made):
    task = Seen()
    dataset = regression_data(18)
    batches = [list(batch) for batch in zip(*(t.split(4) for t in dataset.tensors), strict=True)]
    train = {"dataset": dataset, "stream": RegressionStream(18), "ready": batches}[made]
    overfitted = Data(train=train, batch_size=None if made == "ready" else 4)
    result = make_trainer(max_duration="3epoch", overfit_batches=2).fit(task, overfitted)
    assert result.steps == 6
    seen = targets(task)
    assert seen == seen[:2] * 3
    assert seen[0] != seen[1]


def test_without_overfitting_epochs_differ(make_trainer):
    task = Seen()
    make_trainer(max_duration="2epoch", limit_train_batches=2).fit(task, data())
    assert targets(task)[:2] != targets(task)[2:]


def test_a_fast_dev_run_tries_everything_with_one_batch_and_writes_no_file(make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task, logger, recorder = Seen(), MemoryLogger(), Recorder()
    saving = EachStep(lambda run: run.checkpointer.save(reason="test"))
    trainer = make_trainer(
        fast_dev_run=True,
        max_duration="9epoch",
        num_sanity_batches=2,
        run_dir=tmp_path / "mine",
        loggers=[logger],
        callbacks=[saving, recorder],
    )
    result = trainer.fit(task, data(validation=regression_data(12, seed=1)))
    assert (result.steps, len(task.trained), len(task.validated), result.run_dir) == (1, 1, 1, None)
    assert saving.seen == [None]
    assert "on_evaluation_end validation" in dict(recorder.moments)
    assert logger.opened == []
    assert list(tmp_path.iterdir()) == []


# ---- When it validates


@pytest.mark.parametrize(
    ("evaluate_every", "steps"),
    [
        ("1epoch", [5, 10]),
        ("2epoch", [10]),
        ("3step", [3, 6, 9]),
        ("8sample", [2, 4, 7, 9]),
        ("0.5epoch", [3, 5, 8, 10]),
        (None, []),
    ],
)
def test_validation_comes_as_often_as_asked(make_trainer, evaluate_every, steps):
    recorder = Recorder()
    trainer = make_trainer(evaluate_every=evaluate_every, max_duration="2epoch", callbacks=[recorder])
    trainer.fit(Regression(), data(validation=regression_data(6, seed=1)))
    assert recorder.steps_of("on_evaluation_end validation") == steps


def test_validation_and_logs_may_come_every_few_seconds(make_trainer, monkeypatch):
    recorder = Recorder()
    trainer = make_trainer(
        evaluate_every="0.25s", log_every="0.45s", max_duration="12step", callbacks=[Clock(monkeypatch), recorder]
    )
    trainer.fit(Regression(), data(validation=regression_data(6, seed=1)))
    assert recorder.steps_of("on_evaluation_end validation") == [4, 6, 9, 11]
    assert recorder.steps_of("on_log") == [6, 10, 12]


@pytest.mark.parametrize(("num_sanity_batches", "calls"), [(0, 0), (2, 2), (100, 3)])
def test_a_few_validation_batches_are_tried_before_training(make_trainer, num_sanity_batches, calls):
    counts, logger = EachStep(lambda run: len(run.task.validated)), MemoryLogger()
    trainer = make_trainer(
        num_sanity_batches=num_sanity_batches, evaluate_every="50step", callbacks=[counts], loggers=[logger]
    )
    trainer.fit(Seen(), data(validation=regression_data(12, seed=1)))
    assert set(counts.seen) == {calls}
    assert not any(name.startswith("sanity") for _, row in logger.rows for name in row)


def test_a_mistake_in_validation_is_found_before_the_first_step(make_trainer):
    class Mistaken(Regression):
        def validation_step(self, batch):
            return {"loss": self.not_there(batch)}

    task = Mistaken()
    before = weights(task)
    with pytest.raises(AttributeError, match="not_there"):
        make_trainer(num_sanity_batches=2).fit(task, data(validation=regression_data(6, seed=1)))
    assert_same_bits(task, before)


# ---- Logging


@pytest.mark.parametrize(
    ("log_every", "steps"),
    [
        ("auto", [*range(1, 11)]),
        ("1step", [*range(1, 11)]),
        ("4step", [4, 8, 10]),
        ("1epoch", [5, 10]),
        ("16sample", [4, 9, 10]),
        ("1h", [10]),
    ],
)
def test_training_metrics_are_written_as_often_as_asked_and_at_the_end(make_trainer, log_every, steps):
    logger = MemoryLogger()
    make_trainer(log_every=log_every, max_duration="2epoch", loggers=[logger]).fit(Regression(), data())
    assert [step for step, _ in logger.rows] == steps


def test_each_step_counts_in_one_log_line(make_trainer):
    class Numbered(Regression):
        number = 0

        def training_step(self, batch):
            self.number += 1
            return {"loss": super().training_step(batch), "number": self.number}

    logger = MemoryLogger()
    make_trainer(log_every="2step", loggers=[logger]).fit(Numbered(), data())
    # Steps of 4, 4, 4, 4 and 2 samples.
    assert [row["train/number"] for _, row in logger.rows] == [1.5, 3.5, 5]
    assert [row["train/epoch"] for _, row in logger.rows] == [8 / 18, 16 / 18, 1.0]


class _Instants(Callback):
    def on_fit_start(self, run):
        self.first = time.monotonic()

    def on_fit_end(self, run):
        self.last = time.monotonic()


def test_the_result_has_the_outcome_of_the_run(make_trainer):
    task, instants = Regression(), _Instants()
    trainer = make_trainer(max_duration="2epoch", callbacks=[instants])
    result = trainer.fit(task, data(validation=regression_data(6, seed=1)))
    assert set(result.metrics) == {"train/loss", "train/epoch", "validation/loss", "validation/absolute"}
    assert (result.steps, result.epochs, result.samples) == (10, 2.0, 36)
    assert result.run_dir == trainer.run_dir
    assert result.weights is None
    assert 36 / result.seconds <= result.samples_per_second <= 36 / (instants.last - instants.first)
    assert (
        result.metrics["validation/loss"]
        == trainer.validate(task, data(validation=regression_data(6, seed=1)))["validation/loss"]
    )


@pytest.mark.parametrize("report", [True, False])
def test_the_end_of_a_fit_prints_where_the_run_folder_and_the_report_are(make_trainer, capsys, report):
    trainer = make_trainer(report=report)
    trainer.launch = Launch(prints_run_dir=True)  # as with the default callbacks
    result = trainer.fit(Regression(), data())
    with_report = " (see report.html)" * report
    assert capsys.readouterr().out == f"run folder: {result.run_dir}{with_report}\n"
    assert (result.run_dir / "report.html").exists() == report


@pytest.mark.parametrize("report", [True, False])
def test_without_the_default_callbacks_the_place_of_the_report_is_logged_and_not_printed(
    make_trainer, capsys, caplog, report
):
    caplog.set_level("INFO", logger="trainkit")
    result = make_trainer(report=report).fit(Regression(), data())
    logged = [f"run folder: {result.run_dir} (see report.html)"] if report else []
    assert [text for text in caplog.messages if "run folder" in text] == logged
    assert capsys.readouterr().out == ""


def test_ranks_print_the_run_folder_once(make_trainer, capfd):
    strategy = registry.make("strategy", "ddp", {"device": "cpu", "devices": 2})
    trainer = make_trainer(strategy)
    trainer.launch = Launch(prints_run_dir=True)
    trainer.fit(Regression(), data())
    assert capfd.readouterr().out.count("run folder: ") == 1


def test_a_fast_dev_run_prints_no_run_folder(make_trainer, capsys):
    trainer = make_trainer(fast_dev_run=True)
    trainer.launch = Launch(prints_run_dir=True)
    trainer.fit(Regression(), data())
    assert capsys.readouterr().out == ""


def test_training_learns(make_trainer):
    task = Regression()
    result = make_trainer(max_duration="30epoch").fit(task, data(64, validation=regression_data(32, seed=1)))
    assert result.metrics["validation/loss"] < 0.05
    torch.testing.assert_close(task.network[0].weight, torch.ones(1, 4), atol=0.1, rtol=0)


# ---- Gradients


class LargeGradient(TaskModule):
    """Two parameters with the gradients (3, 4) and 12, whose global norm is 13."""

    def __init__(self):
        super().__init__()
        self.pair = nn.Parameter(torch.zeros(2))
        self.single = nn.Parameter(torch.zeros(()))

    def training_step(self, batch):
        return (self.pair * torch.tensor([3.0, 4.0])).sum() + 12.0 * self.single

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("settings", "pair", "single"),
    [
        ({}, [-3.0, -4.0], -12.0),
        ({"max_grad_norm": 1.3}, [-0.3, -0.4], -1.2),
        ({"max_grad_norm": 100.0}, [-3.0, -4.0], -12.0),
        ({"max_grad_value": 3.5}, [-3.0, -3.5], -3.5),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_of_the_whole_batch_are_clipped_as_computed_by_hand(make_trainer, settings, pair, single, accumulate):
    task, recorder = LargeGradient(), Recorder()
    strategy = SingleStrategy(device="cpu", accumulate=accumulate)
    make_trainer(strategy, max_duration="1step", log_every="1step", callbacks=[recorder], **settings).fit(task, data())
    torch.testing.assert_close(task.pair.detach(), torch.tensor(pair))
    torch.testing.assert_close(task.single.detach(), torch.tensor(single))
    norm = recorder.logged[0].get("train/grad_norm")
    assert norm == (pytest.approx(13.0) if "max_grad_norm" in settings else None)


def test_anomaly_detection_names_the_operation_and_is_switched_off_again(make_trainer):
    class Bad(Regression):
        def training_step(self, batch):
            return super().training_step(batch) + (self.network[0].weight.sum() * 0).sqrt()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch prints the forward's stack as a warning
        with pytest.raises(RuntimeError, match="MulBackward0' returned nan"):
            make_trainer(detect_anomaly=True).fit(Bad(), data())
    assert not torch.is_anomaly_enabled()


def test_deterministic_algorithms_are_used_for_the_run_only(make_trainer):
    asks = EachStep(lambda run: torch.are_deterministic_algorithms_enabled())
    make_trainer(deterministic=True, callbacks=[asks]).fit(Regression(), data())
    assert all(asks.seen)
    assert not torch.are_deterministic_algorithms_enabled()
    make_trainer(callbacks=[asks]).fit(Regression(), data())
    assert not asks.seen[-1]


def test_flags_that_were_set_outside_stay_set(make_trainer):
    torch.use_deterministic_algorithms(True)
    try:
        make_trainer().fit(Regression(), data())
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# ---- Losses that are not finite


class Exploding(Regression):
    """Has a loss that is NaN at some of its calls, counted from 1."""

    def __init__(self, *bad, optimizer=None):
        super().__init__(optimizer)
        self.bad, self.calls = bad, 0

    def training_step(self, batch):
        self.calls += 1
        loss = super().training_step(batch)
        return loss * float("nan") if self.calls in self.bad else loss


@pytest.mark.parametrize("log_every", ["1step", "4step", "1000step"])
def test_raise_names_the_first_bad_step_and_what_to_try(make_trainer, log_every):
    with pytest.raises(UserError, match=r"NaN or infinite at step 3[ ,.].*Lower the learning rate.*The samples were "):
        make_trainer(log_every=log_every).fit(Exploding(3, 4), data())


def test_a_bad_loss_is_found_before_the_weights_are_saved(make_trainer):
    trainer = make_trainer(callbacks=[AtStep(4, lambda run: run.checkpointer.save(reason="test"))])
    with pytest.raises(UserError, match="at step 3"):
        trainer.fit(Exploding(3), data())
    assert not list(trainer.run_dir.glob("checkpoints/*.pt"))


def test_a_bad_loss_is_found_before_validation_uses_the_weights(make_trainer):
    recorder = Recorder()
    trainer = make_trainer(evaluate_every="4step", callbacks=[recorder])
    with pytest.raises(UserError, match="at step 3"):
        trainer.fit(Exploding(3), data(validation=regression_data(6, seed=1)))
    assert recorder.steps_of("on_evaluation_start validation") == []


def test_stop_ends_the_run_and_keeps_no_bad_weights(make_trainer):
    class Save(Callback):
        def on_fit_end(self, run):
            self.entry = run.checkpointer.save(reason="end")

    save = Save()
    trainer = make_trainer(on_nonfinite="stop", log_every="1step", callbacks=[save])
    result = trainer.fit(Exploding(3), data())
    assert result.steps == 3
    assert result.exit_reason == "the loss became NaN or infinite at step 3"
    assert save.entry is None


FUSED_OR_NOT = {
    "fused": lambda task: torch.optim.SGD(task.parameters(), lr=0.05, fused=True),
    "foreach": lambda task: torch.optim.SGD(task.parameters(), lr=0.05, foreach=True),
    "momentum": lambda task: torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9),
    "momentum with dampening": lambda task: torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9, dampening=0.5),
    "AdamW": lambda task: torch.optim.AdamW(task.parameters(), lr=0.05),
    "RMSprop": lambda task: torch.optim.RMSprop(task.parameters(), lr=0.05),
}


@pytest.mark.parametrize("name", FUSED_OR_NOT)
@pytest.mark.parametrize("bad", [(1,), (3,), (1, 2, 5)], ids=str)
def test_skip_leaves_out_exactly_the_bad_steps(make_trainer, name, bad):
    optimizer, recorder = FUSED_OR_NOT[name], Recorder()
    task = Exploding(*bad, optimizer=optimizer)
    trainer = make_trainer(on_nonfinite="skip", callbacks=[recorder], log_every="1epoch")
    assert trainer.fit(task, data()).steps == 5
    assert recorder.logged[0]["train/skipped_steps"] == len(bad)

    expected = Regression(optimizer)
    by_hand = optimizer(expected)
    inputs, targets = regression_data(18).tensors
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0))
    for step, indices in enumerate(order.split(4), start=1):
        if step not in bad:
            by_hand.zero_grad()
            expected.training_step([inputs[indices], targets[indices]]).backward()
            by_hand.step()
    for parameter, wanted in zip(task.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted)


# ---- Optimizer kernels


def used_kernel(make_trainer, optimizer, **settings):
    class Look(Callback):
        def on_fit_start(self, run):
            (group,) = run.phase_optimizer.optimizer.param_groups
            self.fused, self.foreach = group.get("fused"), group.get("foreach")

    look = Look()
    make_trainer(callbacks=[look], **settings).fit(Regression(optimizer), data())
    return look


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_the_fused_kernel_is_used_where_torch_offers_one(make_trainer, kind):
    assert used_kernel(make_trainer, lambda task: kind(task.parameters(), lr=0.01)).fused is True


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("chosen", [{"foreach": True}, {"foreach": False}, {"fused": False}])
def test_the_kernel_that_the_user_chose_is_kept(make_trainer, kind, chosen):
    look = used_kernel(make_trainer, lambda task: kind(task.parameters(), lr=0.01, **chosen))
    assert not look.fused
    assert look.foreach == chosen.get("foreach")


def test_fused_kernels_can_be_switched_off(make_trainer):
    look = used_kernel(make_trainer, lambda task: torch.optim.SGD(task.parameters(), lr=0.01), fused_optimizer=False)
    assert not look.fused


def test_a_subclass_of_an_optimizer_is_left_as_it_is(make_trainer):
    class Mine(torch.optim.SGD):
        pass

    assert not used_kernel(make_trainer, lambda task: Mine(task.parameters(), lr=0.01)).fused


# ---- What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_duration": "10epohc"}, r"max_duration = '10epohc': unknown unit.*Did you mean 'epoch'"),
        ({"evaluate_every": "5"}, r"evaluate_every = '5' is not a duration; write"),
        ({"log_every": "abc"}, r"log_every = 'abc' is not a duration; write"),
        ({"precision": "bf16"}, r"unknown precision 'bf16'\. Did you mean 'bf16-(true|mixed)'.*Choose one of fp32"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm must be a number above 0, got 0\.0; None disables it"),
        ({"max_grad_value": -1.0}, r"max_grad_value must be a number above 0, got -1\.0"),
        (
            {"max_grad_norm": 1.0, "max_grad_value": 1.0},
            r"max_grad_norm and max_grad_value exclude each other; set one",
        ),
        (
            {"on_nonfinite": "skp"},
            r"on_nonfinite='skp' is unknown\. Did you mean 'skip'\? Choose raise, skip, stop or roll",
        ),
        ({"limit_train_batches": 0}, r"limit_train_batches must be a whole number of batches, at least 1, got 0"),
        ({"limit_validation_batches": 0.5}, r"limit_validation_batches must be None or a whole number"),
        ({"limit_test_batches": True}, r"limit_test_batches must be None or a whole number"),
        ({"limit_predict_batches": "3"}, r"limit_predict_batches must be None or a whole number"),
        ({"overfit_batches": 0}, r"overfit_batches must be a whole number of batches, at least 1"),
        ({"num_sanity_batches": -1}, r"num_sanity_batches must be a whole number of batches, at least 0"),
        # of a wrong type
        ({"precision": 32}, r"unknown precision 32\. Did you mean 'fp32'\? Choose one of fp32"),
        ({"precision": None}, r"unknown precision None\. Choose one of fp32"),
        ({"precision": torch.float32}, r"unknown precision torch\.float32\..*Choose one of fp32"),
        ({"max_grad_norm": "1"}, r"max_grad_norm must be None or a number above 0, got '1'; None disables it"),
        ({"max_grad_value": True}, r"max_grad_value must be None or a number above 0, got True; None disables it"),
        ({"on_nonfinite": None}, r"on_nonfinite=None is unknown\. Choose raise, skip, stop or rollback"),
        ({"compile": "false"}, r"compile must be True, False or a mapping .*got 'false'"),
        ({"fast_dev_run": 3}, r"fast_dev_run must be True or False, got 3"),
        ({"report": None}, r"report must be True or False, got None"),
        ({"preemption_signal": 10}, r"preemption_signal must be text or None, got 10"),
        ({"freeze": 5}, r"freeze=5 is not a list of patterns; write freeze=\['encoder'\]"),
        ({"no_weight_decay": None}, r"no_weight_decay=None is not a list of patterns; write no_weight_decay=\["),
        ({"strategy": None}, r"strategy must be text or a trainkit\.Strategy, got None"),
        ({"strategy": SingleStrategy}, r"strategy must be text or a trainkit\.Strategy, got <class"),
        ({"run_dir": 5}, r"run_dir must be text, a Path or None, got 5"),
        ({"run_dir": ""}, r"run_dir is empty; write run_dir='runs/mine'"),
        ({"run_dir": " "}, r"run_dir is empty; write run_dir='runs/mine'"),
        ({"run_dir": Path(" ")}, r"run_dir is empty; write run_dir='runs/mine'"),
        ({"config": {"lr": 1}}, r"config must be text, got \{'lr': 1\}"),
        ({"max_rollbacks": None}, r"max_rollbacks must be a whole number, at least 1, got None"),
        ({"num_sanity_batches": None}, r"num_sanity_batches must be a whole number of batches, at least 0, got None"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_type(settings, message):
    with pytest.raises(UserError, match=message):
        Trainer(**{"callbacks": [], "loggers": [], **settings})


def test_every_setting_is_refused_as_an_unexpected_object_by_its_name():
    for name in inspect.signature(Trainer).parameters:
        with pytest.raises(UserError, match=name):
            Trainer(**{"callbacks": [], "loggers": [], name: object()})


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_a_bare_dataset_is_refused_as_the_signature_promises(make_trainer, method):
    assert get_type_hints(getattr(Trainer, method))["data"] == Data | DataLoader[Any]
    with pytest.raises(UserError, match=r"the data is a TensorDataset; pass Data\(\w+=dataset, batch_size=32\)"):
        getattr(make_trainer(), method)(Regression(), regression_data(8))


@pytest.mark.parametrize("resume", [True, 5])
def test_resume_is_a_path_or_auto(make_trainer, resume):
    with pytest.raises(UserError, match=rf"{resume} is not the path of a run folder.*resume='auto'"):
        make_trainer().fit(Regression(), data(), resume=resume)


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_step_with_more_than_the_batch_is_refused_before_anything_is_written(make_trainer, step):
    def of_lightning(self, batch, batch_idx):
        raise AssertionError("not called")

    trainer = make_trainer()
    message = (
        rf"OfLightning\.{step}\(batch, batch_idx\) must take a batch alone: {step}\(self, batch\)\. "
        r"A LightningModule runs unmodified as .*LightningTask\(module\)"
    )
    with pytest.raises(UserError, match=message):
        trainer.fit(type("OfLightning", (Regression,), {step: of_lightning})(), data(validation=regression_data(6)))
    assert not trainer.run_dir.exists()


def test_predictions_of_a_task_without_a_forward_are_refused(make_trainer):
    with pytest.raises(UserError, match=r"LargeGradient has no predict_step; define predict_step\(self, batch\)"):
        make_trainer().predict(LargeGradient(), Data(predict=regression_data(6), batch_size=3))


@pytest.mark.parametrize("setting", ["callbacks", "loggers"])
@pytest.mark.parametrize("wrong", [[5], "checkpoint"])
def test_an_invalid_callback_or_logger_is_rejected(setting, wrong):
    with pytest.raises(UserError, match=setting.removesuffix("s")):
        Trainer(**{"callbacks": [], "loggers": [], setting: wrong})


@pytest.mark.parametrize("returned", [None, ["checkpoint"], Recorder()])
def test_callbacks_of_a_task_are_a_list_of_objects(make_trainer, returned):
    class Configures(Regression):
        def configure_callbacks(self):
            return returned

    with pytest.raises(UserError, match=r"Configures\.configure_callbacks returned .*; return a list of objects"):
        make_trainer().fit(Configures(), data())


def test_a_callback_or_logger_given_twice_is_rejected():
    recorder = Recorder()
    with pytest.raises(UserError, match=r"callbacks contains <.*Recorder object at .*> twice; remove one"):
        Trainer(callbacks=[recorder, recorder], loggers=[])
    with pytest.raises(UserError, match="loggers contains 'jsonl' twice"):
        Trainer(callbacks=[], loggers=["jsonl", "jsonl"])


@pytest.mark.parametrize("seed", ["abc", -5, 1.5])
def test_a_seed_is_a_whole_number_that_is_not_negative(seed):
    with pytest.raises(UserError, match="seed"):
        Trainer(callbacks=[], loggers=[], seed=seed)


def test_a_strategy_is_chosen_by_one_word(tmp_path):
    trainer = Trainer("single", callbacks=[], loggers=[], run_dir=tmp_path)
    assert type(trainer.strategy) is SingleStrategy
    assert trainer.fit(Regression(), data()).steps == 5


def test_an_invalid_task_is_rejected(make_trainer):
    with pytest.raises(UserError, match=r"the task is a Linear; subclass.*LightningTask\(module\)"):
        make_trainer().fit(nn.Linear(2, 2), data())
    with pytest.raises(UserError, match=r"the task is a type; subclass"):
        make_trainer().fit(Regression, data())


@pytest.mark.parametrize(
    "wrong",
    [
        Data(train=[], batch_size=4),
        Data(train=regression_data(3), batch_size=4),
        Data(train=regression_data(8), validation=[], batch_size=4),
        Data(train=regression_data(8), batch_size=6),
    ],
    ids=["empty", "smaller than a batch", "empty validation", "not divisible"],
)
def test_wrong_data_ends_a_run_before_anything_is_written_or_changed(make_trainer, wrong):
    trainer, task, recorder = make_trainer(SingleStrategy(device="cpu", accumulate=4)), Regression(), Recorder()
    trainer.callbacks[:] = [recorder]
    before, generator = weights(task), torch.get_rng_state()
    with pytest.raises(UserError):
        trainer.fit(task, wrong)
    assert not trainer.run_dir.exists()
    assert recorder.moments == []
    assert_same_bits(task, before)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("num_samples", [0, 3])
def test_a_stream_too_short_for_one_batch_is_an_error(make_trainer, num_samples):
    stream = Data(train=RegressionStream(num_samples), batch_size=4, drop_last=True)
    with pytest.raises(UserError, match=r"gave no sample|smaller batch_size, or drop_last=False"):
        make_trainer().fit(Regression(), stream)


def test_a_trainer_can_be_used_again(make_trainer):
    trainer = make_trainer(max_duration="2epoch")
    first, second = Regression(hidden=4, dropout=0.5), Regression(hidden=4, dropout=0.5)
    assert trainer.fit(first, data()).steps == trainer.fit(second, data()).steps == 10
    assert_same_bits(first, second)


def test_a_strategy_that_cannot_run_here_is_refused_before_it_is_launched(make_trainer):
    class Missing(SingleStrategy):
        def validate(self, task, precision):
            raise UserError("no such device")

        def launch(self, run):
            raise AssertionError("launched")

    with pytest.raises(UserError, match="no such device"):
        make_trainer(Missing(device="cpu")).fit(Regression(), Data(train=regression_data(8), batch_size=4))


def test_a_run_leaves_no_process_and_no_folder_behind(make_trainer, tmp_path):
    gc.collect()  # which ends data workers of other tests
    before = set(os.listdir(tmp_path))
    trainer = make_trainer()
    trainer.fit(Regression(), data(num_workers=2))
    assert set(os.listdir(tmp_path)) - before == {trainer.run_dir.name}
    assert not torch.multiprocessing.active_children()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Trainer(max_steps=3), r"^Trainer has no argument 'max_steps'\. Did you mean 'max_duration'\?$"),
        (lambda: Trainer(run_dri="here"), r"^Trainer has no argument 'run_dri'\. Did you mean 'run_dir'\?$"),
        (
            lambda: Trainer(gpus=2),
            r"^Trainer has no argument 'gpus'\. It is 'devices' of the strategy; .* strategy\.dev",
        ),
        (lambda: Trainer(zzz=1), r"^Trainer has no argument 'zzz'\. There are: strategy, max_duration, "),
        (lambda: Trainer("single", "2epoch"), r"^Trainer takes arguments by name, such as Trainer\(max_duration="),
        (lambda: Trainer(ckpt_path="last"), r"^Trainer has no argument 'ckpt_path'\. It is 'resume' of fit; "),
        (lambda: Data([1, 2]), r"^Data takes arguments by name, such as Data\(train=\.\.\.\)\.$"),
        (lambda: Data(trian=[1, 2]), r"^Data has no argument 'trian'\. Did you mean 'train'\?$"),
    ],
)
def test_an_argument_with_another_name_is_refused_with_the_right_one(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_type_error_inside_of_a_constructor_is_raised_as_it_is():
    class Wrong:
        @property
        def __class__(self):
            raise TypeError("no class")

    with pytest.raises(TypeError, match="no class"):
        Trainer(callbacks=[Wrong()], loggers=[])
