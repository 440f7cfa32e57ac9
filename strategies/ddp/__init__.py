"""DDP: one process per device, gradients averaged in buckets while backward runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distributed_data_parallel import DistributedDataParallel
    from .reducer import Reducer, ReducerSettings
    from .strategy import DDPStrategy

__all__ = ["DDPStrategy", "DistributedDataParallel", "Reducer", "ReducerSettings"]

_HOMES = {"DDPStrategy": "strategy", "DistributedDataParallel": "distributed_data_parallel"}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that naming the package does not import torch.distributed."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES.get(name, 'reducer')}", __name__), name)
