"""DDP: one process per device, gradients averaged in buckets while backward runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..reducer.reducer import Reducer, ReducerSettings
    from .distributed_data_parallel import DistributedDataParallel
    from .strategy import DDPStrategy

__all__ = ["DDPStrategy", "DistributedDataParallel", "Reducer", "ReducerSettings"]

_HOMES = {
    "DDPStrategy": "trainkit.strategies.ddp.strategy",
    "DistributedDataParallel": "trainkit.strategies.ddp.distributed_data_parallel",
    "Reducer": "trainkit.strategies.reducer.reducer",
    "ReducerSettings": "trainkit.strategies.reducer.reducer",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that naming the package does not import torch.distributed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
