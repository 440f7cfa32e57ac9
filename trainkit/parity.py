"""The proof that strategies agree: the same task, data and global batch trained under each of them from one start.

Every strategy is compared with `single` after every step: the loss, the norm of the gradient, and each parameter.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainkit import registry
from trainkit.callback import Callback
from trainkit.errors import UserError
from trainkit.parity_causes import find_causes
from trainkit.precision import Precision
from trainkit.rng import rng_untouched, seed_everything
from trainkit.run import Run
from trainkit.strategy import Strategy
from trainkit.task import TaskModule
from trainkit.trainer import Trainer

DEFAULT_STRATEGIES = ("single", "dp", "ddp")
REFERENCE = "single"
TOLERANCES = {"fp64": 1e-11, "fp32": 1e-5, "bf16-mixed": 2e-2, "fp16-mixed": 5e-3, "bf16-true": 1e-1}
"""Largest relative difference that rounding explains after some tens of steps."""
_NORM_SLACK = 10  # a norm is a long fp32 sum, which some strategies add up more exactly than others
_ROUNDING_SLACK = 10  # between one other order of additions and that of a strategy
_SMALLEST_SCALE = 0.01  # of a parameter, relative to the largest weight of the task: biases begin at zero
_WARM_UP_STEPS = 2  # not counted in the time of a step

Make = Callable[[], Any]


@dataclass(frozen=True)
class Difference:
    """The largest difference from `single`, relative to the scale of what is compared."""

    value: float = 0.0
    step: int = 0
    parameter: str = ""


@dataclass(frozen=True)
class ParityRow:
    """How one strategy compares with `single`."""

    strategy: str
    verdict: str
    """`reference`, `equal`, `rounding` (losses and gradients are equal, and weights differ as rounding alone makes them
    differ under this optimizer), `different` or `failed`."""
    layout: str = ""
    loss: Difference = field(default_factory=Difference)
    gradient_norm: Difference = field(default_factory=Difference)
    weights: Difference = field(default_factory=Difference)
    seconds_a_step: float = math.nan
    bytes_a_step: int | None = None
    """What a rank sends in a step, where the strategy tells."""
    error: str = ""


@dataclass(frozen=True)
class ParityReport:
    """The comparison of several strategies."""

    rows: tuple[ParityRow, ...]
    steps: int
    precision: str
    tolerance: float
    causes: tuple[str, ...] = ()
    """Why strategies differ, where the task tells."""

    @property
    def is_equal(self) -> bool:
        """Whether every strategy agrees with `single` to the tolerance."""
        return all(row.verdict in ("reference", "equal", "rounding") for row in self.rows)

    def as_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps({**asdict(self), "is_equal": self.is_equal}, indent=2)

    def as_table(self) -> str:
        """Return the report as text: a row for each strategy, then the causes."""
        head = ("strategy", "layout", "loss", "gradient norm", "weights", "where", "ms a step", "MB a step", "verdict")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        kind = "all equal" if self.is_equal else "not equal"
        lines.append(
            f"{kind}: {self.steps} steps in {self.precision}, tolerance {self.tolerance:.0e} relative to single"
        )
        lines += [f"{row.strategy} failed: {row.error}" for row in self.rows if row.error]
        kind = "note" if self.is_equal else "cause"
        lines += [f"{kind}: {cause}" for cause in self.causes]
        return "\n".join(lines)


def compare_strategies(
    make_task: TaskModule | Make,
    make_data: Any,
    strategies: Sequence[str | Strategy] = DEFAULT_STRATEGIES,
    *,
    steps: int = 20,
    devices: int = 2,
    device: str = "cpu",
    tolerance: float | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> ParityReport:
    """Return how each strategy compares with `single` after every step, from the same initial weights.

    A task or data may be given as they are or as functions that make them. `devices` and `device` are given to the
    strategies that are named and take them; `trainer` holds settings of the Trainer such as
    `{"precision": "fp64"}`. Raises UserError for what no strategy could train.
    """
    if isinstance(steps, bool) or steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}.")
    settings = dict(trainer or {})
    precision = Precision(settings.get("precision", "fp32")).name
    limit = TOLERANCES[precision] if tolerance is None else tolerance
    chosen = [(_name(item), _made(item, devices=devices, device=device)) for item in strategies]
    chosen = [(name, strategy) for name, strategy in chosen if name != REFERENCE]
    reference = _made(REFERENCE, devices=1, device=device)
    with tempfile.TemporaryDirectory(prefix="trainkit-parity-") as folder, rng_untouched():
        trials = _Trials(make_task, make_data, Path(folder), steps=steps, settings=settings)
        comparison = _Comparison(trials, trials.train(REFERENCE, reference), tolerance=limit)
        rows = [comparison.reference(), *(comparison.attempt(name, strategy) for name, strategy in chosen)]
        causes: Sequence[str] = ()
        if any(row.verdict == "different" for row in rows):
            rows, causes = comparison.explained(rows, device=device)
    return ParityReport(tuple(rows), steps, precision, limit, tuple(causes))


def assert_strategies_equal(
    make_task: TaskModule | Make,
    make_data: Any,
    strategies: Sequence[str | Strategy] = DEFAULT_STRATEGIES,
    *,
    steps: int = 5,
    devices: int = 2,
    device: str = "cpu",
    tolerance: float | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> ParityReport:
    """Raise AssertionError, with the table and the causes, unless all strategies train to the weights of `single`."""
    report = compare_strategies(
        make_task,
        make_data,
        strategies,
        steps=steps,
        devices=devices,
        device=device,
        tolerance=tolerance,
        trainer=trainer,
    )
    if not report.is_equal:
        raise AssertionError(f"strategies do not agree\n{report.as_table()}")
    return report


def assert_resume_exact(
    make_task: TaskModule | Make,
    make_data: Any,
    strategy: str | Strategy = REFERENCE,
    *,
    steps: int = 6,
    stop_after: int = 3,
    devices: int = 2,
    device: str = "cpu",
    trainer: Mapping[str, Any] | None = None,
) -> None:
    """Raise AssertionError unless a run that is stopped and resumed has the weights of one that was not, to the bit."""
    if not 0 < stop_after < steps:
        raise UserError(f"stop_after={stop_after} must lie between 0 and steps={steps}.")
    with tempfile.TemporaryDirectory(prefix="trainkit-resume-") as folder, rng_untouched():
        trials = _Trials(make_task, make_data, Path(folder), steps=steps, settings=dict(trainer or {}))

        def made() -> Strategy:
            return copy.deepcopy(strategy) if isinstance(strategy, Strategy) else _made(strategy, devices, device)

        whole = trials.fit("whole", made(), callbacks=[])
        trials.fit("parts", made(), callbacks=[_StopAfter(stop_after)])
        resumed = trials.fit("parts", made(), callbacks=[], resume=True)
    for name, expected in whole.items():
        if not torch.equal(resumed[name], expected):
            largest = _distance(resumed[name], expected)
            raise AssertionError(
                f"{name} differs by {largest:.3g} between a run of {steps} steps and one that was stopped after "
                f"{stop_after} and resumed. Random numbers or state outside of parameters, buffers and torch's, "
                "numpy's and python's generators are not in a checkpoint."
            )


# ---- Training under each strategy


@runtime_checkable
class CountsBytes(Protocol):
    """A strategy that knows what it sends."""

    @property
    def bytes_a_step(self) -> int | None:
        """Bytes that this rank sends in a step."""


@dataclass(frozen=True)
class _Trial:
    """Where a strategy's steps are kept, and what it said of itself."""

    folder: Path
    layout: str
    bytes_a_step: int | None

    def step(self, number: int) -> dict[str, Any]:
        """Return what was seen after a step; 0 is the start."""
        seen: dict[str, Any] = torch.load(self.folder / f"{number}.pt", weights_only=True)
        return seen


