"""What the ranks agree on before they train: the same parameters, the same values, the same order."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")
BROADCAST_BYTES = 64 * 1024 * 1024  # joined into one message


def check_same_model(tensors: Mapping[str, Iterable[tuple[str, Tensor]]], group: dist.ProcessGroup) -> str:
    """Return a token that names this agreement, equal on every rank and never used before. Collective.

    `tensors` are named, in order, under what to call them: "parameter", "buffer". Raises RuntimeError on every rank,
    naming the first difference in names, shapes, dtypes, in which are trained, or in their number.
    """
    rows = {kind: [_described(name, tensor) for name, tensor in named] for kind, named in tensors.items()}
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    answers = gather((secrets.token_hex(8), digest), group)
    if any(other != answers[0][1] for _, other in answers):
        difference = first_difference(gather(rows, group))
        raise RuntimeError(f"the ranks do not have the same model: {difference}. Build the same model on every rank.")
    return answers[0][0]


def only_device(parameters: Sequence[nn.Parameter]) -> torch.device:
    """Return the device of all parameters; raises where there is none, or more than one."""
    devices = {parameter.device for parameter in parameters}
    if not devices:
        raise RuntimeError("there is nothing to reduce: no parameter requires a gradient")
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"all parameters must be on one device to be reduced together, but they are on {names}")
    return devices.pop()


def tensors_of(module: nn.Module) -> dict[str, Iterable[tuple[str, Tensor]]]:
    """Return what must be the same on every rank: all parameters and buffers of a module."""
    return {"parameter": module.named_parameters(), "buffer": module.named_buffers()}


def first_difference(rows_of_ranks: Sequence[Mapping[str, Sequence[str]]]) -> str | None:
    """Return the first row in which a rank differs from rank 0, in words."""
    first = rows_of_ranks[0]
    for rank, theirs in enumerate(rows_of_ranks):
        for kind, rows in first.items():
            pairs = zip_longest(rows, theirs[kind], fillvalue="nothing")
            for index, (our_row, their_row) in enumerate(pairs):
                if our_row != their_row:
                    return f"{kind} {index} is {our_row} on rank 0, but {their_row} on rank {rank}"
    return None


def gather(value: T, group: dist.ProcessGroup) -> list[T]:
    """Return every rank's value. Collective."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup, *, source: int = 0) -> None:
    """Leave in every tensor the values of the group's rank `source`. Collective."""
    if group.size() == 1:
        return
    origin = dist.get_global_rank(group, source)
    is_source = group.rank() == source
    with torch.no_grad():
        for joined in _join_by_kind(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in joined])
            dist.broadcast(flat, origin, group=group)
            if not is_source:
                for tensor, part in zip(joined, flat.split([t.numel() for t in joined]), strict=True):
                    tensor.detach().copy_(part.view(tensor.shape))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What all ranks know of the first backward."""

    order: list[int]
    """Rank 0's order of arrival; parameters that it has not seen come last, in the reverse order of their own."""
    unseen_by_first: set[int]
    """Parameters that rank 0 has not seen."""
    unseen_by_all: set[int]
    """Parameters that no rank has seen."""
    sparse_dims: list[int]
    """For each parameter its gradient's sparse dimensions on any rank, 0 if it is dense."""


def agree_on_arrivals(
    arrived: Sequence[int], sparse_dims: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> Arrivals:
    """Return what the ranks have seen together. Collective.

    `arrived` holds for each parameter the moment at which its gradient was ready, 0 if it never was; the sparse
    dimensions are 0 for dense gradients.
    """
    of_first = torch.tensor(list(arrived), dtype=torch.int64, device=device)
    of_any = torch.tensor([list(arrived), list(sparse_dims)], dtype=torch.int64, device=device)
    if group.size() > 1:
        dist.broadcast(of_first, dist.get_global_rank(group, 0), group=group)
        dist.all_reduce(of_any, dist.ReduceOp.MAX, group=group)
    known, (known_to_any, sparse) = of_first.tolist(), of_any.tolist()
    count = len(known)
    return Arrivals(
        order=sorted(range(count), key=lambda i: (known[i] == 0, known[i], -i)),
        unseen_by_first={i for i in range(count) if known[i] == 0},
        unseen_by_all={i for i in range(count) if known_to_any[i] == 0},
        sparse_dims=sparse,
    )


def _described(name: str, tensor: Tensor) -> str:
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}{', frozen' * frozen}"


def _join_by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    joined: list[list[Tensor]] = []
    open_lists: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        members, size = open_lists.get(kind, ([], BROADCAST_BYTES))
        if size + tensor.nbytes > BROADCAST_BYTES:
            members, size = [], 0
            joined.append(members)
        members.append(tensor)
        open_lists[kind] = (members, size + tensor.nbytes)
    return joined
