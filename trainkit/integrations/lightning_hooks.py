"""The hooks, self.log and trainer of a LightningModule that runs as a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.callback import Callback
from trainkit.errors import UserError
from trainkit.metrics.step_output import read_evaluation_output
from trainkit.metrics.sync import (
    MetricShard,
    is_metric,
    merge_metric_states,
    metrics_in,
    no_sync_metrics,
    preserve_state,
    reset_all,
    restore,
    states_on_host,
)
from trainkit.strategy import metric_modules
from trainkit.task import evaluation_mode

if TYPE_CHECKING:
    from trainkit.run import Run
    from trainkit.strategy import Strategy
    from trainkit.task import TaskModule

_EVALUATIONS = {"sanity": "validation", "validation": "validation", "test": "test", "predict": "predict"}
MOMENTS = {"validation": "validate", "test": "test", "predict": "predict"}
"""The argument of `setup` and `teardown` for a stage by itself."""
GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")

_MANUAL = (
    "strategy",
    "optimizers",
    "lr_scheduler_configs",
    "precision_plugin",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)
"""Attributes of a trainer that the methods of a LightningModule for manual optimization read."""
_OFFERED = (
    "current_epoch",
    "global_step",
    "total_steps",
    "sanity_checking",
    "world_size",
    "global_rank",
    "loader",
    "manual",
    "set_up",
    *_MANUAL,
)
_NOT_OFFERED = (
    "is not offered to a LightningModule that runs as a task; of self.trainer there are current_epoch, global_step, "
    "estimated_stepping_batches, sanity_checking, world_size, global_rank and is_global_zero. What else the module "
    "needs can be an argument of its constructor, and what it logs is passed to self.log."
)


class TrainerProxy:
    """Stands in for `self.trainer` of a module: how far the run is."""

    def __init__(self) -> None:
        self.current_epoch = 0
        self.global_step = 0
        self.world_size = 1
        self.global_rank = 0
        self.total_steps: int | None = None
        self.sanity_checking = False
        self.loader = 0
        self.manual = False
        self.set_up = {"fit"}  # the stages that the module is set up for

    @property
    def progress_bar_callback(self) -> None:
        """Has no value: `self.print` prints to the console, on rank 0."""

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.global_rank == 0

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run; raises UserError if the duration does not define them."""
        if self.total_steps is None:
            raise UserError(
                "estimated_stepping_batches is not known; give max_duration in steps, samples, or epochs of data "
                "with a length."
            )
        return self.total_steps

    def follow(self, run: Run) -> None:
        """Copy the number of steps and ranks; the epoch lasts until the next one starts, past its validation."""
        if not self.manual:  # whose optimizer steps are counted one by one
            self.global_step = run.state.step
        self.world_size, self.global_rank = run.strategy.comm.world_size, run.strategy.comm.rank
        self.total_steps = run.max_steps

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling ask for private names before __init__ has run;
        # they must not find an error of another type.
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("logger", "loggers", "local_rank"):  # read by properties, which hide an AttributeError
            raise UserError(f"self.{name} {_NOT_OFFERED}")
        raise UnsupportedLightningFeature(f"self.trainer.{name} {_NOT_OFFERED}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "should_stop":
            raise UserError(
                "self.trainer.should_stop cannot be set by a LightningModule that runs as a task; stop with the "
                "callback EarlyStopping, or with run.request_stop(reason) in a trainkit.Callback."
            )
        if name not in _OFFERED:
            raise UnsupportedLightningFeature(f"self.trainer.{name} {_NOT_OFFERED}")
        super().__setattr__(name, value)


class UnsupportedLightningFeature(UserError, AttributeError):
    """An attribute of Lightning's Trainer that has no counterpart."""


class LightningHooks(Callback):
    """Calls a module's own hooks at the moments of a run."""

    def __init__(self, task: Any, proxy: TrainerProxy) -> None:
        self._task, self._module = task, task.module
        self._proxy = proxy
        self._fit_has_started = False
        self._metrics = HookMetrics()

    def on_fit_start(self, run: Run) -> None:
        if self._proxy.manual:
            self._task.precision = run.precision
            self._check_gradients_unread(run)
        else:
            self._follow_gradients(run)
        self._start_fit(run)
        self._module.on_train_start()

    def _start_fit(self, run: Run) -> None:
        """Call the module's hook, once: before the sanity batches, if there are any."""
        self._proxy.follow(run)
        self._proxy.current_epoch = run.state.epoch
        if not self._fit_has_started:
            self._fit_has_started = True
            self._module.on_fit_start()

    def on_fit_end(self, run: Run) -> None:
        self._proxy.current_epoch = run.state.epoch
        # In Lightning's order, from the inner to the outer.
        self._module.on_train_end()
        self._module.on_fit_end()
        self._module.teardown("fit")
        self._task.precision, self._fit_has_started = None, False

    def on_epoch_start(self, run: Run) -> None:
        self._proxy.follow(run)
        self._proxy.current_epoch = run.state.epoch
        # A run that is resumed within an epoch goes on with the count from its checkpoint.
        if run.state.position == 0:
            self._task.train_batch_idx = -1
        self._module.on_train_epoch_start()

    def on_step_end(self, run: Run) -> None:
        self._proxy.follow(run)
        if self._task.last_batch is not None:
            outputs, batch = self._task.last_batch
            # Or the batch would keep its memory during the next step.
            self._task.last_batch = None
            self._module.on_train_batch_end(outputs, batch, self._task.train_batch_idx)

    def on_epoch_end(self, run: Run) -> None:
        if not overrides(self._module, "on_train_epoch_end"):
            # Every rank has the same class, so that all of them enter the collective below or none.
            return
        with self._metrics.synced(run.task, run.strategy, keep_resets=True), capture_logged() as logged:
            self._module.on_train_epoch_end()
            local_numbers = numbers_of(logged)
        values: dict[str, list[float]] = {}
        # Collective: the mean over ranks is logged on all of them.
        for numbers in run.strategy.comm.all_gather_object(local_numbers):
            for name, number in numbers.items():
                values.setdefault(f"train/{name}", []).append(number)
        if values:
            run.log({name: sum(of_ranks) / len(of_ranks) for name, of_ranks in values.items()})

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._proxy.follow(run)
        if stage == "sanity":
            self._start_fit(run)
        self._proxy.sanity_checking = stage == "sanity"
        self._task.batch_idx, self._proxy.loader = -1, 0
        self._metrics.begin_evaluation(run.task)
        with evaluation_mode(run.task), torch.no_grad():  # as in Lightning
            # Within a fit the module is set up already: with optimizers the evaluation is a part of one.
            if not run.phase_optimizers and MOMENTS[stage] not in self._proxy.set_up:
                self._module.setup(MOMENTS[stage])
            getattr(self._module, f"on_{_EVALUATIONS[stage]}_start")()
            getattr(self._module, f"on_{_EVALUATIONS[stage]}_epoch_start")()

    def on_dataset_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._task.batch_idx, self._proxy.loader = -1, self._proxy.loader + 1
        hook = f"on_{_EVALUATIONS[stage]}_epoch_end"
        # Collective, and the same on all ranks, which have the same class.
        if overrides(self._module, hook):
            with self._metrics.synced(run.task, run.strategy, keep_resets=False), capture_logged() as logged:
                getattr(self._module, hook)()
                metrics.update(numbers_of(logged))

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._metrics.end_evaluation()
        with evaluation_mode(run.task), torch.no_grad():  # as in Lightning
            if stage == "predict":
                self._module.on_predict_epoch_end()
            getattr(self._module, f"on_{_EVALUATIONS[stage]}_end")()
            if not run.phase_optimizers:
                self._module.teardown(MOMENTS[stage])
                self._proxy.set_up.discard(MOMENTS[stage])
        self._proxy.sanity_checking = False

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"train_batch": self._task.train_batch_idx}
        if self._proxy.manual:
            saved |= self._proxy.strategy.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._task.train_batch_idx = saved["train_batch"]
        if self._proxy.manual:
            self._proxy.strategy.load_state_dict(saved)

    def _check_gradients_unread(self, run: Run) -> None:
        """Raise UserError if another callback reads or changes gradients in steps that the module makes itself."""
        if any(phase_optimizer.pre_clip_hooks for phase_optimizer in run.phase_optimizers):
            raise UserError(
                f"{type(self._module).__name__} has automatic_optimization=False: it steps its optimizers itself, and "
                "no callback sees the gradients; remove gradient_norms and gradual_unfreezing."
            )

    def _follow_gradients(self, run: Run) -> None:
        """Call the hooks between the backward and the update, where the gradients are complete and not clipped."""
        (phase_optimizer,) = run.phase_optimizers
        if phase_optimizer.needs_closure:
            for hook in (*BATCH_HOOKS, *GRADIENT_HOOKS):
                if overrides(self._module, hook):
                    raise UserError(
                        f"{type(self._module).__name__} overrides {hook}, which LBFGS would call once for each "
                        "evaluation of a batch, or not at all; remove it, or use another optimizer."
                    )
        overridden = [hook for hook in GRADIENT_HOOKS if overrides(self._module, hook)]
        if not overridden:
            return
        arguments: dict[str, Any] = {"on_after_backward": (), "on_before_optimizer_step": (phase_optimizer.optimizer,)}

        def call() -> None:
            for hook in overridden:
                with self._logging(run, hook):
                    getattr(self._module, hook)(*arguments[hook])

        phase_optimizer.pre_clip_hooks.append(call)

    @contextmanager
    def _logging(self, run: Run, hook: str) -> Iterator[None]:
        """Add what is logged in this context to the means of the training steps; each step has the same weight."""
        with capture_logged() as logged:
            yield
        metrics = without_stage(logged)
        if "loss" in metrics:
            raise UserError(f"{hook} logs 'loss', which is the name of the returned loss; log it under another name.")
        if metrics:
            assert run.means is not None
            # One sample of weight 1 for each step; a mean over ranks, as every rank adds its own.
            run.means.add([read_evaluation_output(metrics, 1, run.task, hook)], step=run.state.step)


