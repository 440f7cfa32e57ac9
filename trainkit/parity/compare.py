"""Parity of strategies: one task, trained on the same data from the same weights under each of them.

Every strategy is compared with `single` after every step: the loss, the norm of the gradient, and each parameter. All
compute in fp64 by default: the rounding of sums in another order stays small there, so that a larger difference is an
error of the strategy.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from trainkit.errors import UserError
from trainkit.parity.causes import Cause, Records, explain
from trainkit.parity.trials import (
    REFERENCE,
    ParityRun,
    ParityRuns,
    StopAfterStep,
    StrategyChoice,
    make_strategy,
    strategy_name,
)
from trainkit.rng import preserve_rng
from trainkit.settings import check_arguments
from trainkit.strategy import Strategy
from trainkit.task import TaskModule
from trainkit.tree import tree_leaves, tree_map

DEFAULT_STRATEGIES = ("single", "dp", "ddp")
TOLERANCES = {"fp64": 1e-11, "fp32": 1e-5, "bf16-mixed": 2e-2, "fp16-mixed": 5e-3, "bf16-true": 1e-1}
"""Largest relative difference that rounding explains after some tens of steps, by precision."""
DEFAULT_TOLERANCE = 1e-8
"""The same where none is named, for any optimizer: rounding of 1e-16, made 1e5 times as large in each step by one that
divides by a gradient that is zero except for rounding (a learning rate of 1e-3 over Adam's 1e-8), of a weight that is a
hundredth of the others."""
_PRECISION = "fp64"
_SECOND_PRECISION = "fp32"  # for tasks that do not compute in the first
_NORM_SLACK = 10  # a norm is a long fp32 sum, which some strategies add up more exactly than others
_SMALLEST_SCALE = 0.01  # of a parameter, relative to the largest weight of the task: biases begin at zero
_WARM_UP_STEPS = 2  # not counted in the time of a step
_EVALUATION_SETTINGS = ("evaluate_every", "num_sanity_batches")  # of the Trainer

Make = Callable[[], Any]


@dataclass(frozen=True)
class Difference:
    """The largest difference from `single`, relative to the scale of the values."""

    value: float = 0.0
    step: int = 0
    parameter: str = ""
    """The parameter that differs; of losses and norms the phase, where the task has several."""


@dataclass(frozen=True)
class ParityRow:
    """The differences of one strategy from `single`."""

    strategy: str
    verdict: str
    """`reference`, `equal`, `different` or `failed`."""
    layout: str = ""
    loss: Difference = field(default_factory=Difference)
    grad_norm: Difference = field(default_factory=Difference)
    weights: Difference = field(default_factory=Difference)
    seconds_a_step: float = math.nan
    bytes_a_step: int | None = None
    """Bytes that a rank sends in a step, where the strategy reports them."""
    error: str = ""
    cause: Cause | None = None
    """Of a strategy that is `different`."""


@dataclass(frozen=True)
class ParityReport:
    """The comparison of several strategies."""

    rows: tuple[ParityRow, ...]
    steps: int
    precision: str
    tolerance: float
    notes: tuple[str, ...] = ()
    """Notes on the precision of the task."""

    @property
    def is_equal(self) -> bool:
        """True if every strategy equals `single` to the tolerance."""
        return all(row.verdict in ("reference", "equal") for row in self.rows)

    def as_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(_without_nan({**asdict(self), "is_equal": self.is_equal}), indent=2, allow_nan=False)

    def as_table(self) -> str:
        """Return the report as text: a row of at most 80 columns for each strategy, then causes, then the notes."""
        head = ("strategy", "layout", "loss", "gradient", "weights", "ms/step", "MB/step", "verdict")
        cells = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        cells.insert(1, tuple("-" * width for width in widths))
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        kind = "all equal" if self.is_equal else "not equal"
        tolerance = f"tolerance {self.tolerance:.0e} relative to single"
        lines.append(f"{kind}: {self.steps} steps in {self.precision}, {tolerance}")
        lines += [f"{row.strategy} failed: {row.error}" for row in self.rows if row.error]
        lines += [f"{row.strategy}: {_largest(row)}" for row in self.rows if row.verdict == "different"]
        lines += [f"{row.strategy}: {row.cause.text}" for row in self.rows if row.cause]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def compare_strategies(
    make_task: TaskModule | Make,
    make_data: Any,
    strategies: Sequence[StrategyChoice] = DEFAULT_STRATEGIES,
    *,
    steps: Annotated[int, Ge(1)] = 20,
    devices: int = 2,
    device: str = "cpu",
    tolerance: float | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> ParityReport:
    """Return the differences of each strategy from `single` after every step, from the same initial weights.

    A task or data may be given as they are or as functions that make them. A strategy is an object, a name, or a name
    with settings: `("ddp", {"accumulate": 2})`. `devices` (ranks, replicas or stages) and `device` are given to
    those that are named and take them; `trainer` holds settings of the Trainer such as `{"precision": "fp32"}`. Without
    a precision all compute in fp64, or in fp32 if `single` fails in fp64; if the task computes its losses in fp32, the
    tolerance is that of fp32. A note reports both. Raises UserError for a task or data that no strategy can train.
    """
    check_arguments(compare_strategies, locals())
    # Made before anything is trained, so that an unknown name or a wrong setting costs no run.
    others = [item for item in strategies if item != REFERENCE]
    chosen = [(name, make_strategy(item, devices, device)) for name, item in zip(_names(others), others, strict=True)]
    with tempfile.TemporaryDirectory(prefix="trainkit-parity-") as folder, preserve_rng():
        runs = ParityRuns(make_task, make_data, Path(folder), steps=steps, settings=dict(trainer or {}))
        runs, single, limit, notes = _reference(runs, device)
        limit = limit if tolerance is None else tolerance
        comparison = _Comparison(runs, single, tolerance=limit, device=device)
        rows = [comparison.reference(), *(comparison.attempt(name, strategy) for name, strategy in chosen)]
    return ParityReport(tuple(rows), steps, runs.precision, limit, tuple(notes))


def assert_strategies_equal(
    make_task: TaskModule | Make,
    make_data: Any,
    strategies: Sequence[StrategyChoice] = DEFAULT_STRATEGIES,
    *,
    steps: int = 5,
    devices: int = 2,
    device: str = "cpu",
    tolerance: float | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> ParityReport:
    """Raise AssertionError, with the table, unless all strategies train to the weights of `single`."""
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
    strategy: StrategyChoice = REFERENCE,
    *,
    steps: int = 6,
    stop_after: int = 3,
    devices: int = 2,
    device: str = "cpu",
    trainer: Mapping[str, Any] | None = None,
) -> None:
    """Raise AssertionError unless a run that is stopped and resumed has the state of one that was not, to the bit.

    Compared are parameters, buffers and extra states. `trainer` holds settings of the Trainer; with `evaluate_every`
    the runs are evaluated too.
    """
    if not 0 < stop_after < steps:
        raise UserError(f"stop_after={stop_after} must lie between 0 and steps={steps}.")
    with tempfile.TemporaryDirectory(prefix="trainkit-resume-") as folder, preserve_rng():
        runs = ParityRuns(make_task, make_data, Path(folder), steps=steps, settings=dict(trainer or {}))

        # A deep copy, as a strategy has the state of the run that it was used for.
        def fresh() -> Strategy:
            return make_strategy(copy.deepcopy(strategy), devices, device)

        evaluations: dict[str, Any] = {key: trainer[key] for key in _EVALUATION_SETTINGS if trainer and key in trainer}
        uninterrupted = runs.fit("uninterrupted", fresh(), callbacks=[], **evaluations)
        # Both in one folder, from which the second run takes the checkpoint.
        runs.fit("resumed", fresh(), callbacks=[StopAfterStep(stop_after)], **evaluations)
        resumed = runs.fit("resumed", fresh(), callbacks=[], resume=True, **evaluations)
    for name, expected in uninterrupted.items():
        if difference := _apart(resumed[name], expected):
            raise AssertionError(
                f"{name} differs {difference} between a run of {steps} steps and one that was stopped after "
                f"{stop_after} and resumed. Random numbers or state outside of parameters, buffers and torch's, "
                "numpy's and python's generators are not in a checkpoint."
            )


class _Comparison:
    """Compares every run with the one of `single`."""

    def __init__(self, runs: ParityRuns, single: ParityRun, *, tolerance: float, device: str) -> None:
        self._runs, self._single, self._tolerance, self._device = runs, single, tolerance, device
        self._limits = {"loss": tolerance, "grad_norm": _NORM_SLACK * tolerance, "weights": tolerance}
        self._observed: dict[int, Records] = {}  # by step, of `single`
        self._parameters = [name for name, _ in runs.task().named_parameters()]
        # By phase, the largest loss of the run: the relative difference of a loss near 0 would be that of rounding.
        self._loss_scales: dict[str, float] = {}
        for step in range(1, runs.steps + 1):
            for phase, loss in single.step(step)["losses"].items():
                self._loss_scales[phase] = max(self._loss_scales.get(phase, 0.0), abs(loss))

    def reference(self) -> ParityRow:
        """Return the row of `single`."""
        return self._row(REFERENCE, self._single, *self._differences(self._single), verdict="reference")

    def attempt(self, name: str, strategy: Strategy) -> ParityRow:
        """Train under a strategy and return its row, also when that fails."""
        try:
            # Before it is used: a strategy has the state of the run that it was used for.
            unused = copy.deepcopy(strategy)
        # A process group cannot be copied.
        except Exception:
            unused = None
        try:
            run = self._runs.train(name, strategy)
        # Any failure is a row of the table: the other strategies are still compared.
        except Exception as error:
            return ParityRow(name, "failed", error=f"{type(error).__name__}: {error}")
        differences, seconds = self._differences(run)
        # NaN compares false, so it is never equal.
        steps = [item.step for kind, of_kind in differences.items() for item in of_kind if self._is_beyond(item, kind)]
        if not steps:
            return self._row(name, run, differences, seconds, verdict="equal")
        row = self._row(name, run, differences, seconds, verdict="different")
        return replace(row, cause=self._cause(name, unused, differences, min(steps)))

    def _is_beyond(self, difference: Difference, kind: str) -> bool:
        return not difference.value <= self._limits[kind]

    def _cause(
        self, name: str, strategy: Strategy | None, differences: dict[str, list[Difference]], step: int
    ) -> Cause:
        """Return the cause of the difference at the first step that has one; trains again up to it."""
        at_step = {kind: [item for item in of_kind if item.step == step] for kind, of_kind in differences.items()}
        weights = max(at_step["weights"], key=_order)
        if step == 0:
            return Cause("weights", f"before the first step: {weights.parameter} is not that of {REFERENCE}.")
        rounding = TOLERANCES[self._runs.precision]
        if max(_order(item) for of_kind in at_step.values() for item in of_kind) <= rounding:
            text = f"step {step}: rounding alone explains {rounding:.0e} in {self._runs.precision}: type tolerance="
            return Cause("rounding", f"{text}{rounding:.0e}.")
        limit = max(self._tolerance, rounding)
        differ = {kind: any(self._is_beyond(item, kind) for item in of_kind) for kind, of_kind in at_step.items()}
        step_before = (_order(item) for item in differences["weights"] if item.step == step - 1)
        differ["grown"] = max(step_before, default=0.0) > limit / 10
        try:
            if strategy is None:
                raise UserError("the strategy cannot be copied")
            if step not in self._observed:
                reference = make_strategy(REFERENCE, 1, self._device)
                self._observed[step] = self._runs.observe(REFERENCE, reference, step)
            observed = self._runs.observe(name, strategy, step)
            cause = explain(
                self._observed[step], observed, strategy=name, limit=limit, differ=differ, parameter=weights.parameter
            )
        # The comparison is made: a step that cannot be observed must not lose it.
        except Exception as error:
            cause = Cause("unknown", f"the cause is not told, as observing failed: {type(error).__name__}: {error}")
        return replace(cause, text=f"step {step}: {cause.text}")

    def _differences(self, run: ParityRun) -> tuple[dict[str, list[Difference]], list[float]]:
        """Return the differences of all steps by kind, and the seconds of each step."""
        losses, norms, weights = [Difference()], [Difference()], [Difference()]
        seconds = []
        for step in range(self._runs.steps + 1):
            # Read step by step: all weights of all steps need not fit into memory.
            record, expected = run.step(step), self._single.step(step)
            weights += self._weights(record["weights"], expected["weights"], step)
            if step:
                for phase, scale in self._loss_scales.items():
                    pair = record["losses"][phase], expected["losses"][phase]
                    losses.append(_numbers(*pair, scale=scale, step=step, phase=phase))
                    pair = record["norms"][phase], expected["norms"][phase]
                    norms.append(_numbers(*pair, scale=abs(pair[1]), step=step, phase=phase))
                seconds.append(record["seconds"])
        return {"loss": losses, "grad_norm": norms, "weights": weights}, seconds

    def _row(
        self,
        name: str,
        run: ParityRun,
        differences: dict[str, list[Difference]],
        seconds: list[float],
        *,
        verdict: str,
    ) -> ParityRow:
        """Return the largest differences over all steps, of equal ones the first."""
        # NaN sorts above every number, or max could pass over it.
        loss, norm, weight = (max(differences[kind], key=_order) for kind in ("loss", "grad_norm", "weights"))
        # The median, since single steps wait for the system.
        timed = sorted(seconds[_WARM_UP_STEPS:] or seconds)
        median = timed[len(timed) // 2]
        return ParityRow(name, verdict, run.layout, loss, norm, weight, median, run.bytes_a_step)

    def _weights(self, actual: dict[str, Tensor], expected: dict[str, Tensor], step: int) -> Iterator[Difference]:
        sizes = {name: _size(expected[name]) for name in self._parameters}
        floor = _SMALLEST_SCALE * max(sizes.values(), default=0.0)
        for name, size in sizes.items():
            difference = distance(actual[name], expected[name])
            yield Difference(_relative(difference, max(size, floor)), step, name)


def _reference(runs: ParityRuns, device: str) -> tuple[ParityRuns, ParityRun, float, list[str]]:
    """Return the runs in a precision in which the task trains, the one of `single`, the tolerance, and notes."""
    single = make_strategy(REFERENCE, 1, device)
    if runs.names_precision:
        # A precision that was asked for is not replaced: if `single` fails in it, that is the answer.
        return runs, runs.train(REFERENCE, single), TOLERANCES[runs.precision], []
    try:
        precise = runs.in_precision(_PRECISION)
        run = precise.train(REFERENCE, single)
    # Many tasks have an operation or a constant that does not work in fp64.
    except Exception as error:
        second = runs.in_precision(_SECOND_PRECISION)
        note = f"compared in {_SECOND_PRECISION}, as single failed in {_PRECISION}: {type(error).__name__}: {error}"
        # A new strategy, as the one that failed may be set up in part.
        run = second.train(REFERENCE, make_strategy(REFERENCE, 1, device))
        return second, run, TOLERANCES[_SECOND_PRECISION], [note]
    if run.has_losses_of_fp32:
        note = f"tolerance of {_SECOND_PRECISION}, in which the task computes its losses"
        return precise, run, TOLERANCES[_SECOND_PRECISION], [note]
    return precise, run, DEFAULT_TOLERANCE, []


def _cells(row: ParityRow) -> tuple[str, ...]:
    if row.error:
        return (row.strategy, *[""] * 6, row.verdict)
    sent = "" if row.bytes_a_step is None else f"{row.bytes_a_step / 1e6:.2f}"
    differences = [f"{difference.value:.1e}" for difference in (row.loss, row.grad_norm, row.weights)]
    milliseconds = f"{1000 * row.seconds_a_step:.2f}"
    return (row.strategy, row.layout, *differences, milliseconds, sent, row.verdict)


def _largest(row: ParityRow) -> str:
    """Return where the largest difference is."""
    names = {"weights": row.weights, "the gradient norm": row.grad_norm, "the loss": row.loss}
    name, worst = max(names.items(), key=lambda item: _order(item[1]))
    return f"the largest difference is that of {worst.parameter or name} in step {worst.step}"


def _order(difference: Difference) -> float:
    """Return a key that sorts NaN above every number."""
    return math.inf if math.isnan(difference.value) else difference.value


def _without_nan(value: Any) -> Any:
    """Return a tree with null in place of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _names(strategies: Sequence[StrategyChoice]) -> list[str]:
    """Return the names of strategies, numbered where several have the same."""
    names = [strategy_name(item) for item in strategies]
    counts = [names[: position + 1].count(name) for position, name in enumerate(names)]
    return [name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True)]


