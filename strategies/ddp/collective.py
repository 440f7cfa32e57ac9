"""Buckets summed by the process group's own all_reduce: gloo, nccl or any other backend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.distributed.failure_store import FailureStore, RankError, timed_out

from .transport import Reduction, Transport

SLICE = timedelta(seconds=0.5)  # between two looks at the board


class ProcessGroupTransport(Transport):
    """One asynchronous all_reduce for each bucket."""

    name = "group"

    def __init__(
        self, group: dist.ProcessGroup, *, board: FailureStore, device: torch.device, timeout_seconds: float
    ) -> None:
        self.group, self.board, self.device = group, board, device
        self.timeout_seconds = timeout_seconds
        self.on_stream = device.type == "cuda" and "nccl" in dist.get_backend(group)
        self.flats: list[Tensor] = []

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Return one flat tensor for each (elements, dtype).

        Nothing is written yet: memory is taken as gradients move in, while those that have moved let go of theirs.
        """
        self.flats = [torch.empty(numel, dtype=dtype, device=self.device) for numel, dtype in sizes]
        return self.flats

    def start(self, bucket: int, *, where: str, timed: bool = False) -> Reduction:
        """Start to sum the allocated tensor number `bucket`."""
        return self.start_tensor(self.flats[bucket], where=where, timed=timed)

    def start_tensor(self, tensor: Tensor, *, where: str, timed: bool = False) -> Reduction:
        """Start to sum any tensor, a sparse one included."""
        if self.group.size() == 1:
            return _Done()
        work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        if self.on_stream:
            return _StreamWork(work)
        patient = PatientWork(work, where=where, board=self.board, timeout_seconds=self.timeout_seconds)
        if timed:
            work.get_future().add_done_callback(patient.note_time)
        return patient

    def close(self) -> None:
        """Release the tensors; may be called twice."""
        self.flats = []


class PatientWork:
    """A collective's work whose wait looks at the failure board, so that no rank waits for one that has failed."""

    def __init__(self, work: dist.Work, *, where: str, board: FailureStore, timeout_seconds: float) -> None:
        self.work, self.where, self.board, self.timeout_seconds = work, where, board, timeout_seconds
        self.finished_at: float | None = None

    def note_time(self, _: object) -> None:
        """Note that the collective is done; called on the backend's thread."""
        self.finished_at = time.perf_counter()

    def is_done(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Return once the collective is done; raise with the root cause when a rank failed or did not come."""
        start, slices = time.monotonic(), 0
        while True:
            try:
                self.work.wait(SLICE)
            except RuntimeError as error:
                slices += 1
                self._look_around(error, waited=time.monotonic() - start, slices=slices)
            else:
                if slices > 1:
                    self.board.note_waiting("")
                return

    def _look_around(self, error: RuntimeError, *, waited: float, slices: int) -> None:
        cause = self.board.root_cause()
        if cause is not None:
            raise RankError(f"stopped while waiting in {self.where}, because {cause}") from None
        if self.work.is_completed():  # the connection broke, or the collective ended just after the slice did
            try:
                self.work.wait(SLICE)
                return
            except RuntimeError as broken:
                error = broken
            time.sleep(SLICE.total_seconds())  # a peer that is just failing gets the time to say why
            cause = self.board.root_cause() or f"a rank is gone ({str(error).splitlines()[0]})"
            raise RankError(f"stopped while waiting in {self.where}, because {cause}") from None
        if slices > 1:
            self.board.note_waiting(self.where)
        if waited > self.timeout_seconds:
            raise timed_out(self.board, where=self.where, seconds=waited) from None


class _StreamWork:
    """A collective on a CUDA stream: waiting only orders streams, and nccl's own watchdog keeps the time."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work
        self.finished_at: float | None = None

    def is_done(self) -> bool:
        """Whether the device has done the collective."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Let later kernels of the current stream run after the collective."""
        self.work.wait()


class _Done:
    finished_at: float | None = None

    def is_done(self) -> bool:
        """Return true."""
        return True

    def wait(self) -> None:
        """Return at once: a single rank's sum is its own."""
