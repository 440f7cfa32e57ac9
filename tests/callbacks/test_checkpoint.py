from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.strategies.single import SingleStrategy

from tests.tasks import EachStep, Regression, regression_data
from trainkit import Data
from trainkit.callback import Callback
from trainkit.checkpoint import store as store_module
from trainkit.checkpoint.store import CheckpointStore
from trainkit.distributed.collectives import Collectives
from trainkit.errors import DamagedCheckpoint, NonFiniteLoss, Stopped, UserError
from trainkit.trainer import FitResult

Fit = Callable[..., FitResult]


def kept_weights() -> EachStep:
    return EachStep(lambda run: next(run.task.parameters()).detach().clone())


class OtherRanksAreSlower(Collectives):
    """Returns the seconds of another rank, whose clock runs ahead."""

    hours = 0

    def synced_seconds(self, seconds: float) -> float:
        self.hours += 1
        return 3600.0 * self.hours


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def saved(store: CheckpointStore) -> list[tuple[int, str]]:
    return [(entry.step, entry.reason) for entry in store.entries()]


def raising(error: BaseException) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


BY_LOSS: dict[str, Any] = {"every": None, "monitor": "validation/loss"}


@pytest.mark.parametrize(
    ("losses", "settings", "expected"),
    [
        ([], {"every": "6step", "save_last_k": None}, {6: "interval", 12: "interval", 18: "interval", 20: "end"}),
        (
            [1.0 / n for n in range(1, 11)],
            {"every": "10step", "monitor": "validation/loss", "save_last_k": None},
            {**dict.fromkeys(range(2, 20, 2), "best"), 20: "best"},
        ),
        ([0.1, 0.9, *[0.5] * 8], {**BY_LOSS, "mode": "max"}, {4: "best", 20: "end"}),
        ([0.9, 0.8, 0.7, 0.1, *[0.9] * 6], {**BY_LOSS, "every": "9step"}, {8: "best", 20: "end"}),
        ([float("nan")] * 10, BY_LOSS, {20: "end"}),
        ([0.5] * 10, BY_LOSS, {2: "best", 20: "end"}),
        ([], {"every": "15step", "save_at_end": False}, {15: "interval"}),
        ([], {"every": "0.0001s", "save_last_k": None}, {step: "interval" for step in (5, 10, 15, 20)}),
    ],
    ids=[
        "at every interval and at the end",
        "once for interval, metric and end",
        "the largest is the best in mode max",
        "the value of step 8 does not make step 9 one of the best",
        "nan is never the best",
        "the first of equals remains the best",
        "not at the end if disabled",
        "time intervals are checked at log points",
    ],
)
def test_steps_are_saved_for_their_reason(
    fit: Fit, scripted: Any, store: CheckpointStore, *, losses: list[float], settings: dict[str, Any], expected: Any
) -> None:
    fit(scripted(losses), Checkpoint(**settings))

    assert saved(store) == list(expected.items())


def test_only_the_latest_are_kept(fit: Fit, scripted: Any, store: CheckpointStore) -> None:
    fit(scripted(), Checkpoint(every="3step", save_last_k=2))

    assert [entry.step for entry in store.entries()] == [18, 20]
    assert {path.name for path in store.folder.glob("*.pt")} == {entry.path.name for entry in store.entries()}


def test_the_best_two_and_the_latest_are_kept(fit: Fit, scripted: Any, store: CheckpointStore) -> None:
    # steps                2    4    6    8    10   12   14   16   18   20
    task = scripted([0.9, 0.3, 0.8, 0.2, 0.7, 0.6, 0.9, 0.9, 0.9, 0.9])

    fit(task, Checkpoint(every="5step", monitor="validation/loss", save_top_k=2))

    assert [entry.step for entry in store.entries()] == [4, 8, 20]
    assert [entry.step for entry in store.ranked("validation/loss", "min") if entry.reason == "best"] == [8, 4]
    assert store.monitor() == ("validation/loss", "min")


