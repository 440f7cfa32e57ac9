"""The worker: the function that each rank runs, from setup to teardown."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.checkpoint.resized_buffers import buffer_shapes
from trainkit.console import clock
from trainkit.data.data import Data
from trainkit.data.loader import check_same_data, open_loader
from trainkit.devices import has_streams, indexed
from trainkit.duration import total_steps
from trainkit.errors import NonFiniteLoss, Stopped, UserError, rank_exit
from trainkit.files import reason
from trainkit.loops.checkpointer import Checkpointer
from trainkit.loops.fit_config import FitConfig
from trainkit.loops.fit_loop import FitLoop
from trainkit.loops.handover import hand_over, report_loss, take_over
from trainkit.model.compile import compilation_reported
from trainkit.model.offload import offloaded
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import configure_optimizers
from trainkit.rng import seed_everything
from trainkit.run import Run
from trainkit.run_dir.failure import record_failure, warnings_kept
from trainkit.run_dir.folder import clear_summary, make_run_dir, write_config, write_environment, write_summary
from trainkit.run_dir.lock import lock_run_dir
from trainkit.signals import EXIT_CODES, StopSignals
from trainkit.strategy import PlacesRanks, PreparesSteps, StartsRanks, Strategy
from trainkit.task import TaskModule
from trainkit.tree import map_tensors

if TYPE_CHECKING:
    from trainkit.loops.evaluation_loop import EvaluationLoop

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
# The environment variables by which a user sets what `keep_freed_memory` would change.
MALLOC_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


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
    """Of this part of the run, without those before a resume."""
    exit_reason: str
    run_dir: Path | None
    rank_losses: int = 0
    """Times that ranks were lost and started again."""
    weights: dict[str, Any] | None = field(default=None, repr=False)
    callback_states: Sequence[dict[str, Any] | None] = field(default=(), repr=False)

    def _repr_html_(self) -> str:
        """Return the outcome and the metrics for a notebook, which displays the last value of a cell so."""
        from trainkit.report.html import element, join_html, number, table

        done = f"{self.steps:,} steps, {number(round(self.epochs, 2))} epochs, {self.samples:,} samples"
        rate = f"{clock(self.seconds)}, {number(round(self.samples_per_second, 1))} samples/s"
        rows = [[name, number(value)] for name, value in sorted(self.metrics.items())]
        folder = None if self.run_dir is None else element("p", f"run folder: {self.run_dir}")
        return join_html(element("p", f"{self.exit_reason}: {done}, {rate}"), table(["metric", "last"], rows), folder)


def fit_on_rank(
    strategy: Strategy,
    config: FitConfig,
    task: TaskModule,
    data: Data,
    *,
    checkpoint: Path | None,
    run_dir: Path | None,
    reference: ReferenceBatchSize | None,
    overrides: Sequence[str],
) -> FitResult:
    """Train `task` on this rank's samples and return the result; collective."""
    with run_on_rank(strategy, config, task, data, run_dir) as run:
        run.reference_batch_size, run.overrides = reference, overrides
        seconds, samples = 0.0, 0
        try:
            # Under torchrun each rank has chosen a checkpoint; rank 0 decides.
            folder = run.run_dir if run.is_main else None
            with nullcontext() if config.compile is None else compilation_reported(folder), _exits_named(run):
                loop = prepare_fit(run, config, strategy.comm.broadcast_object(_start_of(run, checkpoint)))
                # After the restore, so that the speed counts this part of the run only.
                seconds, samples = run.state.own_seconds, run.state.samples
                loop.run()
                # A rank that has ended hands nothing over: the death of rank 0 in its last hook would repeat the run.
                if strategy.handover is not None:
                    strategy.comm.barrier()
        except BaseException as error:
            if hand_over(run, error):
                # The launcher starts this rank again, or ends the run: then this is its record.
                _write_summary(run, _result_of(run, seconds, samples), status="failed")
                raise
            # The record first: a callback may hang, and the ranks of a failed run are ended within seconds.
            record_failure(run, error)
            run.report_exception(error)
            _write_summary(run, _result_of(run, seconds, samples), status="failed")
            # A device that failed may never answer; after a loss that is not finite training has just waited for it.
            if isinstance(error, NonFiniteLoss) or not has_streams(strategy.device):
                with suppress(Exception):  # the error that ends the run is the one to see
                    run.log_last_losses()
            raise
        result = _result_of(run, seconds, samples)
        _write_summary(run, result, status="stopped" if result.exit_reason in EXIT_CODES else "finished")
        if isinstance(strategy, StartsRanks):
            result.weights = strategy.final_state_dict(task)
            result.callback_states = _callback_states(config.callbacks, is_wanted=result.weights is not None)
        return result


