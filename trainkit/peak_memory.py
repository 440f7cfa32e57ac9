"""The most memory that tensors have taken on a CUDA device, over a run and from one log point to the next."""

from __future__ import annotations

import torch


class PeakMemory:
    """Asks torch for the peak, and is alone in letting it begin anew: so several may ask, and the run's is known.

    On other devices there is nothing to ask.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: int | None = None
        self._before = 0  # of the run, up to the last log point
        self._between = 0

    def between_logs(self, step: int) -> int:
        """Return the most bytes since the log point before the one of `step`."""
        if step != self._step:
            self._step, self._between = step, torch.cuda.max_memory_allocated(self._device)
            self._before = max(self._before, self._between)
            torch.cuda.reset_peak_memory_stats(self._device)
        return self._between

    def of_run(self) -> int:
        """Return the most bytes since the run began in this process."""
        return max(self._before, torch.cuda.max_memory_allocated(self._device))
