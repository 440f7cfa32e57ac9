"""ReplicaCheck: the replicas of a task have the same weights, compared by checksums that travel with the metrics.

No strategy averages what a step or a callback writes by itself, from its samples or from random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from trainkit.data.batch import StepBatch
from trainkit.distributed.checksum import are_equal, summands
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput
from trainkit.model.carried_state import BufferWrites, is_looked_at, shared_by_micro_batches
from trainkit.phases import PhaseStep
from trainkit.run import Run
from trainkit.strategy import local_state

# Steps. A comparison takes 0.6 ms or more: 0.4 % of this many steps of 0.8 ms; those of two ranks are hardly shorter.
_LONGEST_PAUSE = 200


class ReplicaCheck:
    """Compares the replicas of the task in the first step, at log points that are not too close, and before saves."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # `world_size`, not `num_processes`: the stages of a pipeline are no replicas of each other.
        self._has_replicas = run.strategy.comm.world_size > 1
        self._parameters = list(run.task.parameters())
        self._steps = 0
        # Steps of the run, alike on all ranks: `_steps` also counts phases, and what a rank repeats for want of memory.
        self._first_step = self._compared_step = run.state.step

    def wrap(self, phase: PhaseStep) -> PhaseStep:
        """Return the phase with a check of its first steps, and of all steps in several micro-batches."""
        strategy = self._run.strategy
        if not self._has_replicas and strategy.num_micro_batches <= strategy.micro_batches_at_once:
            return phase
        return replace(phase, forward_backward=partial(self._forward_backward, phase.forward_backward))

    def _forward_backward(
        self, forward_backward: Callable[[StepBatch], list[StepOutput]], batch: StepBatch
    ) -> list[StepOutput]:
        self._steps += 1
        if len(batch.micro_batches) > self._run.strategy.micro_batches_at_once:
            # Private: torch has no public count of writes to a tensor; comparing values would cost a copy and a wait.
            versions = [parameter._version for parameter in self._parameters]
            with self._shared_buffers_refused() if is_looked_at(self._steps) else nullcontext():
                outputs = forward_backward(batch)
            for parameter, version in zip(self._parameters, versions, strict=True):
                # Only the update may write to a parameter: otherwise later micro-batches have other weights.
                if parameter._version != version and not self._run.strategy.updates_in_backward:
                    self._refuse_write(parameter)
        else:
            outputs = forward_backward(batch)
        if self._steps == 1:  # before it is made: a step that writes to a parameter mostly does so from the beginning
            self.check()
        return outputs

    @contextmanager
    def _shared_buffers_refused(self) -> Iterator[None]:
        """Raise UserError if several micro-batches of the step in the block change the same element of a buffer."""
        run = self._run
        buffers = BufferWrites(local_state(run.strategy, run.task), run.task)
        # In a pipeline the first step is also traced, and compared with one process.
        is_followed = self._steps > 1 or run.strategy.supports_module_hooks
        # Around each forward, which is one micro-batch.
        release = run.precision.surround(buffers.micro_batch if is_followed else nullcontext)
        try:
            yield
        finally:
            release()
        # After the step, so that an error of the step itself is the one that is raised.
        for name in buffers.names:
            raise UserError(shared_by_micro_batches(type(run.strategy).__name__, run.task, name))

    def is_due(self) -> bool:
        """Return True if the replicas should be compared at this log point; the same on every rank."""
        state = self._run.state
        since = state.step - self._compared_step
        # Doubled pauses, as most differences begin early. A rollback goes back to before the last comparison.
        is_in_pause = 0 <= since < min(_LONGEST_PAUSE, self._compared_step - self._first_step)
        # Before an evaluation in any case: after it, buffers may hold what each rank has counted in it.
        if is_in_pause and not state.evaluation_due:
            return False
        self._compared_step = state.step
        return True

    def sums(self, *, with_buffers: bool) -> Tensor | None:
        """Return this rank's summands of the comparison, shape (2,), without waiting for the device.

        `None` if there are no replicas.
        """
        if not self._has_replicas:
            return None
        # One checksum of all tensors, to travel with the metrics; the one that differs is looked up only if need be.
        # Also of none, as on a stage without parameters: the metrics of all stages must have the same names.
        return summands([self._replicated(with_buffers=with_buffers).values()])[0]

    def check_sums(
        self, sums: Sequence[float] | None, *, with_buffers: bool, first_check: Callable[[], None] = lambda: None
    ) -> None:
        """Raise UserError on every rank if the summands, added over ranks, show a difference; collective if they do.

        `first_check` is called first then, and may raise a more helpful error.
        """
        if sums is not None and not are_equal(sums, num_ranks=self._run.strategy.comm.world_size):
            first_check()
            self._raise_difference(with_buffers=with_buffers)

    def check(self) -> None:
        """Raise UserError on every rank if the parameters of the replicas differ; waits for the device. Collective."""
        sums, strategy = self.sums(with_buffers=False), self._run.strategy
        if sums is not None:
            self.check_sums(strategy.comm.all_reduce(sums.to(strategy.device)).tolist(), with_buffers=False)

    def _replicated(self, *, with_buffers: bool) -> dict[str, Tensor]:
        tensors = self._run.strategy.replicated(self._run.task)
        return {name: tensor for name, tensor in tensors.items() if with_buffers or isinstance(tensor, nn.Parameter)}

    def _raise_difference(self, *, with_buffers: bool) -> None:
        run, tensors = self._run, self._replicated(with_buffers=with_buffers)
        comm = run.strategy.comm
        # A second collective, with a row for each tensor. All ranks get here, since all have seen the same sums.
        rows = zip(tensors, comm.all_reduce(summands([[tensor] for tensor in tensors.values()])).tolist(), strict=True)
        name = next(name for name, sums in rows if not are_equal(sums, num_ranks=comm.world_size))
        raise UserError(
            f"{type(run.strategy).__name__}: {name} has other values on other ranks, by step {run.state.step + 1}. "
            f"{_cause(run.task, name)} No strategy averages such values. {_REMEDY}"
        )

    def _refuse_write(self, parameter: nn.Parameter) -> None:
        run = self._run
        name = next((name for name, other in run.task.named_parameters() if other is parameter), "a parameter")
        raise UserError(
            f"{type(run.strategy).__name__}: step {run.state.step + 1} changes {name} in place in each of its "
            f"micro-batches. {_cause(run.task, name)} The global batch as one would change it once. {_REMEDY}"
        )


_REMEDY = (
    "Let the gradient change it, or change it in a callback's on_step_end, from values that are the same on every rank "
    "(inside of run.whole_task() those of rank 0 count). As a plain loop does it, it runs with strategy=single and "
    "one micro-batch."
)


def _cause(task: nn.Module, name: str) -> str:
    """Return what has probably changed the parameter."""
    owner = task.get_submodule(name.rpartition(".")[0])
    if getattr(owner, "max_norm", None) is not None:
        return f"{type(owner).__name__}(max_norm={owner.max_norm}) renormalises the rows of the samples that it sees."
    return "A step or a callback writes to it, from its own samples or random numbers."
