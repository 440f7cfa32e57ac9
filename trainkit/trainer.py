"""The Trainer: settings of a run, and the four things that can be done with a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from trainkit import registry
from trainkit.callback import Callback
from trainkit.checkpoints.store import CHECKPOINTS, resolve
from trainkit.continuation import AUTO, run_to_continue
from trainkit.data import Data
from trainkit.duration import Duration
from trainkit.errors import Stopped, UserError
from trainkit.linear_scaling import UsualBatch
from trainkit.logger import Logger
from trainkit.model_settings import ModelSettings, check_patterns
from trainkit.optimization import Clip
from trainkit.phases import check_phases_run
from trainkit.precision import Precision
from trainkit.rank import evaluate_on_rank, fit_on_rank
from trainkit.recovery import Policy, checked_rollbacks
from trainkit.report.writing import reported
from trainkit.result import FitResult
from trainkit.run_folder import check_run_dir, choose_run_dir
from trainkit.run_lock import check_no_other_run
from trainkit.settings import (
    as_data,
    checked_duration,
    checked_limit,
    checked_policy,
    checked_seed,
    made_callbacks,
    made_loggers,
)
from trainkit.signals import ALWAYS, EXIT_CODES, preemption_signal_named
from trainkit.slurm import check_goes_on, requeue_job, signal_to_requeue_after
from trainkit.spikes import checked_spike_factor
from trainkit.strategy import Strategy
from trainkit.task import TaskModule


class Trainer:
    """Trains, evaluates and predicts with a task, under any strategy.

    Durations are texts such as `"500step"`, `"2epoch"`, `"30min"` or `"1e6sample"`. `max_duration` may be several,
    of which the first that is reached ends the run. Limits count global batches. `callbacks` and `loggers` replace
    the default ones; names and objects can be mixed.

    Args:
        strategy: Where the work is done: a name such as `"single"`, or a `Strategy`.
        max_duration: How long to train.
        evaluate_every: How often to validate; `None` never.
        log_every: How often training metrics are reduced and written.
        seed: Seeds python, numpy and torch, and the order of samples.
        precision: `fp32`, `bf16-mixed`, `fp16-mixed`, `bf16-true` or `fp64`.
        tf32: Whether CUDA devices may round factors of fp32 matrix products to TF32.
        clip_norm: Largest global norm of the gradient.
        clip_value: Largest absolute value of a gradient element.
        compile: Whether `torch.compile` compiles the task's forward.
        deterministic: Whether torch may only use deterministic algorithms.
        detect_anomaly: Whether autograd looks for the operation that made a NaN (slow).
        fused_optimizer: Whether torch's fused optimizer kernels are used where there are any.
        no_weight_decay: What weight decay leaves alone: `bias`, `norm`, `embedding`, or patterns of names.
        freeze: Patterns of names of parameters or modules that are not trained.
        checkpoint_activations: Patterns of names of modules whose forward is computed again for backward.
        channels_last: Whether convolutions' weights are laid out by pixels, which is quicker on GPUs.
        sync_batch_norm: Whether batch norms on several devices take their statistics from all of them (CUDA).
        on_nonfinite: What happens to a loss that is NaN or infinite: `raise`, `skip` that step, `stop` the run, or
            `rollback` to the last checkpoint before it, from which the run goes on without that step.
        rollback_limit: How often a run may go back.
        spike_factor: Leave out steps whose gradient norm is so many times the average of those before; `None`: none.
        sanity_batches: Validation batches to try before training.
        limit_train_batches: Global batches that make an epoch at most.
        limit_validation_batches: Global batches of a validation at most.
        limit_test_batches: Global batches of a test at most.
        limit_predict_batches: Global batches of a prediction at most.
        overfit_batches: Train on these first global batches only, the same ones in every epoch.
        fast_dev_run: Try everything with one batch, writing no file.
        preemption_signal: A further signal after which the state is saved and training ends, such as `"SIGUSR1"`.
        requeue: Whether SLURM queues the job again after that signal; needs `resume="auto"`.
        profile: Whether steps 10 to 15 are recorded by torch's profiler, and a step's arithmetic is counted.
        report: Whether the run's folder gets a `report.html` when the run ends, well or not.
        run_dir: The run's folder; by default a new one below `runs/`.
        callbacks: Callbacks or their names; by default checkpoints, progress, throughput, model summary, learning rate.
        loggers: Loggers or their names; by default TensorBoard and `metrics.jsonl`.
        config: The run's settings as YAML, kept in its folder and its checkpoints.

    """

    def __init__(
        self,
        strategy: str | Strategy = "single",
        *,
        max_duration: str | Duration | Sequence[str | Duration] = "1epoch",
        evaluate_every: str | Duration | None = "1epoch",
        log_every: str | Duration = "50step",
        seed: int = 0,
        precision: str = "fp32",
        tf32: bool = False,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        compile: bool = False,
        deterministic: bool = False,
        detect_anomaly: bool = False,
        fused_optimizer: bool = True,
        no_weight_decay: Sequence[str] = (),
        freeze: Sequence[str] = (),
        checkpoint_activations: Sequence[str] = (),
        channels_last: bool = False,
        sync_batch_norm: bool = False,
        on_nonfinite: Policy = "raise",
        rollback_limit: int = 3,
        spike_factor: float | None = None,
        sanity_batches: int = 2,
        limit_train_batches: int | None = None,
        limit_validation_batches: int | None = None,
        limit_test_batches: int | None = None,
        limit_predict_batches: int | None = None,
        overfit_batches: int | None = None,
        fast_dev_run: bool = False,
        preemption_signal: str | None = None,
        requeue: bool = False,
        profile: bool = False,
        report: bool = True,
        run_dir: str | Path | None = None,
        callbacks: Sequence[str | Callback] | None = None,
        loggers: Sequence[str | Logger] | None = None,
        config: str = "",
    ) -> None:
        self.strategy = registry.make("strategy", strategy) if isinstance(strategy, str) else strategy
        self.max_duration = Duration.parse_all(max_duration, where="max_duration")
        self.evaluate_every = checked_duration(evaluate_every, "evaluate_every")
        self.log_every = Duration.parse(log_every, where="log_every")
        self.seed = checked_seed(seed)
        self.precision = Precision(precision, tf32=tf32)
        self.clip = Clip(clip_norm, clip_value)
        self.compile = compile
        self.deterministic = deterministic
        self.detect_anomaly = detect_anomaly
        self.fused_optimizer = fused_optimizer
        check_patterns("no_weight_decay", no_weight_decay)
        self.no_weight_decay = no_weight_decay
        self.model_settings = ModelSettings(freeze, checkpoint_activations, channels_last, sync_batch_norm)
        self.on_nonfinite = checked_policy(on_nonfinite)
        self.rollback_limit = checked_rollbacks(rollback_limit)
        self.spike_factor = checked_spike_factor(spike_factor)
        self.sanity_batches = checked_limit("sanity_batches", sanity_batches, least=0) or 0
        self.limits = {
            "train": checked_limit("limit_train_batches", limit_train_batches),
            "validation": checked_limit("limit_validation_batches", limit_validation_batches),
            "test": checked_limit("limit_test_batches", limit_test_batches),
            "predict": checked_limit("limit_predict_batches", limit_predict_batches),
        }
        self.overfit_batches = checked_limit("overfit_batches", overfit_batches)
        self.fast_dev_run = fast_dev_run
        self.preemption_signal = preemption_signal_named(preemption_signal)
        self.requeue_after = signal_to_requeue_after(requeue, self.preemption_signal)
        if self.preemption_signal is not None:
            self.strategy.stop_signals = (*ALWAYS, self.preemption_signal)
        self.report = report
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.callbacks = made_callbacks(callbacks)
        if profile:
            made = registry.make("callbacks", "profiler")
            if not any(type(callback) is type(made) for callback in self.callbacks):  # or its own settings count
                self.callbacks.append(made)
        self.loggers = made_loggers(loggers)
        self.config = config
        self.usual_batch: UsualBatch | None = None
        """The global batch that the learning rate was chosen for; the command line knows that of a recipe."""
        if fast_dev_run:
            self.max_duration, self.evaluate_every = [Duration(1, "step")], Duration(1, "step")
            self.limits = dict.fromkeys(self.limits, 1)
            self.loggers = []

    # ---- The four entry points; each validates what it can before any process is started

    def fit(
        self,
        task: TaskModule,
        data: Data | DataLoader[Any] | Dataset[Any],
        *,
        resume: str | Path | None = None,
    ) -> FitResult:
        """Train `task` in place and return what the run came to.

        `resume` is a run folder or a checkpoint; training goes on in the same folder at the very sample after the
        last one. With `resume="auto"` the run in `run_dir` goes on, or without a `run_dir` the newest unfinished run
        of this task below `runs/`; where there is none, training starts anew. After a SIGINT or SIGTERM it saves the
        state and raises Stopped, a SystemExit with code 130 or 143; after another signal, 128 and its number.
        """
        data, checkpoint = self.check(task, data, resume=resume)
        run_dir = self._choose_run_dir(task, checkpoint)
        self.strategy.log_dir = run_dir
        with reported(run_dir if self.report else None, is_main=lambda: self.strategy.comm.is_main):
            result = self.strategy.launch(partial(fit_on_rank, self, task, data, checkpoint, run_dir))
        if result.weights is not None:
            self.precision.prepare(task)  # to the type that the ranks trained in
            has_no_memory = any(parameter.is_meta for parameter in task.parameters())
            task.load_state_dict(result.weights, assign=has_no_memory)
        if result.exit_reason in EXIT_CODES:
            if result.exit_reason == self.requeue_after and self.strategy.comm.is_main:
                requeue_job()
            raise Stopped(result.exit_reason, EXIT_CODES[result.exit_reason])
        return replace(result, weights=None)

    def validate(self, task: TaskModule, data: Any, *, checkpoint: str | Path | None = None) -> dict[str, float]:
        """Return the metrics over all validation samples (`validation/loss`)."""
        return self._evaluate(task, data, checkpoint, stage="validation")

    def test(self, task: TaskModule, data: Any, *, checkpoint: str | Path | None = None) -> dict[str, float]:
        """Return the metrics over all test samples (`test/loss`)."""
        return self._evaluate(task, data, checkpoint, stage="test")

    def predict(self, task: TaskModule, data: Any, *, checkpoint: str | Path | None = None) -> Any:
        """Return the predictions in the order of the dataset, joined along their first dimension."""
        data = as_data(data, "predict")
        self._validate(task, data, "predict")
        return self.strategy.launch(partial(evaluate_on_rank, self, task, data, _checked(checkpoint), "predict"))

    def check(self, task: TaskModule, data: Any, *, resume: str | Path | None) -> tuple[Data, Path | None]:
        """Return the data, and the run or checkpoint to go on from; raises UserError for what cannot be trained."""
        data = as_data(data, "train")
        self._validate(task, data, "train")
        check_goes_on(self.requeue_after is not None, resumes_by_itself=resume == AUTO)
        return data, self._run_to_continue(task) if resume == AUTO else _checked(resume)

    def validates(self, data: Data) -> bool:
        """Return whether a run of `fit` evaluates between its steps."""
        return data.has("validation") and self.evaluate_every is not None

    def _evaluate(self, task: TaskModule, data: Any, checkpoint: str | Path | None, *, stage: str) -> dict[str, float]:
        data = as_data(data, stage)
        self._validate(task, data, stage)
        run = partial(evaluate_on_rank, self, task, data, _checked(checkpoint), stage)
        metrics: dict[str, float] = self.strategy.launch(run)
        return metrics

    def _validate(self, task: TaskModule, data: Data, stage: str) -> None:
        if not isinstance(task, TaskModule):
            raise UserError(
                f"the task is a {type(task).__name__}; subclass trainkit.TaskModule and pass an object of it."
            )
        self.strategy.validate()
        self.model_settings.check(task)
        source = data.source(stage)
        if stage == "train":
            check_phases_run(task, self.strategy)
            if source.batch_size is not None:
                self.strategy.plan(source.batch_size)
            if self.validates(data):
                data.source("validation")

    def _run_to_continue(self, task: TaskModule) -> Path | None:
        if self.fast_dev_run:
            return None
        found = run_to_continue(self.run_dir, name=type(task).__name__, max_duration=self.max_duration)
        found.log()
        return found.run_dir

    def _choose_run_dir(self, task: TaskModule, checkpoint: Path | None) -> Path | None:
        if self.fast_dev_run:
            return None
        run_dir = self.run_dir or _run_dir_of(checkpoint) or choose_run_dir(type(task).__name__)
        check_run_dir(run_dir)
        check_no_other_run(run_dir)
        return run_dir


def _checked(path: str | Path | None) -> Path | None:
    """Return the path of a run folder or checkpoint; raises UserError if there is none."""
    if path is None:
        return None
    resolve(path)
    return Path(path)


def _run_dir_of(checkpoint: Path | None) -> Path | None:
    """Return the run folder that a checkpoint lies in, where it lies in one."""
    if checkpoint is None:
        return None
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return folder.parent if folder.name == CHECKPOINTS else folder if checkpoint.is_dir() else None