def _callback_states(callbacks: Sequence[Callback], *, is_wanted: bool) -> list[dict[str, Any] | None]:
    """Return the states of callbacks for the process that called `fit`; `None` for one that cannot be sent.

    Called on every rank, as before a save: a state may be gathered. No error of a callback may cost the weights.
    """
    states: list[dict[str, Any] | None] = []
    for callback in callbacks:
        sent = None
        # What `on_save` adds to a state is in checkpoints only.
        if type(callback).on_save is Callback.on_save:
            try:
                state = callback.state_dict()
                sent = map_tensors(state, Tensor.cpu) if is_wanted else None
                pickle.dumps(sent)
            except Exception as error:
                sent = None
                logger.warning(
                    "the state of %s stays in the ranks: %s: %s.", type(callback).__name__, type(error).__name__, error
                )
        states.append(sent)
    return states


def evaluate_on_rank(
    strategy: Strategy, config: FitConfig, task: TaskModule, data: Data, *, stage: str, checkpoint: Path | None
) -> Any:
    """Return the metrics of a stage, or for `predict` the predictions; collective."""
    with run_on_rank(strategy, config, task, data, None) as run:
        _prepare_task(run, config)
        if checkpoint is not None:
            from trainkit.checkpoint.store import load_from

            # Under torchrun each rank has resolved the path, and may have found another file; rank 0 decides.
            checkpoint = strategy.comm.broadcast_object(checkpoint)
            payload = load_from(checkpoint, strategy.comm).payload
            run.checkpointer.load_weights(payload, where=str(checkpoint), to_evaluate=True)
        loop = evaluation_loop(run, stage, limit=config.limits[stage])
        with _exits_named(run):
            outcome = loop.predict() if stage == "predict" else loop.run()
        # After a stop the loop has returned None or []: no callback may take it for a result.
        if run.sync_stop_signal() and run.stopped_by is not None:
            raise Stopped(run.stopped_by.name, EXIT_CODES[run.stopped_by.name])
        run.emit("on_evaluation_end", stage, {} if stage == "predict" else outcome)
        return outcome


@contextmanager
def _exits_named(run: Run) -> Iterator[None]:
    """Raise RankExit for a `sys.exit` in the block, whose exit code might say that the run has finished."""
    try:
        yield
    except Stopped:
        raise
    except SystemExit as error:
        raise rank_exit(error, run.strategy.comm.process, run.state.step) from error


@contextmanager
def run_on_rank(
    strategy: Strategy, config: FitConfig, task: TaskModule, data: Data, run_dir: Path | None
) -> Iterator[Run]:
    """Set this rank up for a run, and release everything at the end, also after an error; collective."""
    # Signals first: one that comes during the setup must lead to an orderly end too.
    regrow = None if strategy.handover is None else strategy.handover.regrow
    stop_signals = [*strategy.stop_signals, *([] if regrow is None else [regrow])]
    with StopSignals(stop_signals) as signals, _torch_flags(config), ExitStack() as stack:
        try:
            # In the `try`: a setup that fails on one rank may have joined a process group that must be left.
            strategy.setup(config.precision)
            if strategy.device.type == "cpu":
                keep_freed_memory()
            # Ranks draw different dropout masks; the stages of one pipeline replica share their rank, and so the masks.
            seed_everything(config.seed + strategy.comm.rank)
            if config.transforms is not None:
                num_processes, device = strategy.comm.num_processes, strategy.device
                stack.enter_context(config.transforms.applied(task, num_processes=num_processes, device=device))
            if config.offload_activations:
                copies = torch.Stream(indexed(strategy.device))
                stack.callback(config.precision.surround(partial(offloaded, copies)))
            run = Run(
                task=task,
                data=data,
                strategy=strategy,
                precision=config.precision,
                callbacks=[*config.callbacks, *_callbacks_of(task)],
                loggers=config.loggers if strategy.comm.is_main else [],
                signals=signals,
                seed=config.seed,
                run_dir=strategy.comm.broadcast_object(run_dir),  # under torchrun each rank has named one
                remote=config.remote,
                config=config.yaml,
            )
            run.checkpointer = Checkpointer(run, resume_optimizer=config.resume_optimizer)
            if run.run_dir is not None and run.is_main:
                make_run_dir(run.run_dir)
                # In a separate stack, so that the lock can be exchanged if the folder is made again.
                run.folder_lock = stack.enter_context(ExitStack())
                run.folder_lock.enter_context(lock_run_dir(run.run_dir))
            try:
                with warnings_kept(run.run_dir, process=strategy.comm.process):
                    yield run
                    run.checkpointer.wait()  # here, where every rank is: `close` is not collective
            except BaseException:
                with suppress(Exception):  # the first error is the one to raise
                    run.close()
                raise
            run.close()
        finally:
            strategy.teardown()


