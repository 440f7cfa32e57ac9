"""The states of metric objects, ours and those of torchmetrics: saved, merged over ranks, restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.metrics.metric import Metric

States = list[dict[str, Any]]
"""For each module of a metric object that has states: name -> a tensor, or a list of tensors."""


@dataclass
class MetricShard:
    """The states of one rank, or of one of its replicas, with its number of samples."""

    states: States
    num_samples: int


def is_metric(value: object) -> bool:
    """Return True if `value` is a metric object: ours, one of torchmetrics, or a collection of such."""
    return (
        isinstance(value, nn.Module)
        and all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))
        and next(_holders(value), None) is not None
    )


def metrics_in(task: nn.Module) -> list[nn.Module]:
    """Return the modules of a task that hold states of metrics."""
    return list(_holders(task))


def outermost_metrics(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the metric objects in a task, except those that are parts of others."""
    if is_metric(module):
        yield module
        return
    for child in module.children():
        yield from outermost_metrics(child)


def local_states(metric: nn.Module) -> States:
    """Return a metric object's states in host memory."""
    return states_on_host(list(_holders(metric)))


def states_on_host(holders: Sequence[nn.Module]) -> States:
    """Return the states of modules that hold some, in host memory."""
    return [{name: _on_host(getattr(holder, name)) for name in _reductions(holder)} for holder in holders]


def compute_synced(metric: nn.Module, shards: Sequence[MetricShard]) -> Any:
    """Return `metric.compute()` over the states of all shards, which it then holds."""
    holders = list(_holders(metric))
    merge_metric_states(holders, shards)
    with no_sync_metrics(holders):
        return metric.compute()  # type: ignore[operator]


def merge_metric_states(holders: Sequence[nn.Module], shards: Sequence[MetricShard]) -> None:
    """Set the modules' states to the merged states of all shards."""
    for index, holder in enumerate(holders):
        device = _device_of(holder)
        for name, reduction in _reductions(holder).items():
            merged = _merged(reduction, [(shard.states[index][name], shard.num_samples) for shard in shards])
            setattr(holder, name, _to(merged, device))
        if not isinstance(holder, Metric):
            holder._computed = None  # type: ignore[assignment] # a cached result


def reset(metric: nn.Module) -> None:
    """Reset a metric object to its initial state."""
    for holder in _holders(metric):
        _empty_lists(holder)
    metric.reset()  # type: ignore[operator]


def fresh_copy(metric: nn.Module) -> nn.Module:
    """Return a copy of a metric object in its initial state."""
    copied = deepcopy(metric)
    reset(copied)
    return copied


@contextmanager
def no_sync_metrics(holders: Sequence[nn.Module]) -> Iterator[None]:
    """Keep torchmetrics from its own collectives, which hang where ranks have unequal numbers of batches."""
    foreign: list[Any] = [holder for holder in holders if not isinstance(holder, Metric)]
    before = [holder.distributed_available_fn for holder in foreign]
    for holder in foreign:
        holder.distributed_available_fn = _not_distributed
    try:
        yield
    finally:
        for holder, function in zip(foreign, before, strict=True):
            holder.distributed_available_fn = function


@contextmanager
def detach_metrics(holders: Sequence[nn.Module]) -> Iterator[None]:
    """Reset metrics for this context and restore their states afterwards."""
    before = preserve_state(holders)
    reset_all(holders)
    try:
        with no_sync_metrics(holders):
            yield
    finally:
        reset_all(holders)
        restore(before)


