"""Which devices this machine can have, known without importing torch."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_PLENTY = 10**6  # where only the driver knows how many there are


def absence(device: str) -> str | None:
    """Return why the device called `device` cannot be here, with the remedy; `None` where it may be."""
    kind, _, index = device.partition(":")
    if kind == "mps" and sys.platform != "darwin":
        return "device 'mps' is only there on macOS; set strategy.device=cpu"
    if kind != "cuda" or (index and not index.isdigit()):
        return None
    if not _torch_knows_gpus():
        return (
            f"device '{device}' is not there: this torch is built without CUDA; set strategy.device=cpu, "
            "or install a torch build for your GPU"
        )
    count = num_gpus()
    if int(index or 0) < count:
        return None
    remedy = f"cuda:{count - 1}" if count else "cpu"
    return f"device '{device}' is not there: this machine has {count} CUDA device(s); set strategy.device={remedy}"


@cache
def num_gpus() -> int:
    """Return how many CUDA devices there can be at most; 0 for a torch build that knows none."""
    if not _torch_knows_gpus():
        return 0
    if not sys.platform.startswith("linux") or Path("/dev/dxg").exists() or Path("/dev/kfd").exists():
        return _PLENTY
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if visible is None or not nodes:
        return len(nodes)
    named = [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return len(named) if any("MIG" in name for name in named) else min(len(nodes), len(named))


@cache
def _torch_knows_gpus() -> bool:
    """Return whether torch's own note of how it was built names CUDA or ROCm; true where there is none to read."""
    spec = find_spec("torch")
    note = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    if note is None or not note.is_file():
        return True
    text = note.read_text(encoding="utf-8")
    values = re.findall(r"^(?:cuda|hip|rocm)\b[^=\n]*= *(\S+)", text, re.MULTILINE)
    return not values or any(value != "None" for value in values)
