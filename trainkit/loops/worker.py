"""The worker: what each rank runs at the same time as the others, from setup to teardown."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainkit.checkpoint.store import load_from
from trainkit.data.data import Data
from trainkit.data.open_loader import open_loader
from trainkit.duration import total_steps
from trainkit.errors import Stopped, UserError
from trainkit.loops.evaluation_loop import EvaluationLoop
from trainkit.loops.fit_config import FitConfig
from trainkit.loops.fit_loop import FitIntervals, FitLoop
from trainkit.loops.rollback import NonFinitePolicy
from trainkit.loops.run import Run
from trainkit.model.transforms import compile_forward
from trainkit.optim.optimizer import configure_optimizers
from trainkit.rng import seed_everything
from trainkit.run_dir.failure import record_failure, warnings_kept
from trainkit.run_dir.folder import clear_summary, make_run_dir, write_config, write_environment, write_summary
from trainkit.run_dir.lock import lock_run_dir
from trainkit.run_dir.resume_auto import latest_complete
from trainkit.signals import EXIT_CODES, StopSignals
from trainkit.strategy import PreparesSteps, StartsRanks, Strategy
from trainkit.task import TaskModule

logger = logging.getLogger(__name__)


@dataclass
class FitResult:
    """The outcome of `Trainer.fit`."""

    metrics: dict[str, float]
    """The latest value of every metric."""
    steps: int
    epochs: float
    samples: int
    seconds: float
    samples_per_second: float
    """Of this part of the run, not counting what came before a resume."""
    exit_reason: str
    run_dir: Path | None
    weights: dict[str, Any] | None = field(default=None, repr=False)


def fit_on_rank(
    strategy: Strategy,
    config: FitConfig,
    task: TaskModule,
    data: Data,
    *,
    checkpoint: Path | None,
    run_dir: Path | None,
) -> FitResult:
    """Train `task` on this rank's samples and return the result; collective."""
    with run_on_rank(strategy, config, task, data, run_dir) as run:
        seconds, samples = 0.0, 0
        try:
            # Under torchrun each rank has looked for itself; rank 0 decides.
            loop = prepare_fit(run, config, strategy.comm.broadcast_object(_start_of(run, checkpoint)))
            seconds, samples = run.state.own_seconds, run.state.samples
            loop.run()
        except BaseException as error:
            record_failure(run, error)
            run.report_exception(error)
            _write_summary(run, _result_of(run, seconds, samples), status="failed")
            raise
        result = _result_of(run, seconds, samples)
        _write_summary(run, result, status="stopped" if result.exit_reason in EXIT_CODES else "finished")
        if isinstance(strategy, StartsRanks):
            result.weights = strategy.final_state_dict(task)
        return result


def evaluate_on_rank(
    strategy: Strategy, config: FitConfig, task: TaskModule, data: Data, *, stage: str, checkpoint: Path | None
) -> Any:
    """Return the metrics of a stage, or for `predict` the predictions; collective."""
    with run_on_rank(strategy, config, task, data, None) as run:
        _prepare_task(run, config)
        if checkpoint is not None:
            run.checkpointer.load_weights(load_from(checkpoint).payload, where=str(checkpoint), to_evaluate=True)
        loop = evaluation_loop(run, config, stage, limit=config.limits[stage])
        outcome = loop.predict() if stage == "predict" else loop.run()
        if run.sync_stop_signal() and run.stopped_by is not None:
            raise Stopped(run.stopped_by.name, EXIT_CODES[run.stopped_by.name])
        run.emit("on_evaluation_end", stage, {} if stage == "predict" else outcome)
        return outcome


@contextmanager
def run_on_rank(
    strategy: Strategy, config: FitConfig, task: TaskModule, data: Data, run_dir: Path | None
) -> Iterator[Run]:
    """Set this rank up for a run, and release everything at the end, also after an error; collective."""
    with StopSignals(config.preemption_signal) as signals, _torch_flags(config), ExitStack() as stack:
        try:
            strategy.setup(config.precision)
            seed_everything(config.seed + strategy.comm.rank)
            transforms = config.transforms
            stack.enter_context(
                transforms.applied(task, num_processes=strategy.comm.num_processes, device=strategy.device)
            )
            run = Run(
                task=task,
                data=data,
                strategy=strategy,
                precision=config.precision,
                callbacks=[*config.callbacks, *task.configure_callbacks()],
                loggers=config.loggers if strategy.comm.is_main else [],
                signals=signals,
                seed=config.seed,
                run_dir=strategy.comm.broadcast_object(run_dir),
                config=config.yaml,
                reference_batch_size=config.reference_batch_size,
            )
            if run.run_dir is not None and run.is_main:
                make_run_dir(run.run_dir)
                stack.enter_context(lock_run_dir(run.run_dir))
            try:
                with warnings_kept(run.run_dir, process=strategy.comm.process):
                    yield run
                    run.checkpointer.wait()  # here, where every rank is: `close` is not collective
            except BaseException:
                with suppress(Exception):  # the error on its way is the one that matters
                    run.close()
                raise
            run.close()
        finally:
            strategy.teardown()