def test_an_unknown_metric_is_rejected_with_the_nearest_name(fit: Fit, scripted: Any) -> None:
    with pytest.raises(UserError, match=r"validation/acuracy.*Did you mean 'validation/accuracy'"):
        fit(scripted(), Checkpoint(monitor="validation/acuracy"))


@pytest.mark.parametrize(
    ("callbacks", "settings", "message"),
    [
        (
            [Checkpoint(monitor="validation/acuracy")],
            {"num_sanity_batches": 1},
            r"checkpoint.monitor='validation/acuracy'.*Did you mean 'validation/accuracy'",
        ),
        (
            [Checkpoint(monitor="validation/loss"), Checkpoint(every="3step")],  # they would remove each other's
            {},
            "callbacks contains Checkpoint twice",
        ),
        ([Checkpoint(monitor="validation/loss")], {"without_validation": True}, "the data has none"),
    ],
    ids=["unknown in the sanity batches", "two", "no validation data"],
)
def test_what_cannot_be_saved_is_rejected_before_the_first_step(
    fit: Fit, scripted: Any, callbacks: list[Callback], settings: dict[str, Any], message: str
) -> None:
    task = scripted()

    with pytest.raises(UserError, match=message):
        fit(task, *callbacks, **settings)

    assert task.steps == 0


@pytest.mark.parametrize(("metric", "mode"), [("validation/accuracy", "min"), ("validation/loss", "max")])
def test_a_metric_in_the_other_mode_than_its_name_means_is_warned_of(
    fit: Fit, scripted: Any, caplog: pytest.LogCaptureFixture, metric: str, mode: Any
) -> None:
    usual: Any = {"min": "max", "max": "min"}[mode]
    stopping = {m: EarlyStopping(monitor=metric, mode=m, patience=99) for m in (mode, usual)}
    fit(scripted(), Checkpoint(monitor=metric, mode=usual), stopping[usual])
    assert metric not in caplog.text

    fit(scripted(), Checkpoint(monitor=metric, mode=mode), stopping[mode])

    assert f"checkpoint.mode={mode}: " in caplog.text and f"early_stopping.mode={mode}: " in caplog.text
    assert caplog.text.count(f"is, set mode={usual}.") == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "mim"}, "Did you mean 'min'"),
        ({"save_top_k": 0}, "save_top_k must be a whole number, at least 1"),
        ({"save_last_k": 0}, "save_last_k must be a whole number, at least 1"),
        ({"every": "5 stepp"}, "checkpoint.every.*Did you mean"),
    ],
)
def test_a_wrong_setting_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Checkpoint(**settings)


def test_the_last_complete_step_is_saved_after_an_exception(fit: Fit, scripted: Any, store: CheckpointStore) -> None:
    task, weights = scripted(), kept_weights()
    task.at_step[8] = raising(RuntimeError("bug in the model"))

    with pytest.raises(RuntimeError, match="bug in the model"):
        fit(task, weights, Checkpoint())

    assert saved(store) == [(7, "exception")]
    assert torch.equal(store.load_last().payload["task"]["net.weight"], weights.seen[-1])


def test_a_run_resumes_from_the_step_saved_after_an_exception(
    fit: Fit, scripted: Any, store: CheckpointStore, tmp_path: Path
) -> None:
    task = scripted()
    task.at_step[8] = raising(RuntimeError("bug in the model"))
    with pytest.raises(RuntimeError):
        fit(task, Checkpoint())

    repaired = scripted()
    result = fit(repaired, Checkpoint(), resume=tmp_path / "run")

    assert result.steps == 20
    assert repaired.steps == 13


