from __future__ import annotations

import mmap
from typing import Any

import torch
from trainkit.callbacks.device_stats import DeviceStats, resident_bytes

from tests.tasks import Recorder, Regression, data
from trainkit import Callback


def test_memory_and_load_of_the_process_are_logged(make_trainer: Any) -> None:
    recorder = Recorder()
    kept: list[torch.Tensor] = []

    class Holds(Callback):
        def on_step_end(self, run: Any) -> None:
            if run.state.step == 2:
                pages = mmap.mmap(-1, 64 * 2**20)  # from the system: the library may have freed memory to give
                kept.append(torch.frombuffer(pages, dtype=torch.uint8).fill_(1))

    make_trainer(callbacks=[DeviceStats(), recorder, Holds()], log_every="1step").fit(Regression(), data())

    first, *_, last = [row["host/memory_mib"] for row in recorder.logged]
    assert 60 < last - first < 200
    assert all(row["host/cpu_percent"] >= 0 for row in recorder.logged)
    assert resident_bytes() is not None
