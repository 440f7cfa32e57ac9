"""Durations in minutes end on all ranks after the same step, without an extra collective."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from trainkit.strategies.ddp import DDPStrategy

from tests.tasks import Regression, regression_data
from trainkit import Callback, Data, Trainer, state
from trainkit.distributed import collectives
from trainkit.distributed.collectives import ProcessGroupCollectives, StopConsensus
from trainkit.testing import run_ranks


class Clock:
    """Counts 5 ms a step, however long the steps of this machine take."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


class Calls(Callback):
    """Counts the collectives of this rank, and records the steps of log points; the clock of rank 1 is late."""

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.counts: Counter[str] = Counter()
        self.clock = state.time = collectives.time = Clock()  # type: ignore[assignment]
        for name in ("broadcast_object", "all_gather_object", "any_rank", "reduce_in_place"):
            method = self._counting(name, getattr(ProcessGroupCollectives, name))
            setattr(ProcessGroupCollectives, name, method)
        StopConsensus._check = self._counting("check", StopConsensus._check)

    def _counting(self, name: str, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] += 1
            return method(*args, **kwargs)

        return counted

    def on_fit_start(self, run: Any) -> None:
        run.state.resume_clock(-0.5 * run.strategy.comm.rank)  # its clock is behind

    def on_step_end(self, run: Any) -> None:
        if run.state.step == 1:
            self.counts.clear()
        self.clock.seconds += 0.005

    on_step_end.__module__ = "trainkit.callbacks.calls"  # as one of ours, which never requests a stop

    def on_log(self, run: Any, metrics: dict[str, float]) -> None:
        self.logged.append(run.state.step)
        self.during = dict(self.counts)


class Stop(Callback):
    def on_step_end(self, run: Any) -> None:
        if run.state.step == 300 and run.strategy.comm.rank == 1:
            run.request_stop("asked for")


def steps_until_stopped() -> int:
    """Return the number of quick steps of a run in which one rank requests a stop after 300."""
    strategy = DDPStrategy(device="cpu")
    trainer = Trainer(strategy, max_duration="4000step", callbacks=[Stop()], loggers=[], run_dir="stopped")
    return trainer.fit(Regression(), Data(train=regression_data(400), batch_size=4)).steps


def on_two_ranks() -> tuple[int, list[int], dict[str, int], str, int]:
    calls = Calls()
    trainer = Trainer(
        DDPStrategy(device="cpu"), max_duration="1.5s", log_every="0.4s", callbacks=[calls], loggers=[], run_dir="run"
    )
    result = trainer.fit(Regression(), Data(train=regression_data(8), batch_size=4))
    assert dist.get_world_size() == 2
    return result.steps, calls.logged, calls.during, result.exit_reason, steps_until_stopped()


@pytest.mark.slow
def test_ranks_with_different_clocks_stop_and_log_together_without_a_check_in_every_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(on_two_ranks, 2)
    assert first[:2] == second[:2]
    steps, logged, during, reason, stopped = first
    assert stopped == second[-1] == 300
    assert len(logged) >= 3 and 300 <= steps < 400
    assert reason == "reached max_duration=1.5second"
    assert sum(during.values()) < steps / 4  # the few log points
