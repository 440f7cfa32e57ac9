"""Sharded checkpoints: each rank writes its shard; as safe as one file, and loaded on any layout."""

import os
import pickle
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.fusion import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import wait_for_saves
from trainkit import Callback, Data, Stopped, Strategy, TaskModule, Trainer, UserError
from trainkit.checkpoint import shard_files
from trainkit.checkpoint import store as store_module
from trainkit.checkpoint.shard_files import FileSystemWriter, ShardWriter
from trainkit.checkpoint.sharded_state import in_memory
from trainkit.checkpoint.store import CheckpointStore, load_from
from trainkit.cli.export import export_weights
from trainkit.errors import CheckpointError
from trainkit.testing import rank_outcomes, run_ranks

NAMES = ["step_00000004", "step_00000008"]


class Regression(TaskModule):
    """Has a frozen parameter, a tied one, buffers, and one that does not lie in memory as it is written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)
        self.mixing = nn.Parameter(torch.randn(16, 16).t())
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.tied = self.head.bias

    def training_step(self, batch: Any) -> Any:
        hidden = self.network(batch[0]) @ self.mixing
        return nn.functional.mse_loss(self.head(hidden) * self.scale, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(
    folder: Path,
    strategy: Strategy,
    steps: int,
    *,
    task: TaskModule | None = None,
    first: Sequence[Callback] = (),
    **saving: Any,
) -> None:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    trainer = Trainer(
        strategy,
        max_duration=f"{steps}step",
        callbacks=[*first, Checkpoint(every="4step", **{"save_last_k": None, **saving})],
        loggers=[],
        run_dir=folder,
    )
    data = Data(train=TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    trainer.fit(task or Regression(), data, resume="auto")


def fusion() -> Strategy:
    return FusionStrategy(device="cpu", shard_optimizer=True)


def resumed(folder: Path, copy: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run that is resumed in one process, in a copy of its folder."""
    shutil.copytree(folder, copy)
    task = Regression()
    fit(copy, SingleStrategy(device="cpu"), 12, task=task)
    return task.state_dict()


def saved_on_two_ranks(folder: Path) -> list[str]:
    fit(folder / "whole", fusion(), 8)
    fit(folder / "sharded", fusion(), 8, sharded=True)
    fit(folder / "pruned", fusion(), 8, sharded=True, save_last_k=1)
    fit(folder / "failed", fusion(), 5, sharded=True, save_at_end=False)
    for name, sharded in (("staged_whole", False), ("staged", True)):
        fit(folder / name, PipelineStrategy(device="cpu", stages=2), 4, sharded=sharded)
    save_in_background(folder)
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(FileSystemWriter, "write_data", refuse)
        try:
            fit(folder / "failed", fusion(), 8, sharded=True)
        except UserError as error:
            errors.append(str(error))
        failing = Steps({9: wait_for_saves})
        try:
            fit(folder / "failed", fusion(), 12, first=[failing], sharded=True, async_save=True, max_retries=0)
        except UserError as error:
            errors.append(f"{failing.last}: {error}")
    return errors


class Steps(Callback):
    """Calls functions after steps, before the callbacks behind it, and keeps the last step."""

    def __init__(self, functions: dict[int, Callable[[], object]]) -> None:
        self.functions, self.last = functions, 0

    def on_step_end(self, run: Any) -> None:
        self.last = run.state.step
        self.functions.get(self.last, int)()


def save_in_background(folder: Path) -> None:
    write, continued = ShardWriter.write, threading.Event()

    def later(writer: ShardWriter) -> Any:
        assert continued.wait(600), "training did not continue while the shards were written"
        return write(writer)

    def slowly(writer: ShardWriter) -> Any:
        time.sleep(0.5 * dist.get_rank())
        return write(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "write", later)
        fit(folder / "background", fusion(), 8, first=[Steps({7: continued.set})], sharded=True, async_save=True)
        continued.clear()
        first = [Steps({3: continued.set})]
        fit(
            folder / "staged_background",
            PipelineStrategy(device="cpu", stages=2),
            4,
            first=first,
            sharded=True,
            async_save=True,
        )
        fit(folder / "pruned_background", fusion(), 8, sharded=True, async_save=True, save_last_k=1)
        patch.setattr(ShardWriter, "write", slowly)
        stop = Steps({5: lambda: os.kill(os.getpid(), signal.SIGTERM)} if dist.get_rank() == 1 else {})
        with pytest.raises(Stopped):
            fit(folder / "stopped", fusion(), 200, first=[stop], sharded=True, async_save=True)
    (folder / f"stopped_after_{dist.get_rank()}").write_text(str(stop.last))


