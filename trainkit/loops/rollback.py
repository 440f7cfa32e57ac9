"""`on_nonfinite`: an error, a stop or a rollback after a loss or weights that are not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint.sharded_state import in_memory
from trainkit.data.loader import BatchLoader
from trainkit.errors import CheckpointError, NonFiniteLoss
from trainkit.loops.fit_config import NonfinitePolicy
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.run import Run
from trainkit.strategy import local_state
from trainkit.task import begin_training
from trainkit.tree import tensors_in

if TYPE_CHECKING:
    from trainkit.checkpoint.store import CheckpointEntry

logger = logging.getLogger(__name__)

SAMPLES_SHOWN = 20  # of a message


class RollbackRequested(Exception):  # not an error: training continues
    """A loss was not finite after `step - 1` sound steps; raised on all ranks at the same point."""

    def __init__(self, step: int, cause: str) -> None:
        super().__init__(cause)
        self.step, self.cause = step, cause


class NonFinitePolicy:
    """Checks losses where training waits for the device anyway, and applies the policy on all ranks at once.

    step        100        147   150
    checkpoint  saved                        147: a loss that is not finite, found when step 150 logs
    rollback    restored   147   150         steps 101 to 146 are repeated bit for bit, step 147 is skipped
                  ------>   |---->
    """

    def __init__(self, run: Run, *, policy: NonfinitePolicy, max_rollbacks: int) -> None:
        assert run.loader is not None
        self.means = run.means = WeightedMeans(run.strategy.device)
        self._weights_are_sound = True
        self._run = run
        self._loader: BatchLoader = run.loader
        self._lacks_folder = policy == "rollback" and run.checkpointer.store is None
        self._policy: NonfinitePolicy = "raise" if self._lacks_folder else policy
        self._max_rollbacks = max_rollbacks
        self._rollbacks = 0
        self._point = RollbackPoint(run)
        self._suspect: tuple[int, str] | None = None  # the step that the last rollback listed, and its cause

    # ---- Called by the loop

    @property
    def lists_steps(self) -> bool:
        """True if steps are, or may be, listed in `state.skipped_steps`."""
        return self._policy == "rollback" or bool(self._run.state.skipped_steps)

    def prepare(self) -> None:
        """Record which state is not finite before training; collective."""
        strategy = self._run.strategy
        if self._lacks_folder and self._run.is_main:
            logger.warning(
                "on_nonfinite=rollback restores checkpoints, and this run has no folder for any: a loss that is not "
                "finite ends it, as with on_nonfinite=raise."
            )
        # A mask of minus infinity does not mean divergence; without its name every save would be refused.
        names = untrained_nonfinite_state(self._run.task, local_state(strategy, self._run.task))
        if strategy.comm.any_rank(bool(names)):  # stages hold parts of the task
            self._point.never_finite = frozenset(chain.from_iterable(strategy.comm.all_gather_object(names)))

    def start(self) -> None:
        """Save a first checkpoint to roll back to, if the policy needs one and this run has none; collective."""
        run = self._run
        # The main rank alone reads the folder; a save that only it makes would wait for the other ranks forever.
        if self._policy == "rollback" and not run.strategy.comm.broadcast_object(self._point.start()):
            run.checkpointer.save(reason="start")

    @contextmanager
    def rollback_on_request(self, then: Callable[[], None]) -> Iterator[None]:
        """Restore a checkpoint and call `then` where the block raises RollbackRequested; collective."""
        try:
            yield
        except RollbackRequested as request:
            self._rollback(request)
            then()

    def check(self) -> bool:
        """Apply the policy to losses that are not logged yet; return True if the weights may be saved. Collective."""
        first_bad = self.means.first_nonfinite_step()
        # The policy has collectives, so all ranks apply it, or none does.
        if self._run.strategy.comm.any_rank(first_bad is not None):
            self.on_nonfinite_loss(first_bad)
        return self._weights_are_sound

    def weights_are_finite(self) -> bool:
        """Return True if the weights may be saved; apply the policy if they are not finite. Collective.

        A step may have a finite loss and a gradient that is not. Its weights must never replace a sound checkpoint,
        which may be the only one: here training may wait for the device.
        """
        if not self.check():
            return False
        run = self._run
        # The weights are those that the user gave: nothing has been computed yet.
        if run.state.step == 0:
            return True
        name = self._nonfinite_name()
        if not run.strategy.comm.any_rank(name is not None):
            return True
        cause = f"step {run.state.step} left {self._first_of_ranks(name)} not finite"
        if self._policy == "rollback":
            raise RollbackRequested(run.state.step, cause)
        if self._policy == "stop":
            self._stop(cause)
            return False
        skip = (
            "; trainer.on_nonfinite=skip skips steps whose gradient is not finite, and rollback returns to a "
            "checkpoint before them"
        )
        raise NonFiniteLoss(
            f"{cause}, or a step before it did, though no loss was NaN or infinite"
            f"{'' if run.checkpointer.store is None else '; they are not saved, and earlier checkpoints stay'}. Lower "
            "the learning rate, set trainer.max_grad_norm=1.0, or set trainer.detect_anomaly=true to find the "
            f"operation{'' if self._policy == 'skip' else skip}."
        )

    def on_nonfinite_loss(self, step: int | None) -> None:
        """Raise, stop or roll back as the policy says; `step` is this rank's first bad one. Collective.

        A skipped step has changed nothing; the warning comes when training logs.
        """
        if self._policy == "skip":
            return
        if self._policy == "stop":
            where = f"at step {step}" if step is not None else "on another rank"
            self._stop(f"the loss became NaN or infinite {where}")
            return
        # All ranks must raise the same: `step` is None on a rank whose losses are finite.
        first, location, samples = self._place(step)
        cause = f"the loss became NaN or infinite {location}"
        if self._policy == "rollback" and first is not None:
            raise RollbackRequested(first, f"{cause} (samples {samples})" if samples else cause)
        name = self._first_of_ranks(self._nonfinite_name())
        raise NonFiniteLoss(
            f"{cause}{'' if name is None else f', and by now {name} is not finite'}. Lower the learning rate, set "
            "trainer.max_grad_norm=1.0, or set trainer.detect_anomaly=true to find the operation; "
            "trainer.on_nonfinite=skip skips such steps, and rollback returns to a checkpoint before them."
            f"{f' The samples were {samples}.' if samples else ''}"
        )

    def skip_step(self) -> None:
        """Step only the schedules; raises RollbackRequested if the previous step is to blame. Collective."""
        run, step = self._run, self._run.state.step + 1
        # If the repeated steps left finite weights, the loss of this step itself was bad. Otherwise the gradient of the
        # step before it has spoiled them, and that step is listed in its place.
        if self._suspect is not None and self._suspect[0] == step:
            cause, self._suspect = self._suspect[1], None
            name = self._first_of_ranks(self._nonfinite_name())
            if name is not None:
                raise RollbackRequested(step - 1, f"{cause}, since step {step - 1} left {name} not finite")
            if run.is_main:
                logger.warning(
                    "%s: step %d is skipped. Set trainer.detect_anomaly=true to find the operation.", cause, step
                )
        for phase_optimizer in run.phase_optimizers:
            if run.state.step % phase_optimizer.every == 0:
                phase_optimizer.step_schedules("step")

    def _stop(self, cause: str) -> None:
        self._weights_are_sound = False
        self._run.request_stop(cause)
        # Every rank gets here at the same step: all agree on the stop at the end of this one, not some steps later.
        self._run.may_be_stopped = True

    # ---- Rollback

    def _rollback(self, request: RollbackRequested) -> None:
        """Restore the last checkpoint before the step of the request, and list that step to be skipped; collective."""
        run = self._run
        self._rollbacks += 1
        # Weights that diverge again and again would be rolled back without end.
        if self._rollbacks > self._max_rollbacks:
            raise NonFiniteLoss(
                f"{request.cause}, after {self._max_rollbacks} rollbacks. Lower the learning rate, set "
                "trainer.max_grad_norm=1.0, or allow more with trainer.max_rollbacks."
            ) from None
        checkpoint = self._point.checkpoint_before(request.step)
        if checkpoint is None:
            raise NonFiniteLoss(
                f"{request.cause}, and no sound checkpoint from before it exists. Lower the learning rate, or save "
                "more often: callbacks.checkpoint.every=500step."
            ) from None
        self._point.restore(checkpoint)
        # The step after it was listed first if this one is to blame; its loss was bad only through these weights.
        run.state.skipped_steps.discard(request.step + 1)
        run.state.skipped_steps.add(request.step)
        self._suspect = (request.step, request.cause)
        # A stop that a step of the discarded part requested is requested again when that step is repeated.
        if run.stopped_by is None:
            run.stop_reason = None
        run.pending_hooks, run.interrupted_hook = (), None  # of the discarded step
        for destination in run.loggers:
            assert run.run_dir is not None
            # Opened again at the restored step, a logger removes what the discarded steps have written.
            destination.close()
            destination.open(run.run_dir, step=run.state.step)
        if run.is_main:
            logger.warning("%s: rolling back to step %d.", request.cause, run.state.step)

    def _nonfinite_name(self) -> str | None:
        """Return the name of a parameter or buffer of this rank that is no longer finite; waits for the device."""
        run, never_finite = self._run, self._point.never_finite
        names = nonfinite_state(local_state(run.strategy, run.task))
        return next((name for name in names if name not in never_finite), None)

    def _first_of_ranks(self, name: str | None) -> str | None:
        """Return the name from the first rank that has one; collective."""
        return next((other for other in self._run.strategy.comm.all_gather_object(name) if other is not None), None)

    def _place(self, step: int | None) -> tuple[int | None, str, str]:
        """Return the first bad step of all ranks, and as texts where that was and its samples; collective."""
        run = self._run
        failure = None if step is None else (step, run.strategy.comm.rank, self._loader.sample_indices(step, run.state))
        answers = run.strategy.comm.all_gather_object(failure)
        failures = [failure for failure in answers if failure is not None]
        if not failures:  # the bad loss was logged already
            return None, f"before step {run.state.step}", ""
        first, rank, samples = min(failures)
        on_rank = f" on rank {rank}" if len(answers) > 1 else ""
        return first, f"at step {first}{on_rank}", list_samples(samples) if samples else ""


class RollbackPoint:
    """The checkpoints of this run that a rollback may restore."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._foreign: set[Path] = set()
        self.never_finite: frozenset[str] = frozenset()
        """Names of state that was not finite before training and need not be, such as masks of minus infinity."""

    def start(self) -> bool:
        """Return True on the main rank if this run has a checkpoint already.

        The folder may hold others: of an earlier run, or of a later step than the one that was resumed.
        """
        run = self._run
        entries: list[CheckpointEntry] = []
        if run.is_main and run.checkpointer.store is not None:
            with suppress(OSError):  # a save will report what is wrong with the folder
                entries = run.checkpointer.store.entries()
        # A rollback to another run's checkpoint, or to one of later steps than these, would leave this run's course.
        self._foreign = {entry.path for entry in entries if run.resumed_from is None or entry.step > run.state.step}
        return len(entries) > len(self._foreign)

    def checkpoint_before(self, step: int) -> tuple[int, Path] | None:
        """Return the step and path of the last complete checkpoint before `step` with finite weights; collective."""
        run = self._run
        # A save in the background may be the last checkpoint before the step.
        run.checkpointer.wait()
        checkpoint: tuple[int, Path] | None = None
        if run.is_main and run.checkpointer.store is not None:
            for entry in reversed(run.checkpointer.store.entries()):
                if entry.path in self._foreign or entry.step >= step:
                    continue
                # A damaged checkpoint: an earlier one may do.
                with suppress(CheckpointError):
                    if is_finite_state(run.checkpointer.store.load(entry)["task"], except_for=self.never_finite):
                        checkpoint = (entry.step, entry.path)
                        break
        return run.strategy.comm.broadcast_object(checkpoint)

    def restore(self, checkpoint: tuple[int, Path]) -> None:
        """Restore a checkpoint, but keep the clock, the skipped steps and the micro-batch size; collective."""
        from trainkit.checkpoint.serialization import check_payload
        from trainkit.checkpoint.store import load_from

        run, state = self._run, self._run.state
        # A rollback must not take these back: the time is spent, and a listed step must not be made again.
        seconds, skipped_steps, size = state.own_seconds, state.skipped_steps, state.micro_batch_size
        resumed_from = run.resumed_from
        payload = load_from(checkpoint[1], run.strategy.comm).payload
        check_payload(payload, str(checkpoint[1]))
        undo_step, run.undo_step = run.undo_step, None  # a half restored state is not handed over
        run.checkpointer.restore(payload, where=str(checkpoint[1]))
        run.checkpointer.restore_rng(payload)
        state.resume_clock(seconds)
        state.skipped_steps |= skipped_steps
        state.micro_batch_size = size  # found since the checkpoint, and in use
        run.resumed_from = resumed_from
        begin_training(run.task)
        # `Checkpointer.restore` has put them into evaluation mode.
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.set_mode(training=True)
        for phase_optimizer in run.phase_optimizers:  # of the step that was not finished
            phase_optimizer.zero_grad()
        run.undo_step = undo_step


