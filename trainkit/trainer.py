"""The Trainer: settings of a run, and the four things that can be done with a task."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from trainkit import registry
from trainkit.callback import Callback
from trainkit.checkpoints.store import CHECKPOINTS, load_from, resolve
from trainkit.compilation import compile_forward
from trainkit.continuation import AUTO, run_to_continue
from trainkit.data import Data
from trainkit.duration import Duration
from trainkit.errors import Stopped, UserError, nearest
from trainkit.feed import Feed, make_feed
from trainkit.logger import Logger
from trainkit.loops import EvalLoop, FitLoop, FitSchedule, Policy
from trainkit.optimization import Clip, configure
from trainkit.precision import Precision
from trainkit.rng import seed_everything
from trainkit.run import Run
from trainkit.run_folder import check_run_dir, choose_run_dir, forget_summary, make_run_dir, write_config, write_summary
from trainkit.signals import StopSignals
from trainkit.strategy import Strategy
from trainkit.task import TaskModule

DEFAULT_CALLBACKS = ("model_summary", "learning_rate", "throughput", "checkpoint", "progress_bar")
DEFAULT_LOGGERS = ("tensorboard", "jsonl")
_POLICIES: dict[str, Policy] = {"raise": "raise", "skip": "skip", "stop": "stop"}
_EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


@dataclass
class FitResult:
    """What a run came to."""

    metrics: dict[str, float]
    """The latest value of every metric."""
    steps: int
    epochs: float
    samples: int
    seconds: float
    samples_per_second: float
    exit_reason: str
    run_dir: Path | None
    weights: dict[str, Any] | None = field(default=None, repr=False)


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
        on_nonfinite: What happens to a loss that is NaN or infinite: `raise`, `skip` that step, or `stop` the run.
        sanity_batches: Validation batches to try before training.
        limit_train_batches: Global batches that make an epoch at most.
        limit_validation_batches: Global batches of a validation at most.
        limit_test_batches: Global batches of a test at most.
        limit_predict_batches: Global batches of a prediction at most.
        overfit_batches: Train on these first global batches only, the same ones in every epoch.
        fast_dev_run: Try everything with one batch, writing no file.
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
        on_nonfinite: Policy = "raise",
        sanity_batches: int = 2,
        limit_train_batches: int | None = None,
        limit_validation_batches: int | None = None,
        limit_test_batches: int | None = None,
        limit_predict_batches: int | None = None,
        overfit_batches: int | None = None,
        fast_dev_run: bool = False,
        run_dir: str | Path | None = None,
        callbacks: Sequence[str | Callback] | None = None,
        loggers: Sequence[str | Logger] | None = None,
        config: str = "",
    ) -> None:
        self.strategy = registry.make("strategy", strategy) if isinstance(strategy, str) else strategy
        self.max_duration = Duration.parse_all(max_duration, where="max_duration")
        self.evaluate_every = _duration(evaluate_every, "evaluate_every")
        self.log_every = Duration.parse(log_every, where="log_every")
        self.seed = _seed(seed)
        self.precision = Precision(precision, tf32=tf32)
        self.clip = Clip(clip_norm, clip_value)
        self.compile = compile
        self.deterministic = deterministic
        self.detect_anomaly = detect_anomaly
        self.fused_optimizer = fused_optimizer
        self.on_nonfinite = _policy(on_nonfinite)
        self.sanity_batches = _limit("sanity_batches", sanity_batches, least=0) or 0
        self.limits = {
            "train": _limit("limit_train_batches", limit_train_batches),
            "validation": _limit("limit_validation_batches", limit_validation_batches),
            "test": _limit("limit_test_batches", limit_test_batches),
            "predict": _limit("limit_predict_batches", limit_predict_batches),
        }
        self.overfit_batches = _limit("overfit_batches", overfit_batches)
        self.fast_dev_run = fast_dev_run
        self.run_dir = None if run_dir is None else Path(run_dir)
        self.callbacks: list[Callback] = _made_all("callbacks", DEFAULT_CALLBACKS if callbacks is None else callbacks)
        self.loggers: list[Logger] = _made_all("logger", DEFAULT_LOGGERS if loggers is None else loggers)
        self.config = config
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
        state and raises Stopped, a SystemExit with code 130 or 143.
        """
        data = _as_data(data, "train")
        self._validate(task, data, "train")
        checkpoint = self._run_to_continue(task) if resume == AUTO else _checked(resume)
        run_dir = self._choose_run_dir(task, checkpoint)
        self.strategy.log_dir = run_dir
        result = self.strategy.launch(partial(self._fit_on_rank, task, data, checkpoint, run_dir))
        if result.weights is not None:
            self.precision.prepare(task)  # to the type that the ranks trained in
            task.load_state_dict(result.weights)
        if result.exit_reason in _EXIT_CODES:
            raise Stopped(result.exit_reason, _EXIT_CODES[result.exit_reason])
        return replace(result, weights=None)

    def validate(self, task: TaskModule, data: Any, *, checkpoint: str | Path | None = None) -> dict[str, float]:
        """Return the metrics over all validation samples (`validation/loss`)."""
        return self._evaluate(task, data, checkpoint, stage="validation")

    def test(self, task: TaskModule, data: Any, *, checkpoint: str | Path | None = None) -> dict[str, float]:
        """Return the metrics over all test samples (`test/loss`)."""
        return self._evaluate(task, data, checkpoint, stage="test")

    def predict(self, task: TaskModule, data: Any, *, checkpoint: str | Path | None = None) -> Any:
        """Return the predictions in the order of the dataset, joined along their first dimension."""
        data = _as_data(data, "predict")
        self._validate(task, data, "predict")
        return self.strategy.launch(partial(self._evaluate_on_rank, task, data, _checked(checkpoint), "predict"))

    def _evaluate(self, task: TaskModule, data: Any, checkpoint: str | Path | None, *, stage: str) -> dict[str, float]:
        data = _as_data(data, stage)
        self._validate(task, data, stage)
        run = partial(self._evaluate_on_rank, task, data, _checked(checkpoint), stage)
        metrics: dict[str, float] = self.strategy.launch(run)
        return metrics

    def _validate(self, task: TaskModule, data: Data, stage: str) -> None:
        if not isinstance(task, TaskModule):
            raise UserError(
                f"the task is a {type(task).__name__}; subclass trainkit.TaskModule and pass an object of it."
            )
        self.strategy.validate()
        source = data.source(stage)
        if stage == "train":
            if source.batch_size is not None:
                self.strategy.plan(source.batch_size)
            if self._validates(data):
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
        return run_dir

    # ---- What runs on each rank

    def _fit_on_rank(self, task: TaskModule, data: Data, checkpoint: Path | None, run_dir: Path | None) -> FitResult:
        with self._run_on_rank(task, data, run_dir) as run:
            before = _Progress(0.0, 0)
            try:
                # Under torchrun each rank has looked for itself; rank 0 decides.
                loop = self._prepare_fit(run, self.strategy.broadcast_object(checkpoint))
                before = _Progress(run.state.seconds, run.state.samples)
                loop.run()
            except BaseException as error:
                run.report(error)
                self._write_summary(run, _result(run, before), status="failed")
                raise
            result = _result(run, before)
            self._write_summary(run, result, status="stopped" if result.exit_reason in _EXIT_CODES else "finished")
            result.weights = self.strategy.weights_for_caller(task)
            return result

    def _write_summary(self, run: Run, result: FitResult, *, status: str) -> None:
        if run.is_main and run.run_dir is not None:
            write_summary(run.run_dir, {"status": status, **asdict(result)})

    def _prepare_fit(self, run: Run, checkpoint: Path | None) -> FitLoop:
        """Bring task, optimizer and data into place on this rank, and a resumed run to where it was; collective."""
        source = run.data.source("train")
        limit = self.overfit_batches or self.limits["train"]
        seed = self._data_seed(run.data)
        repeat = self.overfit_batches is not None
        run.feed = make_feed(source, self.strategy, seed=seed, limit=limit, repeat_first=repeat)
        run.plan = None if source.batch_size is None else self.strategy.plan(source.batch_size)
        run.state.epoch_length = run.feed.epoch_length
        run.max_steps = _total_steps(self.max_duration, run.feed, source.batch_size)
        self._prepare_task(run)
        run.optimization = configure(
            run.task,
            clip=self.clip,
            precision=self.precision,
            total_steps=run.max_steps,
            fused=self.fused_optimizer,
            skip=self.on_nonfinite == "skip",
        )
        self.strategy.prepare_optimization(run.task, run.optimization)
        validation = self._validation_loop(run)
        followed = [schedule.metric for schedule in run.optimization.schedules if schedule.metric is not None]
        if validation is None and followed:
            raise UserError(
                f"a schedule follows the metric {followed[0]!r}, but nothing is validated; pass Data(validation=...) "
                "and evaluate_every='1epoch'."
            )
        schedule = FitSchedule(self.max_duration, self.log_every, self.evaluate_every)
        loop = FitLoop(run, schedule, validation=validation, on_nonfinite=self.on_nonfinite)
        if checkpoint is not None:
            payload = self._load(checkpoint)
            run.restore(payload, where=str(checkpoint))
            run.restore_rng(payload)
        elif validation is not None and self.sanity_batches and not self.fast_dev_run:
            metrics = self._eval_loop(run, "sanity", limit=self.sanity_batches).run()
            if metrics is not None:
                run.emit("on_evaluation_end", "sanity", metrics)
        self._open_loggers(run)
        return loop

    def _evaluate_on_rank(self, task: TaskModule, data: Data, checkpoint: Path | None, stage: str) -> Any:
        with self._run_on_rank(task, data, None) as run:
            self._prepare_task(run)
            if checkpoint is not None:
                run.load_weights(self._load(checkpoint), where=str(checkpoint))
            loop = self._eval_loop(run, stage, limit=self.limits[stage])
            outcome = loop.predict() if stage == "predict" else loop.run()
            if run.agree_on_signal() and run.stopped_by is not None:
                raise Stopped(run.stopped_by.name, _EXIT_CODES[run.stopped_by.name])
            run.emit("on_evaluation_end", stage, {} if stage == "predict" else outcome)
            return outcome

    @contextmanager
    def _run_on_rank(self, task: TaskModule, data: Data, run_dir: Path | None) -> Iterator[Run]:
        """Set this rank up for a run, and release everything whatever happens."""
        strategy = self.strategy
        with StopSignals() as signals, self._torch_flags():
            try:
                strategy.setup(self.precision)
                seed_everything(self.seed + strategy.rank)
                run = Run(
                    task=task,
                    data=data,
                    strategy=strategy,
                    precision=self.precision,
                    callbacks=self.callbacks,
                    loggers=self.loggers if strategy.is_main else [],
                    signals=signals,
                    seed=self.seed,
                    run_dir=strategy.broadcast_object(run_dir),
                    config=self.config,
                )
                if run.run_dir is not None and run.is_main:
                    make_run_dir(run.run_dir)
                try:
                    yield run
                except BaseException:
                    with suppress(Exception):  # the error on its way is the one that matters
                        run.close()
                    raise
                run.close()
            finally:
                strategy.teardown()

    def _prepare_task(self, run: Run) -> None:
        self.strategy.prepare(run.task)
        if self.compile:
            compile_forward(run.task)

    def _validation_loop(self, run: Run) -> EvalLoop | None:
        if not self._validates(run.data):
            return None
        return self._eval_loop(run, "validation", limit=self.limits["validation"])

    def _validates(self, data: Data) -> bool:
        return data.has("validation") and self.evaluate_every is not None

    def _eval_loop(self, run: Run, stage: str, *, limit: int | None) -> EvalLoop:
        source = run.data.source("validation" if stage == "sanity" else stage)
        return EvalLoop(run, make_feed(source, self.strategy, seed=self._data_seed(run.data), limit=limit), stage=stage)

    def _open_loggers(self, run: Run) -> None:
        if run.run_dir is None or not run.is_main:
            return
        forget_summary(run.run_dir)
        write_config(run.run_dir, self.config)
        for destination in run.loggers:
            destination.open(run.run_dir, step=run.state.step)
            destination.write_config(self.config)

    def _load(self, checkpoint: Path) -> dict[str, Any]:
        return load_from(checkpoint).payload

    def _data_seed(self, data: Data) -> int:
        return self.seed if data.seed is None else data.seed

    @contextmanager
    def _torch_flags(self) -> Iterator[None]:
        """Set torch's global switches for the run, and put them back."""
        deterministic, anomaly = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
        if self.deterministic != deterministic:  # the call alone imports the compiler, which takes seconds
            torch.use_deterministic_algorithms(self.deterministic or deterministic)
        torch.autograd.set_detect_anomaly(self.detect_anomaly or anomaly)
        try:
            with warnings.catch_warnings():
                # A step that the fp16 scaler leaves out still counts for the schedules.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                yield
        finally:
            if self.deterministic != deterministic:
                torch.use_deterministic_algorithms(deterministic)
            torch.autograd.set_detect_anomaly(anomaly)