class _Trials:
    """Trains copies of one task in the same way."""

    def __init__(self, task: Any, data: Any, folder: Path, *, steps: int, settings: dict[str, Any]) -> None:
        self._task, self._data = task, data
        self._folder = folder
        self._settings = settings
        self.steps = steps
        self.seed = int(settings.get("seed", 0))
        self._start = {name: tensor.clone() for name, tensor in self._made_task().state_dict().items()}

    def task(self) -> TaskModule:
        """Return a new task with the weights that all trials start from."""
        task = self._made_task()
        task.load_state_dict(self._start)
        return task

    def data(self) -> Any:
        """Return the data."""
        return self._data() if inspect.isroutine(self._data) or inspect.isclass(self._data) else self._data

    def train(self, name: str, strategy: Strategy) -> _Trial:
        """Train and keep every step."""
        folder = self._folder / name
        folder.mkdir()
        self.fit(name, strategy, callbacks=[_StepRecorder(folder)], log_every="1step", **self._norm())
        told = json.loads((folder / "told.json").read_text())
        return _Trial(folder, told["layout"], told["bytes_a_step"])

    def fit(
        self, name: str, strategy: Strategy, *, callbacks: list[Callback], resume: bool = False, **more: Any
    ) -> dict[str, Tensor]:
        """Train and return the weights."""
        run_dir = self._folder / f"run of {name}"
        settings = {**self._settings, **more, "max_duration": f"{self.steps}step", "evaluate_every": None}
        settings |= {"sanity_batches": 0, "callbacks": callbacks, "loggers": [], "run_dir": run_dir}
        task = self.task()
        Trainer(strategy, **settings).fit(task, self.data(), resume=run_dir if resume else None)
        return {key: tensor.detach().cpu() for key, tensor in task.state_dict().items()}

    def _norm(self) -> dict[str, Any]:
        """Return settings with which the norm of the gradient is known; a limit of infinity changes nothing."""
        limited = any(self._settings.get(name) is not None for name in ("clip_norm", "clip_value"))
        return {} if limited else {"clip_norm": math.inf}

    def _made_task(self) -> TaskModule:
        seed_everything(self.seed)
        task = copy.deepcopy(self._task) if isinstance(self._task, nn.Module) else self._task()
        if not isinstance(task, TaskModule):
            raise UserError(f"the task is a {type(task).__name__}; subclass trainkit.TaskModule.")
        return task


