"""Seconds of each part of the steps, measured without waiting for the device.

    next batch     forward    backward    waiting for ranks    optimizer    log, callbacks
    [data|copy]   [forward]  [        backward            ]   [optimizer]  [    rest     ]

On the CPU a clock measures everything. Work on a CUDA device continues after a call has returned: there events are
recorded in some of the steps, and read at log points, which wait for the device anyway.
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
from trainkit.loops.phases import PhaseStep
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.precision import Precision
from trainkit.strategy import Strategy, waited_seconds

PARTS = ("data", "copy", "forward", "backward", "communication", "optimizer", "rest")
_EVERY = 10  # steps, of which one is measured on a CUDA device
_clock = time.perf_counter


class StepTimer:
    """Adds up the seconds of each part of the steps on this rank."""

    def __init__(self, strategy: Strategy, precision: Precision, loader: BatchLoader) -> None:
        self.steps = 0
        self._strategy = strategy
        self._loader = loader
        self._received = 0.0
        self._waited_before, self._data_before = waited_seconds(strategy), loader.seconds_waited
        self._device = device = _DeviceTimer() if strategy.device.type == "cuda" else None
        self._forward, self._both = _PartTimer("forward", device), _PartTimer("both", device)
        self._optimizer = _PartTimer("optimizer", device)
        self._thread: int | None = None  # that is in a step
        self._in_step = False  # since its first forward, and until it is counted
        self._release = precision.surround(self._forward_of_step)

    def close(self) -> None:
        """Stop timing forwards."""
        self._release()

    # ---- Called by the loop

    def timed_batches(self, batches: Iterator[StepBatch]) -> Iterator[StepBatch]:
        """Yield the batches, counting the time until they are on the device."""
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
        if self._device is not None and not self._in_step:
            self._device.begin_step()
        self._in_step = True
        self._thread = get_ident()
        try:
            with self._both:
                return forward_backward(batch)
        finally:
            self._thread = None

    def _update(self, update: Callable[[], Tensor | None]) -> Tensor | None:
        with self._optimizer:
            return update()

    def end_step(self) -> None:
        """Count a step whose phases are complete."""
        self.steps += 1
        self._in_step = False

    def _forward_of_step(self) -> AbstractContextManager[Any] | None:
        # Replicas on other threads run at the same time: their forwards do not add up to a step.
        return self._forward if self._thread == get_ident() else None

    # ---- What was measured

    def take(self, seconds: float) -> dict[str, float]:
        """Return the seconds of each part of the steps that took `seconds`, and reset; only at a log point."""
        waited = waited_seconds(self._strategy)
        # A new reducer starts from zero.
        communication = None if waited is None else max(waited - (self._waited_before or 0.0), 0.0)
        data = self._loader.seconds_waited - self._data_before
        parts = {"data": data}
        if self._strategy.device.type != "cpu":
            parts["copy"] = max(self._received - data, 0.0)
        if self._device is None:
            parts["forward"] = self._forward.seconds
            parts["backward"] = max(self._both.seconds - self._forward.seconds - (communication or 0.0), 0.0)
            if communication is not None:
                parts["communication"] = communication
            parts["optimizer"] = self._optimizer.seconds
            parts["rest"] = max(seconds - self._received - self._both.seconds - self._optimizer.seconds, 0.0)
        else:
            parts.update(self._on_device(seconds, parts, communication))
        self._received = self._forward.seconds = self._both.seconds = self._optimizer.seconds = 0.0
        self._waited_before, self._data_before, self.steps = waited, self._loader.seconds_waited, 0
        return parts

    def _on_device(self, seconds: float, parts: dict[str, float], communication: float | None) -> dict[str, float]:
        """Return the parts on a device that works behind the CPU: waits of the CPU count only while the device is idle.

        It is idle while the CPU waits for other ranks in backward. Waits in the device's queue stay part of backward.
        """
        assert self._device is not None
        busy = self._device.take(self.steps)
        if communication is not None and busy:
            busy["communication"] = min(communication, busy["backward"])
            busy["backward"] -= busy["communication"]
        idle = max(seconds - sum(busy.values()), 0.0)
        waiting: dict[str, float] = {}
        for name, wait in parts.items():  # of data, then of the copy
            waiting[name] = min(wait, idle)
            idle -= waiting[name]
        return {**waiting, **busy, "rest": idle}


class _PartTimer:
    """Adds the seconds of a block to those of a part, and marks the block on the device."""

    def __init__(self, name: str, device: _DeviceTimer | None) -> None:
        self.seconds = 0.0
        self._name, self._device = name, device

    def __enter__(self) -> None:
        if self._device is not None and self._name == "forward":
            self._device.mark("between")  # forwards, which is backward
        self._began = _clock()

    def __exit__(self, *_: object) -> None:
        self.seconds += _clock() - self._began
        if self._device is not None:
            self._device.mark(self._name)


class _DeviceTimer:
    """Records CUDA events in some of the steps; the time before an event counts for the name of the event."""

    def __init__(self) -> None:
        self._step = -1
        self._marks: list[list[tuple[str, torch.cuda.Event]]] = []
        self._free: list[torch.cuda.Event] = []
        self._records = False

    def begin_step(self) -> None:
        """Begin a step; one in `_EVERY` is recorded."""
        self._step += 1
        self._records = self._step % _EVERY == 0
        if self._records:
            self._marks.append([])
            self.mark("begin")

    def mark(self, name: str) -> None:
        """Record an event; costs nothing in the other steps."""
        if not self._records:
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks[-1].append((name, event))

    def take(self, steps: int) -> dict[str, float]:
        """Return the seconds of `steps` steps, extrapolated from the recorded ones; waits for nothing."""
        totals = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        done = [marks for marks in self._marks if marks[-1][1].query()]
        for marks in done:
            for (_, before), (name, event) in pairwise(marks):
                part = "backward" if name in ("both", "between") else name
                totals[part] += before.elapsed_time(event) / 1e3
            self._free += [event for _, event in marks]
        self._marks = [marks for marks in self._marks if marks not in done]
        return {name: total * steps / len(done) for name, total in totals.items()} if done else {}
