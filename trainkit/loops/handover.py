"""Handover: what a rank does for a run that goes on after the loss of another one."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainkit.data.batch import StepBatch
from trainkit.distributed.collectives import Collectives
from trainkit.distributed.launcher import is_consequence
from trainkit.files import open_to_append, optional_file
from trainkit.metrics.step_output import StepOutput
from trainkit.metrics.sync import preserve_state, restore
from trainkit.phases import PhaseStep
from trainkit.run import Run
from trainkit.strategy import local_state, metric_modules

logger = logging.getLogger(__name__)

FILENAME = "rank_losses.jsonl"
_PENDING, _STOP = "pending_hooks", "stop_reason"  # in the payload, beside what a checkpoint has


class UndoableStep:
    """Takes back a step that the loss of another rank has broken.

        lost in forward, backward, sum    buffers, metrics and generators are restored, weights were not touched
        lost in an update                 the state is neither that of this step nor of the last: it is not used
        lost after the step               the state is that of this step

    No rank finishes a step before all have sent their gradients. So the survivor with the most steps is right: it has
    the sum that the others lack.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_begun = False
        self._buffers: list[tuple[dict[str, Tensor | None], str]] = []  # where the buffers of modules are
        self._copies: list[Tensor] = []  # of the buffers
        self._extra: list[nn.Module] = []  # modules with an extra state
        self._metrics: list[nn.Module] = []
        self._kept: tuple[list[Any], Any] = [], None  # copies of these states
        run.undo_step = self.undo

    def find_state(self) -> None:
        """Find what a step may change; called when a module has registered something."""
        # Not in each step, which would take as long as a small step itself.
        task, strategy = self._run.task, self._run.strategy
        held = {id(tensor) for tensor in local_state(strategy, task).values()}
        self._buffers = [
            (module._buffers, name)
            for module in task.modules()
            for name, tensor in module._buffers.items()
            if id(tensor) in held and not cast(Tensor, tensor).is_meta
        ]
        self._copies = []
        self._extra = [m for m in task.modules() if type(m).get_extra_state is not nn.Module.get_extra_state]
        self._metrics = metric_modules(strategy, task)

    def wrap(self, phase: PhaseStep) -> PhaseStep:
        """Return a phase of the step that can be taken back until its first update."""
        return replace(
            phase,
            forward_backward=partial(self._forward_backward, phase.forward_backward),
        )

    def _forward_backward(
        self, forward_backward: Callable[[StepBatch], list[StepOutput]], batch: StepBatch
    ) -> list[StepOutput]:
        if not self._is_begun:  # the first phase of the step
            self._is_begun = True
            self._keep_buffers()
            # Without random generators: those of the dead rank are lost, and all get new seeds.
            with self._run.strategy.readable():
                self._kept = (
                    [deepcopy(module.get_extra_state()) for module in self._extra],
                    preserve_state(self._metrics) if self._metrics else None,
                )
        return forward_backward(batch)

    def _keep_buffers(self) -> None:
        tensors = [cast(Tensor, buffers[name]) for buffers, name in self._buffers]
        # Into another shape a copy would be broadcast. Sparse tensors have no fixed number of values.
        fits = [tensor.shape for tensor in tensors] == [copy.shape for copy in self._copies]
        if not fits or not all([tensor.layout is torch.strided for tensor in tensors]):
            self._copies = [tensor.detach().clone() for tensor in tensors]
        elif tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, tensors)  # in a third of the time of single copies

    def end(self) -> None:
        """End the step, which is counted."""
        self._is_begun = self._run.strategy.is_updating = False

    def undo(self) -> bool:
        """Return to the end of the last step; return False if the state is that of no step."""
        is_updating = self._run.strategy.is_updating
        if self._is_begun and not is_updating:
            extra_states, metric_states = self._kept
            # Not copied into the buffers, which the step may have replaced.
            for (buffers, name), copy in zip(self._buffers, self._copies, strict=True):
                buffers[name] = copy
            for module, state in zip(self._extra, extra_states, strict=True):
                module.set_extra_state(state)
            if metric_states is not None:
                restore(metric_states)
        return not is_updating


def hand_over(run: Run, error: BaseException) -> bool:
    """Hand this rank's state over if the error is the loss of another rank that the run survives; not collective.

    Returns False for any other error, which ends the run.
    """
    strategy = run.strategy
    handover = strategy.handover
    if handover is None:
        return False
    if not is_consequence(error):
        handover.refuse()
        return False
    if handover.is_refused:  # by a rank with an error of its own, which this one follows from
        return False
    if run.undo_step is None or not run.undo_step():
        return True
    comm = strategy.comm
    # A process by itself: the others are gone, and each of them has the same state.
    strategy.comm = Collectives()
    try:
        with run.optimizers_in_evaluation():  # as for a checkpoint
            shards = run.checkpointer.shards()
            # A callback may have requested a stop that the ranks have not agreed on: without it they would go on.
            state = {**run.checkpointer.payload(shards), _PENDING: _pending_hooks(run), _STOP: run.stop_reason}
        part, local_shards = strategy.state_part, [] if shards is None else shards.shards
        handover.save(state, local_shards, step=run.state.step, part=part)
    except Exception as failure:
        # Another rank or a checkpoint may do.
        logger.warning("the state of rank %d could not be handed over: %s", comm.rank, failure)
    finally:
        strategy.comm = comm
    return True


def _pending_hooks(run: Run) -> list[tuple[str, tuple[Any, ...], int]]:
    """Return the hooks that are still to be called for the last step, the interrupted one from its callback on."""
    interrupted, pending = run.interrupted_hook, list(run.pending_hooks)
    if interrupted is not None and pending and interrupted[0] == pending[0][0]:
        return [interrupted, *pending[1:]]
    # The evaluation is complete, and is not repeated.
    if interrupted is not None and interrupted[0] == "on_evaluation_end" and not run.state.evaluation_due:
        return [interrupted, *pending]
    return pending


def take_over(run: Run) -> tuple[dict[str, Any], str] | None:
    """Return the state that a survivor has handed over, and what messages call it; `None` if there is none."""
    handover = run.strategy.handover
    if handover is None or handover.source is None:
        return None
    payload = handover.load()
    run.pending_hooks, run.stop_reason = tuple(payload.pop(_PENDING)), payload.pop(_STOP)
    run.handed_over = True
    return payload, "the memory of a surviving rank"


def report_loss(run: Run) -> None:
    """Say, and write to the run folder, who died and where training goes on; called when the state is restored."""
    handover = run.strategy.handover
    if handover is None or not handover.lost or not run.is_main:
        return
    seconds, step, num_ranks = time.monotonic() - handover.since, run.state.step, run.strategy.comm.num_processes
    where = "the start" if run.resumed_from is None else run.resumed_from
    how = "all ranks were started again"
    if not handover.replaces:
        how = f"{num_ranks} rank{'s go' if num_ranks > 1 else ' goes'} on"
    repeated = "" if run.handed_over else "; the steps since then are repeated"
    logger.warning("%s; %s after %.1f s, from %s at step %d%s.", handover.lost, how, seconds, where, step, repeated)
    if run.run_dir is not None:
        record = {"step": step, "lost": handover.lost, "from": where, "seconds": seconds, "ranks": num_ranks}
        path = Path(run.run_dir, FILENAME)
        with optional_file(path), open(open_to_append(path), "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