class _StepRecorder(Callback):
    """Writes what is compared after every step into a folder, from rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics: dict[str, float] = {}
        self.before = 0.0

    def on_fit_start(self, run: Run) -> None:
        self._write(run)

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        self.metrics = {name: float(value) for name, value in metrics.items()}

    def on_step_end(self, run: Run) -> None:
        self._write(run)

    def on_fit_end(self, run: Run) -> None:
        strategy = run.strategy
        sent = strategy.bytes_a_step if isinstance(strategy, CountsBytes) else None
        told = {"layout": _layout(run), "bytes_a_step": sent}
        if run.is_main:
            (self.folder / "told.json").write_text(json.dumps(told))

    def _write(self, run: Run) -> None:
        seconds = time.perf_counter() - self.before
        weights = run.strategy.state_dict(run.task)  # collective
        if run.is_main:
            seen = {
                "weights": {name: tensor.detach().cpu() for name, tensor in weights.items()},
                "loss": self.metrics.get("train/loss", math.nan),
                "norm": self.metrics.get("train/gradient_norm", math.nan),
                "seconds": seconds,
            }
            torch.save(seen, self.folder / f"{run.state.step}.pt")
        self.before = time.perf_counter()


class _StopAfter(Callback):
    """Saves a checkpoint after a step and ends the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Run) -> None:
        if run.state.step == self.step:
            run.save(reason="assert_resume_exact")
            run.request_stop("assert_resume_exact")


def _name(item: str | Strategy) -> str:
    return item if isinstance(item, str) else type(item).__name__


def _made(item: str | Strategy, devices: int, device: str) -> Strategy:
    """Return a strategy; one that is named gets the devices if it takes any."""
    if isinstance(item, Strategy):
        return item
    strategy: Strategy = registry.make("strategy", item)
    takes = inspect.signature(type(strategy)).parameters
    settings: dict[str, Any] = {}
    if "device" in takes:
        settings["device"] = device
    if "devices" in takes:
        one_process = "device" not in takes  # such a strategy is told each device
        settings["devices"] = [device] * devices if one_process and device == "cpu" else devices
    return type(strategy)(**settings)


def _layout(run: Run) -> str:
    plan = run.plan
    if plan is None:
        return f"{run.strategy.world_size} x ready-made"
    return f"{plan.world_size} x {plan.micro_batches} x {plan.micro_batch_size}"


# ---- Comparing