def prepare_fit(run: Run, config: FitConfig, checkpoint: Path | None) -> FitLoop:
    """Prepare task, optimizer and data on this rank, and restore a resumed run; collective."""
    payload, where = take_over(run) or ({}, "")
    is_new = not where
    if checkpoint is not None and is_new:
        from trainkit.checkpoint.serialization import check_payload
        from trainkit.checkpoint.store import load_from

        payload = load_from(checkpoint, run.strategy.comm).payload
        where = str(checkpoint)
        check_payload(payload, where)
    if isinstance(run.strategy, PlacesRanks):
        saved = payload.get("strategy", {})
        # Before the data is opened: a rank that moves reads another shard, and draws other random numbers.
        if run.strategy.place_ranks(run.task, run.data.stage_data("train"), saved):
            seed_everything(config.seed + run.strategy.comm.rank)
    validation = _prepare_data(run, config)
    _check_hooks(run)
    if where or run.checkpointer.store is not None:
        # Before the strategy partitions the task and the restore resizes buffers.
        run.checkpointer.first_buffers = buffer_shapes(run.task)
    _prepare_task(run, config)
    run.validates = validation is not None
    _prepare_optimizers(run, config)
    loop = FitLoop(run, config, validation=validation)
    if where:
        from trainkit.checkpoint.serialization import refuse_altered_state

        with refuse_altered_state(where):
            run.checkpointer.restore(payload, where=where, is_new=is_new)
            if loop.auto_micro_batch is not None:
                loop.auto_micro_batch.resume()
            # Last: setting the micro-batch size may change the layout that it compares.
            run.checkpointer.restore_rng(payload)
    assert run.loader is not None
    if isinstance(run.strategy, PreparesSteps):
        run.strategy.prepare_steps(run.task, run.loader.step_batches(run.state.epoch, run.state.position))
    measured = {name for name in run.state.metrics if name.startswith("validation/")}  # before a resume
    is_checked = run.handed_over or (checkpoint is not None and _monitored(run) <= measured)
    if validation is not None and config.num_sanity_batches and not is_checked:
        with run.optimizers_in_evaluation():
            metrics = _open_evaluation(run, "sanity", limit=config.num_sanity_batches).run()
            if metrics is not None:
                for phase_optimizer in run.phase_optimizers:
                    phase_optimizer.check_monitored(metrics)
                run.emit("on_evaluation_end", "sanity", metrics)
    # After the restore: a logger removes what it holds beyond the restored step.
    _open_loggers(run)
    report_loss(run)
    return loop


def evaluation_loop(run: Run, stage: str, *, limit: int | None) -> EvaluationLoop:
    """Return the loop of an evaluation of at most `limit` global batches; collective."""
    loop = _open_evaluation(run, stage, limit=limit)
    check_same_data(loop.loaders, run.strategy.comm)
    return loop


