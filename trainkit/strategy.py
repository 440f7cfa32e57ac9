"""The interface of strategies: where the work of a step is done.

What is computed is fixed: after a window, gradients are those of the weighted mean loss over the whole global
batch, and metrics are weighted means over it. A strategy decides which device does which part. Every method has
its meaning for one process and one device here; a strategy overrides what it does differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from trainkit.batches import to_device
from trainkit.checkpoints.shards import Shards
from trainkit.cutting import cutting_complaint
from trainkit.data import Source
from trainkit.devices import pick_device
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput, read_evaluation_output, read_training_output
from trainkit.metrics.sync import metrics_in
from trainkit.optimization import Optimization
from trainkit.precision import Precision
from trainkit.prefetch import prefetched
from trainkit.profiling.timeline import NO_COMMUNICATION, Overlap
from trainkit.sampling import Order, ShareSampler
from trainkit.signals import ALWAYS
from trainkit.task import TaskModule
from trainkit.window import MicroBatch, Window

T = TypeVar("T")
_NO_SESSION = nullcontext()


@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut: ranks x micro-batches of a rank x samples of a micro-batch."""

    batch_size: int
    world_size: int
    micro_batches: int
    micro_batch_size: int

    def __str__(self) -> str:
        return (
            f"global batch {self.batch_size} = {self.world_size} rank{'s' * (self.world_size > 1)} x "
            f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)} x {self.micro_batch_size} samples"
        )


