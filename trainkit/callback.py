"""Callback: the hooks of a run, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.run import Run


class Callback:
    """Override the hooks you need; the others cost nothing.

    Every hook is called on every rank, in this order:

        on_fit_start             *
          on_epoch_start         *
            on_step_end          *      after every optimizer step, which `run.state` counts already
            on_log                      every `log_every`, with metrics reduced over ranks
            on_evaluation_start
              on_dataset_end            after each dataset of an evaluation
            on_evaluation_end
            on_epoch_end         *      after the last step of an epoch
            on_step_complete            after every step and all of the above
              on_save                   a checkpoint is about to be written
        on_fit_end
        close                           always, also after an error; may be called twice

    Hooks marked * may change weights, in `run.whole_task()`. What `on_step_end` changes is in the metrics and in the
    checkpoint of the same step. A stop that any hook requests comes after this step, on all ranks.

    `validate`, `test` and `predict` call `on_evaluation_start`, `on_evaluation_end` and `close`.
    """

    loads_from_disk: bool = False
    """True if `load_state_dict` takes tensors that are on the disk, in a file that a later save may replace."""
    monitored: str | None = None
    """The validation metric that the callback needs; a resumed run that has not measured it runs sanity batches."""

    def on_fit_start(self, run: Run) -> None:
        """Everything is prepared, or restored when resuming; no step has been made."""

    def on_fit_end(self, run: Run) -> None:
        """Training is over; `run.stop_reason` is the reason."""

    def on_epoch_start(self, run: Run) -> None:
        """The next step is the first of an epoch, or the first after resuming inside one."""

    def on_epoch_end(self, run: Run) -> None:
        """The last step of an epoch is logged and evaluated; `run.state.epoch` counts the epoch already."""

    def on_step_end(self, run: Run) -> None:
        """An optimizer step has been made and counted; it is not logged and evaluated yet."""

    def on_step_complete(self, run: Run) -> None:
        """Nothing more happens in this step; the place for `run.checkpointer.save`."""

    def on_log(self, run: Run, metrics: dict[str, float]) -> None:
        """`metrics` are about to be written by the loggers; add to them in place."""

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        """`stage` is `validation`, `test`, `predict` or `sanity`."""

    def on_dataset_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        """A dataset has been evaluated, and metric objects still hold this rank's state.

        Add this rank's numbers to `metrics` in place: their means over ranks, weighted by samples, are logged too.
        """

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        """Every sample has been counted exactly once; names begin with the stage (`validation/loss`)."""

    def on_save(self, run: Run, payload: dict[str, Any]) -> None:
        """`payload` is about to be written as a checkpoint; add to it in place."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """`error` has ended the run; no collective may be called here, or other ranks hang."""

    def close(self) -> None:
        """Release resources; may be called twice."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints."""
        return {}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""

    def overridden_hooks(self) -> dict[str, Callable[..., None]]:
        """Return the hooks that this callback overrides, by name."""
        return {
            hook: getattr(self, hook)
            for hook in HOOKS
            if getattr(type(self), hook) is not getattr(Callback, hook) or hook in vars(self)
        }


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))