def list_samples(samples: Sequence[int]) -> str:
    """Return the first samples, separated by commas."""
    return ", ".join(map(str, samples[:SAMPLES_SHOWN])) + ", ..." * (len(samples) > SAMPLES_SHOWN)


def nonfinite_state(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of parameters and buffers that are not finite; waits for the device once if all are."""
    candidates = [(name, tensor.detach()) for name, tensor in state.items() if _may_be_nan(tensor)]
    # A sum is finite only if all its terms are; it takes a fortieth of the time of checking each element.
    by_device: dict[torch.device, list[Tensor]] = {}
    # One answer for each device, not for each tensor: reading it waits for the device.
    for _, tensor in candidates:
        by_device.setdefault(tensor.device, []).append(torch.isfinite(tensor.sum()))
    if all(bool(torch.stack(finite).all()) for finite in by_device.values()):
        return []
    # Element by element, since a sum of finite values may overflow.
    return [name for name, tensor in candidates if not _is_finite(tensor)]


def untrained_nonfinite_state(task: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of buffers and frozen parameters that are not finite, such as a mask of minus infinity."""
    trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    return [name for name in nonfinite_state(state) if name not in trained]


def is_finite_state(state: dict[str, Any], *, except_for: Collection[str] = ()) -> bool:
    """Return True if every tensor of a state dict is finite, except those named in `except_for`."""
    # `in_memory` for each tensor: all of them at once might not fit.
    return all(_is_finite(in_memory(value)) for name, value in state.items() if name not in except_for)


def _is_finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(value) if _may_be_nan(tensor))


def _may_be_nan(tensor: Tensor) -> bool:
    # A meta tensor is a placeholder of another stage's values.
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta
