"""The strategy `torch_ddp`: the same as `ddp` over PyTorch's own DistributedDataParallel, for comparison."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.metrics.step_output import StepOutput, read_training_output
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.profiling.timeline import NO_COMMUNICATION, Overlap
from trainkit.task import TaskModule
from trainkit.tree import to_device

from .ddp.bucket_plan import ring_bytes
from .multiprocess import MultiProcessStrategy, RankSettings

_SAMPLE_RATE = 100  # PyTorch's default: one measured step of this many
_ITS_ARGUMENTS = signature(DistributedDataParallel.__init__).parameters
# Buffers are sent after each step, as under all strategies; what leaves them alone has a newer name.
_WITHOUT_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ITS_ARGUMENTS else "broadcast_buffers": False
}


class TorchDDPStrategy(MultiProcessStrategy):
    """PyTorch's Reducer under the same sampling, weighting and launching as `ddp`.

    Args:
        devices: Ranks to start on this machine; "auto" is one for each GPU, or two on the CPU.
        device: `auto`, `cpu` or `cuda`.
        accumulate: Micro-batches of a step on each rank.
        micro_batch_size: Samples on one device at once, at most.
        bucket_mb: Size of a bucket in MiB; `None`: PyTorch's own.
        find_unused: Whether parameters may take no part in the loss.
        static_graph: Whether every step uses the same parameters equally often.
        gradient_as_bucket_view: Whether gradients are parts of the buckets.
        broadcast_buffers: Whether buffers (batch-norm statistics) are those of rank 0 after every step.
        timeout_seconds: Seconds to wait for another rank.
        backend: `auto` (gloo on the CPU, nccl on CUDA), or a backend of torch.distributed.
        launcher: Who starts the ranks: `local` (this process, on this machine) or `ray` (a Ray cluster).
        process_group: The ranks that train together, where this process has joined others already; `None`: all ranks.

    """

    def __init__(
        self,
        *,
        devices: int | str = "auto",
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        bucket_mb: float | None = None,
        find_unused: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        timeout_seconds: float = 1800.0,
        backend: str = "auto",
        launcher: str = "local",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            RankSettings(
                devices=devices,
                device=device,
                timeout_seconds=timeout_seconds,
                backend=backend,
                launcher=launcher,
                process_group=process_group,
            ),
            accumulate=accumulate,
            micro_batch_size=micro_batch_size,
            broadcast_buffers=broadcast_buffers,
        )
        self.bucket_mb = bucket_mb
        self.find_unused = find_unused
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._wrapped: DistributedDataParallel | None = None
        self._through: _Through | None = None
        self._times: ReducerTimes | None = None
        self._last: Any = None  # the batch that this rank had last
        self._has_stepped = False

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Wrap the training step, beside the task, so that the task's own names do not change; collective."""
        self._wrapped = DistributedDataParallel(
            _TrainingStep(task),
            process_group=self.comm.group,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            **_WITHOUT_BUFFERS,
            bucket_cap_mb=self.bucket_mb,
            find_unused_parameters=self.find_unused,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        self._through = _Through(self._wrapped)
        self._last, self._has_stepped = None, False

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch; collective."""
        if batch.micro_batches:
            self._last = batch.micro_batches[0].batch
        if not self._has_stepped and batch.num_samples < self.comm.world_size:
            self._share_first_batch()
        self._has_stepped = True
        assert self._through is not None
        with self.comm.waiting(f"forward and backward of step {self._steps}"):
            outputs = super().forward_backward(self._through, batch)
        if self._times is not None:
            self._times.add_previous_step()
        return outputs

    def _reduce_zeros(self) -> None:
        """Take part in a reduction with the last batch at weight zero: PyTorch's Reducer needs a backward."""
        assert self._wrapped is not None
        returned = self._wrapped(self._last)
        loss = read_training_output(returned, 1, self._wrapped.module.task).loss
        assert loss is not None
        (loss * 0.0).backward()

    def _share_first_batch(self) -> None:
        """Give ranks that have had no samples yet a batch to stand in with: rank 0's; collective."""
        batch = self.comm.broadcast_object(to_device(self._last, torch.device("cpu")) if self.comm.rank == 0 else None)
        if self._last is None:
            self._last = self._move(batch)

    def _backward(self, output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> None:
        """Add this micro-batch's part to the gradients, such that PyTorch's mean over ranks is the sum."""
        loss = output.loss
        assert loss is not None
        undivided = self._is_undivided(batch.micro_batches, batch)
        share = 1.0 if undivided else output.weight / batch.num_samples
        self.precision.scale(loss * (share * self.comm.world_size)).backward()
        output.loss = loss.detach()

    def start_overlap_profile(self) -> None:
        """Let PyTorch's Reducer measure every step from now on."""
        if self._wrapped is not None and self.comm.world_size > 1:
            self._times = ReducerTimes(self._wrapped)

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Return what PyTorch's Reducer measured since `start_overlap_profile`, which ends."""
        times, self._times = self._times, None
        if times is None:
            return NO_COMMUNICATION if self.comm.num_processes == 1 else None
        return times.close()

    @property
    def waited_seconds(self) -> float | None:
        """Not known: PyTorch's Reducer does not tell."""
        return None

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which PyTorch's Reducer only accumulates."""
        return nullcontext() if self._wrapped is None else self._wrapped.no_sync()

    def _synced(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @property
    def bytes_a_step(self) -> int:
        """Bytes of gradients that this rank sends in a step."""
        return ring_bytes(sum(parameter.nbytes for parameter in self._all_trained), self.comm.world_size)

    def teardown(self) -> None:
        """Drop the wrapper and leave the group; may be called twice."""
        self._wrapped = self._through = self._times = self._last = None
        super().teardown()


class _TrainingStep(nn.Module):
    """A module whose forward is the task's training step: what PyTorch's wrapper needs."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> Any:
        return self.task.training_step(batch)


class _Through(TaskModule):
    """Stands in for the task where its training step is called."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        super().__init__()
        self.wrapped = wrapped

    def training_step(self, batch: Any) -> Any:
        return self.wrapped(batch)


class ReducerTimes:
    """Communication of each step as PyTorch's Reducer measures it, known when the next step begins."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._wrapped = wrapped
        self._times: list[tuple[float, float]] | None = None  # of each step: communication, hidden; seconds
        wrapped._set_ddp_runtime_logging_sample_rate(1)

    def add_previous_step(self) -> None:
        """Add the times of the step before the current one, except in the first call."""
        if self._times is None:
            self._times = []
            return
        data = self._wrapped._get_ddp_logging_data()
        if "backward_comm_time" in data:  # some modules and devices are not measured
            communication = data["backward_comm_time"] / 1e9
            self._times.append((communication, min(data["backward_compute_comm_overlap_time"] / 1e9, communication)))

    def close(self) -> Overlap | None:
        """Restore the Reducer's sampling rate and return the means; `None` without any measured step."""
        self._wrapped._set_ddp_runtime_logging_sample_rate(_SAMPLE_RATE)
        if not self._times:
            return None
        communication, hidden = (sum(column) / len(self._times) for column in zip(*self._times, strict=True))
        note = "behind backward, from the first bucket to the last, on this rank"
        return Overlap(communication - hidden, communication, len(self._times), note=note)
