"""Trainer: fit, validate, test and predict, with the settings of a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Unit
from torch import nn
from torch.utils.data import DataLoader

from trainkit import registry
from trainkit.callback import Callback
from trainkit.checkpoint.resized_buffers import resize_buffers
from trainkit.console import say
from trainkit.data.data import Data
from trainkit.devices import check_torch, is_cuda
from trainkit.duration import Duration
from trainkit.errors import Stopped, UserError
from trainkit.logger import Logger
from trainkit.loops.fit_config import FitConfig, NonfinitePolicy
from trainkit.loops.worker import FitResult, evaluate_on_rank, fit_on_rank
from trainkit.model.compile import Compilation
from trainkit.model.transforms import ModelTransforms
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import GradientClipping
from trainkit.optim.optimizer_settings import ResumeOptimizer
from trainkit.optim.phase import GradientLimit
from trainkit.optim.precision import Precision
from trainkit.run_dir.folder import check_run_dir, choose_run_dir
from trainkit.run_dir.lock import check_not_locked
from trainkit.settings import check_arguments, named_arguments
from trainkit.signals import ALWAYS, EXIT_CODES, preemption_signal_named, requeue_job
from trainkit.storage import check_url, is_url, working_folder
from trainkit.strategy import Strategy, check_phases_run
from trainkit.task import (
    ChecksSettings,
    TaskModule,
    check_loss_reduction,
    check_shapes,
    has_meta_tensors,
    has_phases,
    is_deferred,
)

if TYPE_CHECKING:
    from trainkit.report.config_diff import ConfigChange
    from trainkit.run_dir.remote_copy import RemoteCopy
    from trainkit.run_dir.remote_run import RemoteRun

logger = logging.getLogger(__name__)

AUTO = "auto"
DEFAULT_CALLBACKS = ("model_summary", "learning_rate_monitor", "speed_monitor", "checkpoint", "progress_bar")
DEFAULT_LOGGERS = ("tensorboard", "jsonl")
_STEPS = {"train": "training_step", "validation": "validation_step", "test": "test_step", "predict": "predict_step"}


def _resume_call(location: Path | str) -> str:
    """Return the call that resumes the run in a folder or URL."""
    return f"Trainer(...).fit(task, data, resume={str(location)!r})"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the starter of a run knows of it; nothing that changes what is trained."""

    prints_run_dir: bool
    """True if the end of a fit prints the run folder, which is else logged if it has a report."""
    reference_batch_size: ReferenceBatchSize | None = None
    """The global batch that the learning rate was chosen for, such as that of a recipe."""
    overrides: Sequence[str] = ()
    """The settings that were typed."""
    resume_command: Callable[[Path | str], str] = _resume_call
    """Returns what to type to resume the run in a folder or URL."""
    config_diff: Callable[[], Sequence[ConfigChange] | None] = lambda: None
    """Returns how the config differs from its recipe."""


class Trainer:
    """Trains, evaluates and predicts with a task, under any strategy.

    Durations are strings such as `"500step"`, `"2epoch"`, `"30min"` or `"1e6sample"`. If `max_duration` is a list,
    training stops at whichever comes first. Limits count global batches. `callbacks` and `loggers` replace the
    defaults; names and objects can be mixed.

    Args:
        strategy: A strategy or its name, such as `"single"`.
        max_duration: How long to train.
        evaluate_every: How often to validate. None: never.
        log_every: How often training metrics are reduced and written. `auto`: after the first step and every 50 steps,
            in a run of fewer than 2500 steps so often that its curve has about 50 points.
        seed: Seed of python, numpy, torch and the order of samples.
        precision: `fp32`, `bf16-mixed`, `fp16-mixed`, `bf16-true` or `fp64`.
        tf32: Allow TF32 matrix products on CUDA.
        max_grad_norm: Clip gradients to this global norm.
        max_grad_value: Clip each gradient element to this absolute value.
        compile: Compile the task's forward with `torch.compile`. A mapping sets its `mode`, `options`, `backend`,
            `fullgraph` and `dynamic`, and compiles with `blocks` the modules of these name patterns or classes instead.
        deterministic: Use deterministic algorithms only.
        detect_anomaly: Enable `torch.autograd.set_detect_anomaly` (slow).
        fused_optimizer: Use fused optimizer kernels where torch has them.
        deferred_init: On the command line, build the task without memory, so that under `fsdp` it is never whole
            anywhere. In Python, build it in `with trainkit.deferred_init():`.
        no_weight_decay: Parameters without weight decay: `bias`, `norm`, `embedding`, or name patterns.
        freeze: Name patterns of parameters or modules that are not trained; their batch norms keep their statistics.
        activation_checkpointing: Name patterns of modules whose activations are recomputed in backward.
        offload_activations: Keep what backward needs in host memory until then (CUDA).
        channels_last: Use the channels_last memory format, which makes convolutions faster on GPUs.
        sync_batch_norm: Convert BatchNorm to SyncBatchNorm (CUDA).
        on_nonfinite: What to do if the loss is NaN or infinite: `raise`, `skip` the step, `stop` the run, or
            `rollback` to the last checkpoint before the step and continue without it.
        max_rollbacks: Number of rollbacks before the run fails.
        skip_grad_norm_factor: Skip a step if its gradient norm exceeds this multiple of the running average. None
            disables it.
        resume_optimizer: The settings of optimizer and schedules that count in a resumed run if they differ: those that
            the task's `configure_optimizers` makes now (`configured`), or those that were `saved`.
        num_sanity_batches: Validation batches to run before training.
        limit_train_batches: Maximum number of global batches in an epoch.
        limit_validation_batches: Maximum number of global batches in a validation.
        limit_test_batches: Maximum number of global batches in a test.
        limit_predict_batches: Maximum number of global batches in a prediction.
        overfit_batches: Train on this many first global batches only, the same in every epoch.
        fast_dev_run: Run one batch of each stage and write no files.
        preemption_signal: A further signal, such as `"SIGUSR1"`, that saves the state and stops training.
        requeue: Requeue the SLURM job after that signal; needs `resume="auto"`.
        profile: Profile steps 10 to 15 with torch's profiler, and count the FLOPs of a step.
        report: Write `report.html` into the run folder when the run ends, also after an error.
        run_dir: The run folder; by default a new one below `runs/`. A run in a URL such as `s3://bucket/run7` trains in
            `runs/s3/bucket/run7`, which is copied there in the background.
        callbacks: Callbacks or their names; by default checkpoints, progress, throughput, model summary, learning rate.
        loggers: Loggers or their names; by default TensorBoard and `metrics.jsonl`.
        config: The settings of the run as YAML, kept in its folder and its checkpoints.

    """

    @named_arguments
    def __init__(
        self,
        strategy: str | Strategy = "single",
        *,
        max_duration: str | Duration | Sequence[str | Duration] = "1epoch",
        evaluate_every: str | Duration | None = "1epoch",
        log_every: Literal["auto"] | str | Duration = "auto",
        # The largest seed: ranks and steps add to it, and torch takes seeds below 2**64.
        seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0,
        precision: str = "fp32",
        tf32: bool = False,
        max_grad_norm: GradientLimit | None = None,
        max_grad_value: GradientLimit | None = None,
        compile: bool | Mapping[str, Any] = False,
        deterministic: bool = False,
        detect_anomaly: bool = False,
        fused_optimizer: bool = True,
        deferred_init: bool = False,
        no_weight_decay: Sequence[str] = (),
        freeze: Sequence[str] = (),
        activation_checkpointing: Sequence[str] = (),
        offload_activations: bool = False,
        channels_last: bool = False,
        sync_batch_norm: bool = False,
        on_nonfinite: NonfinitePolicy = "raise",
        max_rollbacks: Annotated[int, Ge(1)] = 3,
        skip_grad_norm_factor: Annotated[float, Gt(1), "10 skips steps at ten times the average norm"] | None = None,
        resume_optimizer: ResumeOptimizer = "configured",
        num_sanity_batches: Annotated[int, Ge(0), Unit("batches")] = 2,
        limit_train_batches: Annotated[int, Ge(1), Unit("batches")] | None = None,
        limit_validation_batches: Annotated[int, Ge(1), Unit("batches")] | None = None,
        limit_test_batches: Annotated[int, Ge(1), Unit("batches")] | None = None,
        limit_predict_batches: Annotated[int, Ge(1), Unit("batches")] | None = None,
        overfit_batches: Annotated[int, Ge(1), Unit("batches")] | None = None,
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
        check_torch()
        chosen_precision = Precision(precision, tf32=tf32)  # before others: its error lists the names
        check_arguments(Trainer.__init__, locals(), classes={Strategy: "a trainkit.Strategy"})
        self.strategy = registry.make("strategy", strategy) if isinstance(strategy, str) else strategy
        # `None` passes, as its text is not empty.
        if not str(run_dir).strip():
            raise UserError("run_dir is empty; write run_dir='runs/mine', or leave it out for a new folder in runs/.")
        signal = preemption_signal_named(preemption_signal)
        changes = (freeze, activation_checkpointing, channels_last, sync_batch_norm)
        parsed = FitConfig(
            max_duration=Duration.parse_all(max_duration, where="max_duration"),
            evaluate_every=None if evaluate_every is None else Duration.parse(evaluate_every, where="evaluate_every"),
            log_every=None if log_every == "auto" else Duration.parse(log_every, where="log_every"),
            seed=seed,
            precision=chosen_precision,
            clip=GradientClipping(max_grad_norm, max_grad_value),
            transforms=ModelTransforms(*changes) if any(changes) else None,
            offload_activations=offload_activations,
            compile=Compilation.parse(compile),
            deterministic=deterministic,
            detect_anomaly=detect_anomaly,
            fused_optimizer=fused_optimizer,
            no_weight_decay=no_weight_decay,
            on_nonfinite=on_nonfinite,
            max_rollbacks=max_rollbacks,
            skip_grad_norm_factor=skip_grad_norm_factor,
            resume_optimizer=resume_optimizer,
            num_sanity_batches=num_sanity_batches,
            limits={
                "train": limit_train_batches,
                "validation": limit_validation_batches,
                "test": limit_test_batches,
                "predict": limit_predict_batches,
            },
            overfit_batches=overfit_batches,
            fast_dev_run=fast_dev_run,
            callbacks=_make_all(Callback, "callbacks", DEFAULT_CALLBACKS if callbacks is None else callbacks),
            loggers=_make_all(Logger, "loggers", DEFAULT_LOGGERS if loggers is None else loggers),
            yaml=config,
        )
        self.fit_config = parsed.in_one_batch() if fast_dev_run else parsed
        self.callbacks = self.fit_config.callbacks
        """The callbacks of the run; more can be appended before it starts."""
        if requeue and signal is None:
            raise UserError(
                "requeue=true requeues the job after a signal, but none is chosen; set "
                "trainer.preemption_signal=SIGUSR1, and #SBATCH --signal=USR1@120 in the job."
            )
        self.requeue_after = signal.name if requeue and signal is not None else None
        self.strategy.stop_signals = ALWAYS if signal is None else (*ALWAYS, signal)
        if profile:
            profiler = registry.make("callbacks", "profiler")
            if not any(type(callback) is type(profiler) for callback in self.callbacks):  # else keep its settings
                self.callbacks.append(profiler)
        self.report = report
        self.remote = check_url(run_dir) if run_dir is not None and is_url(run_dir) else None
        """The URL that the run folder is copied to, if one was given as `run_dir`."""
        self.run_dir = None if run_dir is None else working_folder(run_dir)
        self.launch = Launch(prints_run_dir=callbacks is None)  # where the default callbacks print too
        """How the run is started; the command line replaces it."""

    # ---- The four entry points; each checks what it can before any process is started

    def fit(self, task: TaskModule, data: Data | DataLoader[Any], *, resume: str | Path | None = None) -> FitResult:
        """Train `task` in place, print or log where the run folder is, and return the result.

        `resume` is a run folder or a checkpoint, or the URL of one; training continues in the same folder with the next
        sample. With `resume="auto"` it resumes the run in `run_dir`, or without a `run_dir` the newest unfinished run
        of this task below `runs/`, or starts a new run. After a SIGINT, SIGTERM or SIGHUP it saves the state and
        raises Stopped, a SystemExit with 128 plus the signal's number, as after another signal. A second SIGINT raises
        KeyboardInterrupt at once, after a line in the log about what is not saved.
        """
        location: Path | str | None = None
        try:
            data = self._checked_for_fit(task, data, resume)
            remote = self._remote_run(resume)
            if remote is not None and is_url(resume):
                check_not_locked(working_folder(remote.url))
            checkpoint = self._run_or_checkpoint(task, resume, remote)
            run_dir = self._choose_run_dir(task, checkpoint)
            location = run_dir if remote is None else remote.url
            # Before the launch, at which every rank opens its log there.
            self.strategy.log_dir = run_dir
            config = replace(self.fit_config, remote=None if remote is None else remote.url)
            work = partial(
                fit_on_rank,
                self.strategy,
                config,
                task,
                data,
                checkpoint=checkpoint,
                run_dir=run_dir,
                reference=self.launch.reference_batch_size,
                overrides=self.launch.overrides,
            )
            copy = self._remote_copy(run_dir, remote, resumes=resume is not None)
            # The report is written before the copying ends, so that it is copied too.
            with nullcontext() if copy is None else copy.copying(), self._reported(run_dir):
                result = self.strategy.launch(work, repeats=True)
        except KeyboardInterrupt:
            if self.strategy.comm.is_main:
                logger.warning(_interrupt_hint(location, self.launch.resume_command))
            raise
        # Before any exception below: the task has what was trained also after a signal.
        if result.weights is not None:
            self._load_trained(task, result.weights)
            for callback, state in zip(config.callbacks, result.callback_states, strict=True):
                if state is not None:
                    _load_state(callback, state)
        if result.exit_reason in EXIT_CODES:
            if result.exit_reason == self.requeue_after and self.strategy.comm.is_main:
                requeue_job()
            if result.exit_reason == "SIGINT" and hasattr(sys, "ps1"):  # SystemExit would end the session
                raise _interrupted(result, command=self.launch.resume_command(location or ""))
            raise Stopped(result.exit_reason, EXIT_CODES[result.exit_reason])
        if result.run_dir is not None and self.strategy.comm.is_main:
            copied = f", copied to {config.remote}" if copy is not None and copy.is_complete else ""
            line = f"run folder: {result.run_dir}{copied}{' (see report.html)' if self.report else ''}"
            if self.launch.prints_run_dir:
                say(line)
            elif self.report:
                logger.info(line)
        return replace(result, weights=None, callback_states=())

    def validate(
        self, task: TaskModule, data: Data | DataLoader[Any], *, checkpoint: str | Path | None = None
    ) -> dict[str, float]:
        """Return the metrics over all validation samples (`validation/loss`)."""
        return dict(self._evaluate(task, data, checkpoint, stage="validation"))

    def test(
        self, task: TaskModule, data: Data | DataLoader[Any], *, checkpoint: str | Path | None = None
    ) -> dict[str, float]:
        """Return the metrics over all test samples (`test/loss`)."""
        return dict(self._evaluate(task, data, checkpoint, stage="test"))

    def predict(self, task: TaskModule, data: Data | DataLoader[Any], *, checkpoint: str | Path | None = None) -> Any:
        """Return the predictions in the order of the dataset, concatenated along their first dimension."""
        return self._evaluate(task, data, checkpoint, stage="predict")

    def check(self, task: TaskModule, data: Any, *, resume: str | Path | None) -> tuple[Data, Path | None]:
        """Return the data and the run or checkpoint to resume; raises UserError for what cannot be trained."""
        return self._checked_for_fit(task, data, resume), self._run_or_checkpoint(task, resume, None)

    def _checked_for_fit(self, task: TaskModule, data: Any, resume: str | Path | None) -> Data:
        checked = self._checked_data(task, data, "train")
        if isinstance(task, ChecksSettings):
            task.check_settings(self.strategy, self.fit_config)
        check_shapes(task)
        if self.requeue_after is not None and resume != AUTO:
            raise UserError(
                "requeue=true starts the same command again, which must then resume this run; add resume=auto."
            )
        return checked

    def _load_trained(self, task: TaskModule, weights: Mapping[str, Any]) -> None:
        """Load into `task` what other processes have trained."""
        if is_deferred(task):
            from trainkit.model.deferred_init import make_real

            make_real(task)
        self.fit_config.precision.prepare(task)  # to the type that the ranks trained in
        # Buffers, which may have grown in the ranks; `load_state_dict` refuses another shape.
        names = set(weights).difference(name for name, _ in task.named_parameters(remove_duplicate=False))
        resize_buffers(task, weights, names, torch.device("cpu"))
        # Copied into the task's own parameters, which the caller may hold; those on the meta device have no memory.
        has_no_memory = any(parameter.is_meta for parameter in task.parameters())
        task.load_state_dict(weights, assign=has_no_memory)

    def _evaluate(self, task: TaskModule, data: Any, checkpoint: str | Path | None, *, stage: str) -> Any:
        data, start = self._checked_data(task, data, stage), _checked(checkpoint)
        work = partial(evaluate_on_rank, self.strategy, self.fit_config, task, data, stage=stage, checkpoint=start)
        return self.strategy.launch(work)

    def _checked_data(self, task: TaskModule, data: object, stage: str) -> Data:
        """Return a Data or a DataLoader as Data; raises UserError for what cannot be trained or evaluated."""
        if isinstance(data, DataLoader):
            data = Data(**{stage: data})  # type: ignore[arg-type] # one of its four stages
        elif not isinstance(data, Data):
            kind = type(data).__name__
            raise UserError(f"the data is a {kind}; pass Data({stage}=dataset, batch_size=32), or a torch DataLoader.")
        if not isinstance(task, TaskModule):
            raise UserError(
                f"the task is a {type(task).__name__}; subclass trainkit.TaskModule and pass an object of it, or wrap "
                "a LightningModule: trainkit.integrations.lightning.LightningTask(module)."
            )
        check_loss_reduction(task)
        device_type = self.strategy.validate(task, self.fit_config.precision)
        if self.fit_config.offload_activations:
            _check_offloads(self.strategy, device_type)
        if is_deferred(task) or (has_meta_tensors(task) and not self.strategy.initializes_modules):
            from trainkit.model.deferred_init import records_of

            records_of(task)  # for its error: tensors on the meta device whose values cannot be made
        if self.fit_config.transforms is not None:
            self.fit_config.transforms.check(task)
        if self.fit_config.compile is not None:
            _check_compiles(self.strategy)
            self.fit_config.compile.check(task)
        _check_scripts(task, self.strategy)
        source = data.stage_data(stage)
        if stage == "train" and has_phases(task):
            check_phases_run(task, self.strategy)
        else:
            _check_step(task, _STEPS[stage])
        if stage == "train":
            if source.batch_size is not None:
                self.strategy.plan(source.batch_size)
            if data.has("validation") and self.fit_config.evaluate_every is not None:
                data.stage_data("validation")
                _check_step(task, "validation_step")
        return data

    def _reported(self, run_dir: Path | None) -> AbstractContextManager[None]:
        """Return a context at whose end the report is written, if one is wanted."""
        if not self.report or run_dir is None:
            return nullcontext()
        # Here, as other imports below: a run that does not need them starts sooner.
        from trainkit.report.run_report import reported

        return reported(run_dir, is_main=lambda: self.strategy.comm.is_main, config_diff=self.launch.config_diff)

    def _remote_run(self, resume: str | Path | None) -> RemoteRun | None:
        """Return the run in a store that this one is copied to: that of `run_dir`, or the one that is resumed."""
        if self.fit_config.fast_dev_run:
            return None
        if self.remote is not None:
            from trainkit.run_dir.remote_run import RemoteRun

            return RemoteRun(self.remote)
        if self.run_dir is None and resume is not None and is_url(resume):
            from trainkit.run_dir.remote_run import find_remote_run

            return find_remote_run(check_url(resume))[0]
        return None

    def _run_or_checkpoint(self, task: TaskModule, resume: str | Path | None, remote: RemoteRun | None) -> Path | None:
        """Return the local run or checkpoint to resume, fetched if it is in a store."""
        if resume != AUTO:
            return _checked(resume, remote)
        if self.fit_config.fast_dev_run:
            return None
        if remote is not None:
            assert self.run_dir is not None
            check_not_locked(self.run_dir)
            remote.continue_in(self.run_dir)
        from trainkit.run_dir.resume_auto import find_run_to_resume

        run_to_resume = find_run_to_resume(
            self.run_dir, name=type(task).__name__, max_duration=self.fit_config.max_duration
        )
        run_to_resume.log()
        return run_to_resume.run_dir

    def _remote_copy(self, run_dir: Path | None, remote: RemoteRun | None, *, resumes: bool) -> RemoteCopy | None:
        """Return what copies the run folder to its URL, if this process does; raises UserError if it cannot."""
        if run_dir is None or remote is None:
            return None
        from trainkit.distributed.rendezvous import is_main_process

        # Under torchrun every rank comes here.
        if not is_main_process():
            return None
        from trainkit.run_dir.remote_copy import RemoteCopy

        remote.check(run_dir, resumes=resumes)
        return RemoteCopy(run_dir, remote.url)

    def _choose_run_dir(self, task: TaskModule, checkpoint: Path | None) -> Path | None:
        if self.fit_config.fast_dev_run:
            return None
        run_dir = self.run_dir or _run_dir_of(checkpoint) or choose_run_dir(type(task).__name__)
        check_run_dir(run_dir)
        check_not_locked(run_dir)
        return run_dir


def _check_step(task: TaskModule, name: str) -> None:
    """Raise UserError unless the task's method can be called with a batch alone."""
    kind = type(task)
    if name == "predict_step" and kind.predict_step is TaskModule.predict_step and kind.forward is nn.Module.forward:
        raise UserError(f"{kind.__name__} has no predict_step; define predict_step(self, batch), or forward.")
    parameters = signature(getattr(task, name))
    # Bound and not called: the error comes before any process is started.
    try:
        parameters.bind(None)
    except TypeError:
        raise UserError(
            f"{kind.__name__}.{name}{parameters} must take a batch alone: {name}(self, batch). A LightningModule runs "
            "unmodified as trainkit.integrations.lightning.LightningTask(module)."
        ) from None


def _check_offloads(strategy: Strategy, device_type: str) -> None:
    """Raise UserError for a strategy under which activations cannot be offloaded."""
    where = ""
    if not is_cuda(torch.device(device_type)):
        where = f"works on CUDA devices only, and this run is on {device_type}"
    elif not strategy.supports_module_hooks:
        where = f"does not work with {type(strategy).__name__}, which keeps activations by itself"
    if where:
        raise UserError(
            f"offload_activations=true {where}. Set trainer.offload_activations=false; "
            "trainer.activation_checkpointing saves memory on every device and under every strategy."
        )


def _check_compiles(strategy: Strategy) -> None:
    if strategy.compile_obstacle:
        raise UserError(f"compile does not work with {type(strategy).__name__}{strategy.compile_obstacle}")


def _load_state(callback: Callback, state: dict[str, Any]) -> None:
    """Load what a callback has become in the ranks; the run has ended well, whatever the callback makes of it."""
    try:
        callback.load_state_dict(state)
    except Exception as error:
        name = type(callback).__name__
        logger.warning("%s did not take its state from the ranks: %s: %s.", name, type(error).__name__, error)


def _check_scripts(task: TaskModule, strategy: Strategy) -> None:
    for name, module in task.named_modules() if not strategy.supports_scripts else ():
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"{type(task).__name__}.{name} is a TorchScript module, which {type(strategy).__name__} does not "
                "support. Use it without torch.jit.script, or set strategy=single, or strategy=ddp under torchrun."
            )