def _as_data(data: Any, stage: str) -> Data:
    """Return `data` as Data: a DataLoader or ready-made Data is taken as it is; anything else needs a batch size."""
    if isinstance(data, Data):
        return data
    if isinstance(data, DataLoader):
        return Data(**{stage: data})  # type: ignore[arg-type] # one of its four stages
    raise UserError(
        f"the data is a {type(data).__name__}; pass Data({stage}=dataset, batch_size=32), or a torch DataLoader."
    )


def _checked(path: str | Path | None) -> Path | None:
    """Return the path of a run folder or checkpoint; raises UserError if there is none."""
    if path is None:
        return None
    resolve(path)
    return Path(path)


def _duration(text: str | Duration | None, where: str) -> Duration | None:
    return None if text is None else Duration.parse(text, where=where)


def _limit(name: str, value: int | None, *, least: int = 1) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise UserError(f"{name} must be a whole number of batches, at least {least}, got {value!r}.")
    return value


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}.")
    return seed


def _policy(name: str) -> Policy:
    if name not in _POLICIES:
        raise UserError(f"on_nonfinite={name!r} is unknown.{nearest(name, _POLICIES)} Choose raise, skip or stop.")
    return _POLICIES[name]


def _made_all(group: str, items: Any) -> list[Any]:
    """Return the callbacks or loggers that a list names or holds; raises UserError for anything else."""
    kind, name = (Callback, "callbacks") if group == "callbacks" else (Logger, "loggers")
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise UserError(f"{name}={items!r} is not a list; write {name}=[{items!r}].")
    made = []
    for item in items:
        if isinstance(item, type):
            raise UserError(f"{item.__name__} is a class, and an object is wanted; write {item.__name__}().")
        made.append(registry.make(group, item) if isinstance(item, str) else item)
        if not isinstance(made[-1], kind):
            raise UserError(f"{item!r} in {name} is neither a name nor a trainkit.{kind.__name__}.")
    return made


