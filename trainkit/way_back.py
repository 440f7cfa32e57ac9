"""The way back to an earlier checkpoint of a run that goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from trainkit.checkpoints.store import CheckpointEntry, CheckpointError, load_from
from trainkit.nonfinite import is_finite_state
from trainkit.run import Run


class WayBack:
    """Finds sound checkpoints of this run, and restores them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._foreign: set[Path] = set()
        self.never_finite: frozenset[str] = frozenset()
        """Names of state that was not finite before training, and is not to be: masks of minus infinity."""

    def begin(self) -> bool:
        """Return on the main rank whether there is a checkpoint of this run already.

        The folder may hold others: of an earlier run, or of a later step than the one that was resumed.
        """
        run = self._run
        entries: list[CheckpointEntry] = []
        if run.is_main and run.checkpoints is not None:
            with suppress(OSError):  # a save will say what is wrong with the folder
                entries = run.checkpoints.entries()
        self._foreign = {entry.path for entry in entries if run.resumed_from is None or entry.step > run.state.step}
        return len(entries) > len(self._foreign)

    def checkpoint_before(self, step: int) -> tuple[int, Path] | None:
        """Return the step and path of the last whole checkpoint before `step` whose weights are finite; collective."""
        run = self._run
        run.finish_saving()
        found: tuple[int, Path] | None = None
        if run.is_main and run.checkpoints is not None:
            for entry in reversed(run.checkpoints.entries()):
                if entry.path in self._foreign or entry.step >= step:
                    continue
                with suppress(CheckpointError):
                    if is_finite_state(run.checkpoints.load(entry)["task"], but_for=self.never_finite):
                        found = (entry.step, entry.path)
                        break
        return run.strategy.comm.broadcast_object(found)

    def restore(self, checkpoint: tuple[int, Path]) -> None:
        """Let the run be as the checkpoint has it, but for its clock and what it has found out since; collective."""
        run, state = self._run, self._run.state
        seconds, left_out, size = state.own_seconds, state.left_out, state.micro_batch_size
        resumed_from = run.resumed_from
        payload = load_from(checkpoint[1]).payload
        run.restore(payload, where=str(checkpoint[1]))
        run.restore_rng(payload)
        state.go_on_counting(seconds)
        state.left_out |= left_out
        state.micro_batch_size = size  # what was found since then is in use
        run.resumed_from = resumed_from
        run.task.train()
        drop_gradients(run)


def drop_gradients(run: Run) -> None:
    """Leave no gradient of a step that will not be made."""
    for optimization in run.optimizations:
        optimization.zero_grad()
