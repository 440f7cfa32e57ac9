"""The worker: what it sets for the process of a rank."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from torch import nn

from trainkit import Callback, Data, TaskModule, Trainer
from trainkit.loops.worker import MALLOC_SETTINGS, keep_freed_memory
from trainkit.testing import run_ranks


class Large(TaskModule):
    """54 MB of gradients in six tensors."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(6)))

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class PageFaults(Callback):
    """Counts the page faults of each step."""

    def __init__(self):
        self.counts = []

    def on_step_end(self, run):
        self.counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def page_faults_of_later_steps(folder):
    faults = PageFaults()
    trainer = Trainer(run_dir=folder, callbacks=[faults], loggers=[])
    trainer.fit(Large(), Data(train=torch.randn(80, 1500), batch_size=2))
    return faults.counts[-1] - faults.counts[9]


needs_glibc = pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="the C library is not glibc")


@pytest.mark.slow
@needs_glibc
def test_steps_do_not_take_the_memory_of_their_gradients_from_the_system_again(tmp_path, monkeypatch):
    for name in MALLOC_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    pages_of_gradients = 6 * 1500 * 1500 * 4 / resource.getpagesize()
    (pages,) = run_ranks(page_faults_of_later_steps, 1, tmp_path)
    assert pages < 2 * pages_of_gradients  # of 30 steps


@needs_glibc
def test_settings_of_the_user_are_kept(monkeypatch, caplog):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    monkeypatch.setattr("ctypes.CDLL", lambda name: pytest.fail("changed the allocator"))
    with caplog.at_level("DEBUG", logger="trainkit.loops.worker"):
        keep_freed_memory()
    assert "freed memory is handled as MALLOC_TRIM_THRESHOLD_ says" in caplog.text
