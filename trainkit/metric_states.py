"""The states of metric objects, ours and those of torchmetrics: taken, brought together over ranks, put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.metric import Metric

States = list[dict[str, Any]]
"""For each module of a metric object that has states: name -> a tensor, or a list of tensors."""


@dataclass
class Part:
    """What one rank, or one replica on it, has counted."""

    states: States
    num_samples: int


def is_metric(value: object) -> bool:
    """Return whether `value` is a metric object: ours, one of torchmetrics, or a collection of such."""
    return (
        isinstance(value, nn.Module)
        and all(callable(getattr(value, name, None)) for name in ("update", "compute", "reset"))
        and next(_holders(value), None) is not None
    )


def metrics_in(task: nn.Module) -> list[nn.Module]:
    """Return the modules of a task that hold states of metrics."""
    return list(_holders(task))


def outermost_metrics(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the metric objects in a task, but not those that are parts of others."""
    if is_metric(module):
        yield module
        return
    for child in module.children():
        yield from outermost_metrics(child)


def take(metric: nn.Module) -> States:
    """Return a metric object's states in host memory."""
    return states_on_host(list(_holders(metric)))


def states_on_host(holders: Sequence[nn.Module]) -> States:
    """Return the states of modules that hold some, in host memory."""
    return [{name: _on_host(getattr(holder, name)) for name in _reductions(holder)} for holder in holders]


def compute_together(metric: nn.Module, parts: Sequence[Part]) -> Any:
    """Return what `metric` comes to over all parts; leaves their states in it."""
    holders = list(_holders(metric))
    have_together(holders, parts)
    with talking_to_nobody(holders):
        return metric.compute()  # type: ignore[operator]


def have_together(holders: Sequence[nn.Module], parts: Sequence[Part]) -> None:
    """Leave in the modules the states of all parts together."""
    for index, holder in enumerate(holders):
        device = _device_of(holder)
        for name, reduction in _reductions(holder).items():
            together = _together(reduction, [(part.states[index][name], part.num_samples) for part in parts])
            setattr(holder, name, _to(together, device))
        if not isinstance(holder, Metric):
            holder._computed = None  # type: ignore[assignment] # a result of before


def reset(metric: nn.Module) -> None:
    """Let a metric object count from nothing."""
    for holder in _holders(metric):
        _empty_lists(holder)
    metric.reset()  # type: ignore[operator]


def fresh_copy(metric: nn.Module) -> nn.Module:
    """Return another object of the same metric that has counted nothing."""
    copied = deepcopy(metric)
    reset(copied)
    return copied


@contextmanager
def talking_to_nobody(holders: Sequence[nn.Module]) -> Iterator[None]:
    """Keep torchmetrics from collectives of its own, for which ranks with unequal numbers of batches never meet."""
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
def set_aside(holders: Sequence[nn.Module]) -> Iterator[None]:
    """Let metrics count from nothing in this context, and afterwards have the states they had."""
    before = states_of(holders)
    reset_all(holders)
    try:
        with talking_to_nobody(holders):
            yield
    finally:
        reset_all(holders)
        put_back(before)


def states_of(holders: Sequence[nn.Module]) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Return copies of all states, which later updates do not touch."""
    return [
        (holder, {name: _copied(getattr(holder, name)) for name in _names(holder) if hasattr(holder, name)})
        for holder in holders
    ]


def put_back(states: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
    """Let metrics have the states that `states_of` returned."""
    for holder, named in states:
        for name, value in named.items():
            setattr(holder, name, _copied(value))


def _names(holder: nn.Module) -> list[str]:
    return [*_reductions(holder), *_COUNTERS]


_COUNTERS = ("_update_count", "_computed")  # of torchmetrics


def reset_all(holders: Sequence[nn.Module]) -> None:
    """Let modules that hold states count from nothing."""
    for holder in holders:
        _empty_lists(holder)
        holder.reset()  # type: ignore[operator]


def _empty_lists(holder: nn.Module) -> None:
    """Have lists again where bringing states together made tensors of them, which torchmetrics could not reset."""
    if not isinstance(holder, Metric):
        for name, default in vars(holder)["_defaults"].items():
            if isinstance(default, list):
                setattr(holder, name, [])


def _holders(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        if isinstance(part, Metric) or (hasattr(part, "_reductions") and hasattr(part, "_defaults")):
            yield part


def _reductions(holder: nn.Module) -> dict[str, Any]:
    """Return each state's reduction: one of our words, a function, or `None`: the states of ranks side by side."""
    if isinstance(holder, Metric):
        return dict(holder.reductions())
    found: Any = holder._reductions
    return {name: _WORDS.get(getattr(reduction, "__name__", ""), reduction) for name, reduction in found.items()}


_WORDS = {f"dim_zero_{word}": word for word in ("sum", "mean", "min", "max", "cat")}


def _together(reduction: Any, counted: Sequence[tuple[Any, int]]) -> Any:
    """Return one state for the (state, samples) of each part; those of a single part as they are."""
    states = [state for state, _ in counted]
    if len(states) == 1:
        return states[0]
    if not isinstance(states[0], Tensor):
        return _lists_together(reduction, counted)
    stacked = torch.stack(states)  # (parts, ...)
    if reduction is None or callable(reduction):
        return stacked if reduction is None else reduction(stacked)
    if reduction == "cat":
        return stacked.flatten(0, 1) if stacked.dim() > 1 else stacked
    return _OPERATIONS[reduction](stacked, [samples for _, samples in counted])


def _lists_together(reduction: Any, counted: Sequence[tuple[Any, int]]) -> Any:
    if reduction == "cat":
        rows = [torch.cat([torch.atleast_1d(tensor) for tensor in state]) for state, _ in counted if state]
        if not rows:
            return []
        in_order = _are_shares([len(own) for own in rows], [samples for _, samples in counted])
        return [_interleaved(rows) if in_order else torch.cat(rows)]
    flat = [tensor for state, _ in counted for tensor in state]
    return reduction(flat) if callable(reduction) else flat


def _are_shares(rows: Sequence[int], samples: Sequence[int]) -> bool:
    """Return whether there is a row for each sample, and rank r of W has the samples r, r + W, ..."""
    return list(rows) == list(samples) == [len(range(rank, sum(rows), len(rows))) for rank in range(len(rows))]


def _interleaved(rows: Sequence[Tensor]) -> Tensor:
    whole = rows[0].new_empty((sum(map(len, rows)), *rows[0].shape[1:]))
    for rank, own in enumerate(rows):
        whole[rank :: len(rows)] = own
    return whole


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
