"""The stages of the day, those first that are worth most."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace

from tests.gpu.runner import ROOT, Runner, Stage
from tests.pretended_cuda import VARIABLE

_GPU_TEST = re.compile(r"mark\.gpu\b|\bon_gpu\b|\bgpus\(")
_STARTS_PROCESSES = re.compile(r"\brun_ranks\(|\bProgram\(|\bDDPStrategy\(")
_WORKERS = max(1, min(4, (os.cpu_count() or 2) // 2))  # each process of a test has a CUDA context of its own
SLOWER = 4 if VARIABLE in os.environ else 1
"""Factor of time limits in a rehearsal, where few cores pretend to be the device."""


def tests_of_gpus(*, processes: bool) -> list[str]:
    """Return the files with tests of GPUs: those that start processes, or the others."""
    chosen = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text, folder = path.read_text(encoding="utf-8"), path.relative_to(ROOT / "tests").parts[0]
        of_gpus = folder not in ("gpu", "pretended_cuda") and _GPU_TEST.search(text) is not None
        if of_gpus and bool(_STARTS_PROCESSES.search(text)) == processes:
            chosen.append(str(path.relative_to(ROOT)))
    return chosen


def tested(*arguments: str, workers: int = _WORKERS, seconds: int = 90) -> list[str]:
    """Return the command of tests; one that hangs leaves its stacks in the log, and its worker is replaced."""
    # Warnings of another torch would fail every test, and say nothing of the device. Captured file descriptors
    # would keep the stacks of a worker that ends.
    settings = ["-ra", "-W", "default", "--capture=sys", f"-n{workers}", "--dist=load", "--max-worker-restart=50"]
    hangs = ["-p", "tests.gpu.hangs", f"--timeout={SLOWER * seconds}", "--timeout-method=thread"]
    return ["-m", "pytest", "-p", "tests.gpu.figures", *settings, *hangs, *arguments]


def _again(runner: Runner) -> Sequence[str] | None:
    stages = [result for name, result in runner.last().items() if name != "blocking"]
    names = [name for result in stages for name in result["failed"] if ".py::" in name]
    return tested(*names, workers=1) if names else None


def _sanitized(runner: Runner) -> Sequence[str] | None:
    return ["-m", "tests.gpu.sanitizer"] if shutil.which("compute-sanitizer") else None


STAGES: dict[str, Stage] = {
    stage.name: replace(stage, limit=SLOWER * stage.limit)
    for stage in (
        Stage("install", lambda runner: ["-m", "tests.gpu.install", str(runner.folder)], 60, 240),
        Stage("one_process", lambda _: tested("-m", "gpu", *tests_of_gpus(processes=False)), 60, 180),
        Stage("ranks", lambda _: tested("-m", "gpu", *tests_of_gpus(processes=True)), 120, 300),
        Stage("parity", lambda _: tested("tests/gpu/parity.py"), 150, 540),
        Stage(
            "reliability",
            # One worker: its tests fill the device.
            lambda _: tested("tests/gpu/reliability.py", "tests/reliability/test_torture.py", workers=1, seconds=150),
            100,
            300,
            {"TRAINKIT_TORTURE_DEVICE": "cuda", "TRAINKIT_KILLS": "6"},
        ),
        Stage("speed", lambda runner: ["-m", "tests.gpu.speed", str(runner.folder)], 240, 500),
        Stage("mutants", lambda runner: ["-m", "tests.gpu.mutants", str(runner.folder)], 240, 540),
        Stage("sanitizer", _sanitized, 120, 300),
        Stage("blocking", _again, 120, 300, {"CUDA_LAUNCH_BLOCKING": "1", "TORCH_SHOW_CPP_STACKTRACES": "1"}),
    )
}
"""By name, in the order in which they are tried."""
