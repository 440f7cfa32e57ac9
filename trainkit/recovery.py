"""What happens after a loss that is not finite: an error, the end of the run, or going back to before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal

from trainkit.errors import NonFiniteLoss, UserError
from trainkit.feed import Feed
from trainkit.left_out_words import listed
from trainkit.looking_back import LookingBack, first_of
from trainkit.metrics import WeightedMeans
from trainkit.nonfinite import GoBack, untrained_nonfinite_state
from trainkit.run import Run
from trainkit.step_output import StepOutput
from trainkit.way_back import WayBack
from trainkit.window import Window

logger = logging.getLogger(__name__)

Policy = Literal["raise", "skip", "stop", "rollback"]


class Recovery:
    """Looks at losses where training waits for the device anyway, and applies the policy on all ranks at once.

    step        100        147   150
    checkpoint  saved                        147: a loss that is not finite, seen when step 150 logs
    rollback    restored   147   150         training repeats 101 to 146 to the bit, looks at 147 closely,
                  ------>   |---->           leaves it out, and goes on
    """

    def __init__(self, run: Run, *, policy: Policy, rollback_limit: int) -> None:
        assert run.feed is not None
        self.means = run.means = WeightedMeans(run.strategy.device)
        self._weights_are_sound = True
        self._run = run
        self._feed: Feed = run.feed
        self._lacks_folder = policy == "rollback" and run.checkpoints is None
        self._policy: Policy = "raise" if self._lacks_folder else policy
        self._rollback_limit = rollback_limit
        self._rollbacks = 0
        self._way_back = WayBack(run)
        self._suspect: tuple[int, str] | None = None  # the step to look at, and what was said of it
        self.looking_back = LookingBack(run, self._way_back)

    # ---- What the loop calls

    def prepare(self) -> None:
        """Know what is not finite before training; collective."""
        strategy = self._run.strategy
        if self._lacks_folder and self._run.is_main:
            logger.warning(
                "on_nonfinite=rollback goes back to checkpoints, and this run has no folder for any: a loss that is "
                "not finite ends it, as with on_nonfinite=raise."
            )
        own = untrained_nonfinite_state(self._run.task)
        if strategy.comm.any_rank(bool(own)):  # stages have parts of the task
            self._way_back.never_finite = frozenset(
                name for names in strategy.comm.all_gather_object(own) for name in names
            )

    def start(self) -> None:
        """Have a checkpoint to go back to, if the policy may ask for one; collective."""
        run = self._run
        if run.checkpoints is None:
            return
        has_own = self._way_back.begin()
        if self._policy == "rollback" and not run.strategy.comm.broadcast_object(has_own):
            run.save(reason="start")

    def attempts(self, on_return: Callable[[], None]) -> Iterator[Attempt]:
        """Yield contexts to train in until one is left without a need to go back; `on_return` is called after that."""
        while True:
            attempt = Attempt(self)
            yield attempt
            if attempt.succeeded:
                return
            on_return()

    def check(self) -> bool:
        """Apply the policy to losses that were not logged yet, and return whether the weights may be saved."""
        first_bad = self.means.first_nonfinite_step()
        if self._run.strategy.comm.any_rank(first_bad is not None):
            self.handle(first_bad)
        return self._weights_are_sound

    def may_save(self) -> bool:
        """Return whether the weights are worth keeping, or apply the policy if they are not finite; collective.

        A step may have a finite loss and a gradient that is not. What it left must never take the place of a sound
        checkpoint, which may be the only one: here training may wait for the device.
        """
        if not self.check():
            return False
        run = self._run
        if run.state.step == 0:
            return True
        blamed = self.looking_back.not_finite()
        if not run.strategy.comm.any_rank(blamed is not None):
            return True
        said = f"step {run.state.step} left {first_of(run.strategy, blamed)} not finite"
        if self._policy == "rollback":
            raise GoBack(run.state.step, said)
        if self._policy == "stop":
            self._weights_are_sound = False
            run.request_stop(said)
            return False
        raise NonFiniteLoss(f"{said}, or a step before it did, though no loss was NaN or infinite{self._remedy()}")

    def handle(self, step: int | None) -> None:
        """Raise, stop or go back as the policy says; `step` is this rank's first bad one. Collective.

        A skipped step has changed nothing, and is told of when training logs.
        """
        if self._policy == "skip":
            return
        if self._policy == "stop":
            self._weights_are_sound = False
            where = f"at step {step}" if step is not None else "on another rank"
            self._run.request_stop(f"the loss became NaN or infinite {where}")
            return
        first, place = self._place(step)
        said = f"the loss became NaN or infinite {place}"
        if self._policy == "rollback" and first is not None:
            raise GoBack(first, said)
        raise NonFiniteLoss(
            f"{said}. Lower the learning rate, set trainer.clip_norm=1.0, or look for the operation with "
            "trainer.detect_anomaly=true; trainer.on_nonfinite=skip leaves such steps out, and rollback goes back to "
            f"before them.{'' if first is None else self.looking_back.see_again(first)}"
        )

    def leave_out(self, window: Window) -> list[StepOutput]:
        """Let a step change nothing but schedules, after a close look if training has come back for it; collective."""
        run, step = self._run, self._run.state.step + 1
        if self._suspect is not None and self._suspect[0] == step:
            said = self._suspect[1]
            self._suspect = None
            seen = self.looking_back.look_at(window, step, said)
            if run.is_main:
                logger.warning("%s: step %d is left out.%s", said, step, seen)
        for optimization in run.optimizations:
            if run.state.step % optimization.every == 0:
                optimization.after_step()
        return []

    # ---- Going back

    def go_back(self, found: GoBack) -> None:
        """Restore the last checkpoint before the step that was found, which will be left out; collective."""
        run = self._run
        self._rollbacks += 1
        if self._rollbacks > self._rollback_limit:
            raise NonFiniteLoss(
                f"{found.place}, after {self._rollback_limit} rollbacks. Lower the learning rate, set "
                "trainer.clip_norm=1.0, or allow more with trainer.rollback_limit."
            ) from None
        checkpoint = self._way_back.checkpoint_before(found.step)
        if checkpoint is None:
            raise NonFiniteLoss(
                f"{found.place}, and there is no sound checkpoint from before it to go back to. Lower the learning "
                "rate, or save more often: callbacks.checkpoint.every=500step."
            ) from None
        self._way_back.restore(checkpoint)
        run.state.left_out.discard(found.step + 1)
        run.state.left_out.add(found.step)
        self._suspect = (found.step, found.place)
        if run.stopped_by is None:
            run.stop_reason = None
        for destination in run.loggers:
            assert run.run_dir is not None
            destination.close()
            destination.open(run.run_dir, step=run.state.step)
        if run.is_main:
            logger.warning("%s: going back to step %d.", found.place, run.state.step)

    def _remedy(self) -> str:
        """Return what has become of the weights that were not finite, and what to do."""
        kept = "" if self._run.checkpoints is None else "; nothing of it is saved, and earlier checkpoints stay"
        lower = f"{kept}. Lower the learning rate, or set trainer.clip_norm=1.0"
        if self._policy == "skip":
            return f"{lower}."
        return (
            f"{lower}; trainer.on_nonfinite=skip leaves out steps whose gradient is not finite, and rollback goes back "
            "to before them."
        )

    def _place(self, step: int | None) -> tuple[int | None, str]:
        """Return the first bad step of all ranks, and in words where it was; collective."""
        run = self._run
        own = None if step is None else (step, run.strategy.comm.rank, self._feed.samples_of(step, run.state))
        places = run.strategy.comm.all_gather_object(own)
        found = [place for place in places if place is not None]
        if not found:  # it was logged already, and on no rank since
            return None, f"before step {run.state.step}"
        first, rank, samples = min(found)
        on_rank = f" on rank {rank}" if len(places) > 1 else ""
        return first, f"at step {first}{on_rank}" + (f" (samples {listed(samples)})" if samples else "")


class Attempt:
    """A context to train in: where a loss was not finite, it goes back and lets the next attempt train on."""

    def __init__(self, recovery: Recovery) -> None:
        self.succeeded = False
        self._recovery = recovery

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, GoBack):
            self._recovery.go_back(error)
            return True
        self.succeeded = error is None
        return False


def checked_rollbacks(number: int) -> int:
    """Return how often a run may go back."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise UserError(f"rollback_limit must be a whole number, at least 1, got {number!r}.")
    return number