def prepare_fit(run: Run, config: FitConfig, checkpoint: Path | None) -> FitLoop:
    """Prepare task, optimizer and data on this rank, and restore a resumed run; collective."""
    _prepare_data(run, config)
    _prepare_task(run, config)
    _prepare_optimizers(run, config)
    validation = _validation_loop(run, config)
    intervals = FitIntervals(config.max_duration, config.log_every, config.evaluate_every)
    policy = NonFinitePolicy(run, policy=config.on_nonfinite, max_rollbacks=config.max_rollbacks)
    loop = FitLoop(run, intervals, validation=validation, policy=policy)
    if checkpoint is not None:
        run.checkpointer.restore(load_from(checkpoint).payload, where=str(checkpoint))
        if loop.auto_micro_batch is not None:
            loop.auto_micro_batch.resume()
    assert run.loader is not None
    if isinstance(run.strategy, PreparesSteps):
        run.strategy.prepare_steps(run.task, run.loader.step_batches(run.state.epoch, run.state.position))
    if checkpoint is None and validation is not None and config.num_sanity_batches and not config.fast_dev_run:
        metrics = evaluation_loop(run, config, "sanity", limit=config.num_sanity_batches).run()
        if metrics is not None:
            run.emit("on_evaluation_end", "sanity", metrics)
    _open_loggers(run)
    return loop


def evaluation_loop(run: Run, config: FitConfig, stage: str, *, limit: int | None) -> EvaluationLoop:
    """Return the loop of an evaluation of at most `limit` global batches."""
    sources = run.data.stage_data_by_name("validation" if stage == "sanity" else stage)
    seed = config.data_seed(run.data)
    loaders = {name: open_loader(source, run.strategy, seed=seed, limit=limit) for name, source in sources.items()}
    run.loaders += loaders.values()
    return EvaluationLoop(run, loaders, stage=stage)


def _start_of(run: Run, checkpoint: Path | None) -> Path | None:
    """Return where to resume: this run's own folder, if its ranks were lost and have been started again."""
    if run.strategy.attempt and run.is_main and run.run_dir is not None and latest_complete(run.run_dir) is not None:
        return run.run_dir
    return checkpoint


def _prepare_data(run: Run, config: FitConfig) -> None:
    """Open the training data; its length gives the batch plan and the number of steps."""
    source = run.data.stage_data("train")
    run.loader = open_loader(
        source,
        run.strategy,
        seed=config.data_seed(run.data),
        limit=config.overfit_batches or config.limits["train"],
        repeat_first=config.overfit_batches is not None,
    )
    complaint = run.loader.check_order(run.strategy)
    if complaint is not None and run.is_main:
        logger.warning(complaint)
    run.plan = None if source.batch_size is None else run.strategy.plan(source.batch_size)
    run.state.epoch_length = run.loader.epoch_length
    run.max_steps = total_steps(
        config.max_duration,
        steps_of_epoch=run.loader.num_steps,
        items_of_epoch=run.loader.epoch_length,
        batch_size=source.batch_size,
    )


def _prepare_task(run: Run, config: FitConfig) -> None:
    run.strategy.prepare(run.task)
    if config.compile:
        compile_forward(run.task)


def _prepare_optimizers(run: Run, config: FitConfig) -> None:
    run.phase_optimizers = configure_optimizers(
        run.task,
        clip=config.clip,
        precision=config.precision,
        total_steps=run.max_steps,
        fused=config.fused_optimizer,
        skip=config.on_nonfinite == "skip",
        no_weight_decay=config.no_weight_decay,
    )
    for phase_optimizer in run.phase_optimizers:
        if config.skip_grad_norm_factor is not None:
            phase_optimizer.skip_spikes(config.skip_grad_norm_factor)
        run.strategy.prepare_optimizer(run.task, phase_optimizer)


def _validation_loop(run: Run, config: FitConfig) -> EvaluationLoop | None:
    """Return the loop of validations; raises UserError if a schedule needs a metric and nothing is validated."""
    if config.validates(run.data):
        return evaluation_loop(run, config, "validation", limit=config.limits["validation"])
    schedules = [schedule for phase_optimizer in run.phase_optimizers for schedule in phase_optimizer.schedules]
    followed = [schedule.metric for schedule in schedules if schedule.metric is not None]
    if followed:
        raise UserError(
            f"a schedule follows the metric {followed[0]!r}, but nothing is validated; pass Data(validation=...) "
            "and evaluate_every='1epoch'."
        )
    return None


def _open_loggers(run: Run) -> None:
    if run.run_dir is None or not run.is_main:
        return
    clear_summary(run.run_dir)
    write_config(run.run_dir, run.config)
    write_environment(run)
    for destination in run.loggers:
        destination.open(run.run_dir, step=run.state.step)
        destination.write_config(run.config)


def _result_of(run: Run, seconds_before: float, samples_before: int) -> FitResult:
    """Return the result of a run whose present part began at `seconds_before` and `samples_before`."""
    state = run.state
    seconds = state.own_seconds - seconds_before
    return FitResult(
        metrics=dict(state.metrics),
        steps=state.step,
        epochs=state.epochs,
        samples=state.samples,
        seconds=state.own_seconds,
        samples_per_second=(state.samples - samples_before) / seconds if seconds > 0 else 0.0,
        exit_reason=run.stop_reason or "finished",
        run_dir=run.run_dir,
    )


def _write_summary(run: Run, result: FitResult, *, status: str) -> None:
    if run.is_main and run.run_dir is not None:
        write_summary(run.run_dir, {"status": status, **asdict(result)})


@contextmanager
def _torch_flags(config: FitConfig) -> Iterator[None]:
    """Set torch's global switches for the run, and restore them."""
    deterministic, anomaly = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
    if config.deterministic != deterministic:  # the call alone imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(config.deterministic or deterministic)
    torch.autograd.set_detect_anomaly(config.detect_anomaly or anomaly)
    try:
        with warnings.catch_warnings():
            # A step that the fp16 scaler skips still counts for the schedules.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            yield
    finally:
        if config.deterministic != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        torch.autograd.set_detect_anomaly(anomaly)