def preserve_state(holders: Sequence[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return copies of all states, which later updates do not change."""
    return [
        (holder, {name: _copied(getattr(holder, name)) for name in _names(holder) if hasattr(holder, name)})
        for holder in holders
    ]


def restore(states: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Give metrics the states that `preserve_state` returned."""
    for holder, named in states:
        for name, value in named.items():
            setattr(holder, name, _copied(value))


def _names(holder: nn.Module) -> list[str]:
    return [*_reductions(holder), *_COUNTERS]


_COUNTERS = ("_update_count", "_computed")  # of torchmetrics


def reset_all(holders: Sequence[nn.Module]) -> None:
    """Reset modules that hold states."""
    for holder in holders:
        _empty_lists(holder)
        holder.reset()  # type: ignore[operator]


def _empty_lists(holder: nn.Module) -> None:
    """Make lists of states again that merging turned into tensors, which torchmetrics could not reset."""
    if not isinstance(holder, Metric):
        for name, default in vars(holder)["_defaults"].items():
            if isinstance(default, list):
                setattr(holder, name, [])


def _holders(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        if isinstance(part, Metric) or (hasattr(part, "_reductions") and hasattr(part, "_defaults")):
            yield part


def _reductions(holder: nn.Module) -> dict[str, Any]:
    """Return each state's reduction: a name, a function, or `None` to stack the states of ranks."""
    if isinstance(holder, Metric):
        return dict(holder.reductions())
    found: Any = holder._reductions
    return {
        name: _REDUCTION_NAMES.get(getattr(reduction, "__name__", ""), reduction) for name, reduction in found.items()
    }


_REDUCTION_NAMES = {f"dim_zero_{name}": name for name in ("sum", "mean", "min", "max", "cat")}


def _merged(reduction: Any, counted: Sequence[tuple[Any, int]]) -> Any:
    """Return one state for the (state, samples) of each shard; that of a single shard unchanged."""
    states = [state for state, _ in counted]
    if len(states) == 1:
        return states[0]
    if not isinstance(states[0], Tensor):
        return _lists_merged(reduction, counted)
    stacked = torch.stack(states)  # (shards, ...)
    if reduction is None or callable(reduction):
        return stacked if reduction is None else reduction(stacked)
    if reduction == "cat":
        return stacked.flatten(0, 1) if stacked.dim() > 1 else stacked
    return _OPERATIONS[reduction](stacked, [samples for _, samples in counted])


def _lists_merged(reduction: Any, counted: Sequence[tuple[Any, int]]) -> Any:
    if reduction == "cat":
        rows = [torch.cat([torch.atleast_1d(tensor) for tensor in state]) for state, _ in counted if state]
        if not rows:
            return []
        in_order = _are_strided_shards([len(own) for own in rows], [samples for _, samples in counted])
        return [_interleaved(rows) if in_order else torch.cat(rows)]
    flat = [tensor for state, _ in counted for tensor in state]
    return reduction(flat) if callable(reduction) else flat


def _are_strided_shards(rows: Sequence[int], samples: Sequence[int]) -> bool:
    """Return True if there is one row for each sample, and rank r of W has the samples r, r + W, ..."""
    return list(rows) == list(samples) == [len(range(rank, sum(rows), len(rows))) for rank in range(len(rows))]


def _interleaved(rows: Sequence[Tensor]) -> Tensor:
    merged = rows[0].new_empty((sum(map(len, rows)), *rows[0].shape[1:]))
    for rank, own in enumerate(rows):
        merged[rank :: len(rows)] = own
    return merged


def _sum(stacked: Tensor, samples: Sequence[int]) -> Tensor:
    wide = stacked.double() if stacked.is_floating_point() else stacked
    return wide.sum(0).to(stacked.dtype)


def _mean(stacked: Tensor, samples: Sequence[int]) -> Tensor:
    weights = torch.tensor(samples, dtype=torch.float64).reshape(-1, *[1] * (stacked.dim() - 1))
    return ((stacked.double() * weights).sum(0) / weights.sum()).to(stacked.dtype)


def _min(stacked: Tensor, samples: Sequence[int]) -> Tensor:
    return stacked.amin(0)


def _max(stacked: Tensor, samples: Sequence[int]) -> Tensor:
    return stacked.amax(0)


_OPERATIONS: dict[str, Callable[[Tensor, Sequence[int]], Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "min": _min,
    "max": _max,
}


def _device_of(holder: nn.Module) -> torch.device:
    for name in _reductions(holder):
        state = getattr(holder, name)
        for tensor in [state] if isinstance(state, Tensor) else state:
            device: torch.device = tensor.device
            return device
    return torch.device("cpu")


def _on_host(state: Any) -> Any:
    return _to(state, torch.device("cpu"))


def _to(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.detach().to(device)
    return [tensor.detach().to(device) for tensor in state] if isinstance(state, (list, tuple)) else state


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    return list(state) if isinstance(state, list) else state  # its tensors are added to no more


def _not_distributed() -> bool:
    return False
