"""How many samples a device takes best at once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import torch

from trainkit.batches import to_device
from trainkit.callback import Callback
from trainkit.checkpoints.file import write_text
from trainkit.console import Table, say, show
from trainkit.errors import UserError, nearest
from trainkit.step_output import read_training_output
from trainkit.strategy import SupportsPhases
from trainkit.way_back import drop_gradients
from trainkit.window import MicroBatch, Window

from .chart import chart
from .trial import trial

if TYPE_CHECKING:
    from trainkit.run import Run

_ENDINGS = ("stop", "apply", "continue")
_AS_GOOD = 0.97  # of the best throughput: less memory is worth the rest
_REPEATS = 2
_OPTIMIZER_COPIES = 2  # of the weights, which Adam keeps from its first step on


class MicroBatchFinder(Callback):
    """Tries micro-batches of 2, 4, 8, ... samples until memory ends or the global batch does, and suggests a size.

    The global batch stays the same, and with it what is trained (but for batch norms, whose statistics are those of a
    micro-batch). Each size makes a forward and a backward on every rank, without communication; a rank that runs out
    of memory ends the trial for all of them, and everything is put back as it was. Memory that the optimizer will
    take in its first step is held free meanwhile. The suggestion is the smallest size that is about as quick as the
    quickest. A task with phases makes a forward and a backward of each of them. In a pipeline, whose stages need each
    other, whole steps are made with the size that was set and its halves, which leave less idle.

    `micro_batches.svg` and `.json` in the run's folder show what was seen. A resumed run does not look again: set
    `strategy.micro_batch_size` to what was found, and it goes on to the bit.

    Args:
        largest: The size at which to end; `None`: this rank's share of the global batch.
        then: `apply` trains with the suggestion, `stop` ends the run, `continue` trains with what was set.

    """

    def __init__(self, *, largest: int | None = None, then: Literal["apply", "stop", "continue"] = "apply") -> None:
        if largest is not None and (isinstance(largest, bool) or largest < 1):
            raise UserError(f"micro_batch_finder.largest must be at least 1 sample, got {largest}.")
        if then not in _ENDINGS:
            raise UserError(
                f"micro_batch_finder.then={then!r} is unknown.{nearest(then, _ENDINGS)} Choose {', '.join(_ENDINGS)}."
            )
        self.largest = largest
        self.then = then
        self.suggestion: int | None = None
        """What was found, on every rank."""

    def on_fit_start(self, run: Run) -> None:
        if run.resumed_from is not None:
            return
        self._check(run)
        assert run.plan is not None
        share = -(-run.plan.batch_size // run.strategy.comm.world_size)
        in_stages = run.strategy.comm.num_processes != run.strategy.comm.world_size
        sizes = _halves(run.plan.micro_batch_size) if in_stages else _sizes(min(share, self.largest or share))
        with trial(run, who="micro_batch_finder"):
            if in_stages:
                speeds = self._tried_in_steps(run, sizes)
            else:
                # A batch norm takes no single sample, so that one is tried only where two are too many.
                speeds = self._tried(run, sizes) or (self._tried(run, [1]) if sizes != [1] else {})
        if not speeds:
            raise UserError("micro_batch_finder: not even a single sample fits into memory; use a smaller model.")
        best = max(speeds.values())
        self.suggestion = min(size for size, speed in speeds.items() if speed >= _AS_GOOD * best)
        if run.is_main:
            self._tell(run, speeds, stopped=len(speeds) < len(sizes))
        if self.then == "stop":
            run.request_stop(f"micro_batch_finder has looked; set strategy.micro_batch_size={self.suggestion}")
        elif self.then == "apply":
            self._apply(run, self.suggestion)

    def _check(self, run: Run) -> None:
        if run.plan is None or run.feed is None or run.feed.micro_batch(1) is None:
            raise UserError(
                "micro_batch_finder needs training samples that can be read one by one, and a batch_size; streams and "
                "ready-made batches have the size that they have."
            )
        missing = [one.step_name for one in run.optimizations if not callable(getattr(run.task, one.step_name, None))]
        if missing:  # of a task that names its methods in manual_step
            raise UserError(
                f"micro_batch_finder calls the step of each phase, and {type(run.task).__name__} has no method "
                f"{missing[0]}; declare it as Phase(..., step='its_method'), or type strategy.micro_batch_size=8."
            )

    def _tried(self, run: Run, sizes: list[int]) -> dict[int, float]:
        """Return samples a second on one device for each size that fits on every rank; the same on all of them."""
        speeds: dict[int, float] = {}
        parameters = sum(p.nbytes for one in run.optimizations for p in one.parameters)
        held_free = torch.empty(_OPTIMIZER_COPIES * parameters, dtype=torch.uint8, device=run.strategy.device)
        for size in sizes:
            try:
                seconds = min(self._seconds(run, size) for _ in range(_REPEATS))
                is_out = False
            except torch.OutOfMemoryError:
                seconds, is_out = 0.0, True
            drop_gradients(run)
            if run.strategy.device.type == "cuda":
                torch.cuda.empty_cache()
            if run.strategy.comm.any_rank(is_out):
                break
            speeds[size] = size / max(run.strategy.comm.all_gather_object(seconds))
        del held_free
        return speeds

    def _seconds(self, run: Run, size: int) -> float:
        """Return how long a forward and a backward of `size` samples take on this rank, of all phases together."""
        strategy, device = run.strategy, run.strategy.device
        assert run.feed is not None and run.plan is not None
        read = run.feed.micro_batch(size)
        assert read is not None
        micro_batch = MicroBatch(to_device(read.batch, device, dtype=run.precision.batch_type), size)
        window = Window([micro_batch], run.plan.batch_size, run.plan.batch_size, False)
        _wait(device)
        began = time.perf_counter()
        for step_name in _phases_in_turn(run):
            with strategy.no_sync():
                with strategy.precision.forward():
                    returned = getattr(run.task, step_name)(micro_batch.batch)
                strategy._backward(read_training_output(returned, size, run.task, step_name), micro_batch, window)
        _wait(device)
        return time.perf_counter() - began

    def _tried_in_steps(self, run: Run, sizes: list[int]) -> dict[int, float]:
        """Return samples a second of whole steps, where several processes make a step together; the same on all."""
        strategy, feed, plan = run.strategy, run.feed, run.plan
        assert feed is not None and plan is not None
        before, speeds = (strategy.accumulate, strategy.micro_batch_size), {}
        try:
            for size in sizes:  # first the one that was set, by which the windows that have begun are cut
                strategy.accumulate, strategy.micro_batch_size = None, size
                feed.plan_again(strategy)
                window = next(strategy.step_batches(feed.windows(0, 0), pin_memory=feed.source.pin_memory))
                # The first step meets new shapes.
                seconds = min(self._seconds_of_step(run, window) for _ in range(1 + _REPEATS))
                speeds[size] = plan.batch_size / max(strategy.comm.all_gather_object(seconds))
        finally:
            strategy.accumulate, strategy.micro_batch_size = before
            feed.plan_again(strategy)
        return dict(sorted(speeds.items()))

    def _seconds_of_step(self, run: Run, window: Window) -> float:
        _wait(run.strategy.device)
        began = time.perf_counter()
        for _ in _phases_in_turn(run):
            run.strategy.forward_backward(run.task, window)
        _wait(run.strategy.device)
        seconds = time.perf_counter() - began
        drop_gradients(run)
        return seconds

    def _apply(self, run: Run, size: int) -> None:
        assert run.feed is not None and run.plan is not None
        run.strategy.accumulate, run.strategy.micro_batch_size = None, size
        run.plan = run.strategy.plan(run.plan.batch_size)
        run.feed.plan_again(run.strategy)

    def _tell(self, run: Run, speeds: dict[int, float], *, stopped: bool) -> None:
        table = Table("Micro-batches", ["samples", "samples a second"])
        table.rows += [[str(size), f"{speed:,.1f}"] for size, speed in speeds.items()]
        if stopped:
            table.rows.append([f"{2 * max(speeds)}", "out of memory"])
        show(table)
        say(f"micro-batches: {self.suggestion} samples; strategy.micro_batch_size={self.suggestion}")
        if run.run_dir is not None:
            titles = ("Samples a second", "samples of a micro-batch", "samples a second")
            drawn = chart(list(speeds), list(speeds.values()), marked=self.suggestion, titles=titles)
            write_text(run.run_dir / "micro_batches.svg", drawn)
            kept = {"suggestion": self.suggestion, "samples_per_second": {str(k): v for k, v in speeds.items()}}
            write_text(run.run_dir / "micro_batches.json", json.dumps({**kept, "out_of_memory": stopped}) + "\n")


def _phases_in_turn(run: Run) -> Iterator[str]:
    """Yield the method of each phase, which the strategy is to train when it is yielded."""
    for optimization in run.optimizations:
        if optimization.phase:
            assert isinstance(run.strategy, SupportsPhases)
            run.strategy.begin_phase(optimization, step_name=optimization.step_name)
        yield optimization.step_name


def _sizes(most: int) -> list[int]:
    sizes = [min(2, most)]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == most else [*sizes, most]


def _halves(most: int) -> list[int]:
    """Return a size and its halves down to 2: a batch norm takes no single sample."""
    sizes = [most]
    while sizes[-1] >= 4:
        sizes.append(sizes[-1] // 2)
    return sizes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
