"""What the ranks of a process group say to each other: collectives that tell why they broke and who waits where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.batches import concatenate
from trainkit.strategy import Strategy

from .ddp.agreement import gather
from .ddp.failure import RankError, StoreBoard, is_lost, timed_out
from .stop_agreement import StopAgreement

T = TypeVar("T")

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class GroupTalk(Strategy):
    """A strategy whose ranks talk through a process group.

    Args:
        device: `auto`, `cpu` or `cuda`.
        accumulate: Micro-batches of a step on each rank.
        micro_batch_size: Samples on one device at once, at most.
        process_group: The ranks, where this process has joined others already; `None`: all ranks.
        timeout_seconds: How long to wait for another rank.

    """

    def __init__(
        self,
        *,
        device: str,
        accumulate: int | None,
        micro_batch_size: int | Literal["auto"] | None,
        process_group: dist.ProcessGroup | None,
        timeout_seconds: float,
    ) -> None:
        super().__init__(device=device, accumulate=accumulate, micro_batch_size=micro_batch_size)
        self.process_group = process_group
        self.timeout_seconds = timeout_seconds
        self._names: list[str] = []  # of metrics, agreed by all ranks
        self._stop: StopAgreement | None = None
        self._board: StoreBoard | None = None  # where ranks tell each other why they fail and where they are
        self._steps = 0  # that this rank has begun

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that have copies of the task."""
        return self._ranks

    @property
    def _ranks(self) -> dist.ProcessGroup:
        """All ranks of the run."""
        group = self.process_group or dist.group.WORLD
        assert group is not None
        return group

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Return the reduction of `tensor` over ranks; collective."""
        return self._reduce(tensor.detach().clone(), op, where="an all_reduce")

    def _reduce(self, tensor: Tensor, op: str = "sum", *, where: str) -> Tensor:
        with self._waiting(self._after(where)):
            dist.all_reduce(tensor, _OPS[op], group=self.group)
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        """Return each rank's value, in the order of ranks; collective."""
        with self._waiting(self._after("an all_gather")):
            return gather(value, self.group)

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value; collective."""
        values: list[Any] = [value]
        with self._waiting(self._after("a broadcast")):
            dist.broadcast_object_list(values, dist.get_global_rank(self.group, 0), group=self.group)
        received: T = values[0]
        return received

    def barrier(self) -> None:
        """Return when every rank has come here; collective."""
        with self._waiting(self._after("a barrier")):
            dist.barrier(group=self.group)

    def agree(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank; collective."""
        return bool(self.all_reduce(torch.tensor([int(flag)], device=self.device), "max").item())

    def agree_on_host(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank, without waiting for a device; collective."""
        found = torch.tensor([int(flag)])
        return bool(self._reduce(found, "max", where="the question whether a rank is out of memory").item())

    def agreed_seconds(self, seconds: float) -> float:
        """Return the longest time of any rank, as of the last answer."""
        return seconds if self._stop is None else self._stop.seconds

    def agree_to_stop(self, requested: bool, *, seconds: float = 0.0) -> bool:
        """Return on every rank after the same step whether any rank was asked to stop."""
        if self._stop is None:
            return requested
        try:  # in every step, so without a context that costs as much as the question
            return self._stop.after_step(requested, seconds=seconds)
        except RuntimeError as error:
            self._explain(error, self._after("the agreement whether to stop"))
            raise

    def sum_named(
        self, sums: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[str], Tensor]:
        """Return the names known to any rank, and their `(names, 2)` sums over ranks; one collective."""
        packed = self._reduce(self._packed(sums, device, dtype), where="the sum of metrics")
        if packed[-1, 0].item():  # a rank has a name that not all know: agree on names, and add up again
            known = set(self._names)
            for names in self.all_gather_object(sorted(sums)):
                self._names += [name for name in names if name not in known]
                known.update(names)
            packed = self._reduce(self._packed(sums, device, dtype), where="the sum of metrics")
        present = [index for index, (_, weight) in enumerate(packed[:-1].tolist()) if weight]
        return [self._names[index] for index in present], packed[present]

    def _packed(self, sums: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
        packed = torch.zeros(len(self._names) + 1, 2, device=device, dtype=dtype)
        for index, name in enumerate(self._names):
            if name in sums:
                packed[index] = sums[name]
        packed[-1, 0] = float(any(name not in self._names for name in sums))
        return packed

    def gather_predictions(self, outputs: list[Any]) -> list[Any]:
        """Return on rank 0 all predictions in the order of the dataset, elsewhere nothing; collective."""
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        mine = concatenate(outputs) if outputs else None
        with self._waiting(self._after("the gathering of predictions")):
            dist.gather_object(mine, gathered, dist.get_global_rank(self.group, 0), group=self.group)
        parts = [part for part in gathered or [] if part is not None]
        return [interleave(parts)] if parts else []

    # ---- Collectives that break

    @contextmanager
    def _waiting(self, where: str) -> Iterator[None]:
        """Say of a collective in this block that breaks or takes too long where it was, why, and who is where."""
        try:
            yield
        except RuntimeError as error:
            self._explain(error, where)
            raise

    def _explain(self, error: RuntimeError, where: str) -> None:
        """Raise RankError in place of an error that says no more than that a collective broke."""
        if self._board is None or isinstance(error, RankError) or not is_lost(error):
            return
        cause = self._board.root_cause()
        if cause is None and "imed out" in str(error):
            raise timed_out(self._board, where=where, seconds=self.timeout_seconds) from None
        cause = cause or f"a rank is gone ({str(error).splitlines()[0]})"
        raise RankError(f"stopped while waiting in {where}, because {cause}") from None

    def _after(self, what: str) -> str:
        return f"{what} after step {self._steps}"


def interleave(parts: Sequence[Any]) -> Any:
    """Return rows in their original order, of which rank r took every W-th from the r-th on.

    rank 0: a c e    rank 1: b d    ->    a b c d e
    """
    first, count = parts[0], len(parts)
    if isinstance(first, Tensor):
        whole = first.new_empty((sum(len(part) for part in parts), *first.shape[1:]))
        for rank, part in enumerate(parts):
            whole[rank::count] = part
        return whole
    if isinstance(first, Mapping):
        return {key: interleave([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(interleave(columns) for columns in zip(*parts, strict=True))
    items: list[Any] = [None] * sum(len(part) for part in parts)
    for rank, part in enumerate(parts):
        items[rank::count] = part
    return items
