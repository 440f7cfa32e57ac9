"""The interface of strategies: where the work of a step is done, never what is computed.

After `forward_backward` gradients are those of the weighted mean loss over the whole global batch, and logged values
are weighted means over it. Every method has its meaning for one process and one device here; a strategy overrides what
it does differently. What only some strategies offer is a Protocol at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from signal import Signals
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from trainkit.checkpoint.shards import ShardedState
from trainkit.data.batch import BatchPlan, MicroBatch, StepBatch, split_error
from trainkit.data.prefetch import prefetched
from trainkit.data.sampler import Order, ShardSampler
from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError, nearest
from trainkit.metrics.step_output import StepOutput, read_evaluation_output, read_training_output
from trainkit.metrics.sync import metrics_in
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.precision import Precision
from trainkit.profiling.timeline import Overlap
from trainkit.signals import ALWAYS
from trainkit.task import TaskModule
from trainkit.tree import to_device

T = TypeVar("T")
_NO_CONTEXT = nullcontext()
_DEVICE_KINDS = ("auto", "cpu", "cuda", "mps")


class Strategy:
    """One process on one device, unless overridden.

    Order of calls: `validate` and `launch` in the caller's process; then on every rank `setup`, `plan`, `sampler`,
    `prepare`, `prepare_optimizer`; for each step a batch of `step_batches`, `forward_backward`, `optimizer_step`; at
    the end `teardown`. A method said to be collective must be called by every rank at the same point.

    Args:
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        accumulate: Micro-batches of a step on each rank; the global batch must divide by it.
        micro_batch_size: Samples on one device at once, at most; another way to say how often to accumulate. `auto`,
            where the strategy supports it, halves the size whenever a micro-batch does not fit into memory.

    """

    attempt: int = 0
    """How often the ranks of this run were lost and started again."""
    supports_module_hooks: bool = True
    """Whether the modules of a step run as they are, so that hooks see all their outputs."""

    def __init__(
        self,
        *,
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
    ) -> None:
        is_auto = micro_batch_size == "auto"
        if is_auto:
            if not isinstance(self, SupportsAutoMicroBatch):
                raise UserError(
                    f"micro_batch_size=auto does not work with {type(self).__name__}; give a number, or use "
                    "strategy=single, dp, ddp or fusion."
                )
            self.auto_micro_batch = True
        size = None if isinstance(micro_batch_size, str) and is_auto else micro_batch_size
        for name, value in (("accumulate", accumulate), ("micro_batch_size", size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"{name} must be a whole number, at least 1, got {value!r}.")
        if accumulate is not None and micro_batch_size is not None:
            raise UserError(
                f"accumulate={accumulate} and micro_batch_size={micro_batch_size} say the same thing in two ways; set "
                "one of them."
            )
        self.comm = Collectives()
        """This process's place among the ranks, and the collectives; those of the run from `setup` on."""
        self.device = torch.device("cpu")
        """Where this process computes; known from `setup` on."""
        self.precision = Precision()
        self.accumulate = accumulate
        self.micro_batch_size = size if isinstance(size, int) else None
        self.num_micro_batches: int = accumulate or (2 if is_auto or size is not None else 1)
        """Micro-batches in which each rank is asked to take its shard of a step (2 if there is a limit on size)."""
        self.log_dir: Path | None = None
        """The run's folder, where ranks other than the main one write what they print."""
        self.stop_signals: Sequence[Signals] = ALWAYS
        """Signals that the process that started the ranks forwards to them."""
        self._is_auto = is_auto
        self._requested_device = device
        self._trained: list[nn.Parameter] = []  # by the present phase
        self._all_trained: list[nn.Parameter] = []  # by some phase
        self._step_name = "training_step"

    # ---- Ranks

    def validate(self) -> None:
        """Raise UserError for what this machine cannot run; called before any process is started."""
        pick_device(self._requested_device)

    def launch(self, run: Callable[[], T]) -> T:
        """Call `run` on every rank and return what it returned on rank 0."""
        return run()

    def setup(self, precision: Precision) -> None:
        """Leave `device`, `precision` and `comm` those of the run, joined with the other ranks; collective."""
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

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Arrange for the optimizer's gradients to be reduced; collective, before a run is restored.

        Called once for each phase of a task that has several; raises UserError for an optimizer it cannot step.
        """

    def teardown(self) -> None:
        """Leave the other ranks and release what was acquired; may be called twice."""

    # ---- Data

    def plan(self, batch_size: int, *, even: bool = True) -> BatchPlan:
        """Return how a global batch is split; raises UserError where it should be `even` and cannot be.

        Batches that need not be even are those of evaluations, and pre-batched ones of any size.
        """
        world_size = self.comm.world_size
        share = -(-batch_size // world_size)  # of the rank that has most
        if self.accumulate is not None:
            error = split_error(batch_size, accumulate=self.accumulate, world_size=world_size)
            if even and error is not None:
                raise UserError(error)
            size = -(-share // self.accumulate)
        else:
            size = min(share, self.micro_batch_size or share)
        return BatchPlan(batch_size, world_size, -(-share // size), size)

    def sampler(self, dataset: Any, order: Order) -> ShardSampler:
        """Return the sampler of this rank's shard of each global batch."""
        return ShardSampler(dataset, order, rank=self.comm.rank, world_size=self.comm.world_size)

    def step_batches(self, batches: Iterator[StepBatch], *, pin_memory: bool) -> Iterator[StepBatch]:
        """Return the batches with their micro-batches on the device; on CUDA one is copied ahead."""
        if self.device.type == "cpu" and self.precision.batch_type is None:
            return batches
        return prefetched(batches, self._move, device=self.device, pin_memory=pin_memory)

    def _move(self, batch: Any) -> Any:
        return to_device(batch, self.device, dtype=self.precision.batch_type)

    # ---- A step

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch; collective.

        Gradients are added to those that are there. Returns the outputs of this rank's own micro-batches, without
        their graphs. A rank without samples takes part, and returns `[]`.
        """
        outputs: list[StepOutput] = []
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            with self.no_sync() if index < last else self._synced():
                with self.precision.forward():
                    returned = getattr(task, self._step_name)(micro_batch.batch)
                output = read_training_output(returned, micro_batch.num_samples, task, self._step_name)
                self._backward(output, micro_batch, batch)
            outputs.append(output)
        self._normalize_gradients(outputs, batch)
        return outputs

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which a backward adds to this rank's own gradients only; nothing is reduced."""
        return _NO_CONTEXT

    def optimizer_step(self, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Unscale, clip, update, and drop the gradients; collective.

        Returns the global norm of the gradients before clipping, a scalar on the device, where it was needed.
        """
        phase_optimizer.unscale()
        norm = None
        if phase_optimizer.clip.norm is not None or phase_optimizer.skip_nonfinite:
            norm = self._grad_norm(phase_optimizer)
        if phase_optimizer.clip.norm is not None and norm is not None:
            phase_optimizer.clip_by_norm(norm)
        elif phase_optimizer.clip.value is not None:
            phase_optimizer.clip_by_value()
        phase_optimizer.update(norm=norm)
        phase_optimizer.zero_grad()
        return norm

    def _synced(self) -> AbstractContextManager[Any]:
        """Return the context of a step's last backward: at its end gradients are summed over ranks. Collective."""
        return _NO_CONTEXT

    def _backward(self, output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> None:
        """Add this micro-batch's part to the gradients and free its graph."""
        loss = output.loss
        assert loss is not None
        weight = loss_weight(output, micro_batch, batch)
        self.precision.scale(loss if isinstance(weight, float) and weight == 1.0 else loss * weight).backward()
        output.loss = loss.detach()

    def _normalize_gradients(self, outputs: Sequence[StepOutput], batch: StepBatch) -> None:
        """Divide by the batch's sum of weights where the task returned weights of its own; collective."""
        if len(outputs) > 1 and any(output.own_weight for output in outputs):
            self._scale_gradients(_quotient(batch.num_samples, sum(output.weight for output in outputs)))

    def _scale_gradients(self, factor: float | Tensor) -> None:
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        if gradients:  # a pipeline's stage may have none
            torch._foreach_mul_(gradients, factor)

    def _grad_norm(self, phase_optimizer: PhaseOptimizer) -> Tensor:
        """Return the global 2-norm of the gradients, a scalar on the device; collective."""
        return torch.nn.utils.get_total_norm(phase_optimizer.gradients())

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

    # ---- State, full and under the bare task's names whatever the strategy; all collective

    def state_dict(self, task: TaskModule) -> dict[str, Any]:
        """Return the task's parameters and buffers; complete on rank 0."""
        return task.state_dict()

    def load_state_dict(self, task: TaskModule, saved: dict[str, Any]) -> None:
        """Give the task the parameters and buffers in `saved`, which is complete on every rank."""
        task.load_state_dict(saved)

    def optimizer_state_dict(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> dict[str, Any]:
        """Return the optimizer's state; complete on rank 0."""
        return phase_optimizer.optimizer.state_dict()

    def load_optimizer_state_dict(
        self, task: TaskModule, phase_optimizer: PhaseOptimizer, saved: dict[str, Any]
    ) -> None:
        """Give the optimizer the state in `saved`, which is complete on every rank."""
        own = phase_optimizer.optimizer.param_groups
        pairs = zip(saved["param_groups"], own, strict=True)
        # Which kernels are used is this run's own choice, not the one that was saved.
        groups = [{**old, **{key: new[key] for key in ("fused", "foreach") if key in new}} for old, new in pairs]
        phase_optimizer.optimizer.load_state_dict({**saved, "param_groups": groups})

    def strategy_state(self) -> dict[str, Any]:
        """Return what this strategy found out for itself and a resumed run must not find otherwise; not collective."""
        return {}

    def load_strategy_state(self, saved: Mapping[str, Any]) -> None:
        """Take over the `strategy_state` of the run that is resumed, which may be that of another strategy."""


class PhaseTraining(Strategy):
    """A strategy that trains the parameters of one phase at a time: what SupportsPhases asks for."""

    def check_phases(self, task: TaskModule) -> None:
        """Raise UserError for a task whose phases cannot be trained; called before any process is started."""

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Let the next `forward_backward` train a phase's parameters alone, by the task's method `step_name`."""
        own = {id(parameter) for parameter in phase_optimizer.parameters}
        for parameter in self._all_trained:
            parameter.requires_grad_(id(parameter) in own)
        self._trained = phase_optimizer.parameters
        self._step_name = step_name
        self.precision.begin_phase(phase_optimizer.phase)

    def end_phases(self) -> None:
        """Leave every parameter that some phase trains requiring a gradient."""
        for parameter in self._all_trained:
            parameter.requires_grad_(True)
        self._trained, self._step_name = self._all_trained, "training_step"

    def teardown(self) -> None:
        """End the phases, leave the other ranks and release what was acquired; may be called twice."""
        self.end_phases()
        super().teardown()


# ---- What a strategy may offer besides; asked for with isinstance


@runtime_checkable
class SupportsPhases(Protocol):
    """Trains tasks with several optimizers, one phase after the other."""

    def check_phases(self, task: TaskModule) -> None:
        """Raise UserError for a task whose phases cannot be trained; called before any process is started."""

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Let the next `forward_backward` train a phase's parameters alone, by the task's method `step_name`."""

    def end_phases(self) -> None:
        """Leave every parameter that some phase trains requiring a gradient; may be called without a phase."""


@runtime_checkable
class SupportsAutoMicroBatch(Protocol):
    """Raises torch.OutOfMemoryError from `forward_backward` on every rank if it is raised on one.

    The caller then drops the gradients, sets a smaller `micro_batch_size`, and computes the step again.
    """

    auto_micro_batch: bool
    """Whether `micro_batch_size=auto` was asked for."""


@runtime_checkable
class SupportsOverlapProfile(Protocol):
    """Measures how much of its communication goes on behind computation."""

    @property
    def waited_seconds(self) -> float | None:
        """Seconds of steps in which this process only waited for others; `None` where that is unknown."""

    def start_overlap_profile(self) -> None:
        """Measure communication from the next step on."""

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring and return the means over `steps`; `None` where they are unknown."""


@runtime_checkable
class SupportsShardedState(Protocol):
    """Holds parameters or optimizer state of which no rank has all."""

    def shards(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> ShardedState | None:
        """Return this rank's shards of the state; `None` while one rank has all of it. Collective."""

    def local_state(self, task: TaskModule) -> dict[str, Tensor]:
        """Return the parameters and buffers that this process holds, themselves and by name."""


@runtime_checkable
class PreparesSteps(Protocol):
    """Has to see the first batch of training before anything is evaluated."""

    def prepare_steps(self, task: TaskModule, batches: Iterator[StepBatch]) -> None:
        """Get ready for the first step; collective.

        `batches` are those that training begins with, not on the device yet; `step_batches` returns the one that was
        read here as its first.
        """


@runtime_checkable
class SupportsReplicas(Protocol):
    """Drives copies of the task in one process."""

    def metric_modules(self, task: TaskModule) -> list[nn.Module]:
        """Return the modules with metric states in the task, then those in each of its copies."""


@runtime_checkable
class StartsRanks(Protocol):
    """Runs the ranks in processes that may be other than the caller's."""

    @property
    def starts_ranks(self) -> bool:
        """Whether `launch` would start processes, as this one is not one of the ranks."""

    def final_state_dict(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained state on the main rank if `launch` was called in another process, else `None`; collective.

        Where the caller is a rank, the task it passed is complete afterwards.
        """


def local_state(strategy: Strategy, task: TaskModule) -> dict[str, Tensor]:
    """Return the parameters and buffers that this process holds, themselves and by name; not collective."""
    if isinstance(strategy, SupportsShardedState):
        return strategy.local_state(task)
    return named_state(task)


def named_state(task: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name."""
    return dict([*task.named_parameters(), *task.named_buffers()])


def metric_modules(strategy: Strategy, task: TaskModule) -> list[nn.Module]:
    """Return the modules with metric states in the task, then those in each copy of it in this process."""
    return strategy.metric_modules(task) if isinstance(strategy, SupportsReplicas) else metrics_in(task)


def waited_seconds(strategy: Strategy) -> float | None:
    """Return the seconds in which this process only waited for others in steps; `None` where that is unknown."""
    return strategy.waited_seconds if isinstance(strategy, SupportsOverlapProfile) else None


def uses_auto_micro_batch(strategy: Strategy) -> bool:
    """Return whether the size of micro-batches is found while training."""
    return isinstance(strategy, SupportsAutoMicroBatch) and strategy.auto_micro_batch


def check_phases_run(task: TaskModule, strategy: Strategy) -> None:
    """Raise UserError for a task with phases on a strategy that cannot train them."""
    if not isinstance(strategy, SupportsPhases):
        name = type(strategy).__name__
        raise UserError(
            f"{type(task).__name__} has phases, which {name} cannot train: each has a step and optimizer of its own, "
            f"and {name} prepares one of each. Type strategy=ddp, strategy=dp, strategy=pipeline or strategy=single."
        )
    strategy.check_phases(task)


def loss_weight(output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> float | Tensor:
    """Return what a micro-batch's loss is multiplied by in the sum that backward starts from."""
    if micro_batch.num_samples != batch.num_samples:
        return output.weight / batch.num_samples
    return 1.0 if not output.own_weight else _one_unless_zero(output.weight)


def pick_device(name: str) -> torch.device:
    """Return the device called `name` (`auto`: the best one available); raises UserError for one that is missing."""
    kind, _, index = str(name).partition(":")
    if kind not in _DEVICE_KINDS or (index and not index.isdigit()):
        raise UserError(
            f"unknown device {name!r}.{nearest(kind, _DEVICE_KINDS)} Choose auto, cpu, cuda, cuda:0 or mps."
        )
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(index or 0) >= count:
            raise UserError(
                f"device {name!r} is not there: torch sees {count} CUDA device{'s' * (count != 1)}; "
                f"set device={'cuda:0' if count else 'cpu'}, or install a torch build for your GPU."
            )
    if kind == "mps" and not _has_mps():
        raise UserError("device 'mps' is not there; set device=cpu.")
    return torch.device(str(name))


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def _one_unless_zero(weight: float | Tensor) -> float | Tensor:
    """Return 1 for a weight above 0; a batch of padding only, whose weight is 0, does not count."""
    return (weight > 0).to(weight.dtype) if isinstance(weight, Tensor) else float(weight > 0)


def _quotient(samples: int, weight: float | Tensor) -> float | Tensor:
    """Return `samples / weight`, or 0 where the weight is."""
    if isinstance(weight, Tensor):
        return torch.where(weight > 0, samples / weight, 0.0)
    return samples / weight if weight else 0.0
