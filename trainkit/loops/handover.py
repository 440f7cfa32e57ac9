"""Handover: what a rank does for a run that goes on after the loss of another one."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from trainkit.checkpoint.sharded_state import PLACE, TensorOfShards, TensorShard, replace_placeholders
from trainkit.distributed.collectives import Collectives
from trainkit.distributed.failure_store import RankTimeout
from trainkit.distributed.launcher import is_consequence
from trainkit.files import open_to_append, optional_file
from trainkit.run import Run
from trainkit.run_dir.failure import clear_failures, record_failure
from trainkit.tree import num_bytes, tensors_in

logger = logging.getLogger(__name__)

FILENAME = "rank_losses.jsonl"
# In the payload, beside what a checkpoint has.
_PENDING, _STOP, _MEASURED, _UNSAVED = "pending_hooks", "stop_reason", "measured_at", "unsaved"


def hand_over(run: Run, error: BaseException) -> bool:
    """Hand this rank's state over if the error is the loss of another rank that the run survives; not collective.

    Returns False for any other error, which ends the run.
    """
    strategy = run.strategy
    handover = strategy.handover
    if handover is None:
        return False
    if not is_consequence(error) or isinstance(error, RankTimeout):
        handover.refuse()
        return False
    if handover.is_refused:  # by a rank with an error of its own, which this one follows from
        return False
    # Its parts of a failed run's record, in case that the launcher starts nothing again: it does so after a kill alone.
    record_failure(run, error)
    unsaved = None if run.undo_step is None else run.undo_step()
    if unsaved is None:
        return True
    comm, checkpointer = strategy.comm, run.checkpointer
    # A process by itself: the others are gone, and each of them has the same state.
    strategy.comm = Collectives()
    try:
        with run.optimizers_in_evaluation():  # as for a checkpoint
            shards = checkpointer.shards()
            checkpointer.trainable_only = False
            state = {
                **checkpointer.payload(shards),
                _PENDING: _pending_hooks(run),
                # A callback may have requested a stop that the ranks have not agreed on: without it they would go on.
                _STOP: run.stop_reason,
                _MEASURED: run.measured_at,
                _UNSAVED: unsaved,
            }
            local_shards = [] if shards is None else shards.shards
            # Inside the block: the tensors are those of the task, which trains with others.
            handover.save(
                (state, local_shards),
                num_bytes=num_bytes(tensors_in([state, *(shard.elements for shard in local_shards)])),
                step=run.state.step,
                part=strategy.state_part,
                callbacks=state["callbacks"] if comm.is_main else None,
            )
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
    parts, callbacks = handover.load()
    payload = put_together(parts)
    if callbacks is not None:
        payload["callbacks"] = callbacks
    run.pending_hooks, run.stop_reason = tuple(payload.pop(_PENDING)), payload.pop(_STOP)
    run.measured_at, run.unsaved = payload.pop(_MEASURED), payload.pop(_UNSAVED)
    run.handed_over = True
    names = run.unsaved.attributes
    if names and run.is_main:
        logger.warning(
            "%s of %s changed during the run, and no checkpoint has it: from here on it is again what the task begins "
            "with. Keep tensors in buffers, and return the rest from get_extra_state; a callback sets what it changes "
            "again in on_fit_start.",
            ", ".join(names),
            type(run.task).__name__,
        )
    return payload, "the memory of a surviving rank"


def put_together(parts: Sequence[tuple[dict[str, Any], Sequence[TensorShard]]]) -> dict[str, Any]:
    """Return the state of which each part has the shards of its ranks, and placeholders for those of others."""
    shards: dict[str, list[TensorShard]] = defaultdict(list)
    for shard in chain.from_iterable(local_shards for _, local_shards in parts):
        shards[shard.name].append(shard)
    states = [state for state, _ in parts]
    divided = {key: _joined([state[key] for state in states]) for key in ("task", "optimizer", "strategy")}
    payload = {**states[0], **divided}
    replace_placeholders(payload, lambda placeholder: TensorOfShards(placeholder, shards[placeholder[PLACE]]))
    return payload


def _joined(states: list[Any]) -> Any:
    """Return the state that has all entries of several ones; where several have an entry, that of the first."""
    first = states[0]
    if len(states) == 1 or not isinstance(first, dict):
        return first
    keys = dict.fromkeys(key for state in states for key in state)
    return {key: _joined([state[key] for state in states if key in state]) for key in keys}


def report_loss(run: Run) -> None:
    """Say, and write to the run folder, who died and where training goes on; called when the state is restored."""
    handover = run.strategy.handover
    if handover is None or not handover.lost or not run.is_main:
        return
    seconds, step, num_ranks = time.monotonic() - handover.since, run.state.step, run.strategy.comm.num_processes
    where = "the start" if run.resumed_from is None else run.resumed_from
    how = "all ranks were started again"
    if not handover.is_whole:
        how = f"{num_ranks} rank{'s go' if num_ranks > 1 else ' goes'} on"
    repeated = "" if run.handed_over else "; the steps since then are repeated"
    starter = multiprocessing.parent_process()
    hint = ""
    if handover.regrow is not None and starter is not None:
        hint = f" To start all ranks again, type: kill -{handover.regrow.name.removeprefix('SIG')} {starter.pid}"
    message = "%s; %s after %.1f s, from %s at step %d%s.%s"
    logger.warning(message, handover.lost, how, seconds, where, step, repeated, hint)
    if run.run_dir is not None:
        clear_failures(run.run_dir)  # which survivors have written in case that they were not started again
        record = {"step": step, "lost": handover.lost, "from": where, "seconds": seconds, "ranks": num_ranks}
        path = Path(run.run_dir, FILENAME)
        with optional_file(path), open(open_to_append(path), "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
