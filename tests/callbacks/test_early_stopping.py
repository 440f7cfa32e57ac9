from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.early_stopping import EarlyStopping

from trainkit.errors import UserError
from trainkit.trainer import FitResult

Fit = Callable[..., FitResult]


def test_training_ends_after_the_evaluations_without_improvement_and_says_so(fit: Fit, scripted: Any) -> None:
    result = fit(scripted([0.9, 0.5, 0.6, 0.7, 0.1]), EarlyStopping(patience=2))

    assert result.steps == 8
    assert result.exit_reason == "validation/loss has not improved for 2 evaluations (best 0.5 at step 4)"


@pytest.mark.parametrize(
    ("values", "stopping", "settings", "steps"),
    [
        ([0.9, 0.9, 0.8, 0.8, 0.7, 0.7, 0.6, 0.6, 0.5, 0.5], {}, {}, 20),
        ([0.9, 0.88, 0.86, 0.5], {"min_delta": 0.05}, {}, 6),
        ([0.1, 0.2, 0.3, 0.2, 0.1], {"mode": "max"}, {}, 10),
        ([0.1, 0.9, 0.8, 0.9, 0.9], {}, {"num_sanity_batches": 1}, 8),  # the first value does not count
    ],
    ids=["an improvement resets the count", "less than min_delta", "a larger value in mode max", "sanity batches"],
)
def test_an_improvement_is_a_smaller_value_of_a_validation_by_min_delta_or_a_larger_one_in_mode_max(
    fit: Fit, scripted: Any, *, values: list[float], stopping: dict[str, Any], settings: dict[str, Any], steps: int
) -> None:
    assert fit(scripted(values), EarlyStopping(patience=2, **stopping), **settings).steps == steps


def test_nan_does_not_count_as_improvement(fit: Fit, scripted: Any) -> None:
    result = fit(scripted([float("nan")] * 10), EarlyStopping(patience=3))

    assert result.steps == 6
    assert "no value so far" in result.exit_reason


@pytest.mark.parametrize(("mode", "values"), [("min", [0.5, 0.2, 0.1]), ("max", [0.1, 0.2, 0.5])])
def test_training_ends_at_the_threshold(fit: Fit, scripted: Any, mode: Any, values: list[float]) -> None:
    result = fit(scripted(values), EarlyStopping(mode=mode, threshold=0.25 if mode == "min" else 0.15))

    assert result.steps == 4
    assert "reached 0.2, the threshold is" in result.exit_reason


def test_a_resumed_run_ends_at_the_step_of_one_that_was_never_stopped(fit: Fit, scripted: Any, tmp_path: Path) -> None:
    values = [0.9, 0.5, 0.6, 0.7, 0.8, 0.1]
    fit(scripted(values), Checkpoint(), EarlyStopping(patience=3), max_duration="6step")

    result = fit(scripted(values[3:]), Checkpoint(), EarlyStopping(patience=3), resume=tmp_path / "run")

    assert result.steps == 10
    assert result.exit_reason.endswith("(best 0.5 at step 4)")


def test_a_second_run_counts_from_zero(fit: Fit, scripted: Any, tmp_path: Path) -> None:
    stopping = EarlyStopping(patience=2)
    fit(scripted([0.1, 0.5, 0.5]), stopping, run_dir=tmp_path / "first")

    result = fit(scripted([0.9, 0.8, 0.9, 0.9]), stopping, run_dir=tmp_path / "second")

    assert result.steps == 8


def test_an_unknown_metric_is_rejected_with_the_nearest_name(fit: Fit, scripted: Any) -> None:
    with pytest.raises(UserError, match="Did you mean 'validation/loss'"):
        fit(scripted(), EarlyStopping(monitor="validation/los"))


@pytest.mark.parametrize(
    ("monitored", "settings", "message"),
    [
        (
            {"monitor": "validation/los"},
            {"num_sanity_batches": 1},
            r"early_stopping.monitor='validation/los'.*Did you mean 'validation/loss'",
        ),
        ({}, {"evaluate_every": None}, "evaluate_every is None"),
        ({}, {"without_validation": True}, "the data has none"),
    ],
    ids=["unknown in the sanity batches", "no validations", "no validation data"],
)
def test_a_metric_that_is_never_measured_is_rejected_before_the_first_step(
    fit: Fit, scripted: Any, monitored: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    task = scripted()

    with pytest.raises(UserError, match=message):
        fit(task, EarlyStopping(**monitored), **settings)

    assert task.steps == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "maxx"}, "Did you mean 'max'"),
        ({"patience": 0}, "a whole number of evaluations, at least 1"),
        ({"min_delta": -0.1}, "a number, at least 0"),
        ({"min_delta": float("nan")}, "a number, at least 0"),
    ],
)
def test_a_wrong_setting_is_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EarlyStopping(**settings)
