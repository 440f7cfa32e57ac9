"""HookStates: the states of a communication hook, one for each phase of a task, and those of them in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from trainkit.checkpoint.sharded_state import in_memory
from trainkit.distributed.collectives import Collectives
from trainkit.tree import map_tensors

from ..reducer.reducer import Reducer
from .comm_hooks import CommHook, MergedHookState, SavedHookState

logger = logging.getLogger(__name__)


class HookStates:
    """The states of `hook` on this rank, by phase; without a hook there are none."""

    def __init__(self, hook: CommHook | None) -> None:
        self.hook = hook
        self._states: dict[str, Any] = {}  # by phase
        self._has_warned = False  # of a state that is not saved

    def __iter__(self) -> Iterator[Any]:
        return iter(self._states.values())

    def register(self, reducer: Reducer, *, phase: str) -> None:
        """Reduce the buckets by the hook, if there is one, with a new state."""
        if self.hook is not None:
            # One state for each phase: bucket numbers, by which it keeps errors, begin at 0 in each Reducer.
            state = self._states[phase] = self.hook.state(reducer.group)
            reducer.register_hook(state, self.hook.hook)

    def clear(self) -> None:
        """Drop all states."""
        self._states = {}

    def saved(self, comm: Collectives) -> dict[str, Any]:
        """Return the states of all ranks for a checkpoint, complete on rank 0; collective."""
        states = self._saveable(comm)
        if not states:
            return {}
        local_state: dict[str, Any] = {"hooks": {phase: state.state_dict() for phase, state in states.items()}}
        # Copied: pickling a view of a bucket would send the memory of the whole bucket.
        local_state = map_tensors(local_state, lambda tensor: tensor.detach().to("cpu", copy=True))
        return {"comm_hook": self._name, "hook_states": comm.gather_object(local_state)}

    def load(self, saved: Mapping[str, Any], comm: Collectives) -> None:
        """Restore this rank's states from a checkpoint; from another number of ranks errors keep their sum."""
        saved_states, states = saved.get("hook_states"), self._saveable(comm)
        if not saved_states:
            return
        is_same_hook = saved["comm_hook"] == self._name and saved_states[0]["hooks"].keys() == states.keys()
        if is_same_hook and len(saved_states) == comm.world_size:
            local_state = in_memory(saved_states[comm.rank])  # the states of the other ranks stay on the disk
            for phase, state in states.items():
                state.load_state_dict(local_state["hooks"][phase])
            return
        is_merged = is_same_hook and all(isinstance(state, MergedHookState) for state in states.values())
        for phase, state in states.items() if is_merged else ():
            assert isinstance(state, MergedHookState)
            state.load_from_ranks([in_memory(of_rank["hooks"][phase]) for of_rank in saved_states])
        if comm.is_main and not is_merged:
            logger.warning(
                "the checkpoint holds communication state of %s on %d ranks, and this run has that of %s on %d: that "
                "state is dropped.",
                saved["comm_hook"],
                len(saved_states),
                self._name,
                comm.world_size,
            )

    @property
    def _name(self) -> str:
        return "none" if self.hook is None else self.hook.name

    def _saveable(self, comm: Collectives) -> dict[str, SavedHookState]:
        """Return the states that checkpoints hold, by phase; warn once of others."""
        for state in self if comm.is_main and not self._has_warned else ():
            if not isinstance(state, SavedHookState | dist.ProcessGroup | None):
                self._has_warned = True
                logger.warning(
                    "checkpoints do not hold the state of the communication hook: %s has no state_dict and "
                    "load_state_dict. A resumed run starts with a new one.",
                    type(state).__name__,
                )
        return {phase: state for phase, state in self._states.items() if isinstance(state, SavedHookState)}
