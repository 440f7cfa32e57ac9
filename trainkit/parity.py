"""The proof that strategies agree: the same task, data and global batch trained under each of them from one start.

Every strategy is compared with `single` after every step: the loss, the norm of the gradient, and each parameter. All
compute in fp64 unless told otherwise: there the rounding of sums in another order stays small, however much an
optimizer that divides by small gradients enlarges it, so that what is left is a strategy's own.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainkit.errors import UserError
from trainkit.parity_comparison import Comparison, distance
from trainkit.parity_report import ParityReport
from trainkit.parity_trials import REFERENCE, Chosen, StopAfter, Trial, Trials, made, name_of
from trainkit.rng import preserve_rng
from trainkit.strategy import Strategy
from trainkit.task import TaskModule

DEFAULT_STRATEGIES = ("single", "dp", "ddp")
TOLERANCES = {"fp64": 1e-11, "fp32": 1e-5, "bf16-mixed": 2e-2, "fp16-mixed": 5e-3, "bf16-true": 1e-1}
"""Largest relative difference that rounding explains after some tens of steps, in a precision that is named."""
DEFAULT_TOLERANCE = 1e-8
"""The same where none is named, for any optimizer: rounding of 1e-16, made 1e5 times as large in each step by one that
divides by a gradient that is zero but for rounding (a learning rate of 1e-3 over Adam's 1e-8), of a weight that is a
hundredth of the others."""
_PRECISION = "fp64"
_SECOND_PRECISION = "fp32"  # for tasks that do not compute in the first

Make = Callable[[], Any]


def compare_strategies(
    make_task: TaskModule | Make,
    make_data: Any,
    strategies: Sequence[Chosen] = DEFAULT_STRATEGIES,
    *,
    steps: int = 20,
    devices: int = 2,
    device: str = "cpu",
    tolerance: float | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> ParityReport:
    """Return how each strategy compares with `single` after every step, from the same initial weights.

    A task or data may be given as they are or as functions that make them. A strategy is an object, a name, or a name
    with settings: `("ddp", {"hook": "fp16"})`. `devices` (ranks, replicas or stages) and `device` are given to those
    that are named and take them; `trainer` holds settings of the Trainer such as `{"precision": "fp32"}`. Without that
    setting all compute in fp64, or in fp32 where `single` does not train the task in fp64; where its losses are of fp32
    even so, differences may be as large as in that. Both are noted. Raises
    UserError for what no strategy could train.
    """
    if isinstance(steps, bool) or steps < 1:
        raise UserError(f"steps must be at least 1, got {steps}.")
    others = [item for item in strategies if item != REFERENCE]
    chosen = [(name, made(item, devices, device)) for name, item in zip(_names(others), others, strict=True)]
    with tempfile.TemporaryDirectory(prefix="trainkit-parity-") as folder, preserve_rng():
        trials = Trials(make_task, make_data, Path(folder), steps=steps, settings=dict(trainer or {}))
        trials, single, limit, notes = _reference(trials, device)
        limit = limit if tolerance is None else tolerance
        comparison = Comparison(trials, single, tolerance=limit)
        rows = [comparison.reference(), *(comparison.attempt(name, strategy) for name, strategy in chosen)]
        causes: Sequence[str] = ()
        if any(row.verdict == "different" for row in rows):
            causes, more = comparison.causes(rows, device=device)
            notes += more
    return ParityReport(tuple(rows), steps, trials.precision, limit, tuple(causes), tuple(notes))


def assert_strategies_equal(
    make_task: TaskModule | Make,
    make_data: Any,
    strategies: Sequence[Chosen] = DEFAULT_STRATEGIES,
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
    strategy: Chosen = REFERENCE,
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
    with tempfile.TemporaryDirectory(prefix="trainkit-resume-") as folder, preserve_rng():
        trials = Trials(make_task, make_data, Path(folder), steps=steps, settings=dict(trainer or {}))

        def fresh() -> Strategy:
            return copy.deepcopy(strategy) if isinstance(strategy, Strategy) else made(strategy, devices, device)

        whole = trials.fit("whole", fresh(), callbacks=[])
        trials.fit("parts", fresh(), callbacks=[StopAfter(stop_after)])
        resumed = trials.fit("parts", fresh(), callbacks=[], resume=True)
    for name, expected in whole.items():
        if not torch.equal(resumed[name], expected):
            largest = distance(resumed[name], expected)
            raise AssertionError(
                f"{name} differs by {largest:.3g} between a run of {steps} steps and one that was stopped after "
                f"{stop_after} and resumed. Random numbers or state outside of parameters, buffers and torch's, "
                "numpy's and python's generators are not in a checkpoint."
            )


def _reference(trials: Trials, device: str) -> tuple[Trials, Trial, float, list[str]]:
    """Return the trials in a precision in which the task trains, the one of `single`, the tolerance, and notes."""
    if trials.names_precision:
        return trials, trials.train(REFERENCE, made(REFERENCE, 1, device)), TOLERANCES[trials.precision], []
    try:
        precise = trials.in_precision(_PRECISION)
        single = precise.train(REFERENCE, made(REFERENCE, 1, device))
    except Exception as error:
        simple = trials.in_precision(_SECOND_PRECISION)
        single = simple.train(REFERENCE, made(REFERENCE, 1, device))
        why = f"{type(error).__name__}: {error}"
        note = f"compared in {_SECOND_PRECISION}, as single failed in {_PRECISION}: {why}"
        return simple, single, TOLERANCES[_SECOND_PRECISION], [note]
    if single.has_losses_of_fp32:
        note = f"tolerance of {_SECOND_PRECISION}, in which the task computes its losses whatever it is given"
        return precise, single, TOLERANCES[_SECOND_PRECISION], [note]
    return precise, single, DEFAULT_TOLERANCE, []


def _names(strategies: Sequence[Chosen]) -> list[str]:
    """Return what strategies are called, those of one name numbered."""
    names = [name_of(item) for item in strategies]
    return [
        name if names.index(name) == place else f"{name} {names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]
