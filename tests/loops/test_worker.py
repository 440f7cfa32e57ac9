"""The worker: what it sets for the process of a rank."""

from __future__ import annotations

import os
import resource

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.tasks import EachStep, Fitting, fit
from trainkit import Data
from trainkit.loops.worker import MALLOC_SETTINGS, keep_freed_memory
from trainkit.testing import run_ranks


def page_faults_of_later_steps(folder):
    faults = EachStep(lambda run: resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    layers = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(6)))  # 54 MB of gradients
    data = Data(train=TensorDataset(torch.randn(80, 1500)), batch_size=2)
    # Between log points: a small block of one may lie where a gradient was, which then takes memory elsewhere.
    fit("single", Fitting(layers), data, faults, run_dir=folder, log_every="50step")
    return faults.seen[-1] - faults.seen[9]


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
