"""One run on one rank: what callbacks may do with it."""

import os
import sys
from typing import Any

import pytest
import torch
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import MemoryLogger, Recorder, Regression, StopAt, regression_data
from trainkit import Callback, Data, Trainer, UserError
from trainkit.checkpoint.store import CheckpointStore
from trainkit.testing import run_ranks

DATA = Data(train=regression_data(12), validation=regression_data(4, seed=1), batch_size=4)


class At(Callback):
    """Calls a function with the run after a step."""

    def __init__(self, step, function):
        self.step, self.function = step, function

    def on_step_complete(self, run):
        if run.state.step == self.step:
            self.result = self.function(run)


def test_a_checkpoint_is_listed_with_step_epoch_metrics_and_reason(make_trainer):
    at = At(3, lambda run: run.checkpointer.save(reason="mine"))
    trainer = make_trainer(callbacks=[at])
    trainer.fit(Regression(), DATA)
    (entry,) = CheckpointStore(trainer.run_dir / "checkpoints").entries()
    assert entry == at.result
    assert (entry.name, entry.step, entry.epoch, entry.reason) == ("step_00000003", 3, 1, "mine")
    assert "validation/loss" in entry.metrics


def test_a_checkpoint_has_everything_that_a_resume_needs(make_trainer):
    trainer = make_trainer(callbacks=[StopAt(2)], config="lr: 0.1\n", precision="fp16-mixed")
    trainer.fit(Regression(lambda task: torch.optim.AdamW(task.parameters())), DATA)
    payload = CheckpointStore(trainer.run_dir / "checkpoints").load_last().payload
    assert list(payload["task"]) == ["network.0.weight", "network.0.bias"]
    assert set(payload["optimizer"]) == {"state", "param_groups"}
    assert payload["state"]["position"] == 8
    assert payload["scaler"]["scale"] > 0
    assert payload["config"] == "lr: 0.1\n"
    assert payload["task_class"].endswith("Regression")
    assert len(payload["rng"]) == 1
    assert payload["layout"].endswith(
        "BatchPlan(batch_size=4, world_size=1, micro_batches=1, micro_batch_size=4) on cpu"
    )


def test_a_resumed_run_repeats_the_decisions_of_its_strategy(make_trainer):
    class Deciding(SingleStrategy):
        def strategy_state(self):
            return {"partition": [1, 2]}

        def load_strategy_state(self, saved):
            self.repeated = dict(saved)

    trainer, again = make_trainer(Deciding(device="cpu"), callbacks=[StopAt(2)]), Deciding(device="cpu")
    trainer.fit(Regression(), DATA)
    make_trainer(again).fit(Regression(), DATA, resume=trainer.run_dir)
    assert again.repeated == {"partition": [1, 2]}


def test_a_callback_adds_to_a_checkpoint(make_trainer):
    class Adds(Callback):
        def on_save(self, run, payload):
            payload["mine"] = {"answer": 42}

    trainer = make_trainer(callbacks=[Adds(), StopAt(2)])
    trainer.fit(Regression(), DATA)
    assert CheckpointStore(trainer.run_dir / "checkpoints").load_last().payload["mine"] == {"answer": 42}


def test_a_disk_that_is_full_ends_the_run_with_the_remedy_and_keeps_what_was_saved(make_trainer, monkeypatch):
    def fill(run):
        def refuse(*args, **kwargs):
            raise OSError(28, "No space left on device")

        run.checkpointer.save(reason="good")
        monkeypatch.setattr("trainkit.checkpoint.store.write_payload", refuse)
        run.state.step += 1
        run.checkpointer.save(reason="bad")

    trainer, recorder = make_trainer(), Recorder()
    trainer.callbacks[:] = [At(2, fill), recorder]
    with pytest.raises(UserError, match=r"No space left on device.*run_dir=/path/with/room.*saved earlier are intact"):
        trainer.fit(Regression(), DATA)
    assert recorder.moments[-1][0] == "close"
    loaded = CheckpointStore(trainer.run_dir / "checkpoints").load_last()
    assert (loaded.entry.reason, loaded.skipped) == ("good", [])


def test_state_of_a_callback_that_cannot_be_read_back_is_refused_with_its_place(make_trainer):
    class Holds(Callback):
        def state_dict(self):
            return {"object": object()}

    with pytest.raises(UserError, match=r"callbacks\.Holds\.object"):
        make_trainer(callbacks=[Holds(), StopAt(1)]).fit(Regression(), DATA)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(make_trainer, caplog):
    trainer = make_trainer(callbacks=[At(1, lambda run: run.checkpointer.save(reason="a")), StopAt(2)])
    trainer.fit(Regression(), DATA)
    last = CheckpointStore(trainer.run_dir / "checkpoints").last()
    last.path.write_bytes(last.path.read_bytes()[:-100])
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(Regression(), DATA, resume=trainer.run_dir)
    assert recorder.moments[0] == ("on_fit_start", 1)
    assert "step_00000002" in caplog.text


def test_values_that_a_callback_logs_are_written_and_kept(make_trainer):
    logger = MemoryLogger()
    at = At(2, lambda run: run.log({"mine/value": 1.5}))
    result = make_trainer(callbacks=[at], loggers=[logger], log_every="1h").fit(Regression(), DATA)
    assert (2, {"mine/value": 1.5}) in logger.rows
    assert result.metrics["mine/value"] == 1.5


def test_a_run_knows_how_long_it_will_be(make_trainer):
    class Looks(Callback):
        def on_fit_start(self, run):
            self.seen = run.max_steps, run.loader.num_steps, str(run.plan), run.is_main

    looks = Looks()
    make_trainer(callbacks=[looks], max_duration="2epoch").fit(Regression(), DATA)
    assert looks.seen == (6, 3, "global batch 4 = 1 rank x 1 micro-batch x 4 samples", True)


def test_every_logger_is_opened_gets_the_config_and_is_closed(make_trainer):
    class Config(MemoryLogger):
        def write_config(self, config):
            self.config = config

    loggers = [Config(), Config()]
    trainer = make_trainer(loggers=loggers, config="lr: 0.1\n")
    trainer.fit(Regression(), DATA)
    for logger in loggers:
        assert logger.opened == [(trainer.run_dir, 0)]
        assert logger.config == "lr: 0.1\n"
        assert logger.closed == 1
    assert loggers[0].rows == loggers[1].rows


def written_by_rank(folder: str, async_save: bool) -> set[str]:
    """Train, and return the names of what this rank creates, renames or removes in the folder."""
    written: set[str] = set()

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.mkdir", "os.remove", "os.link")
        if event == "open" and isinstance(arguments[2], int):
            changes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if changes and str(arguments[0]).startswith(folder):
            written.add(os.path.relpath(str(arguments[0]), folder))

    sys.addaudithook(record)
    trainer = Trainer(
        DDPStrategy(device="cpu"),
        max_duration="2epoch",
        callbacks=[Checkpoint(every="2step", monitor="validation/loss", async_save=async_save)],
        loggers=["jsonl", "csv"],
        run_dir=folder,
    )
    trainer.fit(Regression(), DATA)
    return written


@pytest.mark.parametrize("async_save", [False, True])
def test_only_rank_0_writes_to_the_run_folder(tmp_path, async_save):
    first, second = run_ranks(written_by_rank, 2, str(tmp_path / "run"), async_save)
    assert {"summary.json", "metrics.jsonl", "checkpoints"} <= first
    assert any(name.startswith("checkpoints/step_00000002") for name in first)
    assert second <= {".", "rank_1.log", "failure.json"}, "its own log; the record of an earlier failure is removed"