@pytest.mark.parametrize(("ends_with", "steps"), [("exception", "20step"), ("end", "10step")])
def test_a_run_from_an_earlier_checkpoint_saves_its_own_later_steps(
    fit: Fit, scripted: Any, store: CheckpointStore, ends_with: str, steps: str
) -> None:
    fit(scripted(), Checkpoint(every="5step", save_last_k=None), max_duration="10step")
    task, weights = scripted(), kept_weights()
    task.at_step[1] = lambda: task.net.weight.data.add_(1.0)
    task.at_step[6] = raising(RuntimeError("bug in the model"))  # after step 10

    with pytest.raises(RuntimeError, match="bug") if ends_with == "exception" else nullcontext():
        checkpoint = Checkpoint(every=None, save_last_k=None)
        fit(task, weights, checkpoint, resume=store.folder / "step_00000005.pt", max_duration=steps)

    assert saved(store)[-1] == (10, ends_with)
    assert torch.equal(store.load_last().payload["task"]["net.weight"], weights.seen[-1])


def test_nothing_is_saved_after_an_exception_during_an_update(fit: Fit, scripted: Any, store: CheckpointStore) -> None:
    task = scripted()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    task.configure_optimizers = lambda: optimizer
    task.at_step[8] = lambda: optimizer.register_step_pre_hook(lambda *_: raising(RuntimeError("out of memory"))())

    with pytest.raises(RuntimeError, match="out of memory"):
        fit(task, Checkpoint())

    assert saved(store) == []


@pytest.mark.parametrize("noticed_by", [{"evaluate_every": None, "log_every": "4step"}, {"log_every": "20step"}])
def test_nothing_is_saved_after_a_nonfinite_loss(
    fit: Fit, scripted: Any, store: CheckpointStore, noticed_by: dict[str, Any]
) -> None:
    task = scripted()
    task.at_step[8] = lambda: task.net.weight.data.fill_(float("nan"))

    with pytest.raises(NonFiniteLoss):
        fit(task, Checkpoint(every=None), **noticed_by)

    assert saved(store) == []


