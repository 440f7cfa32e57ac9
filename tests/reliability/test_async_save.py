"""Checkpoints written while training goes on are those that training would have waited for."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainkit.callbacks.checkpoint import Checkpoint

from tests.tasks import AtStep, EachStep, Regression, assert_same_bits, data, sgd, wait_for_saves, weights
from trainkit import Trainer
from trainkit.checkpoint.background_save import CpuSnapshot
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore
from trainkit.errors import CheckpointError
from trainkit.loops.checkpointer import Checkpointer


def entries(trainer: Trainer) -> list[tuple[int, str, dict[str, float]]]:
    store = CheckpointStore(Path(str(trainer.run_dir)) / "checkpoints")
    return [(entry.step, entry.reason, entry.metrics) for entry in store.entries()]


def slowly(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> None:
    """Have `before(step)` called in the writer's thread before each save."""
    save = CheckpointStore.save

    def later(self: CheckpointStore, payload: Any, **keywords: Any) -> CheckpointEntry:
        before(keywords["step"])
        return save(self, payload, **keywords)

    monkeypatch.setattr(CheckpointStore, "save", later)


def wait_for(event: threading.Event) -> None:
    assert event.wait(600), "training did not go on while the checkpoint was written"


@pytest.mark.parametrize("kept", [1, 3, None])
def test_the_same_checkpoints_are_kept_as_without_a_background(make_trainer, monkeypatch, kept):
    slowly(monkeypatch, lambda step: time.sleep(0.2 if step <= 4 else 0.0))
    saved = []
    for background in (False, True):
        checkpoint = Checkpoint(
            every="7step",
            monitor="validation/loss",
            mode="max",
            save_top_k=1,
            save_last_k=kept,
            async_save=background,
        )
        trainer = make_trainer(callbacks=[checkpoint], max_duration="20step", evaluate_every="2step")
        trainer.fit(Regression(), data(40, batch_size=4))
        saved.append(entries(trainer))
    assert saved[0] == saved[1]
    assert saved[0][-1][:2] == (20, "end")
    assert any(reason == "best" for _, reason, _ in saved[0])


def save_at(step: int) -> AtStep:
    return AtStep(step, lambda run: run.checkpointer.save(reason="test", background=True))


def kept_weights() -> EachStep:
    return EachStep(lambda run: weights(run.task))


def test_a_checkpoint_has_the_weights_of_its_step_although_training_continues(make_trainer, monkeypatch):
    went_on = threading.Event()
    slowly(monkeypatch, lambda step: wait_for(went_on))
    kept = kept_weights()
    callbacks = [kept, save_at(2), AtStep(5, lambda run: went_on.set()), save_at(7)]
    trainer = make_trainer(callbacks=callbacks, max_duration="10step", evaluate_every=None)
    trainer.fit(Regression(sgd), data(40, batch_size=4))
    store = CheckpointStore(trainer.run_dir / "checkpoints")
    assert [entry.step for entry in store.entries()] == [2, 7]
    for entry in store.entries():
        assert_same_bits(store.load(entry)["task"], kept.seen[entry.step - 1])


def test_an_error_of_the_writer_is_raised_after_the_next_step(make_trainer, monkeypatch):
    def full(step: int) -> None:
        if step == 4:
            raise CheckpointError("the disk is full")

    slowly(monkeypatch, full)
    kept = kept_weights()
    callbacks = [kept, AtStep(5, wait_for_saves), Checkpoint(every="2step", async_save=True, max_retries=0)]
    trainer = make_trainer(callbacks=callbacks, max_duration="20step")
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert len(kept.seen) == 5
    assert [step for step, _, _ in entries(trainer)] == [2]


def test_an_error_of_the_last_save_is_raised_too(make_trainer, monkeypatch):
    def full(step: int) -> None:
        time.sleep(0.05)
        if step == 10:
            raise CheckpointError("the disk is full")

    slowly(monkeypatch, full)
    trainer = make_trainer(callbacks=[Checkpoint(every="5step", async_save=True)], max_duration="10step")
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert [step for step, _, _ in entries(trainer)] == [5]