def _make_all(kind: type[Any], name: str, items: Any) -> list[Any]:
    """Return the callbacks or loggers of a list of names and objects; raises UserError for anything else."""
    group = "callbacks" if name == "callbacks" else "logger"
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise UserError(f"{name}={items!r} is not a list; write {name}=[{items!r}].")
    made = []
    for item in items:
        if isinstance(item, type):
            raise UserError(f"{item.__name__} is a class, not an object; write {item.__name__}().")
        made.append(registry.make(group, item) if isinstance(item, str) else item)
        if not isinstance(made[-1], kind):
            raise UserError(f"{item!r} in {name} is not a name or a trainkit.{kind.__name__}.")
        # Objects by identity: of one class there may be several, such as two checkpoints.
        if sum(item is other or (isinstance(item, str) and item == other) for other in items) > 1:
            raise UserError(f"{name} contains {item!r} twice; remove one of them.")
    return made


def _checked(path: str | Path | None, remote: RemoteRun | None = None) -> Path | None:
    """Return the path of a run folder, a checkpoint or `RUN/best`, fetched from a store; raises UserError without one.

    One of the run `remote`, which continues, is fetched into the folder of that run.
    """
    if path is None:
        return None
    if not isinstance(path, (str, Path)):
        raise UserError(f"{path!r} is not the path of a run folder or checkpoint; write 'runs/mine', or resume='auto'.")
    if is_url(path):
        from trainkit.run_dir.remote_run import fetch

        return fetch(check_url(path), continues=remote)
    from trainkit.checkpoint.store import resolve

    path = Path(path)
    if path.name == "best" and not path.exists():
        return resolve(path.parent, "best")
    resolve(path)
    return path


