"""Collectives of the ranks of a run, for one process and over a process group.

A collective must be called by every rank at the same point. If it breaks or times out over a process group it raises
RankError, which names the step, the root cause that another rank has published, and the position of every rank.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.distributed.failure_store import FailureStore, RankError, is_lost, this_host
from trainkit.errors import UserError
from trainkit.tree import concatenate, dense_parts

T = TypeVar("T")
ReduceOp = Literal["sum", "min", "max"]

BROADCAST_BYTES = 64 * 1024 * 1024  # most that are joined into one message
STOP_INTERVAL_SECONDS = 0.1  # between two stop checks
MAX_STOP_INTERVAL = 256  # steps

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Collectives:
    """The collectives of a single process, and the rank and number of processes.

    This process reads the shard `rank` of `world_size` of each global batch; several processes may read the same one.
    By default there is one process for each shard, and one device for each process.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        process: int | None = None,
        num_processes: int | None = None,
        num_devices: int | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.process = rank if process is None else process
        self.num_processes = world_size if num_processes is None else num_processes
        self.num_devices = self.num_processes if num_devices is None else num_devices

    @property
    def is_main(self) -> bool:
        """True on the process that writes files and reports to the user."""
        return self.process == 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return the reduction of `tensor` over ranks, on its device; collective."""
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all processes, in their order; collective."""
        return [value]

    def gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, `[]` on the others; collective."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Return the main process's value; collective."""
        return value

    def barrier(self) -> None:
        """Return when every process has reached this call; collective."""

    def any_rank(self, flag: bool) -> bool:
        """Return True if `flag` is true on any process; collective."""
        return flag

    def should_stop(self, requested: bool, *, seconds: float = 0.0) -> bool:
        """Return True on every process after the same step if any was asked to stop; called after every step.

        The answer may come some steps late and does not wait for the device. `seconds` is this process's training time.
        """
        return requested

    def should_stop_now(self, requested: bool) -> bool:
        """Return True on every process if any was asked to stop by now; collective."""
        return requested

    def synced_seconds(self, seconds: float) -> float:
        """Return the longest training time of any process at the last answer of `should_stop`."""
        return seconds

    def should_stop_evaluation(self, requested: bool) -> bool:
        """Return True if an evaluation ends after this batch; collective over processes that read the same shard."""
        return requested

    def all_reduce_metrics(
        self, sums: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[str], Tensor]:
        """Return the names of any rank and their sums over ranks, shape (names, 2); one packed collective."""
        values = list(sums.values())
        return list(sums), torch.stack(values) if values else torch.zeros(0, 2, dtype=dtype, device=device)

    def gather_predictions(self, outputs: list[Any]) -> list[Any]:
        """Return all ranks' predictions in the order of the dataset on rank 0, `[]` on the others; collective."""
        return outputs