def test_the_end_of_training_waits_for_the_save(make_trainer, monkeypatch):
    slowly(monkeypatch, lambda step: time.sleep(0.2))
    trainer = make_trainer(callbacks=[Checkpoint(every="10step", async_save=True)], max_duration="10step")
    trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert [step for step, _, _ in entries(trainer)] == [10]


def test_an_exception_leaves_the_last_complete_step(make_trainer):
    def fail(run: Any) -> None:
        raise RuntimeError("broken")

    callbacks = [AtStep(7, fail), Checkpoint(every="5step", async_save=True)]
    trainer = make_trainer(callbacks=callbacks, max_duration="10step")
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert [(step, reason) for step, reason, _ in entries(trainer)] == [(7, "exception")]


def test_a_run_resumed_from_a_background_save_is_bit_equal(make_trainer):
    whole, resumed = Regression(sgd, hidden=8, dropout=0.5), Regression(sgd, hidden=8, dropout=0.5)
    make_trainer(max_duration="15step").fit(whole, data(40, batch_size=4))
    trainer = make_trainer(callbacks=[Checkpoint(every="3step", async_save=True)], max_duration="7step")
    trainer.fit(Regression(sgd, hidden=8, dropout=0.5), data(40, batch_size=4))
    make_trainer(max_duration="15step").fit(resumed, data(40, batch_size=4), resume=trainer.run_dir)
    assert_same_bits(resumed, whole)


def test_memory_for_the_first_save_is_ready_before_it(make_trainer, monkeypatch):
    ready: list[set[str]] = []
    take = CpuSnapshot.take

    def noted(self: CpuSnapshot, *state: Any) -> dict[str, Any]:
        ready.append(set(self._buffers))
        return take(self, *state)

    monkeypatch.setattr(CpuSnapshot, "take", noted)
    trainer = make_trainer(callbacks=[Checkpoint(every="4step", async_save=True)], max_duration="4step")
    trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert {"task.network.0.weight", "optimizer.state.0.momentum_buffer"} <= ready[0]


def test_one_save_at_most_is_in_flight(make_trainer, monkeypatch):
    running: list[int] = []

    def noted(step: int) -> None:
        running.append(sum(thread.name.startswith("checkpoint-") for thread in threading.enumerate()))
        time.sleep(0.05)

    slowly(monkeypatch, noted)
    trainer = make_trainer(callbacks=[save_at(step) for step in range(2, 7)], max_duration="8step")
    trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert running == [1] * 5
    store = CheckpointStore(trainer.run_dir / "checkpoints")
    assert [entry.step for entry in store.entries()] == [2, 3, 4, 5, 6]


def test_an_error_of_the_writer_is_raised_by_the_next_save(make_trainer, monkeypatch):
    def full(step: int) -> None:
        if step == 2:
            raise CheckpointError("the disk is full")

    slowly(monkeypatch, full)
    kept = kept_weights()
    trainer = make_trainer(callbacks=[kept, save_at(2), save_at(4)], max_duration="8step")
    with pytest.raises(CheckpointError, match="the disk is full"):
        trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert len(kept.seen) == 4


def test_a_save_that_failed_is_tried_again_once(make_trainer, monkeypatch):
    save, failures = Checkpointer.save, [CheckpointError("no room")]

    def refuse_the_first(self: Checkpointer, **settings: Any) -> Any:
        if failures:
            raise failures.pop()
        return save(self, **settings)

    monkeypatch.setattr(Checkpointer, "save", refuse_the_first)
    slowly(monkeypatch, lambda step: time.sleep(0.2))
    checkpoint = Checkpoint(every="4step", async_save=True, save_last_k=None, retry_every="1step")
    trainer = make_trainer(callbacks=[checkpoint], max_duration="10step")
    trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert [(step, reason) for step, reason, _ in entries(trainer)] == [(5, "retry"), (8, "interval"), (10, "end")]


def test_no_thread_outlives_a_run(make_trainer):
    trainer = make_trainer(callbacks=[Checkpoint(every="2step", async_save=True)], max_duration="10step")
    trainer.fit(Regression(sgd), data(40, batch_size=4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-")]