def _interrupt_hint(location: Path | str | None, resume_command: Callable[[Path | str], str]) -> str:
    """Return the message about a run that a second SIGINT ended: what is not saved, and how to go on."""
    from trainkit.checkpoint.store import resolve

    unsaved = "interrupted; nothing was saved. To start again, type the same command."
    if location is None:
        return unsaved
    try:
        checkpoint = resolve(working_folder(location))
    except UserError:
        return unsaved
    return f"interrupted; later steps than those in {checkpoint} are not saved. To continue: {resume_command(location)}"


def _interrupted(result: FitResult, *, command: str) -> KeyboardInterrupt:
    """Return the exception of an interrupted cell of a notebook, which shows nothing but its message."""
    from trainkit.checkpoint.store import resolve

    then = f"To continue: {command}"
    try:
        resolve(result.run_dir or "")
    except UserError:
        then = "Nothing is saved without the callback Checkpoint."
    error = KeyboardInterrupt(f"interrupted after step {result.steps:,}. {then}")
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {error}"]  # type: ignore[attr-defined] # IPython calls it
    return error


def _run_dir_of(checkpoint: Path | None) -> Path | None:
    """Return the run folder that contains a checkpoint, if any."""
    if checkpoint is None:
        return None
    from trainkit.checkpoint.store import CHECKPOINTS

    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    return folder.parent if folder.name == CHECKPOINTS else folder if checkpoint.is_dir() else None