class _Comparison:
    """Holds every trial against the one of `single`."""

    def __init__(self, trials: _Trials, single: _Trial, *, tolerance: float) -> None:
        self._trials, self._single, self._tolerance = trials, single, tolerance
        self._parameters = [name for name, _ in trials.task().named_parameters()]
        losses = [abs(single.step(step)["loss"]) for step in range(1, trials.steps + 1)]
        self._loss_scale = max(losses)

    def reference(self) -> ParityRow:
        """Return the row of `single` itself."""
        return self.row(REFERENCE, self._single, verdict="reference")

    def attempt(self, name: str, strategy: Strategy) -> ParityRow:
        """Train under a strategy and return its row, also when that fails."""
        try:
            trial = self._trials.train(name, strategy)
        except Exception as error:
            return ParityRow(name, "failed", error=f"{type(error).__name__}: {error}")
        row = self.row(name, trial, verdict="equal")
        return row if self.agrees(row) else replace(row, verdict="different")

    def agrees(self, row: ParityRow) -> bool:
        """Whether the differences are within the tolerance."""
        return self._same_gradients(row) and row.weights.value <= self._tolerance

    def _same_gradients(self, row: ParityRow) -> bool:
        # A difference that is no number agrees with nothing.
        return row.loss.value <= self._tolerance and row.gradient_norm.value <= _NORM_SLACK * self._tolerance

    def row(self, name: str, trial: _Trial, *, verdict: str) -> ParityRow:
        """Return the largest differences over all steps."""
        loss = norm = weights = Difference()
        seconds = []
        for step in range(self._trials.steps + 1):
            ours, expected = trial.step(step), self._single.step(step)
            weights = _larger(weights, self._weights(ours["weights"], expected["weights"], step))
            if step:
                loss = _larger(loss, _numbers(ours["loss"], expected["loss"], self._loss_scale, step))
                norm = _larger(norm, _numbers(ours["norm"], expected["norm"], abs(expected["norm"]), step))
                seconds.append(ours["seconds"])
        timed = sorted(seconds[_WARM_UP_STEPS:] or seconds)
        return ParityRow(name, verdict, trial.layout, loss, norm, weights, timed[len(timed) // 2], trial.bytes_a_step)

    def explained(self, rows: Sequence[ParityRow], *, device: str) -> tuple[list[ParityRow], list[str]]:
        """Return the rows, with what is rounding called so, and why others differ as far as the task tells."""
        trials = self._trials
        again = self.row("again", trials.train("again", _made(REFERENCE, 1, device)), verdict="")
        causes = []
        if again.weights.value != 0.0:
            where = f"step {again.weights.step}, {again.weights.parameter}"
            causes.append(
                f"two equal runs of single differ by {again.weights.value:.1e} ({where}): the task or its data is not "
                "a function of samples and seed. Look for clocks and for generators of its own, or set "
                "trainer.deterministic=true."
            )
        causes += find_causes(trials.task(), trials.data(), seed=trials.seed)
        return (list(rows), causes) if causes else self._rounded(rows, device=device)

    def _rounded(self, rows: Sequence[ParityRow], *, device: str) -> tuple[list[ParityRow], list[str]]:
        """Hold the rows against what another order of additions does to `single` itself."""
        halves = _made(REFERENCE, 1, device)
        halves.accumulate = 2
        floor = self.attempt("single in halves", halves)
        if floor.verdict == "failed":  # a batch that has no halves
            return list(rows), []
        limit = _ROUNDING_SLACK * floor.weights.value
        judged = [
            replace(row, verdict="rounding")
            if row.verdict == "different" and self._same_gradients(row) and row.weights.value <= limit
            else row
            for row in rows
        ]
        if all(row.verdict != "rounding" for row in judged):
            return judged, []
        cause = (
            f"losses and gradients agree, and single itself differs by {floor.weights.value:.1e} when it takes each "
            "batch in two halves: the optimizer enlarges rounding. Compare in trainer.precision=fp64 to see it vanish."
        )
        return judged, [cause]

    def _weights(self, ours: dict[str, Tensor], expected: dict[str, Tensor], step: int) -> Difference:
        sizes = {name: _size(expected[name]) for name in self._parameters}
        floor = _SMALLEST_SCALE * max(sizes.values(), default=0.0)
        largest = Difference()
        for name in self._parameters:
            scale = max(sizes[name], floor)
            distance = _distance(ours[name], expected[name])
            largest = _larger(largest, Difference(_relative(distance, scale), step, name))
        return largest


def _numbers(ours: float, expected: float, scale: float, step: int) -> Difference:
    if math.isnan(ours) and math.isnan(expected):  # neither tells it
        return Difference(0.0, step)
    return Difference(_relative(abs(ours - expected), scale), step)


def _relative(distance: float, scale: float) -> float:
    return distance / scale if scale > 0 and distance else distance


def _larger(left: Difference, right: Difference) -> Difference:
    """Return the larger difference, the first of equal ones; what is no number is larger than all."""
    return right if right.value > left.value or (math.isnan(right.value) and not math.isnan(left.value)) else left


def _distance(left: Tensor, right: Tensor) -> float:
    if left.numel() == 0:
        return 0.0
    return float((left.detach().cpu().double() - right.detach().cpu().double()).abs().max())


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _cells(row: ParityRow) -> tuple[str, ...]:
    if row.error:
        return (row.strategy, *[""] * 7, row.verdict)
    worst = max((row.weights, row.loss, row.gradient_norm), key=lambda difference: difference.value)
    where = "" if worst.value == 0 else f"step {worst.step} {worst.parameter}".strip()
    sent = "" if row.bytes_a_step is None else f"{row.bytes_a_step / 1e6:.2f}"
    differences = [f"{difference.value:.1e}" for difference in (row.loss, row.gradient_norm, row.weights)]
    milliseconds = f"{1000 * row.seconds_a_step:.2f}"
    return (row.strategy, row.layout, *differences, where, milliseconds, sent, row.verdict)