def refuse(*arguments: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def errors(folder: Path) -> list[list[str]]:
    return run_ranks(saved_on_two_ranks, 2, folder)


def same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_bits(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return bool(one == other)


def test_shards_of_two_ranks_equal_a_checkpoint_in_one_file(folder, errors):
    whole, sharded = (in_memory(load_from(folder / name).payload) for name in ("whole", "sharded"))
    for part in ("task", "optimizer", "rng", "schedules"):
        assert same_bits(whole[part], sharded[part]), part
    assert sharded["task"]["mixing"].stride() == whole["task"]["mixing"].stride() == (1, 16)


def test_each_rank_writes_about_half_and_the_manifest_lists_all_files(folder, errors):
    for entry in CheckpointStore(folder / "sharded" / "checkpoints").entries():
        shards = entry.path.with_suffix(".shards")
        assert sorted(shard.file for shard in entry.shards) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        assert {path.name: path.stat().st_size for path in shards.iterdir()} == {s.file: s.size for s in entry.shards}
    first, second = ((shards / f"__{rank}_0.distcp").stat().st_size for rank in range(2))
    assert 0.5 < first / second < 2


def test_each_stage_of_a_pipeline_writes_its_shard(folder, errors):
    whole, staged = load_from(folder / "staged_whole"), load_from(folder / "staged")
    for part in ("task", "optimizer"):
        assert same_bits(whole.payload[part], in_memory(staged.payload[part])), part
    assert sorted(shard.file for shard in staged.entry.shards) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_resuming_shards_in_one_process_is_bit_equal_to_resuming_one_file(folder, errors, tmp_path):
    one, other = (resumed(folder / name, tmp_path / name) for name in ("whole", "sharded"))
    assert same_bits(dict(one), dict(other))


def test_weights_are_exported_to_one_file(folder, errors, tmp_path):
    from safetensors.torch import load_file

    export_weights(folder / "sharded", tmp_path / "model.safetensors")
    weights = load_from(folder / "whole").payload["task"]
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in exported.items())
    assert set(exported) | {"tied"} == set(weights)


def test_retention_removes_the_shards_too(folder, errors):
    names = {path.name for path in (folder / "pruned" / "checkpoints").iterdir()}
    assert names == {"manifest.json", f"{NAMES[1]}.pt", f"{NAMES[1]}.shards"}


def test_a_rank_that_cannot_write_raises_on_every_rank_and_earlier_checkpoints_stay(folder, errors):
    message = r"process 1 could not write its shard: \S+: No space left on device\. It needs about [\d,]+ bytes, "
    assert all(re.search(message, error) for error, _ in errors), errors
    store = CheckpointStore(folder / "failed" / "checkpoints")
    assert store.load_last().entry.step == 4
    assert {path.name for path in store.folder.iterdir()} == {"manifest.json", f"{NAMES[0]}.pt", f"{NAMES[0]}.shards"}


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata", None])
@pytest.mark.parametrize("listed", [True, False])
def test_a_damaged_shard_is_detected_and_the_checkpoint_before_it_loaded(folder, errors, tmp_path, file, listed):
    store = CheckpointStore(shutil.copytree(folder / "sharded" / "checkpoints", tmp_path / "checkpoints"))
    shards = store.folder / f"{NAMES[1]}.shards"
    if file is None:
        shutil.rmtree(shards)
    else:
        content = bytearray((shards / file).read_bytes())
        content[len(content) // 2] ^= 0x10
        (shards / file).write_bytes(content)
    if listed:
        with pytest.raises(CheckpointError, match=r"altered after it was saved|missing"):
            store.verify(store.entries()[-1])
    else:  # the entries are then made from what the files say
        (store.folder / "manifest.json").unlink()
    assert store.load_last().entry.name == NAMES[0]


def test_names_of_shards_are_on_the_disk_before_the_checkpoint_is_listed(tmp_path, monkeypatch):
    done = []

    def noted(name: str) -> Any:
        original = getattr(store_module, name)

        def noting(path: Path, *arguments: Any, **settings: Any) -> Any:
            done.append((name, path.name))
            return original(path, *arguments, **settings)

        return noting

    for name in ("sync_folder", "move", "write_manifest"):
        monkeypatch.setattr(store_module, name, noted(name))
    store = CheckpointStore(tmp_path / "checkpoints")
    with store.shard_folder("a") as folder:
        store.register_shards({"task": {}}, folder, [], name="a", step=1, epoch=0)
    moved = [("move", ".a.shards.part"), ("move", ".a.pt.part")]
    assert done == [("sync_folder", ".a.shards.part"), *moved, ("write_manifest", "checkpoints")]


def test_a_lost_manifest_is_rebuilt_from_files_with_shards(folder, errors, tmp_path):
    store = CheckpointStore(shutil.copytree(folder / "sharded" / "checkpoints", tmp_path / "checkpoints"))
    listed = store.entries()
    (store.folder / "manifest.json").unlink()
    assert [entry.shards for entry in store.entries()] == [entry.shards for entry in listed]


def test_metadata_that_names_code_is_refused_and_never_run(tmp_path):
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trap"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which can run code"):
        shard_files.load_shards({}, tmp_path, [])
    assert not (tmp_path / "trap").exists()


def test_shards_written_in_the_background_are_those_of_their_step(folder, errors):
    for name, background in (("sharded", "background"), ("staged", "staged_background")):
        for one, other in zip(
            *(CheckpointStore(folder / n / "checkpoints").entries() for n in (name, background)), strict=True
        ):
            assert (one.step, one.reason) == (other.step, other.reason)
            payloads = [in_memory(load_from(entry.path).payload) for entry in (one, other)]
            for part in ("task", "optimizer", "rng", "schedules"):
                assert same_bits(payloads[0][part], payloads[1][part]), (name, one.step, part)
    names = {path.name for path in (folder / "pruned_background" / "checkpoints").iterdir()}
    assert names == {"manifest.json", f"{NAMES[1]}.pt", f"{NAMES[1]}.shards"}


def test_a_stopped_run_waits_for_the_shards_of_all_ranks(folder, errors):
    store = CheckpointStore(folder / "stopped" / "checkpoints")
    first, *_, last = store.entries()
    agreed, other = (int((folder / f"stopped_after_{rank}").read_text()) for rank in range(2))
    # Ranks agree some steps later, and a step that an interval has saved already is not saved again.
    reason = "interval" if agreed % 4 == 0 else "SIGTERM"
    assert (first.step, last.step, last.reason) == (4, agreed, reason)
    assert agreed == other
    for entry in store.entries():
        store.verify(entry)
        assert len(entry.shards) == 3


def test_a_rank_that_cannot_write_in_the_background_raises_on_every_rank_after_the_next_step(folder, errors):
    for _, error in errors:
        assert re.match(r"9: process 1 could not write its shard: \S+: No space left on device\. It needs", error), (
            error
        )


def killed_while_saving(folder: Path, rank: int, at: str, background: bool) -> None:
    """Kill a rank in its second save: while it writes its shard, or when the checkpoint is about to be listed."""
    fit(folder, fusion(), 4, sharded=True)
    if dist.get_rank() == rank:
        target = (FileSystemWriter, "write_data") if at == "writing" else (CheckpointStore, "_list")
        setattr(*target, lambda *arguments, **settings: os.kill(os.getpid(), signal.SIGKILL))
    fit(folder, fusion(), 8, sharded=True, async_save=background)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill", [(1, "writing", False), (0, "listing", False), (1, "writing", True), (0, "listing", True)]
)
def test_a_kill_while_ranks_save_costs_only_the_work_since_the_last_checkpoint(tmp_path, folder, errors, kill):
    rank = kill[0]
    outcomes = rank_outcomes(killed_while_saving, 2, tmp_path / "killed", *kill, patience=20)
    assert "SIGKILL" in str(outcomes[rank].failure)
    store = CheckpointStore(tmp_path / "killed" / "checkpoints")
    assert [entry.step for entry in store.entries()] == [4]
    whole = shutil.copytree(folder / "whole", tmp_path / "whole")
    CheckpointStore(whole / "checkpoints").delete(CheckpointStore(whole / "checkpoints").entries()[-1])
    assert same_bits(dict(resumed(tmp_path / "killed", tmp_path / "a")), dict(resumed(whole, tmp_path / "b")))
    swept = {path.name for path in (tmp_path / "a" / "checkpoints").iterdir()}
    assert not any(name.startswith(".") for name in swept)
    assert f"{NAMES[1]}.shards" not in swept
