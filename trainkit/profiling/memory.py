"""Peak memory of a CUDA device, over a run and between log points."""

from __future__ import annotations

import torch


class PeakMemoryTracker:
    """Peak memory of tensors on a CUDA device; the only place that resets torch's peak, so that several may read it.

    Not for other devices.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._step: int | None = None
        self._before = 0  # of the run, up to the last log point
        self._between = 0

    def between_logs(self, step: int) -> int:
        """Return the peak bytes since the log point before the one of `step`."""
        if step != self._step:
            self._step, self._between = step, torch.cuda.max_memory_allocated(self._device)
            self._before = max(self._before, self._between)
            torch.cuda.reset_peak_memory_stats(self._device)
        return self._between

    def of_run(self) -> int:
        """Return the peak bytes since the run started in this process."""
        return max(self._before, torch.cuda.max_memory_allocated(self._device))
