"""Each rank reads from a checkpoint only what it holds, from shards and from one file, on any number of ranks."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.ema import EMA, WeightAveraging
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion import FusionStrategy
from trainkit.strategies.optimizer_shards import ShardedOptimizer
from trainkit.strategies.single import SingleStrategy

from trainkit import Callback, Data, Strategy, TaskModule, Trainer
from trainkit.checkpoint import serialization, sharded_state
from trainkit.checkpoint import store as store_module
from trainkit.checkpoint.sharded_state import in_memory
from trainkit.checkpoint.store import CheckpointStore, load_from
from trainkit.cli import export
from trainkit.distributed.collectives import ProcessGroupCollectives
from trainkit.errors import DamagedCheckpoint
from trainkit.loops.checkpointer import Checkpointer
from trainkit.strategy import local_state
from trainkit.testing import rank_outcomes, run_ranks
from trainkit.tree import tensors_in

pytestmark = pytest.mark.slow

WRONG = 16  # a sample of the fourth step
WIDTH = 254  # rows that three ranks share unevenly


class Wide(TaskModule):
    """Has a shared parameter, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.tied = self.second.weight
        self.scale = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any) -> Any:
        hidden = torch.tanh(self.first(batch[0])) @ self.tied
        return nn.functional.mse_loss(self.head(torch.tanh(self.second(hidden))) * self.scale[0], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.001)


MADE = {
    "fsdp": lambda: FSDPStrategy(device="cpu", units=[]),
    "fusion": lambda: FusionStrategy(device="cpu", shard_optimizer=True),
    "ddp": lambda: DDPStrategy(device="cpu"),
    "single": lambda: SingleStrategy(device="cpu"),
}