class Strategy:
    """One process, one device, unless overridden.

    The methods are called in this order: `launch` in the caller's process; then on every rank `setup`, `plan`,
    `sampler`, `prepare`, `prepare_optimization`, `prepare_steps`; for each step `windows`, `forward_backward`,
    `optimizer_step`; at the end `teardown`. Those said to be collective must be called by every rank at the same point.
    """

    rank: int = 0
    world_size: int = 1
    attempt: int = 0
    """How often the ranks of this run have been lost and started again."""
    runs_phases: bool = True
    """Whether a task may have several optimizers."""
    shows_modules: bool = True
    """Whether the modules of a step run as they are, so that hooks see all their outputs."""

    can_fit_memory: bool = False
    """Whether `micro_batch_size=auto` works: a window can be given up and computed again on all ranks."""

    def __init__(
        self,
        *,
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
    ) -> None:
        self.fits_memory = micro_batch_size == "auto"
        """Whether the size of micro-batches is found out while training."""
        if micro_batch_size == "auto":
            if not self.can_fit_memory:
                raise UserError(
                    f"micro_batch_size=auto does not work with {type(self).__name__}; give a number, or use "
                    "strategy=single, dp, ddp or fusion."
                )
            micro_batch_size = None
        for name, value in (("accumulate", accumulate), ("micro_batch_size", micro_batch_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"{name} must be a whole number, at least 1, got {value!r}.")
        if accumulate is not None and (self.fits_memory or micro_batch_size is not None):
            raise UserError(
                f"accumulate={accumulate} and micro_batch_size={micro_batch_size or 'auto'} say the same thing in two "
                "ways; set one of them."
            )
        self.accumulate = accumulate
        self.micro_batch_size: int | None = micro_batch_size
        self.device = torch.device("cpu")
        self.precision = Precision()
        self.log_dir: Path | None = None
        """The run's folder, where ranks other than the main one write what they print."""
        self.stop_signals: Sequence[Signals] = ALWAYS
        """What started ranks are sent on, when the process that started them receives it."""
        self._requested_device = device
        self._trained: list[nn.Parameter] = []
        self._all_trained: list[nn.Parameter] = []  # by some phase
        self._step_name = "training_step"

    # ---- Where the ranks are

    @property
    def process(self) -> int:
        """Which of all processes this one is: its rank, unless several share the samples of one rank."""
        return self.rank

    @property
    def num_processes(self) -> int:
        """Processes that take part; the length of what `all_gather_object` returns."""
        return self.world_size

    @property
    def num_devices(self) -> int:
        """Different devices that take part, over all processes."""
        return self.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.process == 0

    @property
    def starts_ranks(self) -> bool:
        """Whether `launch` would start processes, as this one is not one of the ranks."""
        return False

    @property
    def waited_seconds(self) -> float | None:
        """Seconds in which this process has done nothing in steps but wait for others; `None` where that is unknown."""
        return None

    def watch_overlap(self) -> None:
        """Measure from now on what communication computation hides; only the profiler asks for it."""

    def take_overlap(self, steps: int) -> Overlap | None:
        """Stop measuring, and return what was found in the `steps` since `watch_overlap`; `None` if it is not known."""
        return NO_COMMUNICATION if self.num_processes == 1 else None

    def validate(self) -> None:
        """Raise UserError for what this machine cannot run; called before any process is started."""
        pick_device(self._requested_device)

    def check_phases(self, task: TaskModule) -> None:
        """Raise UserError for a task with phases that could not be trained; called before any process is started."""

    def launch(self, run: Callable[[], T]) -> T:
        """Call `run` on every rank and return what it returned on rank 0."""
        return run()

    def weights_for_caller(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained weights where `launch` was called in another process; `None` where the caller has them."""
        return None

    def setup(self, precision: Precision) -> None:
        """Choose the device and join the other ranks; collective."""
        self.device = pick_device(self._requested_device)
        self.precision = precision
        precision.setup(self.device)

    def prepare(self, task: TaskModule) -> None:
        """Leave the task on the device, with rank 0's parameters and buffers on every rank; collective.

        The task is changed in place and not wrapped: names of parameters stay those of the bare task.
        """
        self.precision.prepare(task)
        task.to(self.device)
        self._trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        self._all_trained = self._trained

    def prepare_optimization(self, task: TaskModule, optimization: Optimization) -> None:
        """Arrange for gradients to be reduced; called once the optimizer exists, before a run is restored.

        Called for each phase of a task that has several; raises UserError if the strategy has no phases.
        """

    def prepare_steps(self, task: TaskModule, windows: Iterator[Window]) -> None:
        """Get ready for the first step, before anything is evaluated; collective.

        `windows` are those that training will begin with, not on the device yet. A strategy that looks at the first one
        gives it again in `windows`.
        """

    def teardown(self) -> None:
        """Leave the other ranks and release what was acquired; may be called twice."""

    # ---- Who reads what

    @property
    def micro_batches_of_a_step(self) -> int:
        """Micro-batches in which each rank is asked to take its part of a step (1 if there is only a limit on size)."""
        return self.accumulate or (2 if self.fits_memory or self.micro_batch_size is not None else 1)

    def plan(self, batch_size: int, *, even: bool = True) -> BatchPlan:
        """Return how a global batch is cut; raises UserError where it should be `even` and cannot be.

        Batches that need not be even are those of evaluations, and ready-made ones of whatever size they have.
        """
        share = -(-batch_size // self.world_size)  # of the rank that has most
        if self.accumulate is not None:
            complaint = cutting_complaint(batch_size, accumulate=self.accumulate, world_size=self.world_size)
            if even and complaint is not None:
                raise UserError(complaint)
            size = -(-share // self.accumulate)
        else:
            size = min(share, self.micro_batch_size or share)
        return BatchPlan(batch_size, self.world_size, -(-share // size), size)

    def sampler(self, dataset: Any, order: Order) -> ShareSampler:
        """Return the sampler of this rank's share of each global batch."""
        return ShareSampler(dataset, order, rank=self.rank, world_size=self.world_size)

    def windows(self, windows: Iterator[Window], source: Source) -> Iterator[Window]:
        """Return the windows with their micro-batches on the device, copied ahead where the device allows it."""
        if self.device.type == "cpu" and self.precision.batch_type is None:
            return windows
        return prefetched(windows, self._move, device=self.device, pin_memory=source.pin_memory)

    def _move(self, batch: Any) -> Any:
        return to_device(batch, self.device, dtype=self.precision.batch_type)

    # ---- A step

    def forward_backward(self, task: TaskModule, window: Window) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch.

        Returns the outputs of this rank's own micro-batches, without their graphs. Collective.
        """
        outputs: list[StepOutput] = []
        last = len(window.micro_batches) - 1
        for index, micro_batch in enumerate(window.micro_batches):
            with self.gradient_session(sync=index == last):
                with self.precision.forward():
                    returned = getattr(task, self._step_name)(micro_batch.batch)
                output = read_training_output(returned, micro_batch.num_samples, task, self._step_name)
                self.backward(output, micro_batch, window)
            outputs.append(output)
        self.finish_gradients(outputs, window)
        return outputs

    def backward(self, output: StepOutput, micro_batch: MicroBatch, window: Window) -> None:
        """Add this micro-batch's part to the gradients and free its graph."""
        loss = output.loss
        assert loss is not None
        share = self.share_of(output, micro_batch, window)
        self.precision.scale(loss if isinstance(share, float) and share == 1.0 else loss * share).backward()
        output.loss = loss.detach()

    def share_of(self, output: StepOutput, micro_batch: MicroBatch, window: Window) -> float | Tensor:
        """Return what a micro-batch's loss is multiplied by in the sum that backward starts from."""
        if micro_batch.num_samples != window.num_samples:
            return output.weight / window.num_samples
        return 1.0 if not output.own_weight else _one_unless_zero(output.weight)

    def finish_gradients(self, outputs: Sequence[StepOutput], window: Window) -> None:
        """Divide by the window's sum of weights where the task gave weights of its own; collective."""
        if len(outputs) > 1 and any(output.own_weight for output in outputs):
            self.scale_gradients(_quotient(window.num_samples, sum(output.weight for output in outputs)))

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient that `forward_backward` left."""
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        if gradients:  # a pipeline's stage may have none
            torch._foreach_mul_(gradients, factor)

    def begin_phase(self, optimization: Optimization, *, step_name: str) -> None:
        """Let the next `forward_backward` train a phase's parameters alone, by the task's method `step_name`."""
        own = {id(parameter) for parameter in optimization.parameters}
        for parameter in self._all_trained:
            parameter.requires_grad_(id(parameter) in own)
        self._trained = optimization.parameters
        self._step_name = step_name
        self.precision.begin_phase(optimization.phase)

    def end_phases(self) -> None:
        """Let every parameter require a gradient again that some phase trains."""
        for parameter in self._all_trained:
            parameter.requires_grad_(True)
        self._trained, self._step_name = self._all_trained, "training_step"

    def gradient_session(self, *, sync: bool) -> AbstractContextManager[Any]:
        """Return the context of one backward: gradients are reduced over ranks in it if `sync`, else only added up."""
        return _NO_SESSION

    def optimizer_step(self, optimization: Optimization) -> Tensor | None:
        """Unscale, clip, update, and drop the gradients; return their global norm where it was needed. Collective."""
        optimization.unscale()
        norm = None
        if optimization.clip.norm is not None or optimization.skip_nonfinite:
            norm = self.gradient_norm(optimization)
        if optimization.clip.norm is not None and norm is not None:
            optimization.clip_by_norm(norm)
        elif optimization.clip.value is not None:
            optimization.clip_by_value()
        optimization.update(norm=norm)
        optimization.zero_grad()
        return norm

    def gradient_norm(self, optimization: Optimization) -> Tensor:
        """Return the global 2-norm of the gradients, a scalar on the device; collective."""
        return torch.nn.utils.get_total_norm(optimization.gradients())

    # ---- Evaluation

    def evaluate(
        self, task: TaskModule, micro_batch: MicroBatch, step_name: Literal["validation_step", "test_step"]
    ) -> StepOutput:
        """Return the metrics of one batch of this rank; not collective, as ranks may have unequal numbers of them."""
        with self.precision.forward():
            returned = getattr(task, step_name)(self._move_for_evaluation(micro_batch.batch))
        return read_evaluation_output(returned, micro_batch.num_samples, task, step_name)

    def predict(self, task: TaskModule, micro_batch: MicroBatch) -> Any:
        """Return the predictions for one batch of this rank; not collective."""
        with self.precision.forward():
            return task.predict_step(self._move_for_evaluation(micro_batch.batch))

    def _move_for_evaluation(self, batch: Any) -> Any:
        return batch if self.device.type == "cpu" and self.precision.batch_type is None else self._move(batch)

    def metrics_of(self, task: TaskModule) -> list[nn.Module]:
        """Return what holds states of metrics in the task, and in the copies of it that this process drives."""
        return metrics_in(task)

    def stop_evaluating(self, requested: bool) -> bool:
        """Return whether to leave an evaluation after this batch; ranks that evaluate a batch together must agree."""
        return requested

    def gather_predictions(self, outputs: list[Any]) -> list[Any]:
        """Return all ranks' predictions in the order of the dataset; collective."""
        return outputs

    # ---- Talking to the other ranks

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "min", "max"] = "sum") -> Tensor:
        """Return the reduction of `tensor` over ranks; collective."""
        return tensor

    def all_gather_object(self, value: T) -> list[T]:
        """Return each rank's value, in the order of ranks; collective."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value; collective."""
        return value

    def barrier(self) -> None:
        """Return when every rank has come here; collective."""

    def agree(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank; collective."""
        return flag

    def agree_to_stop(self, requested: bool, *, seconds: float = 0.0) -> bool:
        """Return on every rank after the same step whether any rank was asked to stop; called after every step.

        It may answer some steps late, but must not wait for the device. `seconds` is this rank's time of training.
        """
        return requested

    def agreed_seconds(self, seconds: float) -> float:
        """Return the longest time of any rank as `agree_to_stop` last knew it, or one's own `seconds` if alone."""
        return seconds

    def sum_named(
        self, sums: Mapping[str, Tensor], *, device: torch.device, dtype: torch.dtype
    ) -> tuple[list[str], Tensor]:
        """Return the names known to any rank, and their `(names, 2)` sums over ranks; one collective."""
        names = list(sums)
        packed = torch.stack([sums[name] for name in names]) if names else torch.zeros(0, 2, dtype=dtype, device=device)
        return names, packed

    # ---- State, whole and under the bare task's names whatever the strategy; all collective

    def state_dict(self, task: TaskModule) -> dict[str, Any]:
        """Return the task's parameters and buffers; complete on rank 0."""
        return task.state_dict()

    def shards(self, task: TaskModule, optimizations: Sequence[Optimization]) -> Shards | None:
        """Return what this rank holds of the state, in pieces that all ranks' make whole; `None`: one rank has all."""
        return None

    def load_state_dict(self, task: TaskModule, saved: dict[str, Any]) -> None:
        """Give the task the parameters and buffers in `saved`."""
        task.load_state_dict(saved)

    def held(self, task: TaskModule) -> dict[str, Tensor]:
        """Return the parameters and buffers that this process holds, themselves and by name; not collective."""
        return dict([*task.named_parameters(), *task.named_buffers()])

    def optimizer_state_dict(self, task: TaskModule, optimization: Optimization) -> dict[str, Any]:
        """Return the optimizer's state; complete on rank 0."""
        return optimization.optimizer.state_dict()

    def load_optimizer_state_dict(self, task: TaskModule, optimization: Optimization, saved: dict[str, Any]) -> None:
        """Give the optimizer the state in `saved`."""
        own = optimization.optimizer.param_groups
        pairs = zip(saved["param_groups"], own, strict=True)
        # Which kernels are used is this run's own choice, not the one that was saved.
        groups = [{**old, **{key: new[key] for key in ("fused", "foreach") if key in new}} for old, new in pairs]
        optimization.optimizer.load_state_dict({**saved, "param_groups": groups})

    def choices(self) -> dict[str, Any]:
        """Return what this strategy has found out for itself and a resumed run must not find otherwise."""
        return {}

    def take_choices(self, saved: Mapping[str, Any]) -> None:
        """Take over what `choices` returned in the run that is resumed, on whatever strategy."""


def _one_unless_zero(weight: float | Tensor) -> float | Tensor:
    """Return what a weight is over itself; a batch of nothing but padding, whose weight is 0, does not count."""
    return (weight > 0).to(weight.dtype) if isinstance(weight, Tensor) else float(weight > 0)


def _quotient(samples: int, weight: float | Tensor) -> float | Tensor:
    """Return `samples / weight`, or 0 where the weight is."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, samples / weight, 0.0)
    return samples / weight if weight else 0.0
