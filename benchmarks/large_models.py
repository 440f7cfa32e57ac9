"""`Trainer.fit` with its defaults against a plain loop with torch's defaults, on models whose memory counts.

    python benchmarks/large_models.py [--rounds 5] [--models mlp5,gpt4,mlp60] [--steps 24]

The plain loop is `zero_grad`, forward, `backward`, `step` with AdamW as torch constructs it, over a DataLoader; on two
ranks the model is wrapped in stock DistributedDataParallel over gloo. `Trainer.fit` has all of its defaults: a fused
optimizer, kept memory, callbacks, loggers. Every measurement has new processes, one thread each, since the C library's
memory belongs to a process. A round runs each contender once, in rotating order. A figure is the median time from one
forward to the next on the main rank, without the first steps.
"""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_step import MODELS
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainkit import Callback, Data, TaskModule, Trainer

WARM_UP = 6
CONTENDERS = ("plain", "single", "plain ddp", "ddp")


class Timed(TaskModule):
    """A model that records when each of its steps begins."""

    def __init__(self, model: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS[model][0]()
        self.began: list[float] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the mean square of the outputs."""
        self.began.append(time.perf_counter())
        loss: Tensor = self.model(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW as torch constructs it; `Trainer.fit` chooses the fused kernel."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def configure_callbacks(self) -> list[Callback]:
        """Print the time at the end of a fit."""
        return [ShowTime()]

    def show(self) -> None:
        """Print the median milliseconds of a step."""
        seconds = [after - before for before, after in zip(self.began, self.began[1:], strict=False)][WARM_UP:]
        print(f"measured {statistics.median(seconds) * 1e3}", file=sys.__stdout__, flush=True)


class ShowTime(Callback):
    """Prints the time of a step on the main rank."""

    def on_fit_end(self, run: Any) -> None:
        """Print it."""
        if run.is_main:
            run.task.show()


def plain(task: Timed, dataset: TensorDataset, batch_size: int) -> None:
    """Train with a plain loop, on several ranks with stock DistributedDataParallel."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    step: Any = task.training_step
    sampler = None
    if ranks > 1:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(dataset)
        task.forward = step  # type: ignore[method-assign,assignment] # what the wrapper calls
        step = DistributedDataParallel(task)
    optimizer = task.configure_optimizers()
    for batch in DataLoader(dataset, batch_size // ranks, sampler=sampler, shuffle=sampler is None):
        optimizer.zero_grad()
        step(batch).backward()
        optimizer.step()
    if not dist.is_initialized() or dist.get_rank() == 0:
        task.show()
    if dist.is_initialized():
        dist.destroy_process_group()


def measure_here(contender: str, model: str, steps: int) -> None:
    """Train in this process, or in ranks that it starts, and print the time of a step."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    batch_size = 2 * len(MODELS[model][1]())  # of two ranks
    dataset = TensorDataset(torch.cat([MODELS[model][1]() for _ in range(2 * steps)]))
    task = Timed(model)
    if contender.startswith("plain"):
        plain(task, dataset, batch_size)
        return
    strategy = {"single": "single", "ddp": "ddp"}[contender]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = Trainer(strategy, run_dir=Path(folder, "run"))
        trainer.fit(task, Data(train=dataset, batch_size=batch_size))


def measure(contender: str, model: str, steps: int) -> float:
    """Return the milliseconds of a step of a contender in new processes."""
    command = [sys.executable, __file__, "--contender", contender, "--models", model, "--steps", str(steps)]
    environments: list[dict[str, str]] = [{}]
    if contender == "plain ddp":
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environments = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(2)]
    ranks = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **added}
        )
        for added in environments
    ]
    printed = [rank.communicate(timeout=600)[0] for rank in ranks]
    lines = [line for line in "".join(printed).splitlines() if line.startswith("measured ")]
    return float(lines[0].split()[1])


def main() -> None:
    """Print a table of all models and contenders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        measure_here(options.contender, options.models, options.steps)
        return
    rows: list[dict[str, Any]] = []
    print("| model | contender | ms a step | ratio to the plain loop | quartiles |\n|---|---|---|---|---|")
    for model in options.models.split(","):
        found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for index in range(options.rounds):
            for name in CONTENDERS[index % 4 :] + CONTENDERS[: index % 4]:
                found[name].append(measure(name, model, options.steps))
        for name, values in found.items():
            base = found["plain ddp" if "ddp" in name else "plain"]
            ratios = [value / other for value, other in zip(values, base, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            row = {"model": model, "contender": name, "ms": statistics.median(values), "ratio": middle}
            rows.append({**row, "quartiles": [low, high]})
            print(f"| {model} | {name} | {row['ms']:.1f} | {middle:.2f} | {low:.2f}-{high:.2f} |", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
