"""Steps, memory and checkpoints of `fsdp` beside `fully_shard` by hand, Lightning and Accelerate, over gloo on the CPU.

    python benchmarks/sharding.py [--rounds 5] [--ranks 2,4] [--steps 16] [--figures time,memory,checkpoints]

All train the same GPT with the same fused AdamW, one thread a rank, in new processes for each measurement; the C
library keeps freed memory for all of them, as `Trainer.fit` lets it by default. The loop by hand has the units of
`fsdp`, its weights of the loss and no framework. A peer that does not run on a CPU is shown with its error.

time: the median from one forward to the next on the main rank, without the first steps; ratios to the loop by hand
within rounds, in each of which all run in rotating order. CPU: the processor's time of the main rank for a step.
Process: the most memory of the main rank with all that it imports and all freed memory that the C library keeps.

memory: the most bytes that a rank has at once during a step, above what its process has beside tensors; the C library
gives back what is freed. A batch has so few tokens that activations are small. Theory: (parameters, gradients and
optimizer state) / ranks, and the largest unit.

checkpoints: bytes that each rank of `fsdp` writes in a save and reads in a load, against its part of the parameters and
of the optimizer's state. Read are all bytes that the rank asks of files between the start of `fit` and its first step,
with hashes and imports, but without pages of files that are mapped into memory; into tensors: the elements of
parameters and of the optimizer's state that become tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from ddp_step import Block
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.fsdp import sharded_task

from trainkit import Data, TaskModule, Trainer

WARM_UP = 4
WORDS, WIDTH, LAYERS, HEADS = 2048, 448, 12, 8
BATCH, LENGTH = 4, 32  # of a rank
FEW = 8  # tokens of a rank where memory is measured
BY_HAND, OURS = "by hand", "trainkit"
MIB = 2**20
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Gpt(nn.Module):
    """30 million parameters in 148 tensors, with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token at each position, shape (batch, length, words)."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return self.norm(self.blocks(x)) @ self.tokens.weight.t()


