"""How much of the first steps was spent on moving things between devices."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

WARM_UP_STEPS = 2  # the first shows whether replicas draw random numbers, the second starts threads
MEASURED_STEPS = 3
_NOTHING = nullcontext()


class Stopwatch:
    """Measures named phases during a few steps after the warm-up; later it costs nothing and waits for no device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._step = 0
        self._in_step = False
        self._started = 0.0
        self.seconds: dict[str, float] = {}
        self.total_seconds = 0.0

    @property
    def measures(self) -> bool:
        """Whether the present step is measured."""
        return self._in_step

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context whose time counts for `name` if the present step is measured."""
        return self._measured(name) if self._in_step else _NOTHING

    def start_step(self) -> None:
        """Note that a step begins."""
        if WARM_UP_STEPS <= self._step < WARM_UP_STEPS + MEASURED_STEPS:
            self._in_step = True
            self._started = self._now()

    def end_step(self) -> bool:
        """Note that a step ends, and return whether it was the last to be measured."""
        if self._in_step:
            self.total_seconds += self._now() - self._started
            self._in_step = False
        self._step += 1
        return self._step == WARM_UP_STEPS + MEASURED_STEPS

    def shares(self) -> dict[str, float]:
        """Return each phase's share of the measured time, in percent."""
        total = max(self.total_seconds, 1e-9)
        return {name: 100 * seconds / total for name, seconds in self.seconds.items()}

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - started

    def _now(self) -> float:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()
