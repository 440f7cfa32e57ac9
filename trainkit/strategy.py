"""The interface of strategies: where the work of a step is done, never what is computed.

After `forward_backward` gradients are those of the weighted mean loss over the whole global batch, and logged values
are weighted means over it. Each method here is that of one process and one device; a strategy overrides the ones that
differ. Features of some strategies only are the protocols at the end of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from annotated_types import Ge
from torch import Tensor, nn

from trainkit.checkpoint.sharded_state import ShardedState, in_memory
from trainkit.data.batch import BatchPlan, MicroBatch, StepBatch, split_error
from trainkit.data.order import Order, ShardSampler
from trainkit.devices import enter, pick
from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput, read_evaluation_output, read_training_output
from trainkit.metrics.sync import metrics_in
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.precision import Precision
from trainkit.settings import check_arguments
from trainkit.signals import ALWAYS
from trainkit.task import TaskModule, has_meta_tensors, is_deferred
from trainkit.tree import to_device

if TYPE_CHECKING:
    from trainkit.data.data import StageData
    from trainkit.distributed.rank_loss import Handover
    from trainkit.profiling import Overlap

T = TypeVar("T")
_NO_CONTEXT = nullcontext()  # without a state, so one serves all steps
PARTIAL_GRADIENTS = ("shard_optimizer", "optimizer_in_backward")
"""Settings of strategies under which no rank has the complete gradients before the optimizer's step."""


