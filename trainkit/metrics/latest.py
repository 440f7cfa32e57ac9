"""LatestLoss: the loss of a step a moment ago, for a display that must not wait for the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.devices import current_stream, end_of, has_streams
from trainkit.metrics.step_output import StepOutput

SECONDS = 0.5  # between two losses that are read: each costs microseconds, and on a GPU a copy of a few bytes


class LatestLoss:
    """A loss of this rank that has arrived on the host; `offer` is called by the loop, `read` by any thread."""

    def __init__(self) -> None:
        self._due = 0.0
        self._arrived: tuple[int, float] | None = None  # the step and its loss
        self._on_the_way: tuple[int, Tensor, torch.Event] | None = None

    def offer(self, outputs: Sequence[StepOutput], step: int) -> None:
        """Take the loss of the last micro-batch, unless another one was taken a moment ago."""
        now = time.monotonic()
        loss = outputs[-1].loss if now >= self._due and outputs else None
        if loss is None:
            return
        self._due = now + SECONDS
        if not has_streams(loss.device):
            self._arrived = step, float(loss)
            return
        # Started here and not in the display's thread: a copy of another thread would break the capture of a graph.
        on_host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        on_host.copy_(loss.detach(), non_blocking=True)
        self._on_the_way = step, on_host, end_of(current_stream(loss.device))

    def read(self) -> tuple[int, float] | None:
        """Return the latest loss that has arrived, with its step; waits for nothing."""
        copied = self._on_the_way
        if copied is not None and copied[2].query():
            self._arrived = copied[0], float(copied[1])
        return self._arrived
