"""The pieces that the Trainer uses, for a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainkit.data import Data
from trainkit.duration import Duration
from trainkit.errors import UserError
from trainkit.evaluation import EvalLoop
from trainkit.loops import FitLoop
from trainkit.metrics import WeightedMeans
from trainkit.rank import eval_loop, prepare_fit, run_on_rank
from trainkit.run import Run
from trainkit.state import TrainState
from trainkit.step_output import StepOutput
from trainkit.strategy import StartsRanks, Strategy
from trainkit.task import TaskModule
from trainkit.trainer import Trainer
from trainkit.window import Window


@contextmanager
def session(
    strategy: str | Strategy,
    task: TaskModule,
    data: Data | DataLoader[Any],
    *,
    max_duration: str | Duration | Sequence[str | Duration] = "1epoch",
    precision: str = "fp32",
    clip_norm: float | None = None,
    clip_value: float | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    spike_factor: float | None = None,
    seed: int = 0,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
) -> Iterator[Session]:
    """Bring a task, its optimizer and its data into place under a strategy, for a loop of your own.

        with session("single", task, Data(train=dataset, batch_size=64), max_duration="2epoch") as s:
            for window in s.windows():
                outputs = s.step(window)

    The order of samples, the gradient of the global batch, precision, clipping and schedules are those of
    `Trainer.fit`, and so are the weights. Collective: with several ranks each calls it, under torchrun or in a function
    that `strategy.launch` calls on every rank:

        strategy.launch(partial(train, strategy))   # def train(strategy): with session(strategy, ...) as s: ...

    Args:
        strategy: Where the work is done.
        task: The task.
        data: What it is trained on.
        max_duration: Where `windows` ends.
        precision: As of the Trainer.
        clip_norm: As of the Trainer.
        clip_value: As of the Trainer.
        on_nonfinite: `skip` leaves out steps whose gradient is not finite, as of the Trainer; `raise` refuses to save
            weights that are not finite, and leaves it to the loop to look at losses.
        spike_factor: As of the Trainer.
        seed: As of the Trainer.
        run_dir: Where `save` writes checkpoints.
        resume: A run folder or a checkpoint to go on from.

    """
    if on_nonfinite not in ("raise", "skip"):
        raise UserError(
            f"session(on_nonfinite={on_nonfinite!r}): a loop of one's own stops and goes back by itself; "
            "choose 'raise' or 'skip'."
        )
    trainer = Trainer(
        strategy,
        max_duration=max_duration,
        precision=precision,
        clip_norm=clip_norm,
        clip_value=clip_value,
        on_nonfinite=on_nonfinite,
        spike_factor=spike_factor,
        seed=seed,
        sanity_batches=0,
        callbacks=[],
        loggers=[],
    )
    if isinstance(trainer.strategy, StartsRanks) and trainer.strategy.starts_ranks:
        raise UserError(
            f"{type(trainer.strategy).__name__} starts processes, and a session is part of one. Start the program with "
            "torchrun, or put the session into a function and call strategy.launch(partial(function, strategy))."
        )
    data, checkpoint = trainer.check(task, data, resume=resume)
    with run_on_rank(trainer, task, data, None if run_dir is None else Path(run_dir)) as run:
        yield Session(trainer, run, prepare_fit(trainer, run, checkpoint))


class Session:
    """One run on this rank, driven step by step."""

    def __init__(self, trainer: Trainer, run: Run, loop: FitLoop) -> None:
        self.run = run
        self._trainer = trainer
        self._loop = loop
        self._evaluations: dict[str, EvalLoop] = {}  # by stage, each with feeds that keep their workers
        loop.start()

    @property
    def task(self) -> TaskModule:
        """The task, on its device."""
        return self.run.task

    @property
    def state(self) -> TrainState:
        """How far training is."""
        return self.run.state

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer of the task, or of each of its phases."""
        return [optimization.optimizer for optimization in self.run.optimizations]

    @property
    def is_main(self) -> bool:
        """Whether this rank writes and prints."""
        return self.run.is_main

    def windows(self) -> Iterator[Window]:
        """Yield this rank's micro-batches of each step until `max_duration`, or until any rank was asked to stop.

        Raises UserError if a window was not given to `step`.
        """
        loop, state = self._loop, self.run.state
        while not loop.finished():
            first = state.step
            for window in loop.windows():
                before = state.step
                yield window
                if state.step != before + 1:
                    raise UserError(
                        f"a window came with step {before} and left with step {state.step}; call session.step(window) "
                        "once for each window."
                    )
                if loop.finished():
                    break
            loop.check_progress(first)

    def step(self, window: Window) -> list[StepOutput]:
        """Make one optimizer step and count it; return the outputs of this rank's micro-batches. Collective."""
        return self._loop.step(window)

    def mean(self, outputs: Sequence[StepOutput]) -> dict[str, float]:
        """Return the weighted means of loss and metrics over all ranks; waits for the device. Collective.

        Warns of the steps that were left out since the last call, and of what was wrong with them.
        """
        means = WeightedMeans(self.run.strategy.device)
        means.add(list(outputs), step=self.state.step)
        bad = means.nonfinite_steps()
        reduced = means.reduce(self.run.strategy.comm)
        self._loop.tell_left_out(bad)
        return reduced

    def evaluate(self, stage: str = "validation") -> dict[str, float]:
        """Return the metrics over all samples of a stage, each counted once, by name (`validation/loss`). Collective.

        After a validation the schedules step that follow one of its metrics. The task is in training mode again
        afterwards.
        """
        if stage not in self._evaluations:
            self._evaluations[stage] = eval_loop(self._trainer, self.run, stage, limit=None)
        metrics = self._evaluations[stage].run()
        self.task.train()
        if metrics is None:
            return {}
        if stage == "validation":
            for optimization in self.run.optimizations:
                optimization.after_validation(metrics)
        self.run.emit("on_evaluation_end", stage, metrics)
        return metrics

    def save(self) -> Path | None:
        """Write a checkpoint of this moment into `run_dir`; return its path on the main rank. Collective."""
        if self.run.run_dir is None:
            raise UserError("there is no folder to save to; give session(..., run_dir='runs/mine').")
        entry = self.run.save(reason="asked for")
        return None if entry is None else entry.path
