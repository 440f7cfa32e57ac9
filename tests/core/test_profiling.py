from __future__ import annotations

import pytest
import torch

from trainkit.devices import DeviceMemory
from trainkit.profiling import PeakMemoryTracker


class Allocator:
    """The memory statistics of a CUDA device, without a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        for name in ("memory_allocated", "memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - self.now, 1000))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"inactive_split_bytes.all.current": 50})
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.now))

    def use(self, size: int) -> None:
        self.peak = max(self.peak, self.now + size)


def test_the_peak_between_log_points_is_the_same_for_every_reader_and_that_of_the_run_remains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter, peaks = Allocator(monkeypatch), PeakMemoryTracker(torch.device("cuda"))
    seen = []
    for step, size in ((10, 500), (20, 900), (30, 200)):
        counter.use(size)
        seen.append((peaks.between_logs(step), peaks.between_logs(step), peaks.of_run()))
    counter.use(300)

    assert seen == [(500, 500, 500), (900, 900, 900), (200, 200, 900)]
    assert peaks.of_run() == 900


def test_a_measurement_begins_a_peak_that_readers_of_others_do_not_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, peaks = Allocator(monkeypatch), PeakMemoryTracker(torch.device("cuda"))
    counter.use(500)
    assert peaks.measure() == DeviceMemory(peak=500, used=0, free=950)
    counter.now = 100
    counter.use(200)
    assert peaks.measure() == DeviceMemory(peak=300, used=100, free=850, reserved=100)
    assert peaks.measure().peak == 100
    assert (peaks.between_logs(1), peaks.between_logs(2), peaks.of_run()) == (500, 100, 500)
