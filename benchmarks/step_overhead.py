"""Overhead of a step of `Trainer.fit` against a hand-written loop over the same data.

    python benchmarks/step_overhead.py [--rounds 11] [--steps 3000] [--only ready,map32,map256,callbacks]
    python benchmarks/step_overhead.py --device cuda           by the clock, and without Lightning

A tiny MLP (32 -> 32 -> 10), SGD, one thread. All contenders of a table run in this process, once per round, in rotating
order; the figure is process CPU time per step, the ratio is taken round by round against the hand-written loop, and the
table shows medians with quartiles. Lightning is measured too if it is installed (`pip install lightning`).

The table `callbacks` times each hook of each callback in the same runs, without the cost of reading the clock; the
start and the end of the run are excluded, as they do not grow with the number of steps.
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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from trainkit.strategies.single import SingleStrategy

from trainkit import Callback, Data, TaskModule, Trainer, registry
from trainkit.callback import HOOKS
from trainkit.trainer import DEFAULT_CALLBACKS

DEVICE = "cpu"
Train = Callable[[], None]
OTHERS = ("ema", "gradient_norms", "device_stats", "garbage_collection")


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


def hand_written(loader: Iterable[list[Tensor]], *, fused: bool = False) -> Train:
    """Return the loop that one writes by hand."""

    def train() -> None:
        model = TinyMLP().net.to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused or None)
        for batch in loader:
            inputs, targets = (tensor.to(DEVICE, non_blocking=True) for tensor in batch)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return train


def trainkit(make_data: Callable[[], Data], **settings: Any) -> Train:
    """Return a `Trainer.fit`; without settings everything is on at its defaults."""

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            strategy = SingleStrategy(device=DEVICE)
            trainer = Trainer(strategy, run_dir=Path(folder) / "run", log_every="50step", **settings)
            trainer.fit(TinyMLP(), make_data())

    return train


def lightning(loader: DataLoader[Any], **settings: Any) -> Train | None:
    """Return the same training under Lightning, if it is installed."""
    if DEVICE != "cpu":
        return None
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
    """Return a row for each contender: microseconds a step, and its ratio to the first."""
    # What a device computes is no time of this process.
    clock = time.process_time if DEVICE == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for train in contenders.values():
        train()  # imports, allocator, kernels
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()
            started = clock()
            contenders[name]()
            if DEVICE != "cpu":
                torch.accelerator.synchronize()
            times[name].append((clock() - started) / steps * 1e6)
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
    """Every contender iterates over the same list of 3000 batches."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        [torch.randn(32, 32, generator=generator), torch.randint(10, (32,), generator=generator)] for _ in range(steps)
    ]
    loader: DataLoader[Any] = DataLoader(_Batches(batches), batch_size=None, pin_memory=DEVICE != "cpu")
    contenders: dict[str, Train | None] = {
        "hand-written loop": hand_written(loader),
        "trainkit, everything on": trainkit(lambda: Data(train=loader)),
        "trainkit, everything on but the report": trainkit(lambda: Data(train=loader), report=False),
        "trainkit, everything on but the report and the speed monitor": trainkit(
            lambda: Data(train=loader),
            report=False,
            callbacks=[name for name in DEFAULT_CALLBACKS if name != "speed_monitor"],
        ),
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
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, pin_memory=DEVICE != "cpu")
    contenders = {
        "hand-written loop": hand_written(loader),
        "trainkit, everything on": trainkit(lambda: Data(train=dataset, batch_size=batch_size)),
        "trainkit, no callbacks, no loggers": trainkit(
            lambda: Data(train=dataset, batch_size=batch_size), callbacks=[], loggers=[]
        ),
        "hand-written loop, rows of a batch gathered at once": hand_written(_Gathered(dataset, batch_size)),
        "the same with a fused optimizer": hand_written(_Gathered(dataset, batch_size), fused=True),
    }
    return measure(contenders, steps=steps, rounds=rounds)


