"""The states of metric objects, ours and those of torchmetrics: saved, merged over ranks, restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.metrics.metric import Metric

States = list[dict[str, Any]]
"""For each module of a metric object that has states: name -> a tensor, or a list of tensors."""
# Private: torchmetrics warns by the first, and keeps a computed result in the second.
_COUNTERS = ("_update_count", "_computed")  # of torchmetrics
_REDUCTION_NAMES = {f"dim_zero_{name}": name for name in ("sum", "mean", "min", "max", "cat")}


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


def states_on_host(holders: Sequence[nn.Module]) -> States:
    """Return the states of the modules of `metrics_in`, in host memory."""
    host = torch.device("cpu")
    return [{name: _to(getattr(holder, name), host) for name in _reductions(holder)} for holder in holders]


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


def fresh_copy(metric: nn.Module) -> nn.Module:
    """Return a copy of a metric object in its initial state."""
    copied = deepcopy(metric)
    reset_all([copied])
    return copied


def reset_all(metrics: Iterable[nn.Module]) -> None:
    """Reset metric objects, or modules with states in them, to their initial state."""
    for metric in metrics:
        for holder in _holders(metric):
            # Merging turned lists of states into tensors, which torchmetrics could not reset.
            # Private: torchmetrics has no public table of the initial states.
            for name, default in () if isinstance(holder, Metric) else vars(holder)["_defaults"].items():
                if isinstance(default, list):
                    setattr(holder, name, [])
        metric.reset()  # type: ignore[operator]


@contextmanager
def no_sync_metrics(holders: Sequence[nn.Module]) -> Iterator[None]:
    """Keep torchmetrics from its own collectives, which hang where ranks have unequal numbers of batches."""
    foreign: list[Any] = [holder for holder in holders if not isinstance(holder, Metric)]
    functions = [holder.distributed_available_fn for holder in foreign]
    # torchmetrics asks this function whether there are several processes.
    for holder in foreign:
        holder.distributed_available_fn = lambda: False
    try:
        yield
    finally:
        for holder, function in zip(foreign, functions, strict=True):
            holder.distributed_available_fn = function


@contextmanager
def detach_metrics(holders: Sequence[nn.Module]) -> Iterator[None]:
    """Reset metrics for this context and restore their states afterwards."""
    saved_states = preserve_state(holders)
    reset_all(holders)
    try:
        with no_sync_metrics(holders):
            yield
    finally:
        reset_all(holders)
        restore(saved_states)


def preserve_state(holders: Sequence[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return copies of all states, which later updates do not change."""
    named = [(holder, [*_reductions(holder), *_COUNTERS]) for holder in holders]
    return [
        (holder, {name: _copied(getattr(holder, name)) for name in names if hasattr(holder, name)})
        for holder, names in named
    ]


def restore(states: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Give metrics the states that `preserve_state` returned."""
    for holder, named in states:
        for name, value in named.items():
            setattr(holder, name, _copied(value))


def _holders(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        # Private: states have no public list. By attributes, as a test by class would import torchmetrics.
        if isinstance(part, Metric) or (hasattr(part, "_reductions") and hasattr(part, "_defaults")):
            yield part


def _reductions(holder: nn.Module) -> dict[str, Any]:
    """Return each state's reduction: a name, a function, or `None` to stack the states of ranks."""
    if isinstance(holder, Metric):
        return dict(holder.reductions())
    reductions: Any = holder._reductions
    return {
        name: _REDUCTION_NAMES.get(getattr(reduction, "__name__", ""), reduction)
        for name, reduction in reductions.items()
    }


def _merged(reduction: Any, counted: Sequence[tuple[Any, int]]) -> Any:
    """Return one state for the (state, samples) of each shard; that of a single shard unchanged."""
    states = [state for state, _ in counted]
    if len(states) == 1:
        return states[0]
    if not isinstance(states[0], Tensor):
        return _lists_merged(reduction, counted)
    stacked = torch.stack(states)  # (shards, ...)
    # torch.stack and a custom function are what torchmetrics itself does with states of ranks.
    if reduction is None or callable(reduction):
        return stacked if reduction is None else reduction(stacked)
    if reduction == "cat":
        return stacked.flatten(0, 1) if stacked.dim() > 1 else stacked
    if reduction in ("min", "max"):
        return stacked.amin(0) if reduction == "min" else stacked.amax(0)
    if reduction == "mean":
        samples = torch.tensor([samples for _, samples in counted], dtype=torch.float64)
        # In float64, or large counts would lose samples.
        weighted = stacked.double() * samples.reshape(-1, *[1] * (stacked.dim() - 1))
        total = weighted.sum(0) / samples.sum()
    else:
        total = (stacked.double() if stacked.is_floating_point() else stacked).sum(0)
    return total.to(stacked.dtype)


def _lists_merged(reduction: Any, counted: Sequence[tuple[Any, int]]) -> Any:
    if reduction == "cat":
        rows = [torch.cat([torch.atleast_1d(tensor) for tensor in state]) for state, _ in counted if state]
        if not rows:
            return []
        merged, sizes = torch.cat(rows), [len(shard_rows) for shard_rows in rows]
        in_shards = [len(range(rank, len(merged), len(rows))) for rank in range(len(rows))]
        if sizes == in_shards == [samples for _, samples in counted]:
            # One row for each sample, and rank r of W has the samples r, r + W, ...: put them in the dataset's order.
            for rank, shard_rows in enumerate(rows):
                merged[rank :: len(rows)] = shard_rows
        return [merged]
    flat = [tensor for state, _ in counted for tensor in state]
    return reduction(flat) if callable(reduction) else flat


def _device_of(holder: nn.Module) -> torch.device:
    states = [getattr(holder, name) for name in _reductions(holder)]
    tensors = (tensor for state in states for tensor in ([state] if isinstance(state, Tensor) else state))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _to(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.detach().to(device)
    return [tensor.detach().to(device) for tensor in state] if isinstance(state, (list, tuple)) else state


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    return list(state) if isinstance(state, list) else state  # its tensors are added to no more
