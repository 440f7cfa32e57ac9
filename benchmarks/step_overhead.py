"""What a step of `Trainer.fit` costs beside a hand-written loop over the same data.

    python benchmarks/step_overhead.py [--rounds 11] [--steps 3000] [--only ready,map32,map256]

A tiny MLP (32 -> 32 -> 10), SGD, one thread. All contenders of a table live in this process and are visited once a
round, in turning order; the figure is process CPU time for a step, the ratio is taken round by round against the
hand-written loop, and the table shows medians with quartiles. Lightning is measured too where it is installed
(`pip install lightning`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainkit import Data, TaskModule, Trainer

Train = Callable[[], None]


class TinyMLP(TaskModule):
    """The task that every contender trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the cross entropy."""
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def hand_written(loader: Iterable[list[Tensor]]) -> Train:
    """Return the loop that one writes by hand."""

    def train() -> None:
        model = TinyMLP().net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return train


def trainkit(make_data: Callable[[], Data], **settings: Any) -> Train:
    """Return a whole `Trainer.fit`; without settings everything is on at its defaults."""

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = Trainer(run_dir=Path(folder) / "run", log_every="50step", **settings)
            trainer.fit(TinyMLP(), make_data())

    return train


def lightning(loader: DataLoader[Any], **settings: Any) -> Train | None:
    """Return the same training under Lightning, if it is installed."""
    try:
        import lightning as pl
    except ImportError:
        return None
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.task = TinyMLP()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.task.training_step(batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            trainer = pl.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=folder, **settings)
            with contextlib.redirect_stdout(io.StringIO()):
                trainer.fit(Module(), loader)

    return train


def measure(contenders: dict[str, Train], *, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each contender: CPU microseconds a step, and its ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for train in contenders.values():
        train()  # imports, allocator, kernels
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()
            started = time.process_time()
            contenders[name]()
            times[name].append((time.process_time() - started) / steps * 1e6)
    first = times[names[0]]
    rows = []
    for name, values in times.items():
        ratios = sorted(value / base for value, base in zip(values, first, strict=True))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        rows.append(
            {
                "contender": name,
                "us_per_step": round(statistics.median(values), 1),
                "ratio": round(statistics.median(ratios), 3),
                "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
            }
        )
    return rows


def ready_batches(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Every contender iterates over the same list of 3000 ready-made batches."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        [torch.randn(32, 32, generator=generator), torch.randint(10, (32,), generator=generator)] for _ in range(steps)
    ]
    loader: DataLoader[Any] = DataLoader(_Batches(batches), batch_size=None)
    contenders: dict[str, Train | None] = {
        "hand-written loop": hand_written(loader),
        "trainkit, everything on": trainkit(lambda: Data(train=loader)),
        "trainkit, no callbacks, no loggers": trainkit(lambda: Data(train=loader), callbacks=[], loggers=[]),
        "trainkit, everything on, optimizer not fused": trainkit(lambda: Data(train=loader), fused_optimizer=False),
        "lightning, defaults": lightning(loader),
        "lightning, nothing on": lightning(
            loader, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
        ),
    }
    return measure({name: train for name, train in contenders.items() if train}, steps=steps, rounds=rounds)


def map_style(steps: int, rounds: int, *, batch_size: int) -> list[dict[str, Any]]:
    """Every contender shuffles the same TensorDataset."""
    generator = torch.Generator().manual_seed(0)
    count = steps * batch_size
    inputs, targets = torch.randn(count, 32, generator=generator), torch.randint(10, (count,), generator=generator)
    dataset = TensorDataset(inputs, targets)
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    contenders = {
        "hand-written loop": hand_written(loader),
        "trainkit, everything on": trainkit(lambda: Data(train=dataset, batch_size=batch_size)),
    }
    return measure(contenders, steps=steps, rounds=rounds)


class _Batches(Dataset[list[Tensor]]):
    def __init__(self, batches: list[list[Tensor]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> list[Tensor]:
        return self._batches[index]


def main() -> None:
    """Print the tables, and all rows as one last line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--only", default="ready,map32,map256")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tables = {
        "ready": ("ready-made batches of 32", ready_batches),
        "map32": ("TensorDataset, batch 32, shuffled", lambda s, r: map_style(s, r, batch_size=32)),
        "map256": ("TensorDataset, batch 256, shuffled", lambda s, r: map_style(s, r, batch_size=256)),
    }
    results = {}
    for name in arguments.only.split(","):
        title, table = tables[name]
        results[name] = table(arguments.steps, arguments.rounds)
        print(f"\n{title}\n| contender | CPU us a step | ratio | quartiles |\n|---|---|---|---|")
        for row in results[name]:
            low, high = row["quartiles"]
            print(f"| {row['contender']} | {row['us_per_step']} | {row['ratio']} | {low}-{high} |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
