"""What a trainer's ranks do: each of them runs one of these functions, at the same time as the others."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit.checkpoints.store import load_from
from trainkit.compilation import compile_forward
from trainkit.continuation import latest_whole
from trainkit.data import Data
from trainkit.duration import total_steps
from trainkit.environment import write_environment
from trainkit.errors import Stopped, UserError
from trainkit.evaluation import EvalLoop
from trainkit.failure import record_failure
from trainkit.feed import make_feed
from trainkit.loops import FitLoop, FitSchedule
from trainkit.optimization import configure
from trainkit.recovery import Recovery
from trainkit.result import FitResult, Progress, result_of
from trainkit.rng import seed_everything
from trainkit.run import Run
from trainkit.run_folder import forget_summary, make_run_dir, write_config, write_summary
from trainkit.run_lock import only_run_in
from trainkit.signals import EXIT_CODES, StopSignals
from trainkit.strategy import PreparesSteps, StartsRanks
from trainkit.task import TaskModule
from trainkit.warning_log import warnings_kept

if TYPE_CHECKING:
    from trainkit.trainer import Trainer

logger = logging.getLogger(__name__)


def fit_on_rank(
    trainer: Trainer, task: TaskModule, data: Data, checkpoint: Path | None, run_dir: Path | None
) -> FitResult:
    """Train `task` on this rank's samples and return what the run came to; collective."""
    strategy = trainer.strategy
    with run_on_rank(trainer, task, data, run_dir) as run:
        before = Progress()
        try:
            # Under torchrun each rank has looked for itself; rank 0 decides.
            loop = prepare_fit(trainer, run, strategy.comm.broadcast_object(_start_of(run, checkpoint)))
            before = Progress.of(run.state)
            loop.run()
        except BaseException as error:
            record_failure(run, error)
            run.report(error)
            _write_summary(run, result_of(run, since=before), status="failed")
            raise
        result = result_of(run, since=before)
        _write_summary(run, result, status="stopped" if result.exit_reason in EXIT_CODES else "finished")
        if isinstance(strategy, StartsRanks):
            result.weights = strategy.final_state_dict(task)
        return result


def evaluate_on_rank(trainer: Trainer, task: TaskModule, data: Data, checkpoint: Path | None, stage: str) -> Any:
    """Return the metrics of a stage, or for `predict` the predictions; collective."""
    with run_on_rank(trainer, task, data, None) as run:
        _prepare_task(trainer, run)
        if checkpoint is not None:
            run.load_weights(load_from(checkpoint).payload, where=str(checkpoint), to_evaluate=True)
        loop = eval_loop(trainer, run, stage, limit=trainer.limits[stage])
        outcome = loop.predict() if stage == "predict" else loop.run()
        if run.agree_on_signal() and run.stopped_by is not None:
            raise Stopped(run.stopped_by.name, EXIT_CODES[run.stopped_by.name])
        run.emit("on_evaluation_end", stage, {} if stage == "predict" else outcome)
        return outcome


@contextmanager
def run_on_rank(trainer: Trainer, task: TaskModule, data: Data, run_dir: Path | None) -> Iterator[Run]:
    """Set this rank up for a run, and release everything whatever happens."""
    strategy = trainer.strategy
    with StopSignals(trainer.preemption_signal) as signals, _torch_flags(trainer), ExitStack() as stack:
        try:
            strategy.setup(trainer.precision)
            seed_everything(trainer.seed + strategy.comm.rank)
            stack.enter_context(trainer.model_settings.applied(task, strategy))
            run = Run(
                task=task,
                data=data,
                strategy=strategy,
                precision=trainer.precision,
                callbacks=[*trainer.callbacks, *task.configure_callbacks()],
                loggers=trainer.loggers if strategy.comm.is_main else [],
                signals=signals,
                seed=trainer.seed,
                run_dir=strategy.comm.broadcast_object(run_dir),
                config=trainer.config,
                usual_batch=trainer.usual_batch,
            )
            if run.run_dir is not None and run.is_main:
                make_run_dir(run.run_dir)
                stack.enter_context(only_run_in(run.run_dir))
            try:
                with warnings_kept(run.run_dir, process=strategy.comm.process):
                    yield run
                    run.finish_saving()  # here, where every rank is: `close` asks nobody
            except BaseException:
                with suppress(Exception):  # the error on its way is the one that matters
                    run.close()
                raise
            run.close()
        finally:
            strategy.teardown()


def _start_of(run: Run, checkpoint: Path | None) -> Path | None:
    """Return where the run goes on: where it was itself, if its ranks were lost and have been started again."""
    if run.strategy.attempt and run.is_main and run.run_dir is not None and latest_whole(run.run_dir) is not None:
        return run.run_dir
    return checkpoint


