"""Choosing a device by name."""

from __future__ import annotations

import torch

from trainkit.errors import UserError, nearest

_KINDS = ("auto", "cpu", "cuda", "mps")


def pick_device(name: str) -> torch.device:
    """Return the device called `name` (`auto`: the best one there is); raises UserError for one that is not there."""
    kind, _, index = str(name).partition(":")
    if kind not in _KINDS or (index and not index.isdigit()):
        raise UserError(f"unknown device {name!r}.{nearest(kind, _KINDS)} Choose auto, cpu, cuda, cuda:0 or mps.")
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise UserError(
                f"device {name!r} is not there: torch sees {count} CUDA device{'s' * (count != 1)}; "
                f"set device={'cuda:0' if count else 'cpu'}, or install a torch build for your GPU."
            )
    if kind == "mps" and not _has_mps():
        raise UserError("device 'mps' is not there; set device=cpu.")
    return torch.device(str(name))


def _has_mps() -> bool:
    return torch.backends.mps.is_available()
