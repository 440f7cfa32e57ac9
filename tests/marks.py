"""Marks of tests that run with `make zoo` and not with `make test-all`, or on a GPU."""

import os
from typing import Any

import pytest
import torch

EVERY_CASE = os.environ.get("TRAINKIT_ZOO") == "all"
"""True in `make zoo`, which holds tasks against one process in more ways than all other tests together."""
in_make_zoo = pytest.mark.skipif(not EVERY_CASE, reason="`make zoo` runs it")

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")


def gpus(number: int = 1) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need CUDA devices, also those of `make test-gpu-pretended`."""
    reason = f"needs {number} CUDA device{'s' * (number != 1)}"
    return [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < number, reason=reason)]


def on_gpu(test: Any, *, devices: int = 1) -> Any:
    """Mark a test that needs CUDA devices."""
    for mark in gpus(devices):
        test = mark(test)
    return test
