"""The strategy `fsdp`: parameters, gradients and optimizer state in shards, over PyTorch's `fully_shard`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .strategy import FSDPStrategy

__all__ = ["FSDPStrategy"]


def __getattr__(name: str) -> Any:
    """Import the strategy on its first use: a module of this folder may be needed without it."""
    if name != "FSDPStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .strategy import FSDPStrategy

    return FSDPStrategy
