"""TorchDDPStrategy: the same as `ddp` over PyTorch's DistributedDataParallel, for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from inspect import signature
from typing import Annotated, Any, Literal

from annotated_types import Gt, Unit
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import has_streams
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput, read_training_output
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.profiling import Overlap
from trainkit.task import TaskModule

from .gradient_sum import NO_CONTEXT, GradientSum
from .multiprocess import MultiProcessStrategy
from .reducer.bucket_plan import ring_bytes

_SAMPLE_RATE = 100  # PyTorch's default: one measured step of this many
# The strategy broadcasts buffers after each step; the argument that keeps PyTorch from doing it has a newer name.
_PARAMETERS = signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers": False
}


@dataclass(kw_only=True, eq=False, repr=False)
class TorchDDPStrategy(MultiProcessStrategy):
    """PyTorch's Reducer under the same sampling, weighting and launching as `ddp`.

    Further settings are those of `MultiProcessStrategy`.

    Args:
        micro_batch_size: Most samples on one device at once.
        bucket_cap_mb: Size of a bucket in MiB; `None`: PyTorch's default.
        find_unused_parameters: Allow parameters that take no part in the loss.
        static_graph: Every step uses the same parameters equally often.
        gradient_as_bucket_view: Make gradients views of the buckets.

    """

    is_replicated = True

    bucket_cap_mb: Annotated[float, Gt(0), Unit("MiB")] | None = None
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = True
    gradients: TorchSum = field(init=False)

    def __post_init__(self, device: str, micro_batch_size: int | Literal["auto"] | None) -> None:
        super().__post_init__(device, micro_batch_size)
        self.gradients = TorchSum(self._checked_backward)
        self._has_stepped = False

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Wrap the training step outside the task, so that the task's names do not change; collective."""
        step = _TrainingStep(task)
        # Private: PyTorch cannot compare sparse buffers, and the strategy makes all buffers equal itself.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(step, [n for n, _ in step.named_buffers()])
        wrapped = DistributedDataParallel(
            step,
            process_group=self.comm.group,
            device_ids=[self.device] if has_streams(self.device) else None,
            **_NO_BUFFER_SYNC,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
        )
        self.gradients.use(wrapped)
        self._has_stepped = False

    def is_outdated(self, phase_optimizers: Sequence[PhaseOptimizer]) -> bool:
        is_frozen = any([not parameter.requires_grad for parameter in self._trained])  # PyTorch would wait for it
        return super().is_outdated(phase_optimizers) or is_frozen

    def retrain(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> None:
        super().retrain(task, phase_optimizers)
        self.prepare_optimizer(task, phase_optimizers[0])

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch; collective."""
        gradients = self.gradients
        if batch.micro_batches:
            gradients.last = batch.micro_batches[0].batch
        # Once, as every rank has a batch from then on. All ranks decide alike, so all enter the collective or none.
        if not self._has_stepped and self._may_lack_samples(batch):
            gradients.last = self._move(self._batch_of_any_rank(gradients.last))
        self._has_stepped = True
        with self.comm.waiting(f"forward and backward of step {self._steps}"):
            outputs = super().forward_backward(task, batch)
        if gradients.times is not None:
            gradients.times.add_previous_step()
        return outputs

    def _step_of(self, task: TaskModule) -> Callable[[Any], Any]:
        return self.gradients.wrapped

    def _backward(self, output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> None:
        """Add the gradients of this micro-batch, scaled so that PyTorch's mean over ranks is the sum."""
        loss = output.loss
        assert loss is not None
        weight = 1.0 if self._is_undivided(batch) else output.weight / batch.num_samples
        self._checked_backward(self.precision.scale(loss * (weight * self.comm.world_size)))
        output.loss = loss.detach()  # or the graph of every micro-batch would live until the end of the step

    def _checked_backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss, and raise UserError if PyTorch's Reducer did not get those that it waits for.

        It would notice in the next step or never, and this rank would go on into another collective than the others.
        """
        wrapped = self.gradients.wrapped
        is_last = wrapped.require_backward_grad_sync
        trained = [parameter for parameter in self._trained if parameter.requires_grad] if is_last else []
        former = [_version(parameter.grad) for parameter in trained]
        loss.backward()
        if not is_last or self.comm.world_size == 1:
            return
        unused = [
            parameter for parameter, version in zip(trained, former, strict=True) if _version(parameter.grad) == version
        ]
        # With those settings too a loss without any parameter starts no backward in which the Reducer could take part.
        allowed = len(trained) - 1 if self.find_unused_parameters or self.static_graph else 0
        if len(unused) > allowed:
            names = {id(parameter): name for name, parameter in wrapped.module.task.named_parameters()}
            raise UserError(
                f"the loss of rank {self.comm.rank} does not depend on the parameter {names[id(unused[0])]}, for whose "
                "gradient strategy=torch_ddp waits on every rank. Set strategy=ddp"
                f"{'' if allowed else ', or strategy.find_unused_parameters=true'}."
            )

    @property
    def bytes_a_step(self) -> int:
        """Bytes of gradients that this rank sends in a step."""
        return ring_bytes(sum(parameter.nbytes for parameter in self._all_trained), self.comm.world_size)


class TorchSum(GradientSum):
    """The sums that PyTorch's wrapper makes, by one `backward` of its output in each step."""

    def __init__(self, backward: Callable[[Tensor], None]) -> None:
        self.last: Any = None
        """This rank's most recent batch."""
        self.times: ReducerTimes | None = None
        self._backward = backward
        self._wrapped: DistributedDataParallel | None = None

    def use(self, wrapped: DistributedDataParallel) -> None:
        """Sum by this wrapper from now on."""
        self.close()
        self._wrapped = wrapped

    def close(self) -> None:
        self._wrapped, self.last, self.times = None, None, None  # times measure a wrapper that is replaced

    @property
    def wrapped(self) -> DistributedDataParallel:
        """PyTorch's wrapper, whose forward is the task's training step."""
        assert self._wrapped is not None, "prepare_optimizer comes first"
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.wrapped.no_sync()

    def session(self) -> AbstractContextManager[Any]:
        return NO_CONTEXT

    def reduce_zeros(self) -> None:
        """Take part in a reduction with the last batch at weight zero: PyTorch's Reducer needs a backward."""
        returned = self.wrapped(self.last)
        loss = read_training_output(returned, 1, self.wrapped.module.task).loss
        assert loss is not None
        self._backward(loss * 0.0)  # a new zero would have no graph, and start no reduction

    def start_overlap_profile(self) -> None:
        """Start to measure every step with PyTorch's Reducer."""
        if self._wrapped is not None and self.wrapped.process_group.size() > 1:
            self.times = ReducerTimes(self.wrapped)

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring and return the overlap since `start_overlap_profile`."""
        times, self.times = self.times, None
        return None if times is None else times.close()


def _version(gradient: Tensor | None) -> tuple[int, int] | None:
    """Return what changes whenever a backward adds to a gradient."""
    # Backward adds in place, a new version, or assigns, a new object. Private: torch has no public count of writes.
    return None if gradient is None else (id(gradient), gradient._version)


class _TrainingStep(nn.Module):
    """A module whose forward is the task's training step, for PyTorch's wrapper."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> Any:
        return self.task.training_step(batch)


class ReducerTimes:
    """Communication of each step as PyTorch's Reducer measures it, known when the next step begins."""

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._wrapped = wrapped
        self._times: list[tuple[float, float]] | None = None  # of each step: communication, hidden; seconds
        wrapped._set_ddp_runtime_logging_sample_rate(1)  # private, as is all that the Reducer measures

    def add_previous_step(self) -> None:
        """Add the times of the step before the current one, except in the first call."""
        # The first call finds the times of a step from before the profile.
        if self._times is None:
            self._times = []
            return
        data = self._wrapped._get_ddp_logging_data()
        if "backward_comm_time" in data:  # some modules and devices are not measured
            communication = data["backward_comm_time"] / 1e9  # from nanoseconds
            self._times.append((communication, min(data["backward_compute_comm_overlap_time"] / 1e9, communication)))

    def close(self) -> Overlap | None:
        """Restore the Reducer's sampling rate and return the means; `None` without any measured step."""
        self._wrapped._set_ddp_runtime_logging_sample_rate(_SAMPLE_RATE)
        if not self._times:
            return None
        communication, hidden = (sum(column) / len(self._times) for column in zip(*self._times, strict=True))
        note = "behind backward, from the first bucket to the last, on this rank"
        return Overlap(communication - hidden, communication, len(self._times), note=note)
