"""Seconds from the death of a rank to the next finished step.

    replace, continue    trainkit.strategies.ddp with on_rank_loss
    stop and resume      the run ends, and a new process resumes it from its last checkpoint, one step before

Each is measured several times in turn; a small model, one of 60 million parameters, and more ranks. `--cost` compares
the time of a step with on_rank_loss=replace and stop, of runs in turn that lose nobody.

    python benchmarks/rank_loss.py --rounds 5
    python benchmarks/rank_loss.py --cost --rounds 15
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.strategy import Strategy

DEATH, STEPS = 6, 9  # the step in which a rank dies, and the last one
WIDTHS = {"small": (64, 2), "60M": (2925, 7)}  # width and number of layers
CONTENDERS = ("replace", "continue", "stop and resume")


class Layers(TaskModule):
    """A perceptron whose rank 1 dies once."""

    def __init__(self, model: str, folder: Path) -> None:
        super().__init__()
        width, depth = WIDTHS[model]
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.folder = folder

    def training_step(self, batch: Any) -> Any:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Normalized(TaskModule):
    """A perceptron with buffers, which are kept in each step."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        blocks = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh()) for _ in range(depth)]
        self.layers = nn.Sequential(*(layer for block in blocks for layer in block), nn.Linear(width, 1))

    def training_step(self, batch: Any) -> Any:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Durations(Callback):
    """Collects when each step has ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, run: Any) -> None:
        self.ends.append(time.perf_counter())

    def state_dict(self) -> dict[str, Any]:
        return {"ends": self.ends}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.ends = saved["ends"]


class Clock(Callback):
    """Writes when each step has ended, and kills rank 1 in the step after `DEATH - 1`."""

    def on_step_end(self, run: Any) -> None:
        folder = run.task.folder
        with open(folder / "steps", "a", encoding="utf-8") as file:
            file.write(f"{run.state.step} {time.monotonic()}\n")

    def on_step_complete(self, run: Any) -> None:
        folder = run.task.folder
        if run.state.step == DEATH - 1 and os.environ.get("RANK") == "1" and not (folder / "death").exists():
            (folder / "death").write_text(str(time.monotonic()), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)


def fit(contender: str, model: str, ranks: int, folder: Path) -> None:
    """Train, or resume the run in the folder."""
    is_resumed = (folder / "death").exists()
    width, _ = WIDTHS[model]
    policy = contender if contender in ("replace", "continue") else "stop"
    callbacks = [Checkpoint(every=f"{DEATH - 1}step")] if policy == "stop" else []
    trainer = Trainer(
        DDPStrategy(devices=ranks, device="cpu", on_rank_loss=policy),
        max_duration=f"{STEPS}step",
        callbacks=[*callbacks, Clock()],
        loggers=[],
        run_dir=folder / "run",
        report=False,
    )
    data = Data(train=TensorDataset(torch.randn(16 * STEPS, width)), batch_size=16)
    trainer.fit(Layers(model, folder), data, resume=folder / "run" if is_resumed else None)


def seconds_lost(contender: str, model: str, ranks: int) -> float:
    """Return the seconds from the death to the end of the next step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--fit", contender, model, str(ranks), name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for _ in range(2):  # the second one only after a stop
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
        if done.returncode:
            raise RuntimeError(done.stderr)
        death = float((folder / "death").read_text(encoding="utf-8"))
        ends = [float(line.split()[1]) for line in (folder / "steps").read_text(encoding="utf-8").splitlines()]
        return min(end for end in ends if end > death) - death


def ddp(policy: str) -> DDPStrategy:
    """Return the strategy of two ranks that have the whole task."""
    return DDPStrategy(devices=2, device="cpu", on_rank_loss=policy)


def pipeline(policy: str) -> PipelineStrategy:
    """Return the strategy of four ranks, which wait for each other before their update if they may be replaced."""
    return PipelineStrategy(stages=2, replicas=2, device="cpu", on_rank_loss=policy)


def step_seconds(strategy: Strategy, width: int, depth: int) -> float:
    """Return the median duration of a step."""
    durations = Durations()
    trainer = Trainer(
        strategy,
        max_duration="500step",
        callbacks=[durations],
        loggers=[],
        run_dir=None,
    )
    trainer.fit(Normalized(width, depth), Data(train=TensorDataset(torch.randn(4096, width)), batch_size=64))
    ends = durations.ends[100:]
    return median(end - start for start, end in pairwise(ends))


def compare_steps(rounds: int) -> None:
    """Print the ratio of a step that may be taken back to one that may not."""
    for layout, width, depth in ((ddp, 64, 3), (ddp, 256, 8), (ddp, 512, 16), (pipeline, 64, 3), (pipeline, 512, 16)):
        ratios, times = [], []
        for number in range(rounds):
            order = ("replace", "stop") if number % 2 else ("stop", "replace")
            seconds = {policy: step_seconds(layout(policy), width, depth) for policy in order}
            ratios.append(seconds["replace"] / seconds["stop"])
            times.append(seconds["stop"])
        low, middle, high = quantiles(ratios, n=4)
        name = f"{layout.__name__}, {depth} layers of {width} with batch norm, {1000 * median(times):.2f} ms"
        print(f"{name} | {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


def main() -> None:
    """Print a table for each model and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--fit", nargs=4)
    parser.add_argument("--cost", action="store_true")
    arguments = parser.parse_args()
    if arguments.cost:
        compare_steps(arguments.rounds)
        return
    if arguments.fit:
        contender, model, ranks, folder = arguments.fit
        fit(contender, model, int(ranks), Path(folder))
        return
    cases = [("small", ranks) for ranks in arguments.ranks] + [("60M", 2)]
    print("model | ranks | " + " | ".join(CONTENDERS))
    for model, ranks in cases:
        times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        for _ in range(arguments.rounds):
            for contender in CONTENDERS:
                times[contender].append(seconds_lost(contender, model, ranks))
        shown = (f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" for values in times.values())
        print(f"{model} | {ranks} | {' | '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
