"""Memory and CPU load of the processes."""

from __future__ import annotations

import os
import time

from trainkit.callback import Callback
from trainkit.devices import has_streams, memory
from trainkit.run import Run

MIB = 2**20
_STATM = "/proc/self/statm"  # sizes in pages; the second one is the resident memory
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class DeviceStats(Callback):
    """Adds memory and load at each log point: the largest over all processes.

    device/memory_mib        allocated now (CUDA)
    device/peak_memory_mib   peak since the last log point (CUDA)
    device/reserved_mib      memory reserved by torch's allocator (CUDA)
    host/memory_mib          resident memory of the process
    host/cpu_percent         CPU time over wall time since the last log point; 200 for two busy threads
    """

    def __init__(self) -> None:
        self._cpu = self._wall = 0.0

    def on_fit_start(self, run: Run) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        # Collective: on_log runs on every rank after the same step.
        for stats in run.strategy.comm.all_gather_object(self._measure(run)):
            for name, value in stats.items():
                metrics[name] = max(value, metrics.get(name, value))

    def _measure(self, run: Run) -> dict[str, float]:
        stats = {}
        device = run.strategy.device
        if has_streams(device):
            measured = memory(device)
            stats["device/memory_mib"] = measured.used / MIB
            stats["device/peak_memory_mib"] = run.peak_memory.between_logs(run.state.step) / MIB
            stats["device/reserved_mib"] = measured.reserved / MIB
        resident = resident_bytes()
        if resident is not None:
            stats["host/memory_mib"] = resident / MIB
        cpu, wall = time.process_time(), time.monotonic()
        # Two log points may fall into the same tick of the clock.
        if wall > self._wall:
            stats["host/cpu_percent"] = 100 * (cpu - self._cpu) / (wall - self._wall)
        self._cpu, self._wall = cpu, wall
        return stats


def resident_bytes() -> int | None:
    """Return the resident memory of this process; `None` on systems without /proc."""
    try:
        file = os.open(_STATM, os.O_RDONLY)
    except OSError:
        return None
    try:
        return int(os.read(file, 64).split()[1]) * _PAGE_SIZE
    finally:
        os.close(file)
