"""The arguments of PyTorch's DistributedDataParallel: what they mean together, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, get_origin, get_type_hints

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined] # torch exports it at run time
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from .gradient_bucket import GradientBucket
from .hook_run import HookFuture

_INSTEAD = {
    "mixed_precision": "compute in torch.autocast, which keeps parameters and gradients in full precision",
    "delay_all_reduce_named_params": "leave it out: a bucket is reduced as soon as its gradients are ready",
    "param_to_hook_all_reduce": "leave it out: a bucket is reduced as soon as its gradients are ready",
    "bucket_cap_mb_list": "give one size for all buckets, bucket_cap_mb",
    "skip_all_reduce_unused_params": "give find_unused_parameters=True: what no rank uses costs one flag",
}


def group_of(process_group: dist.ProcessGroup | None, device_mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the ranks that the two arguments name, by default all of them."""
    if device_mesh is None:
        return process_group if process_group is not None else all_ranks()
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments. They name the same ranks.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, got {device_mesh}; give the part that has the copies.")
    return device_mesh.get_group(0)


def refuse(**arguments: object) -> None:
    """Raise ValueError, saying what to use instead, for arguments that are given."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported here; {_INSTEAD[name]}, or use PyTorch's own class.")


def all_ranks() -> dist.ProcessGroup:
    """Return the default process group; raise RuntimeError where there is none."""
    if not dist.is_initialized():
        raise RuntimeError(
            "the default process group is not initialized; call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds for which ranks of `group` wait for each other; the default where torch does not tell."""
    try:
        limit = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # not every backend has options
        limit = default_pg_timeout
    return float(limit.total_seconds())


def check_hook(hook: Callable[..., Any]) -> None:
    """Raise TypeError for a communication hook that cannot be called, ValueError for one that is for something else."""
    if not callable(hook):
        raise TypeError("Communication hook must be callable.")
    try:
        hints = get_type_hints(hook)
    except Exception:  # names that are not there at run time
        hints = {}
    bucket, returned = hints.get("bucket", Any), hints.get("return", Any)
    if bucket not in (GradBucket, GradientBucket, Any):
        raise ValueError(f"Communication hook: bucket annotation should be dist.GradBucket, not {bucket}.")
    if returned not in (HookFuture, Any) and get_origin(returned) not in (Generator, Iterator):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], not {returned}."
        )


def check_devices(
    module: nn.Module, device_ids: Sequence[int | torch.device] | None, ignored: set[str]
) -> torch.device:
    """Return the device of the parameters; raise for several kinds, or for devices that do not fit."""
    devices = {p.device for name, p in module.named_parameters() if name not in ignored and p.requires_grad}
    if not devices:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module has no parameter that requires a gradient."
        )
    if len({device.type for device in devices}) != 1:
        raise ValueError(f"the module's parameters must be on one kind of device, but are on {devices}")
    device = min(devices, key=str)
    if device_ids is not None:
        if len(device_ids) > 1:
            raise ValueError(f"device_ids must be None or name one device, got {list(device_ids)}")
        if device_ids and device.type == "cpu":
            raise ValueError(f"device_ids must be None for a module on the CPU, got {list(device_ids)}")
    return device