class ProcessGroupCollectives(Collectives):
    """Collectives over a process group.

    Flags are reduced on `device`. Errors name the timeout of the group and the number of steps that this rank has
    begun, which `step` returns. `failure_store`, in which ranks publish why they fail, and `consensus`, which answers
    `should_stop`, are `None` for a single rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        device: torch.device,
        timeout_seconds: float,
        step: Callable[[], int],
        failure_store: FailureStore | None = None,
        consensus: StopConsensus | None = None,
        process: int | None = None,
        num_processes: int | None = None,
    ) -> None:
        super().__init__(rank=group.rank(), world_size=group.size(), process=process, num_processes=num_processes)
        self.group = group
        self.device = device
        self.timeout_seconds = timeout_seconds
        self.failure_store = failure_store
        self.consensus = consensus
        self.asks_on_host = device.type != "cpu" and has_host_backend(group)
        """True if `any_rank_on_host` avoids a wait for a GPU."""
        self._step = step
        self._names: list[str] = []  # of metrics, known to all ranks in this order

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, *, device: torch.device, timeout_seconds: float, step: Callable[[], int]
    ) -> ProcessGroupCollectives:
        """Return the collectives of `group` with a new failure store and consensus; collective."""
        comm = cls(group, device=device, timeout_seconds=timeout_seconds, step=step)
        if group.size() > 1:
            # NCCL alone has no backend for the host: then each check waits for the device.
            comm.consensus = StopConsensus(group, device=torch.device("cpu") if has_host_backend(group) else device)
            # Rank 0's token on every rank: without it, keys that an earlier store of the group left would be read.
            tokens, hosts = zip(*gather((secrets.token_hex(8), this_host(group)), group), strict=True)
            comm.failure_store = FailureStore(group, token=tokens[0], hosts=hosts)
        return comm

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        # A copy: torch reduces in place, and the caller still needs its local value; detached from its graph.
        return self.reduce_in_place(tensor.detach().clone(), op, where="an all_reduce")

    def reduce_in_place(self, tensor: Tensor, op: ReduceOp = "sum", *, where: str) -> Tensor:
        """Reduce `tensor` over ranks in place, and return it; `where` names the collective in errors. Collective."""
        with self.waiting(self.after(where)):
            dist.all_reduce(tensor, _OPS[op], group=self.group)
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        with self.waiting(self.after("an all_gather")):
            return gather(value, self.group)

    def gather_object(self, value: T) -> list[T]:
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with self.waiting(self.after("a gather")):
            # torch expects the number in the default group, which differs from rank 0 of a subgroup.
            dist.gather_object(value, gathered, dist.get_global_rank(self.group, 0), group=self.group)
        return gathered or []

    def broadcast_object(self, value: T) -> T:
        values = [value]
        with self.waiting(self.after("a broadcast")):
            dist.broadcast_object_list(values, dist.get_global_rank(self.group, 0), group=self.group)
        return values[0]

    def barrier(self) -> None:
        with self.waiting(self.after("a barrier")):
            dist.barrier(group=self.group)

    def any_rank(self, flag: bool) -> bool:
        device = "cpu" if self.asks_on_host else self.device  # there it waits for the device
        return bool(self.all_reduce(torch.tensor([int(flag)], device=device), "max").item())

    def any_rank_on_host(self, flag: bool) -> bool:
        """Return True if `flag` is true on any rank, without waiting for a device; collective."""
        return bool(self.reduce_in_place(torch.tensor([int(flag)]), "max", where="the out-of-memory check").item())

    def synced_seconds(self, seconds: float) -> float:
        return seconds if self.consensus is None else self.consensus.seconds

    def should_stop(self, requested: bool, *, seconds: float = 0.0) -> bool:
        if self.consensus is None:
            return requested
        # In every step: a context manager would cost as much as the check.
        try:
            return self.consensus.after_step(requested, seconds=seconds)
        except RuntimeError as error:
            self._explain(error, self.after("the stop check"))
            raise

    def should_stop_now(self, requested: bool) -> bool:
        if self.consensus is None:
            return requested
        # The strategy may have set a comparison in shared memory, which is faster inside a host.
        return (self.consensus.any_rank or self.any_rank)(requested)

    def all_reduce_metrics(
        self, sums: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[str], Tensor]:
        # The rows have no names, so that a log point sends one tensor; the last row is the flag of `_packed`.
        packed = self.reduce_in_place(self._packed(sums, device, dtype), where="the sum of metrics")
        if packed[-1, 0].item():  # a rank has a new name: exchange names and reduce again
            known_names = set(self._names)
            for names in self.all_gather_object(sorted(sums)):
                # In the order of the gathered lists, which is the same on every rank: rows are summed by position.
                self._names += [name for name in names if name not in known_names]
                known_names.update(names)
            packed = self.reduce_in_place(self._packed(sums, device, dtype), where="the sum of metrics")
        # Without a weight, no rank has measured the name since the last call.
        present = [index for index, (_, weight) in enumerate(packed[:-1].tolist()) if weight]
        return [self._names[index] for index in present], packed[present]

    def _packed(self, sums: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
        packed = torch.zeros(len(self._names) + 1, 2, device=device, dtype=dtype)
        for index, name in enumerate(self._names):
            if name in sums:
                packed[index] = sums[name]
        # Summed over ranks: above zero if any rank has a name that the others do not expect.
        packed[-1, 0] = float(any(name not in self._names for name in sums))
        return packed

    def gather_predictions(self, outputs: list[Any]) -> list[Any]:
        gathered = self.gather_object(concatenate(outputs) if outputs else None)
        # A rank is empty only if there are fewer samples than ranks: then each of the others has one row, in order.
        parts = [part for part in gathered if part is not None]
        return [interleave(parts)] if parts else []

    # ---- Errors

    @contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Raise RankError if a collective in this block breaks or times out; it names `where` and the root cause."""
        try:
            yield
        # gloo and NCCL raise RuntimeError for a dead peer as for a wrong shape; `_explain` leaves the latter as it is.
        except RuntimeError as error:
            self._explain(error, where)
            raise

    def after(self, what: str) -> str:
        """Return `what` with the current step, for errors."""
        return f"{what} after step {self._step()}"

    def _explain(self, error: RuntimeError, where: str) -> None:
        """Raise RankError instead of an error that does not name the root cause."""
        if self.failure_store is None or isinstance(error, RankError) or not is_lost(error):
            return
        # `from None`: the backend's error names a socket, and would be shown before the rank that failed.
        raise self.failure_store.broken(error, where=where, seconds=self.timeout_seconds) from None