def overrides(module: Any, hook: str) -> bool:
    """Return True if a class other than Lightning's base classes defines the hook."""
    owner = next((cls for cls in type(module).__mro__ if hook in vars(cls)), None)
    # By module name, as Lightning is not imported here.
    return owner is not None and not owner.__module__.startswith(("lightning.pytorch.core.", "pytorch_lightning.core."))


_STAGE_PREFIXES = tuple(f"{stage}{mark}" for stage in ("train", "validation", "valid", "val", "test") for mark in "_/")

_logged: ContextVar[dict[str, Any] | None] = ContextVar("_logged", default=None)
"""The values logged by the running step; a context variable, as replicas run in threads."""


def log_value(name: str, value: Any, *args: Any, reduce_fx: Any = "mean", **kwargs: Any) -> None:
    """Keep one value that the running step or hook logs; raises UserError but for means."""
    if reduce_fx not in ("mean", "avg", torch.mean) and not is_metric(value):
        raise UserError(
            f"self.log({name!r}, reduce_fx={getattr(reduce_fx, '__name__', reduce_fx)!r}) is not offered: values are "
            "logged as means; log a metric object, such as torchmetrics.MaxMetric, MinMetric or SumMetric."
        )
    logged = _logged.get()
    if logged is None:
        raise UserError(
            f"self.log({name!r}) was called where nothing is logged: values are logged in steps, in the hooks "
            "around a batch of an evaluation, in on_train_batch_start, on_after_backward and on_before_optimizer_step, "
            "and in on_train_epoch_end, on_validation_epoch_end and on_test_epoch_end."
        )
    logged[name] = value


