"""Pipeline parallelism: one task over several devices, traced, partitioned into stages and run by a schedule."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .strategy import PipelineStrategy

__all__ = ["PipelineStrategy"]


def __getattr__(name: str) -> Any:
    """Import the strategy on its first use: a module of this folder may be needed without it."""
    if name != "PipelineStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .strategy import PipelineStrategy

    return PipelineStrategy
