"""session(): the Trainer's pieces for a custom training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainkit.data.batch import StepBatch
from trainkit.data.data import Data
from trainkit.duration import Duration
from trainkit.errors import UserError
from trainkit.loops.evaluation_loop import EvaluationLoop
from trainkit.loops.fit_loop import FitLoop
from trainkit.loops.worker import evaluation_loop, prepare_fit, run_on_rank
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.metrics.step_output import StepOutput
from trainkit.optim.optimizer_settings import ResumeOptimizer
from trainkit.run import Run
from trainkit.storage import local_path
from trainkit.strategy import StartsRanks, Strategy
from trainkit.task import TaskModule
from trainkit.trainer import Trainer


@contextmanager
def session(
    strategy: str | Strategy,
    task: TaskModule,
    data: Data | DataLoader[Any],
    *,
    max_duration: str | Duration | Sequence[str | Duration] = "1epoch",
    precision: str = "fp32",
    max_grad_norm: float | None = None,
    max_grad_value: float | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    skip_grad_norm_factor: float | None = None,
    resume_optimizer: ResumeOptimizer = "configured",
    seed: int = 0,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
) -> Iterator[Session]:
    """Prepare a task, its optimizer and its data under a strategy for a custom loop.

        with session("single", task, Data(train=dataset, batch_size=64), max_duration="2epoch") as s:
            for batch in s.step_batches():
                outputs = s.step(batch)

    The order of samples, the gradient of the global batch, precision, clipping and schedules are those of
    `Trainer.fit`, and so are the weights. Collective: with several ranks each calls it, under torchrun or in a function
    that `strategy.launch` calls on every rank:

        strategy.launch(partial(train, strategy))   # def train(strategy): with session(strategy, ...) as s: ...

    Args:
        strategy: A strategy or its name, such as `"single"`.
        task: The task to train, changed in place.
        data: Its datasets.
        max_duration: End of `step_batches`.
        precision: As in the Trainer.
        max_grad_norm: As in the Trainer.
        max_grad_value: As in the Trainer.
        on_nonfinite: `skip` skips steps whose gradient is not finite, as in the Trainer; `raise` only refuses to save
            weights that are not finite: the loop checks losses.
        skip_grad_norm_factor: As in the Trainer.
        resume_optimizer: As in the Trainer.
        seed: As in the Trainer.
        run_dir: The folder for the checkpoints of `save`.
        resume: A run folder or a checkpoint to resume.

    """
    if on_nonfinite not in ("raise", "skip"):
        raise UserError(
            f"session(on_nonfinite={on_nonfinite!r}): a custom loop stops and rolls back by itself; "
            "choose 'raise' or 'skip'."
        )
    trainer = Trainer(
        strategy,
        max_duration=max_duration,
        precision=precision,
        max_grad_norm=max_grad_norm,
        max_grad_value=max_grad_value,
        on_nonfinite=on_nonfinite,
        skip_grad_norm_factor=skip_grad_norm_factor,
        resume_optimizer=resume_optimizer,
        seed=seed,
        num_sanity_batches=0,
        callbacks=[],
        loggers=[],
    )
    if isinstance(trainer.strategy, StartsRanks) and trainer.strategy.starts_ranks:
        raise UserError(
            f"{type(trainer.strategy).__name__} starts processes, and a session is part of one. Start the program with "
            "torchrun, or put the session into a function and call strategy.launch(partial(function, strategy))."
        )
    folder = None if run_dir is None else local_path(run_dir, what="run_dir of a session")
    data, checkpoint = trainer.check(task, data, resume=resume)
    config = trainer.fit_config
    with run_on_rank(trainer.strategy, config, task, data, folder) as run:
        loop = prepare_fit(run, config, checkpoint)
        yield Session(run, loop)
        # Not after an error: this is collective, and other ranks may not come here.
        loop.end()


class Session:
    """One run on this rank, driven step by step."""

    def __init__(self, run: Run, loop: FitLoop) -> None:
        self.run, self._loop = run, loop
        self.task, self.state = run.task, run.state
        # By stage, as starting the worker processes of a loader for each evaluation would take seconds.
        self._evaluations: dict[str, EvaluationLoop] = {}
        loop.start()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer of the task, or of each of its phases."""
        return [phase_optimizer.optimizer for phase_optimizer in self.run.phase_optimizers]

    def step_batches(self) -> Iterator[StepBatch]:
        """Yield this rank's step batches until `max_duration`, or until any rank was asked to stop.

        The task's callbacks are called as in `Trainer.fit`: `on_step_end` at the end of `step`, and when the next batch
        is requested `on_epoch_end`, `on_step_complete` and `on_epoch_start`. Raises UserError if a batch was not passed
        to `step`.
        """
        for batch in self._loop.step_batches():
            steps_before = self.state.step
            yield batch
            # The loop's own code may have requested a stop, and ranks ask each other only if it is possible.
            self.run.may_be_stopped = True
            if self.state.step != steps_before + 1:
                raise UserError(
                    f"the step count went from {steps_before} to {self.state.step} over one step batch; call "
                    "session.step(batch) once for each."
                )

    def step(self, batch: StepBatch) -> list[StepOutput]:
        """Make one optimizer step and count it; return the outputs of this rank's micro-batches. Collective."""
        outputs = self._loop.begin_step(batch)
        self._loop.finish_step(batch)
        self.run.emit("on_step_end")
        return outputs

    def mean(self, outputs: Sequence[StepOutput]) -> dict[str, float]:
        """Return the weighted means of loss and metrics over all ranks; waits for the device. Collective.

        Warns about the steps that were skipped since the last call.
        """
        means = WeightedMeans(self.run.strategy.device)
        means.add(list(outputs), step=self.state.step)
        # Before `reduce`, which clears the losses.
        nonfinite_steps = means.nonfinite_steps()
        reduced = means.reduce(self.run.strategy.comm)
        self._loop.warn_skipped_steps(nonfinite_steps)
        return reduced

    def evaluate(self, stage: str = "validation") -> dict[str, float]:
        """Return the metrics over all samples of a stage, each counted once, by name (`validation/loss`). Collective.

        A validation also steps the schedules that follow a metric. Each module has the mode of before afterwards.
        """
        if stage not in self._evaluations:
            self._evaluations[stage] = evaluation_loop(self.run, stage, limit=None)
        with self.run.optimizers_in_evaluation():
            metrics = self._evaluations[stage].run()
            if metrics is None:
                return {}
            if stage == "validation":
                for phase_optimizer in self.run.phase_optimizers:
                    phase_optimizer.step_schedules("metric", metrics)
            self.run.emit("on_evaluation_end", stage, metrics)
        return metrics

    def save(self) -> Path | None:
        """Write a checkpoint of the present state into `run_dir`; return its path on the main rank. Collective."""
        if self.run.run_dir is None:
            raise UserError("no folder to save to; pass session(..., run_dir='runs/mine').")
        entry = self.run.checkpointer.save(reason="asked for")
        return None if entry is None else entry.path
