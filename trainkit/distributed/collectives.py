"""Collectives of the ranks of a run: those of one process alone, and those over a process group.

A collective must be called by every rank at the same point. One that breaks or times out over a process group raises
RankError, which names the step, the reason that another rank has published, and where every rank is.
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

from trainkit.distributed.failure_store import FailureStore, RankError, is_lost, stopped, timed_out
from trainkit.tree import concatenate

T = TypeVar("T")
ReduceOp = Literal["sum", "min", "max"]

BROADCAST_BYTES = 64 * 1024 * 1024  # joined into one message
STOP_INTERVAL_SECONDS = 0.1  # between two questions whether to stop
MAX_STOP_INTERVAL = 256  # steps

_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Collectives:
    """The collectives of one process alone, and what every process knows of its place among the ranks.

    Args:
        rank: Which shard of each global batch this process reads.
        world_size: Shards of a global batch.
        process: Index of this process among all; by default its rank. Several processes may share a rank's samples.
        num_processes: All processes; by default as many as ranks.
        num_devices: Different devices over all processes; by default one for each process.

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
        """Whether this process writes files and reports to the user."""
        return self.process == 0

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Return the reduction of `tensor` over ranks, on its device; collective."""
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        """Return the value of each process, in their order; collective."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Return the main process's value; collective."""
        return value

    def barrier(self) -> None:
        """Return when every process has reached this call; collective."""

    def any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is true on any process; collective, and waits for the device."""
        return flag

    def should_stop(self, requested: bool, *, seconds: float = 0.0) -> bool:
        """Return on every process after the same step whether any was asked to stop; call it after every step.

        The answer may come some steps late and never waits for the device. `seconds` is this process's training time.
        """
        return requested

    def synced_seconds(self, seconds: float) -> float:
        """Return the longest training time of any process at the last answer of `should_stop`; `seconds` if alone."""
        return seconds

    def should_stop_evaluation(self, requested: bool) -> bool:
        """Return whether to leave an evaluation after this batch; collective over processes that share a batch."""
        return requested

    def all_reduce_metrics(
        self, sums: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[str], Tensor]:
        """Return the names known to any rank, and their `(names, 2)` sums over ranks; one packed collective."""
        names = list(sums)
        packed = torch.stack([sums[name] for name in names]) if names else torch.zeros(0, 2, dtype=dtype, device=device)
        return names, packed

    def gather_predictions(self, outputs: list[Any]) -> list[Any]:
        """Return on rank 0 the predictions of all ranks in the order of the dataset, elsewhere `[]`; collective."""
        return outputs


class ProcessGroupCollectives(Collectives):
    """Collectives over a process group.

    Args:
        group: The ranks.
        device: Where flags are reduced.
        timeout_seconds: Named in the error of a collective that timed out.
        step: Returns how many steps this rank has begun, for messages.
        failure_store: Where ranks publish why they fail; `None` for one rank alone.
        consensus: Answers `should_stop`; `None` for one rank alone.
        process: As for `Collectives`.
        num_processes: As for `Collectives`.

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
        """Whether `any_rank_on_host` is available while the ranks compute on GPUs."""
        self._step = step
        self._names: list[str] = []  # of metrics, known to all ranks in this order

    @classmethod
    def join(
        cls, group: dist.ProcessGroup, *, device: torch.device, timeout_seconds: float, step: Callable[[], int]
    ) -> ProcessGroupCollectives:
        """Return the collectives of `group` with a failure store and a consensus of its own; collective."""
        store = consensus = None
        if group.size() > 1:
            consensus = StopConsensus(group, device=torch.device("cpu") if has_host_backend(group) else device)
            store = FailureStore(group, token=gather(secrets.token_hex(8), group)[0])
        return cls(
            group,
            device=device,
            timeout_seconds=timeout_seconds,
            step=step,
            failure_store=store,
            consensus=consensus,
        )

    def close(self) -> None:
        """Ask no longer whether to stop; may be called twice."""
        self.consensus = None

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self.reduce_in_place(tensor.detach().clone(), op, where="an all_reduce")

    def reduce_in_place(self, tensor: Tensor, op: ReduceOp = "sum", *, where: str) -> Tensor:
        """Leave in `tensor` its reduction over ranks, and return it; `where` names it in an error. Collective."""
        with self.waiting(self.after(where)):
            dist.all_reduce(tensor, _OPS[op], group=self.group)
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        with self.waiting(self.after("an all_gather")):
            return gather(value, self.group)

    def broadcast_object(self, value: T) -> T:
        values: list[Any] = [value]
        with self.waiting(self.after("a broadcast")):
            dist.broadcast_object_list(values, dist.get_global_rank(self.group, 0), group=self.group)
        received: T = values[0]
        return received

    def barrier(self) -> None:
        with self.waiting(self.after("a barrier")):
            dist.barrier(group=self.group)

    def any_rank(self, flag: bool) -> bool:
        return bool(self.all_reduce(torch.tensor([int(flag)], device=self.device), "max").item())

    def any_rank_on_host(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank, without waiting for a device; collective."""
        found = torch.tensor([int(flag)])
        return bool(self.reduce_in_place(found, "max", where="the check whether a rank is out of memory").item())

    def synced_seconds(self, seconds: float) -> float:
        return seconds if self.consensus is None else self.consensus.seconds

    def should_stop(self, requested: bool, *, seconds: float = 0.0) -> bool:
        if self.consensus is None:
            return requested
        try:  # in every step: a context manager would cost as much as the question
            return self.consensus.after_step(requested, seconds=seconds)
        except RuntimeError as error:
            self._explain(error, self.after("the check whether to stop"))
            raise

    def all_reduce_metrics(
        self, sums: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[str], Tensor]:
        packed = self.reduce_in_place(self._packed(sums, device, dtype), where="the sum of metrics")
        if packed[-1, 0].item():  # a rank has a name that not all know: exchange names and add up again
            known = set(self._names)
            for names in self.all_gather_object(sorted(sums)):
                self._names += [name for name in names if name not in known]
                known.update(names)
            packed = self.reduce_in_place(self._packed(sums, device, dtype), where="the sum of metrics")
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
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        mine = concatenate(outputs) if outputs else None
        with self.waiting(self.after("the gathering of predictions")):
            dist.gather_object(mine, gathered, dist.get_global_rank(self.group, 0), group=self.group)
        parts = [part for part in gathered or [] if part is not None]
        return [interleave(parts)] if parts else []

    # ---- Collectives that break

    @contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Raise RankError for a collective in this block that breaks or times out: `where`, why, and who is where."""
        try:
            yield
        except RuntimeError as error:
            self._explain(error, where)
            raise

    def after(self, what: str) -> str:
        """Return `what` with the step after which it is called, for messages."""
        return f"{what} after step {self._step()}"

    def _explain(self, error: RuntimeError, where: str) -> None:
        """Raise RankError in place of an error that says only that a collective broke."""
        if self.failure_store is None or isinstance(error, RankError) or not is_lost(error):
            return
        cause = self.failure_store.root_cause()
        if cause is None and "imed out" in str(error):
            raise timed_out(self.failure_store, where=where, seconds=self.timeout_seconds) from None
        cause = cause or f"a rank is gone ({str(error).splitlines()[0]})"
        raise stopped(where, cause) from None


class StopConsensus:
    """Asks all ranks now and then whether one wants to stop; the answer is read some steps later.

        step       0     1 ... n      n+1 ... 2n
        question   ask         ask            ask
        answer                 read           read      the same on every rank, since n is agreed as well

    The number of steps between questions follows the length of a step, so that asking costs next to nothing. The time
    of training goes along with the question, for durations in minutes.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        """Ask on `device`: the host, where the group can talk between hosts' memories; no step waits for a GPU then."""
        self.group, self.device = group, device
        self.seconds = 0.0
        """The longest time of any rank when it was last asked; the same on every rank."""
        self._step = 0
        self._next = 0  # step after which to read and to ask
        self._last_time = time.monotonic()
        self._interval = 1
        self._answer: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def after_step(self, requested: bool, *, seconds: float = 0.0) -> bool:
        """Return whether any rank had requested to stop when it was last asked; the same on every rank."""
        step, self._step = self._step, self._step + 1
        if step < self._next:
            return False
        stop = False
        if self._work is not None and self._answer is not None:
            self._work.wait()
            flag, interval, milliseconds = self._answer.tolist()
            stop, self._interval, self.seconds = bool(flag), interval, milliseconds / 1000
        self._ask(requested, seconds)
        self._next = step + self._interval
        return stop

    def _ask(self, requested: bool, training_seconds: float) -> None:
        now = time.monotonic()
        seconds = max(now - self._last_time, 1e-9) / self._interval  # of one step
        self._last_time = now
        wanted = min(max(int(STOP_INTERVAL_SECONDS / seconds), 1), MAX_STOP_INTERVAL, 2 * self._interval)
        self._answer = torch.tensor([int(requested), wanted, int(1000 * training_seconds)], device=self.device)
        self._work = dist.all_reduce(self._answer, dist.ReduceOp.MAX, group=self.group, async_op=True)


def has_host_backend(group: dist.ProcessGroup) -> bool:
    """Return whether the group has a backend for tensors in host memory."""
    return "cpu" in dist.get_backend_config(group)


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
