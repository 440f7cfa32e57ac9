"""Fixtures of all tests: seeded generators, one thread, and trainers that write below the test's own folder."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from packaging.version import Version

from trainkit import Trainer
from trainkit.distributed.fork_server import start_fork_server

os.environ["HF_HUB_OFFLINE"] = "1"  # the tests need no network; set before the first import of huggingface_hub

# Time limits on single examples fail on a busy machine; the same examples every time make a failure repeatable.
hypothesis.settings.register_profile("trainkit", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("trainkit")

MakeTrainer = Callable[..., Trainer]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Search for no garbage: imports leave none, and what they have made stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first: each file runs in one worker, and a long one at the end would run alone."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _fork_server() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # one of many tests will need it, and would wait for its imports
        used = [
            "cli.compose",
            "callbacks.model_summary",
            "loggers.tensorboard",
            "report.run_report",
            "strategies.torch_ddp",
        ]
        used += [f"strategies.{name}.strategy" for name in ("ddp", "fsdp", "fusion", "pipeline")]
        preload = ["pytest", "hypothesis", "trainkit.testing", "torch.distributed.checkpoint", "transformers.models"]
        start_fork_server(preload=[*preload, *(f"trainkit.{name}" for name in used)])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _forgotten_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget modules that a test has imported from its own folder: another test has its own of the same name."""
    before = set(sys.modules)
    yield
    folders = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folders):
            del sys.modules[name]


@pytest.fixture
def peft() -> Any:
    """The package peft, if it is one that transformers takes."""
    peft = pytest.importorskip("peft")
    needed = pytest.importorskip("transformers.integrations.peft").MIN_PEFT_VERSION
    if Version(peft.__version__) < Version(needed):
        pytest.skip(f"this transformers takes peft {needed} and newer ones, and {peft.__version__} is installed")
    return peft


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[MakeTrainer]:
    """A function that makes a Trainer on the CPU with its own run folder, and nothing around it unless asked for."""
    numbers = count()

    def make(strategy: Any = None, **settings: Any) -> Trainer:
        from trainkit.strategies.single import SingleStrategy

        defaults: dict[str, Any] = {"callbacks": [], "loggers": [], "num_sanity_batches": 0}
        defaults["run_dir"] = tmp_path / f"run_{next(numbers)}"
        return Trainer(strategy or SingleStrategy(device="cpu"), **{**defaults, **settings})

    yield make