class Timed(TaskModule):
    """Records when each of its steps begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Gpt()
        self.began: list[tuple[float, float]] = []  # seconds of the clock, of the processor

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the mean loss of a token."""
        self.began.append((time.perf_counter(), time.process_time()))
        (ids,) = batch
        logits = self.model(ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return fused AdamW: what `Trainer.fit` makes of AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


# ---- Contenders: each trains a task on its rank of the group


def by_hand(task: Timed, samples: TensorDataset, batch_size: int, folder: Path) -> None:
    """Train with `fully_shard` and a plain loop."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    shard(task, init_device_mesh("cpu", (ranks,)))
    optimizer = task.configure_optimizers()
    for batch in DataLoader(samples, batch_size, sampler=DistributedSampler(samples)):
        (task(batch) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()


def shard(task: Timed, mesh: Any) -> None:
    """Shard each block and the rest, with gradients that are summed over ranks."""
    task.forward = task.training_step  # type: ignore[assignment,method-assign] # gathers the unit of the rest
    for block in task.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(task, mesh=mesh)
    for module in task.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def with_trainkit(task: Timed, samples: TensorDataset, batch_size: int, folder: Path) -> None:
    """`Trainer.fit` with `strategy=fsdp` and all defaults."""
    ranks = int(os.environ["WORLD_SIZE"])
    Trainer("fsdp", run_dir=folder / "run").fit(task, Data(train=samples, batch_size=batch_size * ranks))


def with_lightning(task: Timed, samples: TensorDataset, batch_size: int, folder: Path) -> None:
    """`lightning.Trainer.fit` with `ModelParallelStrategy`, whose modules call `fully_shard` themselves."""
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = task

        def configure_model(self) -> None:
            assert self.device_mesh is not None
            shard(self.task, self.device_mesh["data_parallel"])

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss: Tensor = self.task(batch)
            self.log("loss", loss)
            return loss / self.trainer.world_size

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.task.configure_optimizers()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        max_epochs=1,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), DataLoader(samples, batch_size=batch_size, shuffle=True))


def with_accelerate(task: Timed, samples: TensorDataset, batch_size: int, folder: Path, *, force: bool = False) -> None:
    """The loop of Accelerate's guide with its FSDP2, which it ignores on a CPU unless `force` changes its state."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if force:
        PartialState._shared_state["distributed_type"] = accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    if not accelerator.is_fsdp2:
        raise RuntimeError(f"asked for FSDP2, Accelerate chose {accelerator.distributed_type}")
    task.forward = task.training_step  # type: ignore[assignment,method-assign] # what is wrapped
    loader = DataLoader(samples, batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(task, task.configure_optimizers(), loader)
    for batch in loader:
        accelerator.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()


CONTENDERS: dict[str, Callable[[Timed, TensorDataset, int, Path], None]] = {
    BY_HAND: by_hand,
    OURS: with_trainkit,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
    "accelerate, forced": partial(with_accelerate, force=True),
}


# ---- On a rank: each prints one line


T = TypeVar("T", bound=Timed)


def train(contender: str, *, steps: int, batch_size: int, length: int, folder: Path, make: type[T]) -> T:
    """Return a task that a contender has trained."""
    task, ranks = make(), int(os.environ["WORLD_SIZE"])
    CONTENDERS[contender](task, samples(steps * ranks * batch_size, length), batch_size, folder)
    return task


def samples(number: int, length: int) -> TensorDataset:
    """Return random sentences."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randint(0, WORDS, (number, length + 1), generator=generator))


def time_of_step(contender: str, folder: Path, steps: int) -> dict[str, float]:
    """Return the seconds of a step, of the clock and of the processor, and the most bytes of the process."""
    began = train(contender, steps=steps, batch_size=BATCH, length=LENGTH, folder=folder, make=Timed).began[WARM_UP:]
    pairs = list(pairwise(began))
    wall, processor = (statistics.median(after[i] - before[i] for before, after in pairs) for i in range(2))
    return {"seconds": wall, "cpu_seconds": processor, "process": process_bytes("VmHWM")}


def memory_of_step(contender: str, folder: Path, steps: int) -> dict[str, float]:
    """Return the most bytes of a rank in a step, and in theory."""
    task = train(contender, steps=5, batch_size=1, length=FEW, folder=folder, make=Weighed)
    return {"most": statistics.median(task.most[2:]), **in_theory()}  # the optimizer's state is made in the first step


class Weighed(Timed):
    """Notes the most bytes that its process has between two of its steps.

    The system keeps the highest mark of what the process has in memory. What it has beside tensors is taken off when a
    step begins, where all tensors are known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most: list[int] = []
        self._beside = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the mean loss of a token."""
        if self.began:
            self.most.append(process_bytes("VmHWM") - self._beside)
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the mark begins again
        self._beside = process_bytes("VmRSS") - bytes_of_tensors()
        return super().training_step(batch)


def process_bytes(name: str) -> int:
    """Return a figure of the system for this process."""
    with open("/proc/self/status", encoding="ascii") as file:
        return 1024 * int(next(line for line in file if line.startswith(name)).split()[1])


def bytes_of_tensors() -> int:
    """Return the bytes of all tensors that Python knows."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def in_theory() -> dict[str, float]:
    """Return the bytes of a rank's part of a state of which AdamW has two tensors, and of the largest unit."""
    whole = Timed()
    state = 4 * sum(parameter.nbytes for parameter in whole.parameters()) / int(os.environ["WORLD_SIZE"])
    return {
        "state": state,
        "unit": max(unit.num_bytes for unit in sharded_task.choose_units(whole, "auto", min_bytes=MIB)),
    }


def save(contender: str, folder: Path, steps: int) -> dict[str, float]:
    """Save a checkpoint after two steps."""
    fit_and_save(folder, 2, sharded=contender == "sharded")
    return {}


def load(contender: str, folder: Path, steps: int) -> dict[str, float]:
    """Return the bytes that this rank reads to go on from a checkpoint, and those that become tensors."""
    into_tensors = 0
    elements = sharded_task.elements

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal into_tensors
        read = elements(*args, **kwargs)
        into_tensors += read.nbytes
        return read

    sharded_task.elements = counted
    before = bytes_read()
    task = fit_and_save(folder, 3, sharded=contender == "sharded", resume=folder / "run")
    return {"read": task.read - before, "into_tensors": into_tensors}


class Counting(Timed):
    """Notes how much its process has read when the first step begins."""

    read = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the mean loss of a token."""
        self.read = self.read or bytes_read()
        return super().training_step(batch)


def fit_and_save(folder: Path, steps: int, *, sharded: bool, resume: Path | None = None) -> Counting:
    """Train with `fsdp` until a step, and save at the end."""
    task = Counting()
    trainer = Trainer(
        "fsdp", max_duration=f"{steps}step", callbacks=[Checkpoint(sharded=sharded)], run_dir=folder / "run"
    )
    trainer.fit(task, Data(train=samples(32, FEW), batch_size=int(os.environ["WORLD_SIZE"])), resume=resume)
    return task


def bytes_read() -> int:
    """Return the bytes that this process has asked of files."""
    with open("/proc/self/io", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("rchar")).split()[1])


MEASURES = {"time": time_of_step, "memory": memory_of_step, "save": save, "load": load}


def measure_here(what: str, contender: str, folder: Path, steps: int) -> None:
    """Measure on this rank and print the figures, or why there are none."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found: dict[str, Any] = MEASURES[what](contender, folder, steps)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    print("measured", json.dumps(found), file=sys.__stdout__, flush=True)
    os._exit(0)  # without waiting for a rank that has failed


# ---- Tables


def measure(what: str, contender: str, ranks: int, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Return what each rank measures, in new processes."""
    command = [sys.executable, __file__, "--measure", what, contender, str(folder), "--steps", str(steps)]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {  # as torchrun says it, so that none of them starts processes
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    memory = GIVE_BACK if what == "memory" else KEEP_MEMORY
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **memory, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=900)[0] for process in processes]
    return [
        json.loads(line.partition(" ")[2])
        for text in printed
        for line in text.splitlines()
        if line.startswith("measured ")
    ]


def show_times(ranks: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Print and return the step times of all contenders."""
    names = list(CONTENDERS)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name not in errors:
                with tempfile.TemporaryDirectory() as folder:
                    main = measure("time", name, ranks, Path(folder), steps)[0]
                if "error" in main:
                    errors[name] = main["error"]
                found[name].append(main)
    rows: list[dict[str, Any]] = []
    print(
        "\n| ranks | contender | ms a step | x by hand | quartiles | CPU ms | x by hand | process MiB |\n"
        + "|---" * 8
        + "|"
    )
    for name, times in found.items():
        row: dict[str, Any] = {"ranks": ranks, "contender": name}
        if name in errors:
            row["error"] = errors[name]
            print(f"| {ranks} | {name} | {errors[name]} | | | | | |", flush=True)
        else:
            for key in ("seconds", "cpu_seconds"):
                ratios = [a[key] / b[key] for a, b in zip(times, found[BY_HAND], strict=True)]
                quartiles = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
                row |= {key: statistics.median(a[key] for a in times), f"{key}_to_hand": quartiles}
            row["process"] = statistics.median(a["process"] for a in times)
            (low, middle, high), (_, processor, _) = row["seconds_to_hand"], row["cpu_seconds_to_hand"]
            print(
                f"| {ranks} | {name} | {1e3 * row['seconds']:.1f} | {middle:.3f} | {low:.3f}-{high:.3f} "
                f"| {1e3 * row['cpu_seconds']:.1f} | {processor:.3f} | {row['process'] / MIB:.0f} |",
                flush=True,
            )
        rows.append(row)
    return rows


def show_memory(ranks: int) -> list[dict[str, Any]]:
    """Print and return the memory of all contenders, on the rank that has most."""
    rows: list[dict[str, Any]] = []
    print("\n| ranks | contender | MiB at most | x theory | state / ranks | unit |\n" + "|---" * 6 + "|")
    for name in CONTENDERS:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure("memory", name, ranks, Path(folder), 0)
        row = {"ranks": ranks, "contender": name, **max(measured, key=lambda rank: rank.get("most", 0))}
        rows.append(row)
        if "error" in row:
            print(f"| {ranks} | {name} | {row['error']} | | | |", flush=True)
            continue
        ratio = row["most"] / (row["state"] + row["unit"])
        mib = [f"{row[key] / MIB:.1f}" for key in ("most", "state", "unit")]
        print(f"| {ranks} | {name} | {mib[0]} | {ratio:.3f} | {mib[1]} | {mib[2]} |", flush=True)
    return rows


def show_checkpoints(ranks: int) -> list[dict[str, Any]]:
    """Print and return what each rank of `fsdp` writes and reads."""
    rows: list[dict[str, Any]] = []
    part = 3 * sum(parameter.nbytes for parameter in Timed().parameters()) / ranks  # with two tensors of AdamW
    print(
        f"\nPart of a rank: {part / MIB:.1f} MiB, as parameters and optimizer state / ranks\n\n"
        "| ranks | checkpoint | rank | MiB written | x its part | read | x its part | into tensors | x its part |\n"
        + "|---" * 9
        + "|"
    )
    for kind in ("sharded", "whole"):
        with tempfile.TemporaryDirectory() as folder:
            saved = measure("save", kind, ranks, Path(folder), 0)
            files = {path.name: path.stat().st_size for path in Path(folder, "run", "checkpoints").rglob("*.*")}
            loaded = measure("load", kind, ranks, Path(folder), 0)
        for rank, (was_saved, figures) in enumerate(zip(saved, loaded, strict=True)):
            error = {**was_saved, **figures}.get("error")
            if error is not None:
                rows.append({"ranks": ranks, "kind": kind, "rank": rank, "error": error})
                print(f"| {ranks} | {kind} | {rank} | {error} | | | | | |", flush=True)
                continue
            figures["written"] = sum(size for name, size in files.items() if _writer(name) == rank)
            rows.append({"ranks": ranks, "kind": kind, "rank": rank, "part": part, **figures})
            cells = [
                f"{figures[key] / MIB:.1f} | {figures[key] / part:.2f}" for key in ("written", "read", "into_tensors")
            ]
            print(f"| {ranks} | {kind} | {rank} | {' | '.join(cells)} |", flush=True)
    return rows


def _writer(name: str) -> int:
    """Return the rank that writes a file of a checkpoint."""
    return int(name.split("_")[2]) if name.endswith(".distcp") else 0


def main() -> None:
    """Print the tables, and their figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--figures", default="time,memory,checkpoints")
    parser.add_argument("--measure", nargs=3, metavar=("WHAT", "CONTENDER", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        what, contender, folder = options.measure
        measure_here(what, contender, Path(folder), options.steps)
    rows: list[dict[str, Any]] = []
    for ranks in map(int, options.ranks.split(",")):
        if "time" in options.figures:
            rows += show_times(ranks, options.rounds, options.steps)
        if "memory" in options.figures:
            rows += show_memory(ranks)
        if "checkpoints" in options.figures:
            rows += show_checkpoints(ranks)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
