"""The profiler's line about the overlap of communication, and its fractions."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from trainkit.callbacks.profiler import Profiler
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.torch_ddp import ReducerTimes

from tests.tasks import EachStep, FakeRank, Regression, regression_data
from trainkit import Callback, Data

SLEEP = 0.05


class SlowlyValidated(Regression):
    def validation_step(self, batch: Any) -> Any:
        time.sleep(SLEEP)
        return super().validation_step(batch)


def overlap_of(
    make_trainer: Any,
    *strategy: Any,
    first: int = 10,
    around: tuple[list[Callback], list[Callback]] = ([], []),
    **settings: Any,
) -> dict[str, Any]:
    callbacks = [*around[0], Profiler(start_step=first, end_step=first), *around[1]]
    trainer = make_trainer(*strategy, callbacks=callbacks, max_duration="9step", **settings)
    data = Data(train=regression_data(80), validation=regression_data(8), batch_size=8)
    trainer.fit(SlowlyValidated(hidden=32), data)
    kept: dict[str, Any] = json.loads((trainer.run_dir / "profile.json").read_text())["overlap"]
    assert kept["line"].removeprefix("overlap: ") in (trainer.run_dir / "report.html").read_text()
    return kept


@pytest.mark.parametrize("first", [3, 10])
def test_one_device_has_no_communication(make_trainer: Any, capsys: pytest.CaptureFixture[str], first: int) -> None:
    overlap = overlap_of(make_trainer, first=first)
    assert overlap["communication_seconds"] == 0
    assert overlap["line"] == "overlap: SingleStrategy has no communication here (one process, one device)"
    assert capsys.readouterr().out.count(overlap["line"]) == 1


def test_communication_between_replicas_is_measured_and_none_of_it_is_hidden(make_trainer: Any) -> None:
    before, after = (EachStep(lambda run: time.perf_counter()) for _ in range(2))
    overlap = overlap_of(
        make_trainer,
        DataParallelStrategy(devices=["cpu", "cpu"]),
        around=([before], [after]),
        evaluate_every="1step",
    )
    assert overlap["steps"] == 4  # steps 5 to 8
    without_evaluations = after.seen[7] - before.seen[3] - 4 * SLEEP
    assert 0 < overlap["communication_seconds"] < overlap["step_seconds"] < without_evaluations / 4
    assert overlap["hidden_share"] == 0
    assert overlap["exposed_seconds"] == overlap["communication_seconds"]
    assert "0% of it hidden (scatter, replicate, gather and sum)" in overlap["line"]


def test_too_early_steps_are_rejected_with_the_first_that_can_be_measured(make_trainer: Any) -> None:
    overlap = overlap_of(make_trainer, DataParallelStrategy(devices=["cpu", "cpu"]), first=5)
    assert overlap == {"line": "overlap: not measured; it needs profiler.start_step=6 or later"}


def test_the_overlap_of_a_custom_strategy_is_unknown(make_trainer: Any) -> None:
    class Custom(FakeRank):
        pass

    assert "unknown for Custom on cpu" in overlap_of(make_trainer, Custom(world_size=2))["line"]


class Wrapped:
    """The times that PyTorch's DDP reports, one step late."""

    def __init__(self, *times: dict[str, float]) -> None:
        self.times, self.rates = list(times), [100]

    def _get_ddp_logging_data(self) -> dict[str, float]:
        return self.times.pop(0)

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rates.append(rate)


def ddp_times(communication: float, hidden: float) -> dict[str, float]:
    return {"backward_comm_time": communication * 1e9, "backward_compute_comm_overlap_time": hidden * 1e9}


def test_the_reducer_of_torch_measures_every_step_while_profiling() -> None:
    wrapped = Wrapped(ddp_times(0.4, 0.1), ddp_times(0.2, 0.3))
    times = ReducerTimes(wrapped)  # type: ignore[arg-type] # stands in for it
    for _ in range(3):
        times.add_previous_step()
    overlap = times.close()
    assert wrapped.rates == [100, 1, 100]
    assert overlap is not None
    assert overlap.steps == 2  # the first call is about a step before the measurement
    assert overlap.communication == pytest.approx(0.3)
    assert overlap.exposed == pytest.approx(0.15)


def test_the_overlap_of_a_reducer_without_times_is_unknown() -> None:
    wrapped = Wrapped({"iteration": 3.0})
    times = ReducerTimes(wrapped)  # type: ignore[arg-type] # stands in for it
    times.add_previous_step()
    times.add_previous_step()
    assert times.close() is None
