"""What the run takes of the machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainkit.callback import Callback

if TYPE_CHECKING:
    from trainkit.loops.run import Run

MIB = 2**20


class DeviceStats(Callback):
    """Adds memory and load at each log point: the largest over all processes.

    device/memory_mib        allocated now (CUDA)
    device/peak_memory_mib   most since the last log point (CUDA)
    device/reserved_mib      what torch keeps of the device (CUDA)
    host/memory_mib          resident memory of the process
    host/cpu_percent         CPU time over wall time since the last log point; 200 for two busy threads
    """

    def __init__(self) -> None:
        self._cpu = self._wall = 0.0

    def on_fit_start(self, run: Run) -> None:
        self._begin()

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        known = self._look(run)
        for other in run.strategy.comm.all_gather_object(known):
            for name, value in other.items():
                metrics[name] = max(value, metrics.get(name, value))
        self._begin()

    def _begin(self) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()

    def _look(self, run: Run) -> dict[str, float]:
        known = {}
        device = run.strategy.device
        if device.type == "cuda":
            known["device/memory_mib"] = torch.cuda.memory_allocated(device) / MIB
            known["device/peak_memory_mib"] = run.peak_memory.between_logs(run.state.step) / MIB
            known["device/reserved_mib"] = torch.cuda.memory_reserved(device) / MIB
        resident = resident_bytes()
        if resident is not None:
            known["host/memory_mib"] = resident / MIB
        wall = time.monotonic() - self._wall
        if wall > 0:
            known["host/cpu_percent"] = 100 * (time.process_time() - self._cpu) / wall
        return known


def resident_bytes() -> int | None:
    """Return the memory of this process that is in RAM; `None` where the system does not say."""
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None
