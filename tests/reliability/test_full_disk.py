"""Runs that the system refuses a disk or open files."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from re import search
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Fitting
from trainkit import Callback, Data, Trainer
from trainkit.checkpoint.background_save import CpuSnapshot, save_shards
from trainkit.checkpoint.serialization import Labels
from trainkit.checkpoint.sharded_state import TensorShard
from trainkit.checkpoint.store import CheckpointStore
from trainkit.errors import CheckpointError, UserError


def test_training_continues_while_the_disk_is_full_and_saves_when_there_is_room(small_disk: Path) -> None:
    filler = small_disk / "filler"

    class Cleaner(Callback):
        def on_step_end(self, run: Any) -> None:
            if run.state.step == 2:
                filler.write_bytes(bytes(9 * 2**20 - 2**17 - sum(p.stat().st_size for p in small_disk.rglob("*.*"))))
            elif run.state.step == 5:
                filler.unlink()

    callbacks = [Cleaner(), Checkpoint(every="2step", save_last_k=None, retry_every="1step")]
    trainer = Trainer(callbacks=callbacks, loggers=[], run_dir=small_disk, report=False)
    trainer.fit(Fitting(nn.Linear(1, 100_000)), Data(train=TensorDataset(torch.ones(8, 1)), batch_size=1))
    assert [entry.step for entry in CheckpointStore(small_disk / "checkpoints").entries()] == [5, 6, 8]


def test_full_disk_of_a_shard_names_what_is_needed_and_free(small_disk: Path) -> None:
    comm = SingleStrategy(device="cpu").comm
    shard = TensorShard("weight", torch.ones(3 * 2**20), 0, 3 * 2**20)
    store = CheckpointStore(small_disk / "checkpoints")
    labels: Labels = {"name": "step_1", "step": 1, "epoch": 0}
    message = (
        rf"process 0 could not write its shard: {store.folder}: No space left on device\. "
        r"It needs about 12,582,912 bytes, [\d,]+ are free there\. Make room .* Earlier checkpoints are intact"
    )
    for snapshot in (None, CpuSnapshot()):
        save = save_shards(store, {}, [shard], comm=comm, snapshot=snapshot, **labels)
        with pytest.raises(CheckpointError, match=message):
            save.wait()
    assert list(store.folder.iterdir()) == []


class UseUpOpenFiles(Callback):
    """Lets this process open no more files after a step, and fails then if it is to."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def on_step_end(self, run: Any) -> None:
        if run.state.step == 2:
            with open(os.devnull) as file:
                lowest = file.fileno()
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            if self.fails:
                raise RuntimeError("the cause")


@pytest.fixture
def _few_open_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (False, [Checkpoint(every="3step", max_retries=0)], r"step_00000003' could not be saved .*Too many open files"),
        (False, [], r"the run's summary could not be written to .*: Too many open files"),
        (False, [Checkpoint(every=None)], r"manifest\.json cannot be read: Too many open files"),
        (True, [], "the cause"),
    ],
    ids=["a checkpoint", "the summary", "the manifest", "the error of a run"],
)
@pytest.mark.usefixtures("_few_open_files")
def test_open_files_that_are_used_up_are_named(
    make_trainer: Any, caplog: pytest.LogCaptureFixture, first: bool, then: list[Callback], message: str
) -> None:
    trainer = make_trainer(callbacks=[UseUpOpenFiles(fails=first), *then])
    with pytest.raises(RuntimeError if first else UserError, match=message) as caught:
        trainer.fit(Fitting(nn.Linear(1, 100_000)), Data(train=TensorDataset(torch.ones(8, 1)), batch_size=1))
    advice = r"\(a process may have \d+\); type ulimit -n 65536 or lower data\.num_workers\."
    assert search(advice, caplog.text if first else str(caught.value))