def test_nothing_is_saved_after_an_exception_that_follows_a_nonfinite_loss(
    fit: Fit, scripted: Any, store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    """No log point has noticed the loss when the exception comes."""
    task = scripted()
    task.at_step[7] = lambda: task.net.weight.data.fill_(float("nan"))
    task.at_step[8] = raising(RuntimeError("bug in the model"))

    with pytest.raises(RuntimeError, match="bug in the model"):
        fit(task, Checkpoint(), log_every="20step", evaluate_every=None)

    assert saved(store) == []
    assert "could not be saved after the exception" in caplog.text


@pytest.mark.parametrize(
    ("error", "settings"),
    [(KeyboardInterrupt(), {}), (RuntimeError("bug in the model"), {"save_on_exception": False})],
    ids=["second interrupt", "disabled"],
)
def test_nothing_is_saved_after_a_second_interrupt_or_an_exception_if_disabled(
    fit: Fit, scripted: Any, store: CheckpointStore, error: BaseException, settings: dict[str, Any]
) -> None:
    task = scripted()
    task.at_step[8] = raising(error)

    with pytest.raises(type(error)):
        fit(task, Checkpoint(**settings))

    assert saved(store) == []


def test_a_failing_save_does_not_hide_the_exception(
    fit: Fit, scripted: Any, store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    task = scripted()
    store.folder.parent.mkdir()
    store.folder.touch()  # where the folder of checkpoints would have to be
    task.at_step[8] = raising(RuntimeError("bug in the model"))

    with pytest.raises(RuntimeError, match="bug in the model"), caplog.at_level(logging.ERROR):
        fit(task, Checkpoint())

    assert "step 7 could not be saved" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_step_of_a_signal_is_saved(fit: Fit, scripted: Any, store: CheckpointStore, number: signal.Signals) -> None:
    task, weights = scripted(), kept_weights()
    task.at_step[7] = lambda: os.kill(os.getpid(), number)

    with pytest.raises(Stopped):
        fit(task, weights, Checkpoint(save_at_end=False))

    assert saved(store) == [(7, number.name)]
    assert torch.equal(store.load_last().payload["task"]["net.weight"], weights.seen[-1])


def test_an_older_checkpoint_is_kept_while_the_newer_one_is_damaged(
    fit: Fit, scripted: Any, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = store_module.move

    def damaging_move(part: Path, path: Path) -> None:
        move(part, path)
        if path.name == "step_00000012.pt":
            os.truncate(path, path.stat().st_size // 2)

    monkeypatch.setattr(store_module, "move", damaging_move)

    with pytest.raises(DamagedCheckpoint):
        fit(scripted(), Checkpoint(every="6step"))

    assert store.load_last().entry.step == 6


def test_a_time_interval_is_due_on_all_ranks_if_it_is_on_one(fit: Fit, scripted: Any, store: CheckpointStore) -> None:
    """Otherwise the ranks that save would wait for the others forever."""
    strategy = SingleStrategy(device="cpu")
    strategy.comm = OtherRanksAreSlower()

    fit(scripted(), Checkpoint(every="4h", save_last_k=None), strategy=strategy, evaluate_every=None)

    assert [entry.step for entry in store.entries()] == [5, 10, 15, 20]


def test_an_exception_on_one_of_several_ranks_does_not_wait_for_the_others(
    fit: Fit, scripted: Any, store: CheckpointStore
) -> None:
    task = scripted()
    task.at_step[8] = raising(RuntimeError("bug in the model"))

    with pytest.raises(RuntimeError):
        strategy = SingleStrategy(device="cpu")
        strategy.comm = Collectives(num_processes=2)
        fit(task, Checkpoint(every="5step"), strategy=strategy)

    assert saved(store) == [(5, "interval")]


def test_the_best_checkpoints_before_a_resume_remain_the_best(
    fit: Fit, scripted: Any, store: CheckpointStore, tmp_path: Path
) -> None:
    fit(scripted([0.9, 0.1, 0.5]), Checkpoint(every=None, monitor="validation/loss"), max_duration="6step")
    before = [entry.step for entry in store.entries()]

    fit(
        scripted([0.5, 0.4]),
        Checkpoint(every=None, monitor="validation/loss"),
        max_duration="10step",
        resume=tmp_path / "run",
    )

    assert before == [4, 6]
    assert [entry.step for entry in store.entries()] == [4, 10]


def test_a_resumed_run_with_nothing_left_to_do_saves_nothing(
    fit: Fit, scripted: Any, store: CheckpointStore, tmp_path: Path
) -> None:
    fit(scripted(), Checkpoint())
    before = store.entries()

    fit(scripted(), Checkpoint(), resume=tmp_path / "run")

    assert store.entries() == before


def test_a_checkpoint_has_the_state_of_other_callbacks_after_the_evaluation(
    fit: Fit, scripted: Any, store: CheckpointStore
) -> None:
    """Early stopping comes after the checkpoint in the list, and still is saved with this evaluation counted."""
    fit(scripted([0.5]), Checkpoint(monitor="validation/loss"), EarlyStopping(), max_duration="3step")

    best = next(entry for entry in store.entries() if entry.step == 2)
    assert store.load(best)["callbacks"]["EarlyStopping"] == {"best": 0.5, "best_step": 2, "waited": 0}


@pytest.fixture(autouse=True)
def handlers_are_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_best_checkpoint_of_a_run_has_the_name_best_in_python_too(make_trainer, tmp_path):
    data = Data(train=regression_data(8), validation=regression_data(8, seed=1), batch_size=4)
    task = Regression(lambda task: torch.optim.SGD(task.parameters(), lr=0.5))
    checkpoint = Checkpoint(every="1step", monitor="validation/loss", save_last_k=None)
    settings = {"max_duration": "4step", "evaluate_every": "1step", "run_dir": tmp_path / "run"}
    make_trainer(callbacks=[checkpoint], **settings).fit(task, data)
    metrics = [
        entry.metrics["validation/loss"] for entry in CheckpointStore(tmp_path / "run" / "checkpoints").entries()
    ]
    assert len(set(metrics)) > 1
    found = make_trainer().validate(task, data, checkpoint=tmp_path / "run" / "best")
    assert found["validation/loss"] == pytest.approx(min(metrics), rel=1e-6)
