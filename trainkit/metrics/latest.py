"""LatestLoss: the loss of a step a moment ago, for a display that must not wait for the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.devices import current_stream, end_of, has_streams, is_asynchronous
from trainkit.metrics.step_output import StepOutput

SECONDS = 0.5  # between two losses that are read: each costs microseconds, and on a GPU a copy of a few bytes


class LatestLoss:
    """A loss of this rank that has arrived on the host; `offer` is called by the loop, `read` by any thread.

    The loop alone asks the device: a call of another thread could break the capture of a graph.
    """

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
        if not is_asynchronous(loss.device):
            self._arrived = step, float(loss)
        elif has_streams(loss.device):  # of others each read would wait
            self._copy(loss.detach(), step)

    def _copy(self, loss: Tensor, step: int) -> None:
        if self._on_the_way is not None:
            step_of_copy, on_host, end = self._on_the_way
            # Not replaced before it has arrived: a device that is far behind would never show a loss.
            if not end.query():
                return
            self._arrived = step_of_copy, float(on_host)
        on_host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        on_host.copy_(loss, non_blocking=True)
        self._on_the_way = step, on_host, end_of(current_stream(loss.device))

    def read(self) -> tuple[int, float] | None:
        """Return the latest loss that is known to have arrived, with its step; waits for nothing."""
        return self._arrived