def _total_steps(durations: Sequence[Duration], feed: Feed, batch_size: int | None) -> int | None:
    """Return the optimizer steps that the first duration to be reached allows, where that is known beforehand."""
    totals = []
    for duration in durations:
        if duration.unit == "step":
            totals.append(int(duration.value))
        elif feed.num_steps is None or feed.epoch_length is None:
            continue
        elif duration.unit == "epoch":
            whole, part = divmod(duration.value, 1.0)
            items = part * feed.epoch_length * (1 - 1e-12)
            totals.append(int(whole) * feed.num_steps + math.ceil(items / (batch_size or 1)))
        elif duration.unit == "sample" and batch_size is not None:
            whole, rest = divmod(int(duration.value), feed.epoch_length)
            totals.append(int(whole) * feed.num_steps + math.ceil(rest / batch_size))
    return min(totals, default=None)


def _run_dir_of(checkpoint: Path | None) -> Path | None:
    """Return the run folder that a checkpoint lies in, where it lies in one."""
    if checkpoint is None:
        return None
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return folder.parent if folder.name == CHECKPOINTS else folder if checkpoint.is_dir() else None


class _Progress(NamedTuple):
    """How far a run had come when this part of it began."""

    seconds: float
    samples: int


def _result(run: Run, before: _Progress) -> FitResult:
    state = run.state
    seconds = state.seconds - before.seconds
    return FitResult(
        metrics=dict(state.metrics),
        steps=state.step,
        epochs=state.epochs,
        samples=state.samples,
        seconds=state.seconds,
        samples_per_second=(state.samples - before.samples) / seconds if seconds > 0 else 0.0,
        exit_reason=run.stop_reason or "finished",
        run_dir=run.run_dir,
    )
