"""TransferTimer: seconds of a step spent on transfers between devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from trainkit.profiling.timeline import Overlap

WARM_UP_STEPS = 2  # the first shows whether replicas draw random numbers, the second starts threads
MEASURED_STEPS = 3
_NOTHING = nullcontext()


class TransferTimer:
    """Times named phases during a few steps after the warm-up, and while overlap is measured.

    A measured step waits for its CUDA devices where a phase begins and ends; other steps cost nothing.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._step = 0
        self._in_step = False
        self._started = 0.0
        self._seconds: dict[str, float] = {}
        self._total_seconds = 0.0
        self._measured_steps = 0
        self._overlap_since: tuple[int, float] | None = None  # measured steps, seconds of phases

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context whose seconds are added to `name` in a measured step."""
        return self._measured(name) if self._in_step else _NOTHING

    def start_step(self) -> None:
        """Start a step, measured or not."""
        is_early = WARM_UP_STEPS <= self._step < WARM_UP_STEPS + MEASURED_STEPS
        if is_early or self._overlap_since is not None:
            self._in_step = True
            self._started = self._now()

    def end_step(self) -> bool:
        """End a step; return whether it was the last of the measured steps after the warm-up."""
        if self._in_step:
            self._total_seconds += self._now() - self._started
            self._measured_steps += 1
            self._in_step = False
        self._step += 1
        return self._step == WARM_UP_STEPS + MEASURED_STEPS

    def percentages(self) -> dict[str, float]:
        """Return the percentage of measured time that each phase took."""
        total = max(self._total_seconds, 1e-9)
        return {name: 100 * seconds / total for name, seconds in self._seconds.items()}

    def start_overlap(self) -> None:
        """Measure every step from now on."""
        self._overlap_since = self._measured_steps, sum(self._seconds.values())

    def stop_overlap(self) -> Overlap | None:
        """Return the seconds of all phases, none of them hidden; `None` if no step was measured."""
        assert self._overlap_since is not None
        (first_step, before), self._overlap_since = self._overlap_since, None
        steps = self._measured_steps - first_step
        if not steps:
            return None
        communication = (sum(self._seconds.values()) - before) / steps
        return Overlap(communication, communication, steps, note="scatter, replicate, gather and sum")

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def _now(self) -> float:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()