def prepare_fit(trainer: Trainer, run: Run, checkpoint: Path | None) -> FitLoop:
    """Bring task, optimizer and data into place on this rank, and a resumed run to where it was; collective."""
    _prepare_data(trainer, run)
    _prepare_task(trainer, run)
    run.optimizations = configure(
        run.task,
        clip=trainer.clip,
        precision=trainer.precision,
        total_steps=run.max_steps,
        fused=trainer.fused_optimizer,
        skip=trainer.on_nonfinite == "skip",
        no_weight_decay=trainer.no_weight_decay,
    )
    for optimization in run.optimizations:
        if trainer.spike_factor is not None:
            optimization.leave_out_spikes(trainer.spike_factor)
        trainer.strategy.prepare_optimizer(run.task, optimization)
    validation = _validation_loop(trainer, run)
    schedule = FitSchedule(trainer.max_duration, trainer.log_every, trainer.evaluate_every)
    recovery = Recovery(run, policy=trainer.on_nonfinite, rollback_limit=trainer.rollback_limit)
    loop = FitLoop(run, schedule, validation=validation, recovery=recovery)
    if checkpoint is not None:
        payload = load_from(checkpoint).payload
        run.restore(payload, where=str(checkpoint))
        if loop.memory_fit is not None:
            loop.memory_fit.resume()
        run.restore_rng(payload)
    assert run.feed is not None
    if isinstance(trainer.strategy, PreparesSteps):
        trainer.strategy.prepare_steps(run.task, run.feed.windows(run.state.epoch, run.state.position))
    if checkpoint is None and validation is not None and trainer.sanity_batches and not trainer.fast_dev_run:
        metrics = eval_loop(trainer, run, "sanity", limit=trainer.sanity_batches).run()
        if metrics is not None:
            run.emit("on_evaluation_end", "sanity", metrics)
    _open_loggers(run)
    return loop


def _prepare_data(trainer: Trainer, run: Run) -> None:
    """Have the feed of training, and know from it how the global batch is cut and how many steps there are."""
    source = run.data.source("train")
    run.feed = make_feed(
        source,
        trainer.strategy,
        seed=_data_seed(trainer, run.data),
        limit=trainer.overfit_batches or trainer.limits["train"],
        repeat_first=trainer.overfit_batches is not None,
    )
    complaint = run.feed.check_order(trainer.strategy)
    if complaint is not None and run.is_main:
        logger.warning(complaint)
    run.plan = None if source.batch_size is None else trainer.strategy.plan(source.batch_size)
    run.state.epoch_length = run.feed.epoch_length
    run.max_steps = total_steps(
        trainer.max_duration,
        steps_of_epoch=run.feed.num_steps,
        items_of_epoch=run.feed.epoch_length,
        batch_size=source.batch_size,
    )


def _prepare_task(trainer: Trainer, run: Run) -> None:
    trainer.strategy.prepare(run.task)
    if trainer.compile:
        compile_forward(run.task)


def _validation_loop(trainer: Trainer, run: Run) -> EvalLoop | None:
    """Return the loop of validations; raises UserError if a schedule follows one and there is none."""
    if trainer.validates(run.data):
        return eval_loop(trainer, run, "validation", limit=trainer.limits["validation"])
    schedules = [schedule for optimization in run.optimizations for schedule in optimization.schedules]
    followed = [schedule.metric for schedule in schedules if schedule.metric is not None]
    if followed:
        raise UserError(
            f"a schedule follows the metric {followed[0]!r}, but nothing is validated; pass Data(validation=...) "
            "and evaluate_every='1epoch'."
        )
    return None


def eval_loop(trainer: Trainer, run: Run, stage: str, *, limit: int | None) -> EvalLoop:
    """Return the loop of an evaluation of at most `limit` global batches."""
    sources = run.data.sources("validation" if stage == "sanity" else stage)
    seed = _data_seed(trainer, run.data)
    feeds = {name: make_feed(source, trainer.strategy, seed=seed, limit=limit) for name, source in sources.items()}
    run.feeds += feeds.values()
    return EvalLoop(run, feeds, stage=stage)


def _data_seed(trainer: Trainer, data: Data) -> int:
    return trainer.seed if data.seed is None else data.seed


def _open_loggers(run: Run) -> None:
    if run.run_dir is None or not run.is_main:
        return
    forget_summary(run.run_dir)
    write_config(run.run_dir, run.config)
    write_environment(run)
    for destination in run.loggers:
        destination.open(run.run_dir, step=run.state.step)
        destination.write_config(run.config)


def _write_summary(run: Run, result: FitResult, *, status: str) -> None:
    if run.is_main and run.run_dir is not None:
        write_summary(run.run_dir, {"status": status, **asdict(result)})


@contextmanager
def _torch_flags(trainer: Trainer) -> Iterator[None]:
    """Set torch's global switches for the run, and put them back."""
    deterministic, anomaly = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
    if trainer.deterministic != deterministic:  # the call alone imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(trainer.deterministic or deterministic)
    torch.autograd.set_detect_anomaly(trainer.detect_anomaly or anomaly)
    try:
        with warnings.catch_warnings():
            # A step that the fp16 scaler leaves out still counts for the schedules.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            yield
    finally:
        if trainer.deterministic != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        torch.autograd.set_detect_anomaly(anomaly)