class Held(Callback):
    """Keeps the bytes of parameters, buffers and optimizer state that this rank holds after the first step."""

    num_bytes = 0

    def on_step_end(self, run: Any) -> None:
        averages = [tensor for each in run.callbacks if isinstance(each, EMA) for tensor in each._average.values()]
        state = tensors_in(run.phase_optimizer.optimizer.state)
        held = [*local_state(run.strategy, run.task).values(), *state, *averages]
        self.num_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def fit(
    kind: str, folder: Path, steps: int, *callbacks: Callback, wrong: int | None = None, **saving: Any
) -> dict[str, Tensor]:
    """Train, or continue the run in the folder, until after the step; of 5 in an epoch.

    The loss of the sample `wrong` is not a number, and the run continues without its step.
    """
    inputs = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(0))
    if wrong is not None:
        inputs[wrong] = torch.nan
    strategy: Strategy = MADE[kind]()
    task = Wide()
    trainer = Trainer(
        strategy,
        max_duration=f"{steps}step",
        precision="fp64",
        on_nonfinite="raise" if wrong is None else "rollback",
        callbacks=[Checkpoint(every="2step", **{"save_last_k": None, **saving}), *callbacks],
        loggers=[],
        run_dir=folder,
    )
    data = Data(train=TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    trainer.fit(task, data, resume="auto")
    return task.state_dict()


# ---- Counting


class MappedReads(TorchDispatchMode):
    """Counts the bytes of tensors in mapped files that operations read."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.files = 0, []

    def map(self, file: Any, *arguments: Any, **settings: Any) -> Any:
        self.files.append(MAP(file, *arguments, **settings))
        return self.files[-1]

    def is_mapped(self, value: Any) -> bool:
        """Return True if the value is a tensor in a file."""
        if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu":
            return False
        place = value.untyped_storage().data_ptr()
        return any(file.data_ptr() <= place < file.data_ptr() + file.nbytes() for file in self.files)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.new_empty.default:
            flat = torch.utils._pytree.tree_leaves((args, kwargs))
            self.bytes += sum(value.nbytes for value in flat if self.is_mapped(value))
        return func(*args, **(kwargs or {}))


MAP = torch.UntypedStorage.from_file


class Reads:
    """The bytes that were read into tensors, of shards and of mapped files."""

    def __init__(self) -> None:
        self.shards, self.mapped = 0, MappedReads()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while a checkpoint is loaded and restored, and what fusion and averages read in the first step."""
        with pytest.MonkeyPatch.context() as patch:
            read = sharded_state._read_elements

            def count(chunk: Any, first: int, into: memoryview, **settings: Any) -> None:
                read(chunk, first, into, **settings)
                self.shards += len(into)

            patch.setattr(sharded_state, "_read_elements", count)
            patch.setattr(torch.UntypedStorage, "from_file", self.mapped.map)
            for place, name in (
                (store_module, "load_from"),
                (Checkpointer, "restore"),
                (ShardedOptimizer, "open"),
                (WeightAveraging, "_local_average"),
            ):
                patch.setattr(place, name, self.inside(getattr(place, name)))
            yield

    def inside(self, function: Any) -> Any:
        """Return the function, which counts the bytes that it reads from mapped files."""

        def counting(*arguments: Any, **settings: Any) -> Any:
            with self.mapped:
                return function(*arguments, **settings)

        return counting


# ---- Ranks

SAVED = ["fsdp_shards", "fsdp_whole", "fusion_shards", "fusion_whole"]


AVERAGED = ["fsdp_shards_averaged", "fsdp_whole_averaged"]
REPLACED = ["fsdp_shards_replaced", "fusion_shards_replaced"]


def average() -> EMA:
    return EMA(decay=0.5, load_average_at_end=False)


def saved_on_three_ranks(folder: Path) -> None:
    for name in SAVED:
        kind, form = name.split("_")
        fit(kind, folder / name, 3, sharded=form == "shards")
    for name in AVERAGED:
        fit("fsdp", folder / name, 3, average(), sharded="shards" in name)
    fit("fsdp", folder / "fsdp_background", 3, sharded=True, async_save=True)


class SaveAtStart(Callback):
    """Saves before the first step, in place of the checkpoint that is resumed."""

    def on_fit_start(self, run: Any) -> None:
        run.checkpointer.save(reason="start")


class NothingIsMapped(Callback):
    """Finds all that is trained in memory after a step."""

    def __init__(self, reads: Reads) -> None:
        self.mapped = reads.mapped

    def on_step_end(self, run: Any) -> None:
        held = [*local_state(run.strategy, run.task).values(), *tensors_in(run.phase_optimizer.optimizer.state)]
        assert not any(self.mapped.is_mapped(tensor) for tensor in held)


def resumed_on_two_ranks(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what each resume read, of what it holds; and what happens to sound and damaged files."""
    outcomes = {}
    for name in [*SAVED, *AVERAGED]:
        reads, held = Reads(), Held()
        averages = [average()] if name in AVERAGED else []
        with reads.counted():
            weights = fit(name.split("_")[0], folder / name, 8, *averages, held, NothingIsMapped(reads))
        outcomes[name] = (reads.shards, reads.mapped.bytes, held.num_bytes, weights)
    for name in REPLACED:
        outcomes[name] = fit(name.split("_")[0], folder / name, 8, SaveAtStart())
    for kind in ("fsdp", "fusion"):
        outcomes[f"{kind} after a rollback"] = fit(kind, folder / f"{kind}_back", 5, wrong=WRONG, sharded=True)
    return outcomes, verified_together(folder / "fsdp_background")


def verified_together(folder: Path) -> dict[str, Any]:
    verified: list[str] = []
    check = serialization._check_digest

    def noted(file: Any, path: Path, saved: Any) -> None:
        verified.append(path.name)
        check(file, path, saved)

    comm = ProcessGroupCollectives.join(
        dist.group.WORLD, device=torch.device("cpu"), timeout_seconds=60, step=lambda: 0
    )
    store = CheckpointStore(folder / "checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "_check_digest", noted)
        store.load(store.entries()[-1], comm)
    comm.barrier()
    if comm.is_main:
        (store.entries()[-1].path.with_suffix(".shards") / "__2_0.distcp").write_bytes(b"altered")
    comm.barrier()
    return {"verified": verified, "chosen": load_from(folder, comm).entry.step}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    """The folder with runs of three ranks that were stopped inside an epoch."""
    run_ranks(saved_on_three_ranks, 3, folder)
    shutil.copytree(folder, folder.parent / "copy")
    for name in REPLACED:
        shutil.copytree(folder / name.removesuffix("_replaced"), folder / name)
    return folder.parent / "copy"


@pytest.fixture(scope="module")
def ranks(folder: Path, saved: Path) -> list[Any]:
    return run_ranks(resumed_on_two_ranks, 2, folder)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return fit("single", tmp_path_factory.mktemp("single"), 8)


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(weights) == list(expected)
    for name, tensor in weights.items():
        assert (tensor - expected[name]).abs().max() < 1e-9, name


@pytest.mark.parametrize("name", SAVED)
def test_each_rank_reads_from_a_checkpoint_of_other_ranks_what_it_holds(ranks, expected, name):
    for outcomes, _ in ranks:
        shards, mapped, held, weights = outcomes[name]
        assert held < shards + mapped < 1.1 * held
        assert (shards > 0.9 * held) == name.endswith("shards")
        assert_close(weights, expected)


@pytest.mark.parametrize("name", AVERAGED)
def test_each_rank_reads_what_it_holds_of_an_average(ranks, folder, tmp_path, name):
    fit("single", tmp_path, 8, average())
    expected = load_from(tmp_path).payload["evaluation_weights"]
    assert_close(in_memory(load_from(folder / name).payload["evaluation_weights"]), expected)
    for outcomes, _ in ranks:
        shards, mapped, held, _ = outcomes[name]
        assert held < shards + mapped < 1.1 * held


@pytest.mark.parametrize("kind", ["fsdp", "fusion"])
def test_a_rollback_restores_the_optimizer_state_of_every_shard(ranks, tmp_path, kind):
    expected = fit("single", tmp_path, 5, wrong=WRONG)
    for outcomes, _ in ranks:
        assert_close(outcomes[f"{kind} after a rollback"], expected)


def test_ranks_of_a_machine_share_the_files_to_verify_and_the_verdict(ranks):
    (one, other) = (together for _, together in ranks)
    assert sorted(one["verified"] + other["verified"]) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "step_00000003.pt",
    ]  # fmt: skip
    assert one["verified"] and other["verified"]
    assert one["chosen"] == other["chosen"] == 2


def test_shards_that_fsdp_writes_in_the_background_are_those_of_their_step(saved):
    one, other = (CheckpointStore(saved / name / "checkpoints") for name in ("fsdp_shards", "fsdp_background"))
    assert [entry.step for entry in one.entries()] == [entry.step for entry in other.entries()] == [2, 3]
    for own, background in zip(one.entries(), other.entries(), strict=True):
        payloads = [in_memory(store.load(entry)) for store, entry in ((one, own), (other, background))]
        for part in ("task", "optimizer"):
            torch.testing.assert_close(payloads[0][part], payloads[1][part], rtol=0, atol=0)


def test_a_run_goes_on_under_other_strategies_from_shards_and_whole_files(tmp_path, expected):
    for kind, num_ranks, step, saving in [
        ("fsdp", 4, 2, {"sharded": True}),
        ("ddp", 2, 4, {}),
        ("single", 1, 6, {}),
        ("fsdp", 3, 7, {"sharded": True, "async_save": True}),
        ("fusion", 2, 8, {}),
    ]:
        weights, *_ = run_ranks(continued, num_ranks, kind, tmp_path / "run", step, saving)
    assert_close(weights, expected)


def killed_while_writing(folder: Path) -> None:
    fit("fsdp", folder, 2, sharded=True, async_save=True)
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = lambda *arguments, **settings: os.kill(os.getpid(), signal.SIGKILL)
    fit("fsdp", folder, 8, sharded=True, async_save=True)


def test_a_rank_of_fsdp_killed_while_it_writes_costs_the_work_since_the_last_checkpoint(tmp_path, expected):
    outcomes = rank_outcomes(killed_while_writing, 2, tmp_path / "run", patience=20)
    assert "SIGKILL" in str(outcomes[1].failure)
    assert [entry.step for entry in CheckpointStore(tmp_path / "run" / "checkpoints").entries()] == [2]
    weights, *_ = run_ranks(continued, 3, "fsdp", tmp_path / "run", 8, {})
    assert_close(weights, expected)


def continued(kind: str, folder: Path, step: int, saving: dict[str, Any]) -> dict[str, Tensor]:
    return fit(kind, folder, step, **saving)


@pytest.mark.parametrize("name", REPLACED)
def test_a_save_before_the_first_step_may_replace_what_is_resumed(ranks, folder, saved, expected, name):
    for outcomes, _ in ranks:
        assert_close(outcomes[name], expected)
    started = [entry for entry in CheckpointStore(folder / name / "checkpoints").entries() if entry.reason == "start"]
    (one, other) = (
        in_memory(load_from(path).payload) for path in (saved / name.removesuffix("_replaced"), started[0].path)
    )
    for part in ("task", "optimizer"):
        torch.testing.assert_close(dict(one[part]), dict(other[part]), rtol=0, atol=0)


@pytest.mark.parametrize("name", SAVED)
def test_nothing_that_one_device_trains_stays_in_the_file(saved, tmp_path, expected, name):
    reads = Reads()
    with reads.counted():
        shutil.copytree(saved / name, tmp_path / "run")
        assert_close(fit("single", tmp_path / "run", 8, NothingIsMapped(reads)), expected)
    assert (reads.shards > 0) == name.endswith("shards")
    assert reads.mapped.files


# ---- Export


@pytest.mark.parametrize("name", SAVED)
def test_export_holds_one_tensor_at_a_time(saved, tmp_path, monkeypatch, name):
    safetensors = pytest.importorskip("safetensors.torch")
    alive: list[StorageWeakRef] = []
    read = sharded_state.StoredTensor.read

    def noted(tensor: Any, start: int, stop: int) -> Tensor:
        assert all(storage.expired() for storage in alive)
        content = read(tensor, start, stop)
        alive.append(StorageWeakRef(content.untyped_storage()))
        return content

    monkeypatch.setattr(sharded_state.StoredTensor, "read", noted)
    reads = Reads()
    monkeypatch.setattr(torch.UntypedStorage, "from_file", reads.mapped.map)
    monkeypatch.setattr(export, "write_safetensors", reads.inside(export.write_safetensors))
    export.export_weights(saved / name, tmp_path / "model.safetensors")
    assert reads.mapped.bytes == 0  # files of whole tensors are written from where they are mapped
    assert bool(alive) == name.endswith("shards")
    monkeypatch.undo()
    weights = in_memory(load_from(saved / name).payload["task"])
    torch.testing.assert_close(safetensors.load_file(tmp_path / "model.safetensors"), dict(weights), rtol=0, atol=0)


def test_an_export_that_fails_leaves_the_file_that_was_there(saved, tmp_path, monkeypatch):
    out = tmp_path / "model.safetensors"
    out.write_text("before")

    def fail(*arguments: Any) -> Any:
        raise DamagedCheckpoint("a shard is gone")

    monkeypatch.setattr(sharded_state.StoredTensor, "read", fail)
    with pytest.raises(DamagedCheckpoint):
        export.export_weights(saved / "fsdp_shards", out)
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