def _numbers(actual: float, expected: float, *, scale: float, step: int, phase: str) -> Difference:
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):  # also if neither logged it
        return Difference(0.0, step)
    return Difference(_relative(abs(actual - expected), scale), step, phase)


def _apart(actual: Any, expected: Any) -> str:
    """Return how far two states of a module are apart; nothing if they are equal to the bit."""
    if not (isinstance(actual, Tensor) and isinstance(expected, Tensor)):  # an extra state
        forms = [tree_map(lambda _: None, state) for state in (actual, expected)]
        leaves = [list(tree_leaves(state)) for state in (actual, expected)]
        if forms[0] != forms[1]:
            return f"in form ({actual!r} in place of {expected!r})"
        if leaves == [[actual], [expected]]:
            return "" if bool(actual == expected) else f"({actual!r} in place of {expected!r})"
        return next(filter(None, map(_apart, *leaves)), "")
    if actual.shape != expected.shape:
        return f"in shape ({tuple(actual.shape)} in place of {tuple(expected.shape)})"
    return "" if torch.equal(actual, expected) else f"by {distance(actual, expected):.3g}"


def _relative(difference: float, scale: float) -> float:
    return difference / scale if scale > 0 and difference else difference


def distance(left: Tensor, right: Tensor) -> float:
    """Return the largest difference between two elements."""
    # `max` of no element raises. In fp64, where a difference of two bf16 values is exact.
    if left.numel() == 0:
        return 0.0
    return float((left.detach().cpu().double() - right.detach().cpu().double()).abs().max())


def _size(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