class StopConsensus:
    """Checks every few steps if any rank wants to stop; the result is read some steps later.

        step       0       1 ... n      n+1 ... 2n
        start      check         check          check
        read                     result         result     the same on every rank, since n is reduced as well

    The number of steps between checks follows the duration of a step, so that they cost next to nothing. The training
    time is reduced with the check, for durations in minutes. On the CPU of `device` no step waits for a GPU.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self.group, self.device = group, device
        self.any_rank: Callable[[bool], bool] | None = None
        """Returns True if a flag is true on any rank, in less time than a collective; collective."""
        self.seconds = 0.0
        """The longest training time of any rank at the last check; the same on every rank."""
        self._step = 0
        self._next = 0  # step of the next check
        self._last_time = time.monotonic()
        self._interval = 1
        self._result: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def after_step(self, requested: bool, *, seconds: float = 0.0) -> bool:
        """Return True if any rank had requested to stop at the last check; the same on every rank."""
        # Every rank counts the same steps, so the checks, which are collectives, meet without a message.
        step, self._step = self._step, self._step + 1
        if step < self._next:
            return False
        stop = False
        if self._work is not None and self._result is not None:
            # Started some steps ago, so it is usually complete and costs nothing.
            self._work.wait()
            flag, interval, milliseconds = self._result.tolist()
            stop, self._interval, self.seconds = bool(flag), interval, milliseconds / 1000
        self._check(requested, seconds)
        self._next = step + self._interval
        return stop

    def _check(self, requested: bool, training_seconds: float) -> None:
        now = time.monotonic()
        # At least 1e-9, since the clock may not have moved between two steps.
        seconds = max(now - self._last_time, 1e-9) / self._interval  # of one step
        self._last_time = now
        # It at most doubles, so that a few quick steps before slow ones do not delay a stop for long.
        wanted = min(max(int(STOP_INTERVAL_SECONDS / seconds), 1), MAX_STOP_INTERVAL, 2 * self._interval)
        # Integers, so that flag, interval and time (in milliseconds) travel in one message.
        self._result = torch.tensor([int(requested), wanted, int(1000 * training_seconds)], device=self.device)
        # Without a wait: the next steps overlap it. The attributes keep the tensor alive until the result is read.
        self._work = dist.all_reduce(self._result, dist.ReduceOp.MAX, group=self.group, async_op=True)


@contextmanager
def same_errors(comm: Collectives) -> Iterator[None]:
    """Raise on every process the first one's UserError, if there is any; collective at the end of the block."""
    local_error: UserError | None = None
    try:
        yield
    except UserError as error:
        local_error = error
    # Without the error the other processes would go on, and wait forever in their next collective.
    for first in comm.all_gather_object(local_error):
        if first is not None:  # the same one, as each decides by it if an earlier checkpoint is loaded
            raise first


def has_host_backend(group: dist.ProcessGroup) -> bool:
    """Return True if the group has a backend for tensors in host memory."""
    return "cpu" in dist.get_backend_config(group)


