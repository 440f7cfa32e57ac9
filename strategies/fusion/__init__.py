"""Balanced fusion buffers: every rank is a server that sums an equal part of all gradients."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .strategy import FusionStrategy

__all__ = ["FusionStrategy"]


def __getattr__(name: str) -> Any:
    """Import the strategy on its first use, so that naming the package does not import torch.distributed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".strategy", __name__), name)


def __dir__() -> list[str]:
    return __all__