def _open_evaluation(run: Run, stage: str, *, limit: int | None) -> EvaluationLoop:
    from trainkit.loops.evaluation_loop import EvaluationLoop

    sources = run.data.stage_data_by_name("validation" if stage == "sanity" else stage)
    seed = run.seed if run.data.seed is None else run.data.seed
    loaders = {name: open_loader(source, run.strategy, seed=seed, limit=limit) for name, source in sources.items()}
    run.loaders += loaders.values()  # closed at the end of the run
    return EvaluationLoop(run, loaders, stage=stage)


def _monitored(run: Run) -> set[str]:
    """Return the names of the validation metrics that callbacks and schedules follow."""
    schedules = [schedule for phase_optimizer in run.phase_optimizers for schedule in phase_optimizer.schedules]
    names = (*(callback.monitored for callback in run.callbacks), *(schedule.metric for schedule in schedules))
    return {name for name in names if isinstance(name, str)}


def _callbacks_of(task: TaskModule) -> Sequence[Callback]:
    callbacks: object = task.configure_callbacks()
    if not isinstance(callbacks, Sequence) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise UserError(
            f"{type(task).__name__}.configure_callbacks returned {callbacks!r}; return a list of objects of "
            "trainkit.Callback."
        )
    return callbacks


def _start_of(run: Run, checkpoint: Path | None) -> Path | None:
    """Return the checkpoint to resume: that of this run, if its ranks were lost and started again."""
    # The ranks were lost after they had saved more than the checkpoint that the user named.
    return run.strategy.restart_from or checkpoint


def _prepare_data(run: Run, config: FitConfig) -> EvaluationLoop | None:
    """Open the training data, which gives the batch plan and the number of steps, and return the loop of validations.

    Collective. Raises UserError if the ranks' data differ.
    """
    source = run.data.stage_data("train")
    seed = run.seed if run.data.seed is None else run.data.seed
    unused_seed = run.data.unused_sampler_seed()
    if unused_seed not in (None, seed) and run.is_main:
        logger.warning(
            "the train DataLoader's DistributedSampler has seed=%d, but samples come in the order of seed=%d. For the "
            "former pass Data(train=..., seed=%d).",
            unused_seed,
            seed,
            unused_seed,
        )
    run.loader = loader = open_loader(
        source,
        run.strategy,
        seed=seed,
        limit=config.overfit_batches or config.limits["train"],
        repeat_first=config.overfit_batches is not None,
    )
    validation = None
    if run.data.has("validation") and config.evaluate_every is not None:
        validation = _open_evaluation(run, "validation", limit=config.limits["validation"])
    loaders = {"train": loader, **({} if validation is None else validation.loaders)}
    # Collective, with the loaders of all stages at once: ranks with other data would hang in a later step.
    order_warning = check_same_data(loaders, run.strategy.comm)
    if order_warning is not None and run.is_main:
        logger.warning(order_warning)
    size, length = source.batch_size, loader.epoch_length
    run.plan = None if size is None else run.strategy.plan(size)
    run.state.epoch_length = length
    run.max_steps = total_steps(
        config.max_duration, steps_of_epoch=loader.num_steps, items_of_epoch=length, batch_size=size
    )
    return validation


def _check_hooks(run: Run) -> None:
    """Raise UserError for a hook on a gradient that does not allow this split of a step."""
    # Private, as torch lists hooks nowhere else. The strategy adds its own later.
    if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in run.task.parameters()):
        from trainkit.optim.gradient_hooks import check_gradient_hooks

        plan, strategy = run.plan, run.strategy
        num_ranks = strategy.comm.world_size if plan is None else plan.world_size
        num_backwards = 1 if plan is None else max(plan.num_backwards, 2 if strategy.auto_micro_batch else 1)
        check_gradient_hooks(run.task, num_ranks=num_ranks, num_backwards=num_backwards)


def _prepare_task(run: Run, config: FitConfig) -> None:
    if config.compile is not None:  # first: fsdp changes the classes of modules, which may be named
        config.compile.apply(run.task)
    run.strategy.prepare(run.task)


