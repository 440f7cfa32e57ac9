"""GradientSum: a strategy sums gradients by the object that it is given, once a step, on ranks without samples too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from trainkit.strategies.gradient_sum import SumAfterBackward
from trainkit.strategies.multiprocess import MultiProcessStrategy
from trainkit.strategies.single import SingleStrategy

from tests.equality import Perceptron, StepWeights, largest_difference, numbers
from tests.strategies.fusion.test_failure import FailingOnOne
from tests.strategies.fusion.training import train
from trainkit import Data
from trainkit.testing import rank_outcomes, run_ranks


class CountingSum(SumAfterBackward):
    """Counts what it is asked for, and keeps in a file what it is told."""

    def __init__(self, reduce: Callable[[], None], told: Path) -> None:
        super().__init__(reduce)
        self.calls: Counter[str] = Counter()
        self.told = told

    def no_sync(self) -> Any:
        self.calls["no_sync"] += 1
        return super().no_sync()

    def session(self) -> Any:
        self.calls["session"] += 1
        return super().session()

    def reduce_zeros(self) -> None:
        self.calls["reduce_zeros"] += 1
        super().reduce_zeros()

    def fail(self, message: str) -> None:
        self.told.write_text(message)

    def close(self) -> None:
        self.calls["close"] += 1


class FlatStrategy(MultiProcessStrategy):
    def __init__(self, told: Path, *, accumulate: int = 1) -> None:
        super().__init__(accumulate=accumulate)
        self.gradients = CountingSum(self.reduce_gradients, told)


def counts_on_this_rank(run_dir: Path) -> tuple[float, dict[str, int]]:
    # The third batch of an epoch has one sample, which leaves rank 1 without any.
    strategy, data = FlatStrategy(run_dir / "told", accumulate=2), Data(train=numbers(9), batch_size=4)
    ours, single = StepWeights(), StepWeights()
    train(
        SingleStrategy(device="cpu"), Perceptron(), data, single, run_dir=run_dir / f"single_{dist.get_rank()}", steps=3
    )
    train(strategy, Perceptron(), data, ours, run_dir=run_dir / "flat", steps=3)
    assert isinstance(strategy.gradients, CountingSum)
    return largest_difference(ours.steps, single.steps), dict(strategy.gradients.calls)


def test_gradients_are_summed_once_a_step_by_the_object_of_the_strategy(tmp_path):
    first, second = run_ranks(counts_on_this_rank, 2, tmp_path)
    assert max(first[0], second[0]) < 1e-6
    assert first[1] == {"no_sync": 2, "session": 3, "close": 1}
    assert second[1] == {"no_sync": 2, "session": 3, "reduce_zeros": 1, "close": 1}, "its last session has no backward"


def failing(folder: Path) -> None:
    strategy = FlatStrategy(folder / f"told_{dist.get_rank()}")
    task = FailingOnOne()
    task.rank = 3
    train(strategy, task, Data(train=numbers(24), batch_size=6), run_dir=folder / "run")


def test_a_rank_that_fails_tells_why(tmp_path):
    assert "cannot go on" in rank_outcomes(failing, 4, tmp_path, patience=60)[3].failure
    assert "rank 3 failed in step 2: ZeroDivisionError" in (tmp_path / "told_3").read_text()