def check_same_model(tensors: Mapping[str, Iterable[tuple[str, Tensor]]], group: dist.ProcessGroup) -> str:
    """Return a new random token, equal on every rank, if all ranks have the same tensors. Collective.

    `tensors` holds (name, tensor) in order by kind: "parameter", "buffer". Raises RuntimeError on every rank that names
    the first difference in number, names, shapes, dtypes, which are trained, or which are on the same device.
    """
    devices: dict[torch.device, int] = {}  # numbered, as each rank has its own

    def describe(name: str, tensor: Tensor) -> str:
        number = devices.setdefault(tensor.device, len(devices))
        return f"{_describe(name, tensor)}{f' on device {number}' if number else ''}"

    rows = {kind: [describe(name, tensor) for name, tensor in named] for kind, named in tensors.items()}
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    # Digests first: the names of a large model are sent only if they differ.
    gathered = gather((secrets.token_hex(8), digest), group)
    # Every rank compares the same values, so all enter the second gather or none; else some would wait in it forever.
    if any(other != gathered[0][1] for _, other in gathered):
        difference = _first_difference(gather(rows, group))
        raise RuntimeError(f"the ranks do not have the same model: {difference}. Build the same model on every rank.")
    return gathered[0][0]


def tensors_of(module: nn.Module) -> dict[str, Iterable[tuple[str, Tensor]]]:
    """Return the tensors that must be the same on every rank: all parameters and buffers of a module."""
    return {"parameter": module.named_parameters(), "buffer": module.named_buffers()}


def _first_difference(rows_of_ranks: Sequence[Mapping[str, Sequence[str]]]) -> str | None:
    """Return a description of the first row in which a rank differs from rank 0; `None` if all are equal."""
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
    """Copy the values of the group's rank `source` to every tensor. Collective."""
    if group.size() == 1:
        return
    origin = dist.get_global_rank(group, source)
    is_source = group.rank() == source
    with torch.no_grad():
        for joined in _join_by_type(part for tensor in tensors for part in dense_parts(tensor)):
            # Joined, since a message for each of many small tensors costs its latency. BROADCAST_BYTES limits the copy.
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in joined])
            dist.broadcast(flat, origin, group=group)
            if not is_source:
                for tensor, part in zip(joined, flat.split([t.numel() for t in joined]), strict=True):
                    # Into the tensor itself, to which optimizers and views refer.
                    tensor.detach().copy_(part.view(tensor.shape))


def interleave(parts: Sequence[Any]) -> Any:
    """Return the rows of all ranks in their original order, where rank r has every W-th row from row r on.

    rank 0: a c e    rank 1: b d    ->    a b c d e
    """
    first, count = parts[0], len(parts)
    if isinstance(first, Tensor):
        full_tensor = first.new_empty((sum(len(part) for part in parts), *first.shape[1:]))
        for rank, part in enumerate(parts):
            full_tensor[rank::count] = part
        return full_tensor
    if isinstance(first, Mapping):
        return {key: interleave([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(interleave(columns) for columns in zip(*parts, strict=True))
    items: list[Any] = [None] * sum(len(part) for part in parts)
    for rank, part in enumerate(parts):
        items[rank::count] = part
    return items


def _describe(name: str, tensor: Tensor) -> str:
    # Ranks that train different parameters would wait for different gradients.
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    # Private: the public `values()` refuses what is not coalesced. `broadcast` needs equal numbers of values.
    sparse = "" if tensor.layout is torch.strided else f", {tensor.layout} of {tensor._nnz()} values"
    return f"{name} {tuple(tensor.shape)} {tensor.dtype}{', frozen' * frozen}{' on meta' * tensor.is_meta}{sparse}"


def _join_by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    joined: list[list[Tensor]] = []
    open_lists: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    # All ranks have the tensors in the same order and so make the same lists; one kind per list, as `torch.cat` needs.
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        # As if full, so that the first tensor of a kind opens a list.
        members, size = open_lists.get(kind, ([], BROADCAST_BYTES))
        if size + tensor.nbytes > BROADCAST_BYTES:
            members, size = [], 0
            joined.append(members)
        members.append(tensor)
        open_lists[kind] = (members, size + tensor.nbytes)
    return joined
