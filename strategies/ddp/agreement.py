"""What the ranks agree on before they train: the same parameters, the same values, the same order."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
BROADCAST_BYTES = 64 * 1024 * 1024  # joined into one message


def check_same_parameters(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> str:
    """Return a token that names this agreement, equal on every rank and never used before. Collective.

    Raises RuntimeError on every rank, naming the first difference in names, shapes, dtypes or their number.
    """
    rows = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
    answers = gather((secrets.token_hex(8), digest), group)
    if any(other != answers[0][1] for _, other in answers):
        difference = first_difference(gather(rows, group))
        assert difference is not None
        raise RuntimeError(
            f"the ranks do not train the same parameters: {difference}. Build the same model on every rank."
        )
    return answers[0][0]


def first_difference(rows_of_ranks: Sequence[Sequence[str]]) -> str | None:
    """Return the first row in which a rank differs from rank 0, in words."""
    first = rows_of_ranks[0]
    for rank, rows in enumerate(rows_of_ranks):
        for index in range(max(len(first), len(rows))):
            ours = first[index] if index < len(first) else "nothing"
            theirs = rows[index] if index < len(rows) else "nothing"
            if ours != theirs:
                return f"parameter {index} is {ours} on rank 0, but {theirs} on rank {rank}"
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


def agree_on_order(
    arrived: Sequence[int], sparse_dims: Sequence[int], group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], set[int], list[int]]:
    """Return rank 0's order of arrival, the parameters it has not seen, and where gradients are sparse on any rank.

    `arrived` holds for each parameter the moment at which its gradient was ready, 0 if it never was; the sparse
    dimensions are 0 for dense gradients. Collective.
    """
    moments = torch.tensor(list(arrived), dtype=torch.int64, device=device)
    sparse = torch.tensor(list(sparse_dims), dtype=torch.int64, device=device)
    if group.size() > 1:
        dist.broadcast(moments, dist.get_global_rank(group, 0), group=group)
        dist.all_reduce(sparse, dist.ReduceOp.MAX, group=group)
    known = moments.tolist()
    count = len(known)
    # Parameters that were never seen keep their place in the reverse order, behind all others.
    order = sorted(range(count), key=lambda i: (known[i] == 0, known[i], -i))
    return order, {i for i in range(count) if known[i] == 0}, sparse.tolist()


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
