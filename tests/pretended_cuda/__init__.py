"""A CUDA device that is not there: tests of what runs on GPUs, and of its waits, with a CPU build of torch.

    python -m tests.pretended_cuda pytest -m gpu       builds it, and runs a command that sees it

Device memory is host memory, and streams are queues that run late: a missing wait, a missing `record_stream`, or
memory that is reused too early gives wrong numbers every time. `TRAINKIT_PRETENDED_CUDA=2:late` has two devices under
the policy `late`. A green run says that the waits are enough, and not that the code works on a GPU.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

VARIABLE = "TRAINKIT_PRETENDED_CUDA"
POLICIES = ("in_order", "late", "side_first", "random")
"""in_order: at once; late: when something waits; side_first: late on default streams only; random: some, at times."""

_FOLDER = Path(__file__).parent
_SOURCES = ("queues.cpp", "device.cpp", "communicator.cpp")
_HEADERS = ("queues.h", "device.h")
_FLAGS = ["-O1", "-std=c++20", "-w"]


def why_not() -> str | None:
    """Return why the device cannot be built here, or `None`."""
    if sys.platform != "linux":
        return "the pretended CUDA device is built on Linux only"
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        return "the pretended CUDA device is built with g++ and ninja, which are not here"
    if _torch_version().partition("+")[2] not in ("", "cpu"):
        return "the pretended CUDA device needs a CPU build of torch"
    return None


def library() -> Path:
    """Return the path of the library for these sources and this torch, built or not."""
    content = "".join((_FOLDER / name).read_text() for name in (*_SOURCES, *_HEADERS))
    version = f"{_torch_version()} {sys.implementation.cache_tag} {_FLAGS}"
    name = hashlib.sha256((version + content).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "trainkit" / "pretended_cuda" / name / "pretended_cuda.so"


def build() -> Path:
    """Return the path of the library, which is compiled unless it was before: about a minute and a half."""
    path = library()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # In a process of its own: this one must not import torch before it has loaded the library.
        call = (
            "from torch.utils.cpp_extension import load\n"
            f"load('pretended_cuda', {[str(_FOLDER / name) for name in _SOURCES]}, extra_cflags={_FLAGS},"
            f" build_directory={str(path.parent)!r}, is_python_module=False)"
        )
        environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
        environment.setdefault("MAX_JOBS", "1")  # a compiler takes 1 GB
        subprocess.run([sys.executable, "-c", call], check=True, env=environment)
    return path


def environment(setting: str = "2:late") -> dict[str, str]:
    """Return the environment of this process in which Python sees the device, as do the processes it starts."""
    paths = [str(_FOLDER / "site"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, VARIABLE: setting, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def parsed(setting: str) -> tuple[int, str, int]:
    """Return devices, policy and seed of a setting such as `2:late` or `2:random:7`."""
    devices, policy, seed = (*setting.split(":"), *("", "late", "0")[setting.count(":") + 1 :])[:3]
    if policy not in POLICIES or not devices.isdigit() or not seed.isdigit():
        raise ValueError(f"{VARIABLE}={setting!r} is not DEVICES:POLICY:SEED with a policy of {', '.join(POLICIES)}")
    return int(devices), policy, int(seed)


def _torch_version() -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    for line in (Path(spec.origin).parent / "version.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split("'")[1]
    raise RuntimeError("torch has no version")