def of_callbacks(steps: int, rounds: int) -> list[dict[str, Any]]:
    """Return microseconds per step of each callback: the default ones, then others."""
    # One batch more than there are steps: a save at the end of an epoch is no step's.
    count = (steps + 1) * 32
    dataset = TensorDataset(torch.randn(count, 32), torch.randint(10, (count,)))
    rows = [_by_difference(dataset, steps, rounds)]
    for names in (list(DEFAULT_CALLBACKS), list(OTHERS)):
        spent: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds):
            timed = {name: _timed(registry.make("callbacks", name)) for name in names}
            callbacks = [callback for callback, _ in timed.values()]
            data = partial(Data, train=dataset, batch_size=32)
            trainkit(data, callbacks=callbacks, max_duration=f"{steps}step")()
            for name, (_, seconds) in timed.items():
                spent[name].append(sum(seconds) / steps * 1e6)
        for name, values in spent.items():
            quartiles = statistics.quantiles(values, n=4) if rounds > 1 else values * 3
            rows.append(_callback_row(name, statistics.median(values), quartiles))
        together = sum(row["us_per_step"] for row in rows[-len(names) :])
        rows.append(_callback_row("together", together, [together] * 3))
    return rows


def _by_difference(dataset: TensorDataset, steps: int, rounds: int) -> dict[str, Any]:
    """Return the difference of the median step with all default callbacks and with none, by the wall clock.

    It holds what they do inside of a step too, such as looking at the clock between its parts, and not what they do at
    log points, which the other rows hold.
    """
    data = partial(Data, train=dataset, batch_size=32)
    differences = []
    for _ in range(rounds):
        medians = []
        for names in (list(DEFAULT_CALLBACKS), []):
            gc.collect()
            clock = _Clock()
            trainkit(data, callbacks=[*names, clock], loggers=[], max_duration=f"{steps}step")()
            moments = clock.moments[steps // 10 :]
            medians.append(statistics.median(b - a for a, b in pairwise(moments)))
        differences.append((medians[0] - medians[1]) * 1e6)
    quartiles = statistics.quantiles(differences, n=4) if rounds > 1 else differences * 3
    return _callback_row("all default ones, in the median step", statistics.median(differences), quartiles)


class _Clock(Callback):
    """Records the time of the end of each step."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_step_end(self, run: Any) -> None:
        self.moments.append(time.perf_counter())


def _callback_row(name: str, microseconds: float, quartiles: list[float]) -> dict[str, Any]:
    return {
        "contender": name,
        "us_per_step": round(microseconds, 2),
        "ratio": "",
        "quartiles": [round(quartiles[0], 2), round(quartiles[2], 2)],
    }


def _timed(callback: Callback) -> tuple[Callback, list[float]]:
    """Return a callback whose hooks between start and end are timed, and their seconds."""
    seconds: list[float] = []
    for moment in HOOKS:
        method = getattr(callback, moment)
        if moment in ("on_fit_start", "on_fit_end", "on_exception") or (
            getattr(type(callback), moment) is getattr(Callback, moment)
        ):
            continue
        setattr(callback, moment, _with_clock(method, seconds))
    return callback, seconds


def _with_clock(method: Callable[..., None], seconds: list[float]) -> Callable[..., None]:
    clock = time.perf_counter
    started = clock()
    for _ in range(1000):
        clock()
    of_the_clock = (clock() - started) / 1000

    def timed(*arguments: Any) -> None:
        began = clock()
        method(*arguments)
        seconds.append(clock() - began - of_the_clock)

    return timed


class _Gathered:
    """Shuffled batches of a TensorDataset, each gathered by one call for each tensor: the least that reading costs."""

    def __init__(self, dataset: TensorDataset, batch_size: int) -> None:
        self._tensors, self._batch_size = dataset.tensors, batch_size

    def __iter__(self) -> Iterator[list[Tensor]]:
        for indices in torch.randperm(len(self._tensors[0])).split(self._batch_size):
            yield [tensor[indices] for tensor in self._tensors]


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
    parser.add_argument("--only", default="ready,map32,map256,callbacks")
    parser.add_argument("--device", default=DEVICE)
    arguments = parser.parse_args()
    globals()["DEVICE"] = arguments.device
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tables = {
        "ready": ("pre-batched batches of 32", ready_batches),
        "map32": ("TensorDataset, batch 32, shuffled", lambda s, r: map_style(s, r, batch_size=32)),
        "map256": ("TensorDataset, batch 256, shuffled", lambda s, r: map_style(s, r, batch_size=256)),
        "callbacks": ("what callbacks take of a step, logging every 50 steps", of_callbacks),
    }
    results = {}
    for name in arguments.only.split(","):
        title, table = tables[name]
        results[name] = table(arguments.steps, arguments.rounds)
        print(f"\n{title}\n| contender | us a step | ratio | quartiles |\n|---|---|---|---|")
        for row in results[name]:
            low, high = row["quartiles"]
            print(f"| {row['contender']} | {row['us_per_step']} | {row['ratio']} | {low}-{high} |")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
