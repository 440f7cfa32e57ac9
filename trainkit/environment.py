"""What a run ran on: `environment.json` in its folder, for the report."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trainkit.run import Run

logger = logging.getLogger(__name__)

FILENAME = "environment.json"
_GIT_SECONDS = 2.0
_PACKAGES = ("numpy", "transformers", "lightning", "torchmetrics", "datasets")


def write_environment(run: Run) -> None:
    """Keep versions, device, system, the state of the git repository and the layout; never raises."""
    if run.run_dir is None:
        return
    try:
        (run.run_dir / FILENAME).write_text(json.dumps(environment(run), indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        logger.warning("the environment could not be kept in %s: %s", run.run_dir, error)


def environment(run: Run) -> dict[str, Any]:
    """Return what the report's header shows."""
    task, strategy = run.task, run.strategy
    parameters = [parameter for parameter in task.parameters() if not _is_lazy(parameter)]
    return {
        "started": time.time(),
        "command": command(sys.argv),
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "strategy": type(strategy).__name__,
        "processes": strategy.comm.num_processes,
        "plan": None if run.plan is None else str(run.plan),
        "max_steps": run.max_steps,
        "precision": run.precision.name,
        "device": device_name(strategy.device),
        "seed": run.seed,
        "resumed_from": run.resumed_from,
        "versions": versions(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git": git_state(Path.cwd()),
    }


def command(argv: Sequence[str]) -> str:
    """Return what was typed, without the folders that programs lie in; nothing for what was not started by a file."""
    if not argv or not argv[0] or argv[0].startswith("-"):
        return ""
    program = Path(argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return " ".join([name, shlex.join(argv[1:])]).strip()


def versions() -> dict[str, str]:
    """Return the versions of what is imported already."""
    from trainkit import __version__

    found = {"trainkit": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def device_name(device: torch.device) -> str:
    """Return the device as torch writes it, with its model where that is known."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit that is checked out, and whether tracked files differ from it; `None` outside of git."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None  # without starting a process
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit = done.stdout.strip()
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}


def _is_lazy(parameter: torch.nn.Parameter) -> bool:
    return isinstance(parameter, torch.nn.parameter.UninitializedParameter)
