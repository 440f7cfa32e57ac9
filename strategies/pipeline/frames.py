"""Where in the user's code a call is made, read from the Python stack."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_CHECKPOINT = str(Path(torch.__file__).parent / "utils" / "checkpoint.py")


def place() -> str:
    """Return `file:line` of the innermost call that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_HERE, _TORCH)) and Path(name).name != "contextlib.py":
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def checkpoint_frames() -> list[FrameType]:
    """Return the frames of torch's activation checkpoints that the present call is made in, innermost first."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            frames.append(frame)
        frame = frame.f_back
    return frames
