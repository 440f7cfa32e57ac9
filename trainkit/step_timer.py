"""Seconds of each part of the steps, measured without waiting for the device.

    next batch     forward    backward    waiting for ranks    optimizer    log, callbacks
    [data|copy]   [forward]  [        backward            ]   [optimizer]  [    rest     ]

On the CPU a clock measures. Work on a CUDA device continues after a call has returned: there events are recorded, and
read at log points, which wait for the device anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from trainkit.data.batch import StepBatch
from trainkit.data.loader import BatchLoader
from trainkit.devices import current_stream, has_streams, is_asynchronous
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.precision import Precision
from trainkit.phases import PhaseStep
from trainkit.strategy import Strategy

PARTS = ("data", "copy", "forward", "backward", "communication", "optimizer", "rest")
_EVERY = 16
"""Steps of which one is measured."""
_WARM_UP = 16
"""First steps of a run, which are all measured: they differ from later ones."""
_clock = time.perf_counter


class StepTimer:
    """Adds up the seconds of each part of the steps on this rank, by measuring one step in sixteen.

    steps        0 1 2 ... 15   16 ... 30   31   32 ... 46   47   log   48
    measured     x x x      x                x                x          x
    stands for   1 1 1      1    ........   16    .......    16          1

    The first step after a log point is measured too, so that every interval has one. Reads of data are all timed.
    """

    def __init__(self, strategy: Strategy, precision: Precision, loader: BatchLoader) -> None:
        self.steps = 0
        """Steps since the last `take`."""
        self._strategy = strategy
        self._loader = loader
        self._received = 0.0  # seconds until batches were on the device, since the last `take`
        self._waited_before, self._data_before = self._waited_seconds(), loader.seconds_waited
        self._device = device = _DeviceTimer(strategy.device) if has_streams(strategy.device) else None
        self._forward, self._both = _PartTimer("forward", device), _PartTimer("both", device)
        self._optimizer = _PartTimer("optimizer", device)
        self._measures = True
        self._weight = 1  # steps that the present one stands for if it is measured
        self._measured_weight = 0  # steps that the measured ones stand for, since the last `take`
        self._warm_up = _WARM_UP
        self._thread: int | None = None  # that is in a measured step
        self._in_step = False  # since its first forward, and until it is counted
        self._release = precision.surround(self._forward_of_step)

    def close(self) -> None:
        """Stop timing forwards."""
        self._release()

    # ---- Called by the loop

    def timed_batches(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Return the batches, counting the time until they are on a device that is not the CPU."""
        return self._counting(batches) if is_asynchronous(self._strategy.device) else batches

    def _counting(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        while True:
            began = _clock()
            batch = next(batches, None)
            self._received += _clock() - began
            if batch is None:
                return
            yield batch

    def wrap(self, step: PhaseStep) -> PhaseStep:
        """Return the step with its forward and backward and its update timed."""
        return replace(
            step,
            forward_backward=partial(self._forward_backward, step.forward_backward),
            update=partial(self._update, step.update),
        )

    def _forward_backward(
        self, forward_backward: Callable[[StepBatch], list[StepOutput]], batch: StepBatch
    ) -> list[StepOutput]:
        if not self._measures:
            return forward_backward(batch)
        # Not again in a later phase of the step: its events belong to the same step.
        if self._device is not None and not self._in_step:
            self._device.begin_step(self._weight)
        self._in_step = True
        self._thread = get_ident()
        try:
            with self._both:
                return forward_backward(batch)
        finally:
            self._thread = None

    def _update(self, update: Callable[[], Tensor | None]) -> Tensor | None:
        if not self._measures:
            return update()
        with self._optimizer:
            return update()

    def end_step(self) -> None:
        """Count a step whose phases are complete."""
        self.steps += 1
        if self._measures:
            for part in (self._forward, self._both, self._optimizer):
                part.end_step(self._weight)
            self._measured_weight += self._weight
            self._weight, self._warm_up, self._in_step = 0, max(self._warm_up - 1, 0), False
        self._weight += 1
        self._measures = self._weight >= _EVERY or self._warm_up > 0

    def _forward_of_step(self) -> AbstractContextManager[Any] | None:
        # Replicas on other threads run at the same time: their forwards do not add up to a step.
        return self._forward if self._thread is not None and self._thread == get_ident() else None

    # ---- What was measured

    def _waited_seconds(self) -> float | None:
        """Return the seconds of steps in which this process only waited for others; `None` if unknown."""
        seconds: float | None = getattr(self._strategy, "waited_seconds", None)
        return seconds

    def take(self, seconds: float) -> dict[str, float]:
        """Return the seconds of each part of the steps that took `seconds`, and reset; only at a log point."""
        waited = self._waited_seconds()
        # A new reducer starts from zero.
        communication = None if waited is None else max(waited - (self._waited_before or 0.0), 0.0)
        data = self._loader.seconds_waited - self._data_before
        received = max(self._received, data)
        parts = {"data": data}
        if self._strategy.device.type != "cpu":
            parts["copy"] = received - data
        if self._device is None:
            # The measured steps may stand for fewer than all: those since the last one of them are not weighted.
            scale = self.steps / self._measured_weight if self._measured_weight else 0.0
            forward, both, optimizer = (part.take() * scale for part in (self._forward, self._both, self._optimizer))
            # `both` includes the wait for other ranks, which all steps add to and not one of sixteen: hence the bound.
            backward = max(both - forward - (communication or 0.0), 0.0)
            left = seconds - received - (communication or 0.0)
            parts.update(_within({"forward": forward, "backward": backward, "optimizer": optimizer}, left))
            if communication is not None:
                parts["communication"] = communication
            parts["rest"] = max(seconds - sum(parts.values()), 0.0)
        else:
            parts.update(self._on_device(seconds, parts, communication))
        self._received, self._waited_before, self._data_before = 0.0, waited, self._loader.seconds_waited
        self.steps = self._measured_weight = 0
        self._measures = True
        return parts

    def _on_device(self, seconds: float, parts: dict[str, float], communication: float | None) -> dict[str, float]:
        """Return the parts on a device that works after the CPU: waits of the CPU count only while the device is idle.

        It is idle while the CPU waits for other ranks in backward. Waits in the device's queue stay part of backward.
        """
        assert self._device is not None
        busy = _within(self._device.take(self.steps), seconds)
        if communication is not None and busy:
            # The events count this wait as backward: the device was idle between them.
            busy["communication"] = min(communication, busy["backward"])
            busy["backward"] -= busy["communication"]
        idle = max(seconds - sum(busy.values()), 0.0)
        waiting: dict[str, float] = {}
        for name, wait in parts.items():  # of data, then of the copy
            waiting[name] = min(wait, idle)
            idle -= waiting[name]
        return {**waiting, **busy, "rest": idle}


def _within(estimates: dict[str, float], seconds: float) -> dict[str, float]:
    """Return the parts extrapolated from some steps, scaled down if these were slower than the others."""
    total, seconds = sum(estimates.values()), max(seconds, 0.0)
    factor = seconds / total if total > seconds else 1.0
    return {part: value * factor for part, value in estimates.items()}


class _PartTimer:
    """Adds the seconds of a block to those of a part of the step, and marks the block on the device."""

    def __init__(self, name: str, device: _DeviceTimer | None) -> None:
        self._of_step = self._seconds = 0.0
        self._name, self._device = name, device

    def __enter__(self) -> None:
        if self._device is not None and self._name == "forward":
            self._device.mark("between")  # forwards, which is backward
        self._began = _clock()

    def __exit__(self, *_: object) -> None:
        self._of_step += _clock() - self._began
        if self._device is not None:
            self._device.mark(self._name)

    def end_step(self, weight: int) -> None:
        """Count the step's seconds for `weight` steps."""
        self._seconds += self._of_step * weight
        self._of_step = 0.0

    def take(self) -> float:
        """Return the seconds of the counted steps, and reset them."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _DeviceTimer:
    """Records events in the measured steps; the time before an event counts for the name of the event."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple[int, list[tuple[str, torch.Event]]]] = []  # weight, marks
        self._free: list[torch.Event] = []

    def begin_step(self, weight: int) -> None:
        """Begin a measured step, which stands for `weight` steps."""
        self._steps.append((weight, []))
        self.mark("begin")

    def mark(self, name: str) -> None:
        """Record an event."""
        event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
        event.record(current_stream(self._device))
        self._steps[-1][1].append((name, event))

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds of `steps` steps, extrapolated from the measured ones; waits for nothing."""
        totals = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        # A step whose last event has not passed counts in the next interval: `elapsed_time` would raise for it.
        done = [(weight, marks) for weight, marks in self._steps if marks[-1][1].query()]
        for weight, marks in done:
            for (_, previous), (name, event) in pairwise(marks):
                part = "backward" if name in ("both", "between") else name
                totals[part] += weight * previous.elapsed_time(event) / 1e3  # from ms
            self._free += [event for _, event in marks]  # used again: the driver makes each event
        self._steps = [step for step in self._steps if step not in done]
        measured = sum(weight for weight, _ in done)
        return {name: total * steps / measured for name, total in totals.items()} if done else {}