class Strategy:
    """One process on one device, unless overridden.

    Order of calls: `validate` and `launch` in the caller's process; then on every rank `setup`, `plan`, `sampler`,
    `prepare`, `prepare_optimizer`; for each step a batch of `step_batches`, `forward_backward`, `optimizer_step`; at
    the end `teardown`. A collective method must be called by every rank at the same point.

    Args:
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        accumulate: Micro-batches of a step on each rank; the global batch must be divisible by it.
        micro_batch_size: Maximum number of samples on one device at once, instead of `accumulate`. `auto`, if the
            strategy supports it, finds the size that fits into memory.

    """

    attempt: int = 0
    """Number of times that the ranks of this run were lost and started again."""
    restart_from: Path | None = None
    """The last checkpoint that this run saved before its ranks were lost."""
    handover: Handover | None = None
    """What the ranks of this run go on from, and where they leave it; `None` if the loss of a rank ends the run."""
    is_updating: bool = False
    """True from the first update of a step on; the loop resets it where steps can be taken back."""
    supports_module_hooks: bool = True
    """True if the modules of a step run unchanged, so that hooks see all their outputs."""
    supports_manual_backward: bool = False
    """True if a task may make the backward of a micro-batch, and step its optimizers, by itself."""
    compile_obstacle: str = ""
    """Why the task's own modules cannot be compiled, and what to set, as the end of a sentence; empty if they can."""
    supports_scripts: bool = True
    """True if the task may have modules of TorchScript, which cannot be copied, traced or given hooks."""
    supports_auto_micro_batch: bool = False
    """True if `forward_backward` raises torch.OutOfMemoryError on every rank if it is raised on one.

    The caller then drops the gradients, sets a smaller `micro_batch_size`, and computes the step again.
    """
    grows_micro_batch: bool = False
    """True if `micro_batch_size=auto` grows the size as far as memory allows: no step can be computed again."""

    updates_in_backward: bool = False
    """True if `forward_backward` updates parameters, and not `optimizer_step`."""
    micro_batches_at_once: int = 1
    """Micro-batches that one process computes at once, each with the values from before the step."""
    shards_parameters: bool = False
    """True if each rank holds a shard of every parameter, and `local_state` returns shards."""
    initializes_modules: bool = False
    """True if parameters on the meta device get values from the `reset_parameters` of their modules."""

    def __init__(
        self,
        *,
        device: str = "auto",
        accumulate: Annotated[int, Ge(1)] | None = None,
        micro_batch_size: Annotated[int, Ge(1)] | Literal["auto"] | None = None,
    ) -> None:
        check_arguments(Strategy.__init__, locals())
        self.auto_micro_batch = micro_batch_size == "auto"
        """True if the size of micro-batches is found while training."""
        size = None if self.auto_micro_batch else micro_batch_size
        if self.auto_micro_batch and not (self.supports_auto_micro_batch or self.grows_micro_batch):
            raise UserError(
                f"micro_batch_size=auto does not work with {type(self).__name__}; give a number, or use "
                "strategy=single, dp, ddp, fusion or fsdp."
            )
        if accumulate is not None and micro_batch_size is not None:
            raise UserError(
                f"accumulate={accumulate} and micro_batch_size={micro_batch_size} both split a batch; set one of them."
            )
        self.comm = Collectives()
        """This process's place among the ranks, and their collectives; valid from `setup` on."""
        self.device = torch.device("cpu")
        """The device of this process; known from `setup` on."""
        self.precision = Precision()
        self.accumulate = accumulate
        self.micro_batch_size = size if isinstance(size, int) else None
        self.num_micro_batches: int = accumulate or (1 if micro_batch_size is None else 2)
        """Micro-batches of a step that are asked for on each rank (2 if their size is limited)."""
        self.log_dir: Path | None = None
        """The run's folder, for the output of ranks other than the main one."""
        self.stop_signals: Sequence[Signals] = ALWAYS
        """Signals that the process that started the ranks forwards to them."""
        self._requested_device = device
        self._trained: list[nn.Parameter] = []  # in the present phase
        self._all_trained: list[nn.Parameter] = []  # in any phase
        self._untrained: dict[str, nn.Parameter] = {}  # the others, by name
        self._step_name = "training_step"

    # ---- Ranks

    def validate(self, task: TaskModule, precision: Precision) -> str:
        """Return the kind of device that the ranks compute on: `cpu`, `cuda` or `mps`.

        Raises UserError for what this machine or the strategy cannot run; called before any process is started.
        """
        return pick(self._requested_device).type

    def launch(self, run: Callable[[], T], *, repeats: bool = False) -> T:
        """Call `run` on every rank and return what it returned on rank 0.

        `repeats` allows to call it again after the loss of a rank; it then goes on from `handover` or `restart_from`.
        """
        return run()

    def setup(self, precision: Precision) -> None:
        """Join the other ranks and set `device`, `precision` and `comm`; collective."""
        self.device = pick(self._requested_device)
        enter(self.device)
        self.precision = precision
        precision.setup(self.device)

    @property
    def devices_of_rank(self) -> list[torch.device]:
        """The devices that this process computes on."""
        return [self.device]

    def prepare(self, task: TaskModule) -> None:
        """Move the task to the device, with rank 0's parameters and buffers on every rank; collective.

        The task is changed in place and not wrapped: its parameters keep their names.
        """
        self._move_task(task)
        self._find_trained(task)

    def _find_trained(self, task: TaskModule) -> None:
        named = list(task.named_parameters())
        self._trained = self._all_trained = [parameter for _, parameter in named if parameter.requires_grad]
        self._untrained = {name: parameter for name, parameter in named if not parameter.requires_grad}

    def _move_task(self, task: TaskModule) -> None:
        """Leave the task on the device, with values and in the dtype of the precision."""
        # Values first, as `to` refuses the meta device; then the dtype, so that a smaller one is what is copied.
        if is_deferred(task) or has_meta_tensors(task):
            from trainkit.model.deferred_init import make_real

            make_real(task, device=self.device)
        self.precision.prepare(task)
        self._place(task)

    def _place(self, task: TaskModule) -> None:
        """Move the task, which has values, to where it trains."""
        task.to(self.device)

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Arrange for the optimizer's gradients to be reduced; collective, before a run is restored.

        Called once for each phase of the task. Raises UserError for an optimizer that the strategy cannot step.
        """

    def teardown(self) -> None:
        """End the phases, leave the other ranks and release resources; may be called twice."""
        # The task is the user's again, and must not keep a phase's frozen parameters.
        self.end_phases()

    @property
    def hands_over(self) -> bool:
        """True if another rank has each part of the state too, so that it can outlive a rank."""
        return False

    @property
    def state_part(self) -> tuple[int, int]:
        """The part of the state that this rank has, and the number of parts; `(0, 1)` is the whole."""
        return 0, 1

    def readable(self) -> AbstractContextManager[Any]:
        """Return a context in which placeholders of what only other ranks have can be read."""
        return _NO_CONTEXT

    # ---- Between steps

    def is_outdated(self, phase_optimizers: Sequence[PhaseOptimizer]) -> bool:
        """Return True if `retrain` must be called: what is trained has changed since the last step, on every rank."""
        # Without a short cut: `follow_groups` takes over the groups of each optimizer.
        is_outdated = False
        for phase_optimizer in phase_optimizers:
            is_outdated |= phase_optimizer.follow_groups()
        # A list, which is built faster than a generator is stepped: this runs before every step.
        return is_outdated or any([parameter.requires_grad for parameter in self._untrained.values()])

    def retrain(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> None:
        """Train the parameters that require a gradient now and those in the optimizers now; collective."""
        # Phases first: within one the parameters of the others are frozen, and would be lost to training.
        self.end_phases()
        self._find_trained(task)

    def end_phases(self) -> None:
        """Make every parameter that some phase trains require a gradient; may be called without a phase."""

    def add_untrained(self, task: TaskModule) -> None:
        """Know of parameters that were added to the task, so that `is_outdated` finds those that require a gradient."""
        # By identity, as `in` compares tensors by elements.
        trained = set(map(id, self._all_trained))
        self._untrained = {name: tensor for name, tensor in task.named_parameters() if id(tensor) not in trained}

    def _check_untrained(self) -> None:
        """Raise UserError for a parameter that a step has unfrozen: ranks or replicas would not sum its gradient."""
        for name, parameter in self._untrained.items():
            if parameter.grad is not None:
                raise UserError(
                    f"{name} got a gradient in this step, but was frozen when the step began, so that "
                    f"{type(self).__name__} did not sum it. Unfreeze it between steps, such as in a callback's "
                    "on_step_end: parameter.requires_grad_(True)."
                )

    # ---- Data

    def plan(self, batch_size: int, *, even: bool = True) -> BatchPlan:
        """Return the split of a global batch into ranks and micro-batches.

        Raises UserError if it must be `even` and cannot be; batches of evaluations and pre-batched ones need not be.
        """
        world_size = self.comm.world_size
        shard_size = -(-batch_size // world_size)  # the largest of all ranks
        if self.accumulate is not None:
            error = split_error(batch_size, accumulate=self.accumulate, world_size=world_size)
            if even and error is not None:
                raise UserError(error)
            size = -(-shard_size // self.accumulate)
        else:
            size = min(shard_size, self.micro_batch_size or shard_size)
        return BatchPlan(batch_size, world_size, -(-shard_size // size), size)

    def sampler(self, dataset: Any, order: Order) -> ShardSampler:
        """Return the sampler of this rank's shard of each global batch."""
        return ShardSampler(dataset, order, rank=self.comm.rank, world_size=self.comm.world_size)

    def step_batches(self, batches: Iterator[StepBatch], *, pin_memory: bool) -> Iterator[StepBatch]:
        """Return the batches with their micro-batches on the device; on CUDA the next one is copied ahead."""
        # The usual case of a CPU: not even a generator in the loop.
        if self.device.type == "cpu" and self.precision.batch_type is None:
            return batches
        from trainkit.data.prefetch import prefetched

        return prefetched(batches, self._move, device=self.device, pin_memory=pin_memory)

    def _move(self, batch: Any) -> Any:
        return to_device(batch, self.device, dtype=self.precision.batch_type)

    # ---- A step

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Add to every `.grad` the gradient of the weighted mean loss over the whole global batch; collective.

        Returns the outputs of this rank's micro-batches, without their graphs; `[]` on a rank without samples, which
        takes part too.
        """
        outputs: list[StepOutput] = []
        step = self._step_of(task)
        last = len(batch.micro_batches) - 1
        for index, micro_batch in enumerate(batch.micro_batches):
            # Gradients are reduced once a step, while the last backward runs.
            with self.no_sync() if index < last else self._synced():
                former = self._watched_gradients(batch)
                # The backward is outside of autocast, as torch asks: it uses the dtypes of the forward.
                with self.precision.forward():
                    returned = step(micro_batch.batch)
                self._check_gradients_kept(task, former, is_first=index == 0)
                output = read_training_output(
                    returned, micro_batch.num_samples, task, self._step_name, of=batch.num_samples
                )
                self._backward(output, micro_batch, batch)
            outputs.append(output)
        self._normalize_gradients(outputs, batch)
        return outputs

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which a backward adds to this rank's gradients only; nothing is reduced."""
        return _NO_CONTEXT

    def optimizer_step(self, phase_optimizer: PhaseOptimizer) -> Tensor | None:
        """Unscale, clip, update, and drop the gradients; collective.

        Returns the global norm of the gradients before clipping, a scalar on the device, if it was needed.
        """
        # Unscaled first: the scaler has made gradients larger than what is clipped, measured and reported.
        phase_optimizer.unscale()
        norm = None
        # A norm reads every gradient, and under a strategy with ranks may be a collective.
        if phase_optimizer.clip.norm is not None or phase_optimizer.skip_nonfinite:
            norm = self._grad_norm(phase_optimizer)
        if phase_optimizer.clip.norm is not None and norm is not None:
            phase_optimizer.clip_by_norm(norm)
        elif phase_optimizer.clip.value is not None:
            phase_optimizer.clip_by_value()
        self.is_updating = True  # from here on the step cannot be taken back
        self._update(phase_optimizer, norm)
        phase_optimizer.zero_grad()
        return norm

    def _update(self, phase_optimizer: PhaseOptimizer, norm: Tensor | None) -> None:
        """Update the parameters from the clipped gradients, whose global norm is `norm` if it was needed."""
        phase_optimizer.update(norm=norm)

    def _synced(self) -> AbstractContextManager[Any]:
        """Return the context of a step's last backward: at its end gradients are summed over ranks. Collective."""
        return _NO_CONTEXT

    def _step_of(self, task: TaskModule) -> Callable[[Any], Any]:
        """Return what is called with each micro-batch."""
        step: Callable[[Any], Any] = getattr(task, self._step_name)
        return step

    def _watched_gradients(self, batch: StepBatch) -> list[bool] | None:
        """Return which gradients there are before a step; `None` if it may add and remove some, as in a plain loop."""
        return None if self._is_plain_step(batch) else self._have_gradients()

    def _check_gradients_kept(self, task: TaskModule, former: list[bool] | None, *, is_first: bool) -> None:
        """Raise UserError if a step has left gradients where there were none, or removed some of other micro-batches.

        They would miss the weight of their micro-batch, the scale of the loss and the sum over ranks. Before the first
        micro-batch there are those of parameters without an optimizer only, which it may remove.
        """
        if former is None:
            return
        present = self._have_gradients()
        if present == former:  # in every micro-batch
            return
        pairs = enumerate(zip(former, present, strict=True))
        indices = [index for index, (had, has) in pairs if had != has and (has or not is_first)]
        if not indices:
            return
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        # Of shards there are more entries than parameters, and they are not part of the task while they are gathered.
        index = indices[0]
        name = names.get(id(self._trained[index]), "a parameter") if index < len(self._trained) else "a parameter"
        did = (
            f"calls backward itself: {name} has a gradient before that of the returned loss"
            if present[index]
            else f"removes the gradient of {name}, to which each micro-batch of the step adds"
        )
        raise UserError(
            f"{type(task).__name__}.{self._step_name} {did}. Remove the calls of backward and zero_grad, and return "
            "the loss; for the gradients of several losses return their sum. A gradient that a loss needs comes from "
            "torch.autograd.grad. As a plain loop does it, it runs with strategy=single, one micro-batch and another "
            "precision than fp16-mixed."
        )

    def _is_plain_step(self, batch: StepBatch) -> bool:
        """Return True if the step may add to gradients, and remove them, as in a plain loop."""
        return len(batch.micro_batches) == 1 and self.precision.scaler is None

    def _have_gradients(self) -> list[bool]:
        """Return for each trained parameter if it has a gradient."""
        return [parameter.grad is not None for parameter in self._trained]

    def _backward(self, output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> None:
        """Add this micro-batch's gradient and free its graph."""
        loss = output.loss
        assert loss is not None
        weight = loss_weight(output, micro_batch, batch)
        # Not multiplied by 1, which would be a kernel more. A tensor is not compared: that would wait for the device.
        self.precision.scale(loss if isinstance(weight, float) and weight == 1.0 else loss * weight).backward()
        # Outputs live until they are logged, and with its graph each would hold its activations.
        output.loss = loss.detach()

    def _normalize_gradients(self, outputs: Sequence[StepOutput], batch: StepBatch) -> None:
        """Divide by the batch's sum of weights if the task returned weights; collective."""
        if len(outputs) > 1 and any(output.own_weight for output in outputs):
            # The sum is known only after the last forward: until then gradients are divided by the number of samples.
            total = sum(output.weight for output in outputs)  # 0 for a batch of padding only
            if isinstance(total, Tensor):
                self._scale_gradients(torch.where(total > 0, batch.num_samples / total, 0.0))
            else:
                self._scale_gradients(batch.num_samples / total if total else 0.0)

    def _scale_gradients(self, factor: float | Tensor) -> None:
        parameters = (*self._trained, *self._untrained.values())  # one process may train what the step unfreezes
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:  # a pipeline's stage may have none
            # Private: torch has no public function that scales a list of tensors in one kernel.
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

    # ---- Outside of the step

    def whole_task(self, task: TaskModule) -> AbstractContextManager[TaskModule]:
        """Return a context in which every rank has all values of the task's parameters and buffers; collective.

        At its end the values that rank 0 has left in them are those that every rank trains on.
        """
        return nullcontext(task)

    def replicated(self, task: TaskModule) -> dict[str, Tensor]:
        """Return by name the parameters and buffers that have the same values on all ranks of `comm` after a step."""
        return {}

    # ---- State, complete and under the bare task's names for every strategy; all collective

    def state_dict(self, task: TaskModule) -> dict[str, Any]:
        """Return the task's parameters and buffers; complete on rank 0."""
        return task.state_dict()

    def load_state_dict(self, task: TaskModule, saved: dict[str, Any]) -> None:
        """Load the parameters and buffers in `saved`, which is complete on every rank.

        Tensors of a checkpoint are on the disk: `in_memory` reads them, and `elements` a range of one.
        """
        task.load_state_dict(in_memory(saved))

    def optimizer_state_dict(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> dict[str, Any]:
        """Return the optimizer's state; complete on rank 0."""
        return phase_optimizer.optimizer.state_dict()

    def load_optimizer_state_dict(
        self, task: TaskModule, phase_optimizer: PhaseOptimizer, saved: dict[str, Any]
    ) -> None:
        """Load the optimizer state in `saved`, which is complete on every rank, its tensors on the disk."""
        saved = in_memory(saved)
        pairs = zip(saved["param_groups"], phase_optimizer.optimizer.param_groups, strict=True)
        # The kernels are those of this run, not of the one that was saved.
        groups = [{**old, **{key: new[key] for key in ("fused", "foreach") if key in new}} for old, new in pairs]
        phase_optimizer.optimizer.load_state_dict({**saved, "param_groups": groups})

    def strategy_state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside task and optimizer, such as a partition; complete on rank 0."""
        return {}

    def load_strategy_state(self, saved: Mapping[str, Any]) -> None:
        """Restore a `strategy_state`, which may be another strategy's; task and optimizer are restored.

        `saved` is complete on every rank, its tensors on the disk.
        """


class PhaseTraining(Strategy):
    """A strategy that holds the whole task and trains its phases one after the other."""

    def check_phases(self, task: TaskModule) -> None:
        """Accept every task."""

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Freeze all parameters but those of this phase, and train by the task's method `step_name`."""
        chosen = {id(parameter) for parameter in phase_optimizer.parameters}
        # A frozen parameter gets no gradient from this phase's loss, and its backward costs nothing.
        for parameter in self._all_trained:
            parameter.requires_grad_(id(parameter) in chosen)
        self._trained = phase_optimizer.parameters
        self._step_name = step_name
        self.precision.begin_phase(phase_optimizer.phase)

    def end_phases(self) -> None:
        """Unfreeze the parameters of all phases; may be called without a phase."""
        # Nothing without a phase: what the user has frozen since the last step stays frozen.
        for parameter in self._all_trained if self._trained is not self._all_trained else ():
            parameter.requires_grad_(True)
        self._trained, self._step_name = self._all_trained, "training_step"


# ---- Optional protocols of a strategy, checked with isinstance


@runtime_checkable
class SupportsPhases(Protocol):
    """Trains tasks with several optimizers, one phase after the other."""

    def check_phases(self, task: TaskModule) -> None:
        """Raise UserError for a task whose phases cannot be trained; called before any process is started."""

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Make the next `forward_backward` train only this phase's parameters, by the task's method `step_name`."""

    def end_phases(self) -> None:
        """Make every parameter that some phase trains require a gradient; may be called without a phase."""


@runtime_checkable
class SupportsOverlapProfile(Protocol):
    """Measures the overlap of communication with computation."""

    @property
    def waited_seconds(self) -> float | None:
        """Seconds of steps in which this process only waited for others; `None` if unknown."""

    def start_overlap_profile(self) -> None:
        """Start measuring at the next step."""

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring and return the means over `steps`; `None` if unknown."""


@runtime_checkable
class SupportsShardedState(Protocol):
    """Shards parameters or optimizer state, so that no rank has all of it."""

    def shards(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> ShardedState | None:
        """Return this rank's shards of the state; `None` if one rank has all of it. Collective."""

    def local_state(self, task: TaskModule) -> dict[str, Tensor]:
        """Return this process's parameters and buffers by name, not copied."""


@runtime_checkable
class PlacesRanks(Protocol):
    """Decides by the task and its data which part of the work each host has."""

    def place_ranks(self, task: TaskModule, source: StageData, saved: Mapping[str, Any]) -> bool:
        """Place the ranks, before data is opened, and return True if their numbers have changed; collective.

        `saved` is the `strategy_state` of the run that is resumed, which may be another strategy's; else it is empty.
        """

    def places(self) -> object:
        """Return where ranks are; a resumed run with the same places repeats the random numbers of each rank."""


@runtime_checkable
class PreparesSteps(Protocol):
    """Needs the first batch of training before anything is evaluated."""

    def prepare_steps(self, task: TaskModule, batches: Iterator[StepBatch]) -> None:
        """Prepare the first step from the first of `batches`, which `step_batches` yields again; collective."""


@runtime_checkable
class EvaluatesJointly(Protocol):
    """Evaluates with collectives in every batch, so that ranks must take equally many."""

    def joint_batches(self, task: TaskModule, batches: Iterator[MicroBatch], step_name: str) -> Iterator[MicroBatch]:
        """Yield this rank's batches, and take part in those of the other ranks until all are done; collective."""


@runtime_checkable
class SupportsReplicas(Protocol):
    """Runs copies of the task in one process."""

    def metric_modules(self, task: TaskModule) -> list[nn.Module]:
        """Return the modules with metric states in the task, then those in each of its copies."""


@runtime_checkable
class StartsRanks(Protocol):
    """Runs the ranks in other processes, or in the caller's."""

    @property
    def starts_ranks(self) -> bool:
        """True if `launch` would start processes, since this process is not a rank."""

    def final_state_dict(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained state on the main rank if `launch` was called in another process, else `None`; collective.

        If the caller is a rank, its task is complete afterwards.
        """


@runtime_checkable
class SupportsPartitionPreview(Protocol):
    """Partitions a task into stages, and can show them without training."""

    def preview(self, task: TaskModule, source: StageData, *, precision: Precision) -> str:
        """Return the number of stages, their table and a drawing; the task stays whole, and no process is started."""


def local_state(strategy: Strategy, task: TaskModule) -> dict[str, Tensor]:
    """Return this process's parameters and buffers by name, not copied; not collective."""
    return strategy.local_state(task) if isinstance(strategy, SupportsShardedState) else named_state(task)


def evaluation_batches(
    strategy: Strategy, task: TaskModule, batches: Iterator[MicroBatch], step_name: str
) -> Iterator[MicroBatch]:
    """Return this rank's batches of an evaluation by the task's method `step_name`."""
    return strategy.joint_batches(task, batches, step_name) if isinstance(strategy, EvaluatesJointly) else batches


def named_state(task: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers of a module by name."""
    return dict([*task.named_parameters(), *task.named_buffers()])


def metric_modules(strategy: Strategy, task: TaskModule) -> list[nn.Module]:
    """Return the modules with metric states in the task, then those in each copy of it in this process."""
    return strategy.metric_modules(task) if isinstance(strategy, SupportsReplicas) else metrics_in(task)


def has_full_gradients(strategy: Strategy) -> bool:
    """Return False if the optimizer is sharded or steps during backward: hooks see no complete gradients then."""
    return not any(getattr(strategy, setting, False) is True for setting in PARTIAL_GRADIENTS)  # it may be "auto"


def check_whole_parameters(strategy: Strategy, what: str) -> None:
    """Raise UserError for `what`, which reads whole parameters or gradients, on a strategy that shards them."""
    if strategy.shards_parameters:
        raise UserError(
            f"{what} needs whole parameters, and {type(strategy).__name__} leaves each rank a shard of them. Omit "
            f"{what}, or set strategy=ddp."
        )


def check_phases_run(task: TaskModule, strategy: Strategy) -> None:
    """Raise UserError for a task with phases on a strategy that cannot train them."""
    if not isinstance(strategy, SupportsPhases):
        raise UserError(
            f"{type(task).__name__} has phases, which {type(strategy).__name__} cannot train: it supports one step and "
            "one optimizer. Set strategy=ddp, strategy=dp, strategy=fsdp, strategy=pipeline or strategy=single."
        )
    strategy.check_phases(task)


def loss_weight(output: StepOutput, micro_batch: MicroBatch, batch: StepBatch) -> float | Tensor:
    """Return the factor of a micro-batch's loss in the sum that backward starts from."""
    # Without a weight of the task the factors of a step, over all ranks and micro-batches, add up to 1.
    if micro_batch.num_samples != batch.num_samples:
        return output.weight / batch.num_samples
    if not output.own_weight:
        return 1.0
    # One micro-batch is the whole step: its mean needs no weight, unless there is nothing in it.
    weight = output.weight  # 0 for a batch of padding only
    return (weight > 0).to(weight.dtype) if isinstance(weight, Tensor) else float(weight > 0)
