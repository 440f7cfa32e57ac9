"""Step times of full training programs on two processes: trainkit's `ddp`, Lightning's DDP and Accelerate's.

    python benchmarks/ddp_frameworks.py [--rounds 6] [--models mlp5,gpt4] [--steps 60]

Each trains the same task on the same samples with its own defaults, over gloo, one thread a process; frameworks
that are not installed are skipped. A round is one short run of each, in rotating order, in the same two processes; the
steps after the first `WARM_UP` are timed on the slower rank. The table shows medians of the ratios within rounds, with
quartiles, of wall-clock time and of CPU time.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from ddp_step import MODELS, Squares
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from trainkit.strategies.ddp import DDPStrategy

from trainkit import Callback, Data, Trainer
from trainkit.testing import run_ranks

WARM_UP = 10
OURS = "trainkit"


class Watch:
    """The clock and the processor's time between the end of the warm-up and the last step."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.seconds = (0.0, 0.0)
        self._began = (0.0, 0.0)

    def step(self) -> None:
        self.done += 1
        if self.done == WARM_UP:
            dist.barrier()
            self._began = _clocks()
        elif self.done == self.steps:
            timed = self.steps - WARM_UP
            wall, processor = ((now - began) / timed for now, began in zip(_clocks(), self._began, strict=True))
            self.seconds = (wall, processor)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def with_trainkit(task: Squares, samples: Tensor, batch_size: int, watch: Watch) -> None:
    """`Trainer.fit` with `strategy=ddp`: progress, TensorBoard, metrics.jsonl, checkpoints, everything by default."""

    class Timed(Callback):
        def on_step_end(self, run: object) -> None:
            watch.step()

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(DDPStrategy(device="cpu"), max_duration=f"{watch.steps}step", run_dir=folder)
        trainer.callbacks.append(Timed())
        trainer.fit(task, Data(train=TensorDataset(samples), batch_size=batch_size * dist.get_world_size()))


def with_lightning(task: Squares, samples: Tensor, batch_size: int, watch: Watch) -> None:
    """`lightning.Trainer.fit` with `strategy="ddp"`, its own logger and checkpoints."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = task

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.task.training_step(batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.task.configure_optimizers()

        def on_train_batch_end(self, *_: Any) -> None:
            watch.step()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy="ddp",
            max_steps=watch.steps,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), DataLoader(TensorDataset(samples), batch_size=batch_size, shuffle=True))


def with_accelerate(task: Squares, samples: Tensor, batch_size: int, watch: Watch) -> None:
    """The loop of Accelerate's guide; its DDP wraps a module whose forward is the training step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(samples), batch_size=batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(task.model, task.configure_optimizers(), loader)
    for (x,) in loader:
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
        if watch.done == watch.steps:
            return


CONTENDERS: dict[str, tuple[str, Callable[[Squares, Tensor, int, Watch], None]]] = {
    # name, the package that it needs
    OURS: ("trainkit", with_trainkit),
    "lightning": ("lightning", with_lightning),
    "accelerate": ("accelerate", with_accelerate),
}


def compare(model: str, rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each contender the seconds of a step in each round, of the clock and of the processor."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    os.environ.update(  # as torchrun says it, so that none of them starts processes
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="benchmark",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        ACCELERATE_USE_CPU="true",
    )
    warnings.simplefilter("ignore")
    make, make_input, _ = MODELS[model]
    share = make_input()
    # One epoch is longer than the run, so that no checkpoint is written in what is timed.
    samples = share.repeat(world_size * (steps + 5), *[1] * (share.dim() - 1))
    names = [name for name, (package, _) in CONTENDERS.items() if importlib.util.find_spec(package)]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            torch.manual_seed(0)
            watch = Watch(steps)
            with redirect_stdout(io.StringIO()):
                CONTENDERS[name][1](Squares(make()), samples, len(share), watch)
            slower = torch.tensor(watch.seconds, dtype=torch.float64)
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            wall, processor = slower.tolist()
            if turn:  # the first round imports and compiles
                seconds[name].append((wall, processor))
    return seconds if rank == 0 else {}


def show(model: str, rounds: int, steps: int) -> dict[str, dict[str, float]]:
    seconds = run_ranks(compare, 2, model, rounds, steps, timeout=230)[0]
    rows = {}
    for name, times in seconds.items():
        wall = [theirs[0] / ours[0] for theirs, ours in zip(times, seconds[OURS], strict=True)]
        low, middle, high = statistics.quantiles(wall, n=4)
        processor = statistics.median(a[1] / b[1] for a, b in zip(times, seconds[OURS], strict=True))
        rows[name] = {
            "ms": 1e3 * statistics.median(time[0] for time in times),
            "to_ours": middle,
            "low": low,
            "high": high,
            "cpu_ms": 1e3 * statistics.median(time[1] for time in times),
            "cpu_to_ours": processor,
        }
        row = rows[name]
        print(
            f"{model:7}{name:12}{row['ms']:9.2f}{middle:8.3f}  [{low:.3f}, {high:.3f}]{row['cpu_ms']:9.2f}"
            f"{processor:8.3f}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--models", default="mlp5,gpt4")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    print(f"{'model':7}{'contender':12}{'ms':>9}{'x ours':>8}  {'quartiles':16}{'cpu ms':>9}{'x ours':>8}")
    print(json.dumps({name: show(name, options.rounds, options.steps) for name in options.models.split(",")}))


if __name__ == "__main__":
    main()