def log_values(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    """Keep several values that the running step logs."""
    for name, value in dictionary.items():
        log_value(name, value, **kwargs)


@contextmanager
def capture_logged() -> Iterator[dict[str, Any]]:
    """Collect the values that are logged in this context in a dict."""
    logged: dict[str, Any] = {}
    token = _logged.set(logged)
    try:
        yield logged
    finally:
        _logged.reset(token)


def without_stage(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logged values under names without the stage, unless two would then have the same."""
    metrics: dict[str, Any] = {}
    for name, value in logged.items():
        prefix = next((prefix for prefix in _STAGE_PREFIXES if name.startswith(prefix)), "")
        short = name.removeprefix(prefix) or name
        if short == "weight":  # of a step, this is the weight of its samples
            if name == short:
                raise UserError("self.log('weight') has a name with a meaning of its own; log it as 'mean_weight'.")
            short = name
        metrics[name if short in metrics else short] = value
    return metrics


def numbers_of(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the values logged at the end of an epoch as numbers; metric objects are computed and reset."""
    numbers: dict[str, float] = {}
    for name, value in without_stage(logged).items():
        computed = value.compute() if is_metric(value) else value
        named = computed if isinstance(computed, Mapping) else {name: computed}
        for key, number in named.items():
            if isinstance(number, Tensor) and number.numel() != 1:
                raise UserError(f"self.log({key!r}) was given a tensor of shape {tuple(number.shape)}; log scalars.")
            numbers[key] = float(number)
    reset_all(value for value in logged.values() if is_metric(value))
    return numbers


class HookMetrics:
    """The metric objects of a module while its hooks at the end of an epoch run.

    Objects that steps update have the merged states of all ranks there. Those that hooks alone update, such as a
    MaxMetric of the best accuracy, are the same on every rank: they are not merged, and keep their states from one
    evaluation to the next.
    """

    def __init__(self) -> None:
        # By the index of the object in `metrics_in`: torchmetrics computes hashes from states.
        self._fed: dict[int, int] = {}  # by hooks: the number of updates after the last hook
        self._before: list[_SavedState] = []  # the evaluation that runs
        self._kept: dict[int, _SavedState] = {}

    def begin_evaluation(self, task: TaskModule) -> None:
        """Save the states that the objects have before an evaluation, which resets all of them."""
        self._before, self._kept = preserve_state(metrics_in(task)), {}

    def end_evaluation(self) -> None:
        """Give the objects that hooks updated the states from there, in place of those from before the evaluation."""
        restore(list(self._kept.values()))
        self._before, self._kept = [], {}

    @contextmanager
    def synced(self, task: TaskModule, strategy: Strategy, *, keep_resets: bool) -> Iterator[None]:
        """Give the objects that steps updated the merged states of all ranks in this context; collective.

        Afterwards they hold what this rank has counted, or nothing if they were reset meanwhile and `keep_resets`.
        Raises UserError for an object that both steps and hooks update.
        """
        task_holders = metrics_in(task)
        if not task_holders:
            yield
            return
        holders = metric_modules(strategy, task)  # of the task, then those of each replica of it
        replicas = [holders[start : start + len(task_holders)] for start in range(0, len(holders), len(task_holders))]
        local_states = [(list(map(_updates, replica)), states_on_host(replica)) for replica in replicas]
        of_ranks: dict[int, Any] = {}
        for rank, counted in strategy.comm.all_gather_object((strategy.comm.rank, local_states)):
            # Of several processes that share a rank's samples, it may be one alone that counts.
            most = max(of_ranks.get(rank, counted), counted, key=lambda parts: sum(sum(counts) for counts, _ in parts))
            of_ranks[rank] = most
        shards = [part for counted in of_ranks.values() for part in counted]
        # Over all ranks, so that they agree; `_fed` is the same on each, as hooks run on all of them.
        num_updates = [max(counts) for counts in zip(*(counts for counts, _ in shards), strict=True)]
        is_of_hooks = [
            count == 0 or (not self._before and self._fed.get(index) == count)
            for index, count in enumerate(num_updates)
        ]
        restore([self._before[index] for index in self._fed if self._before and is_of_hooks[index]])
        # Saved before the merge, which writes the states of all ranks into these objects.
        saved_states = preserve_state(task_holders)
        of_steps = [index for index, of_hooks in enumerate(is_of_hooks) if not of_hooks]
        merge_metric_states(
            [task_holders[index] for index in of_steps],
            [MetricShard([states[index] for index in of_steps], 1) for _, states in shards],
        )
        # Private: torchmetrics warns in compute() by this count, and has no public one.
        counting: list[Any] = [task_holders[index] for index in of_steps]
        for holder in counting:
            if hasattr(holder, "_update_count"):
                holder._update_count = max(1, holder._update_count)  # a rank may have had no sample
        updates_before = list(map(_updates, task_holders))
        merged = [{name: getattr(holder, name) for name in states} for holder, states in saved_states]
        try:
            # Merged already: a metric of torchmetrics would add up the ranks once more in its `compute`.
            with no_sync_metrics(task_holders):
                yield
            for index, (holder, count) in enumerate(zip(task_holders, updates_before, strict=True)):
                saved_count = self._before[index][1].get("_update_count", 1) if self._before else 0
                counts_in_training = saved_count if index not in self._fed else 0
                if _updates(holder) > count and (counts_in_training or not is_of_hooks[index]):
                    name = next(name for name, module in task.named_modules() if module is holder)
                    raise UserError(
                        f"{name.removeprefix('module.')} is updated in steps and in a hook at the end of an epoch, "
                        "where every rank would count the same once more. Use two metric objects."
                    )
        finally:
            rows = zip(task_holders, updates_before, merged, saved_states, *replicas[1:], strict=True)
            for index, (holder, count, states, saved, *copies) in enumerate(rows):
                if is_of_hooks[index] and (index in self._fed or _updates(holder) != count):
                    self._fed[index] = _updates(holder)
                    if self._before:
                        # The hook of the next dataset of this evaluation goes on from there.
                        (self._kept[index],) = (self._before[index],) = preserve_state([holder])
                elif keep_resets and _was_reset(holder, states):
                    reset_all(copies)
                else:
                    restore([saved])


_SavedState = tuple[nn.Module, dict[str, Any]]
"""An object and its states, as `preserve_state` returns them."""


def _updates(holder: nn.Module) -> int:
    return int(getattr(holder, "_update_count", 1))


def _was_reset(holder: nn.Module, states: Mapping[str, Any]) -> bool:
    """Return True if a module has been reset since it had these states."""
    if hasattr(holder, "_update_count"):
        return _updates(holder) == 0
    # Resetting a state puts a new tensor in its place.
    return any(getattr(holder, name) is not state for name, state in states.items())