def _prepare_optimizers(run: Run, config: FitConfig) -> None:
    """Make the optimizers; raises UserError if a schedule needs a metric of validations, and there are none."""
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
        phase_optimizer.settings.check_length(run.max_steps, phase_optimizer.schedules)
    schedules = [schedule for phase_optimizer in run.phase_optimizers for schedule in phase_optimizer.schedules]
    metric = next((schedule.metric for schedule in schedules if schedule.metric is not None), None)
    if metric is not None and not run.validates:
        raise UserError(
            f"a schedule follows the metric {metric!r}, but nothing is validated; pass Data(validation=...) "
            "and evaluate_every='1epoch'."
        )


def _open_loggers(run: Run) -> None:
    if run.run_dir is None or not run.is_main:
        return
    # The summary of an earlier part of the run would say that this one has finished, even if it is killed.
    clear_summary(run.run_dir)
    write_config(run.run_dir, run.config)
    write_environment(run)
    for destination in run.loggers:
        destination.open(run.run_dir, step=run.state.step)
        if run.config:
            destination.write_config(run.config)
    # Last: until the first config is written, the check for a removed folder would find none.
    run.remake_folder = partial(_remake_folder, run, run.run_dir)


def _remake_folder(run: Run, folder: Path) -> None:
    """Make the folder again, with its config, lock and loggers; a disk error is a warning."""
    try:
        make_run_dir(folder)
        if run.folder_lock is not None:
            # The old lock is on a file that was removed with the folder, so it keeps no other run out.
            run.folder_lock.close()
            run.folder_lock.enter_context(lock_run_dir(folder))
        _open_loggers(run)
        metrics = run.metrics_of_this_step()
        for destination in run.loggers if metrics else ():
            destination.write(metrics, step=run.state.step)
    # The disk may be gone for good, and training does not need the folder until the next checkpoint.
    except (OSError, UserError) as error:
        logger.warning("the run folder %s was removed or moved, and cannot be made again: %s", folder, error)
        return
    logger.warning(
        "the run folder %s was removed or moved before step %d. It was made again with the run's config; the metrics "
        "and checkpoints in it until then are lost.",
        folder,
        run.state.step,
    )


def _result_of(run: Run, seconds_before: float, samples_before: int) -> FitResult:
    """Return the result of a run; its present part started at `seconds_before` and `samples_before`."""
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
        rank_losses=run.strategy.attempt,
        run_dir=run.run_dir,
    )


def _write_summary(run: Run, result: FitResult, *, status: str) -> None:
    if not run.is_main or run.run_dir is None:
        return
    run.check_folder()
    try:
        write_summary(run.run_dir, {"status": status, **asdict(result)})
    except OSError as error:
        message = f"the run's summary could not be written to {run.run_dir}: {reason(error)}."
        if status != "failed":
            raise UserError(message) from error
        logger.warning(message)  # the error of the run is the one to raise


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in this process; do nothing with another C library, or if its settings were chosen.

    Otherwise glibc returns the memory of a step's gradients to the system, and the next step takes it again page by
    page. Allocations above 32 MiB, the most that glibc allows here, are still returned.
    """
    chosen = [name for name in MALLOC_SETTINGS if name in os.environ]
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):  # not glibc
        return
    if chosen:
        logger.debug("freed memory is handled as %s says", ", ".join(chosen))
        return
    # The process itself: it has the C library loaded, and Python has no call for mallopt.
    allocator = ctypes.CDLL(None)
    # 32 MiB and the largest int: an allocation below the one comes from the heap, and the heap never shrinks.
    if allocator.mallopt(_M_MMAP_THRESHOLD, 2**25) and allocator.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1):
        logger.debug("%s keeps freed memory in this process", library)


@contextmanager
def _torch_flags(config: FitConfig) -> Iterator[None]:
    """Set torch's global switches for the run, and restore them."""
    detect_anomaly = config.detect_anomaly or torch.is_anomaly_enabled()
    sets_deterministic = config.deterministic and not torch.are_deterministic_algorithms_enabled()
    if sets_deterministic:  # the call alone imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(True)
    try:
        # Global switches of torch: a later run in this process must find them as they were.
        with torch.autograd.set_detect_anomaly(detect_anomaly), warnings.catch_warnings():
            # A step that the fp16 scaler skips still counts for the schedules.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            yield
    finally:
        if sets_deterministic:
            torch.use_deterministic_algorithms(False)
