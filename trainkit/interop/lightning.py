"""Modules written for Lightning, as tasks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.callback import Callback
from trainkit.data import Data
from trainkit.errors import UserError
from trainkit.optimization import OptimizerSpec, Schedule
from trainkit.task import StepReturn, TaskModule

if TYPE_CHECKING:
    from trainkit.run import Run

_STAGE_PREFIXES = tuple(f"{stage}{mark}" for stage in ("train", "validation", "valid", "val", "test") for mark in "_/")
_CALLED_HOOKS = frozenset(
    f"on_{moment}_{edge}"
    for moment in ("fit", "train", "train_epoch", "validation", "validation_epoch", "test", "test_epoch")
    for edge in ("start", "end")
)
_STAGES = ("train", "val", "test", "predict")
_OTHER_HOOKS_USED = frozenset(
    {"configure_model", "prepare_data", "setup", *(f"{stage}_dataloader" for stage in _STAGES)}
)
_OVERRIDES_LEFT_OUT = ("configure_callbacks", "configure_gradient_clipping", "lr_scheduler_step", "optimizer_step")

_logged: ContextVar[dict[str, Any] | None] = ContextVar("_logged", default=None)
"""What the step that is running has logged; a variable of the context, as replicas run in threads side by side."""


class LightningTask(TaskModule):
    """Runs an unmodified LightningModule with automatic optimization.

    Used are its steps, `configure_optimizers`, `self.log` and `self.log_dict`, `configure_model`, `prepare_data` and
    `setup`, and the hooks at the start and end of fit, training, epochs and evaluations; a warning names hooks that
    are overridden and are not called. Every logged value is a weighted mean over samples and ranks, whatever
    `on_step`, `on_epoch` and `sync_dist` say. `train_`, `val_` and `test_` in front of a name are dropped, as the
    name of the stage is put there: `val_acc` becomes `validation/acc`.

    Of `self.trainer` there are `current_epoch`, `global_step`, `estimated_stepping_batches`, `world_size`,
    `global_rank` and `is_global_zero`. `batch_idx` counts the micro-batches of this rank.

    Args:
        module: The LightningModule. Its parameters are called `module.<name>` in checkpoints.

    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        _check(module)
        module.trainer = self.trainer_view = TrainerView()
        for name, record in (("log", record_one), ("log_dict", record_all)):
            setattr(module, name, record)  # Lightning's own reach into its Trainer
        for prepare in ("prepare_data", "configure_model"):
            getattr(module, prepare)()
        module.setup("fit")
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward gives."""
        return self.module(*args, **kwargs)

    def training_step(self, batch: Any) -> StepReturn:
        """Return the loss and what was logged."""
        return self._step("training_step", batch)

    def validation_step(self, batch: Any) -> StepReturn:
        """Return what the step returned as the loss, and what was logged."""
        return self._step("validation_step", batch)

    def test_step(self, batch: Any) -> StepReturn:
        """Return what the step returned as the loss, and what was logged."""
        return self._step("test_step", batch)

    def predict_step(self, batch: Any) -> Any:
        """Return what the module predicts."""
        return _call(self.module.predict_step, batch, self.trainer_view.next_batch())

    def configure_optimizers(self, total_steps: int | None = None) -> OptimizerSpec:
        """Return the module's optimizer and schedules."""
        self.trainer_view.total_steps = total_steps
        return read_optimizers(self.module.configure_optimizers(), of=type(self.module).__name__)

    def configure_callbacks(self) -> Sequence[Callback]:
        """Return what calls the module's hooks."""
        return [LightningHooks(self.module, self.trainer_view)]

    def _step(self, name: str, batch: Any) -> StepReturn:
        with _recording() as logged:
            returned = _call(getattr(self.module, name), batch, self.trainer_view.next_batch())
        metrics = _without_stage(logged)
        if isinstance(returned, Mapping):
            returned = returned.get("loss")
        if returned is None and name == "training_step":
            raise UserError(
                f"{type(self.module).__name__}.training_step returned no loss, which Lightning takes as a skipped "
                "step; return the loss, times 0 for a batch that should not count."
            )
        if isinstance(returned, Tensor):
            metrics["loss"] = returned
        return metrics


class TrainerView:
    """What a module sees as `self.trainer`: how far the run is."""

    def __init__(self) -> None:
        self.current_epoch = 0
        self.global_step = 0
        self.world_size = 1
        self.global_rank = 0
        self.total_steps: int | None = None
        self.batch = -1

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank is the one that writes."""
        return self.global_rank == 0

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run; raises UserError where the duration does not tell."""
        if self.total_steps is None:
            raise UserError(
                "estimated_stepping_batches is not known; give max_duration in steps, samples, or epochs of data "
                "with a length."
            )
        return self.total_steps

    def next_batch(self) -> int:
        """Return the index of the batch that comes now."""
        self.batch += 1
        return self.batch

    def follow(self, run: Run) -> None:
        """Take over where the run is."""
        self.current_epoch, self.global_step = run.state.epoch, run.state.step
        self.world_size, self.global_rank = run.strategy.world_size, run.strategy.rank
        self.total_steps = run.max_steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotOffered(
            f"self.trainer.{name} is not offered to a LightningModule that runs as a task; there are current_epoch, "
            "global_step, estimated_stepping_batches, world_size, global_rank and is_global_zero. What else the "
            "module needs can be an argument of its constructor."
        )


class NotOffered(UserError, AttributeError):
    """An attribute of Lightning's Trainer that has no counterpart."""


class LightningHooks(Callback):
    """Calls a module's own hooks at the moments of a run."""

    def __init__(self, module: Any, view: TrainerView) -> None:
        self._module = module
        self._view = view
        self._stage = ""

    def on_fit_start(self, run: Run) -> None:
        self._view.follow(run)
        self._module.on_fit_start()
        self._module.on_train_start()

    def on_fit_end(self, run: Run) -> None:
        self._module.on_train_end()
        self._module.on_fit_end()

    def on_epoch_start(self, run: Run) -> None:
        self._view.follow(run)
        self._view.batch = -1
        self._module.on_train_epoch_start()

    def on_step_end(self, run: Run) -> None:
        self._view.global_step = run.state.step

    def on_epoch_end(self, run: Run) -> None:
        self._module.on_train_epoch_end()

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._view.follow(run)
        self._training_batch, self._view.batch = self._view.batch, -1
        self._call(stage, "start")

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._view.batch = self._training_batch
        self._call(stage, "end")

    def _call(self, stage: str, edge: str) -> None:
        names = {"sanity": "validation", "validation": "validation", "test": "test"}
        if stage in names:
            for moment in (names[stage], f"{names[stage]}_epoch"):
                getattr(self._module, f"on_{moment}_{edge}")()


def data_of(source: Any, *, batch_size: int | None = None) -> Data:
    """Return the data of a LightningDataModule, or of a LightningModule that has its own loaders.

    `batch_size` is the global batch; without it, the batch size of the training loader is.
    """
    for prepare in (source.prepare_data, lambda: source.setup("fit")):
        prepare()
    loaders = {stage: _loader(source, stage) for stage in _STAGES}
    return Data(
        train=loaders["train"],
        validation=loaders["val"],
        test=loaders["test"],
        predict=loaders["predict"],
        batch_size=batch_size,
    )


def read_optimizers(returned: Any, *, of: str) -> OptimizerSpec:
    """Return the optimizer and schedules of what a module's configure_optimizers returned; `of` names the module."""
    optimizers, schedulers = _parts(returned)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise UserError(
            f"{of}.configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization has one; "
            "train several with TaskModule.configure_phases."
        )
    return optimizers[0], [_schedule(item, of) for item in schedulers]


def record_one(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Keep one value that the running step logs; outside a step it is left out, as there is nothing to average."""
    logged = _logged.get()
    if logged is not None:
        logged[name] = value


def record_all(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    """Keep several values that the running step logs."""
    for name, value in dictionary.items():
        record_one(name, value)


@contextmanager
def _recording() -> Iterator[dict[str, Any]]:
    logged: dict[str, Any] = {}
    token = _logged.set(logged)
    try:
        yield logged
    finally:
        _logged.reset(token)


def _check(module: Any) -> None:
    kinds = {cls.__name__ for cls in type(module).__mro__}
    if "LightningModule" not in kinds:
        raise UserError(f"LightningTask takes a LightningModule, got a {type(module).__name__}.")
    name = type(module).__name__
    if not module.automatic_optimization:
        raise UserError(
            f"{name} has automatic_optimization=False, which only Lightning's own loop can drive; write it as a "
            "TaskModule with configure_phases, or with manual = True."
        )
    left_out = [hook for hook in sorted(_hooks_of(module)) if _overrides(module, hook)]
    if left_out:
        warnings.warn(f"{name} overrides hooks that are not called here: {', '.join(left_out)}.", stacklevel=3)


def _hooks_of(module: Any) -> set[str]:
    """Return the names of Lightning's hooks that have no counterpart."""
    from_mixins = {
        name
        for cls in type(module).__mro__
        if cls.__name__ in ("ModelHooks", "DataHooks", "CheckpointHooks")
        for name in vars(cls)
        if not name.startswith("_")
    }
    return (from_mixins | set(_OVERRIDES_LEFT_OUT)) - _CALLED_HOOKS - _OTHER_HOOKS_USED - {"teardown"}


def _overrides(module: Any, hook: str) -> bool:
    owner = next((cls for cls in type(module).__mro__ if hook in vars(cls)), None)
    return owner is not None and not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _loader(source: Any, stage: str) -> Any:
    """Return a stage's loader, or `None` where it has none."""
    method = f"{stage}_dataloader"
    return getattr(source, method)() if _overrides(source, method) else None


def _call(step: Callable[..., Any], batch: Any, index: int) -> Any:
    """Call a step with the index of its batch if it asks for one."""
    takes_index = len(inspect.signature(step).parameters) > 1
    return step(batch, index) if takes_index else step(batch)


def _without_stage(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logged values under names without the stage, unless two would then have the same."""
    metrics: dict[str, Any] = {}
    for name, value in logged.items():
        prefix = next((prefix for prefix in _STAGE_PREFIXES if name.startswith(prefix)), "")
        short = name.removeprefix(prefix) or name
        metrics[name if short in metrics else short] = value
    return metrics


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedulers in one of the forms that Lightning knows."""
    if isinstance(returned, Mapping):
        scheduler = returned.get("lr_scheduler")
        return [returned["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(returned, tuple | list):
        if len(returned) == 2 and all(isinstance(item, list | tuple) for item in returned):
            return list(returned[0]), list(returned[1])
        if len(returned) == 1:
            return _parts(returned[0])
        return list(returned), []
    return [returned], []


def _schedule(item: Any, of: str) -> Schedule:
    """Return one of Lightning's schedules: a scheduler, stepped each epoch, or a mapping that says when."""
    config = item if isinstance(item, Mapping) else {"scheduler": item}
    scheduler: LRScheduler = config["scheduler"]
    if config.get("frequency", 1) != 1:
        raise UserError(
            f"{of}.configure_optimizers asks for a scheduler with frequency={config['frequency']}; schedules step "
            "after every step or every epoch. Scale the scheduler's own step size instead."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        monitor = config.get("monitor")
        if monitor is None:
            raise UserError(f"{of}.configure_optimizers: ReduceLROnPlateau needs a monitor, such as 'val_loss'.")
        (name,) = _without_stage({monitor: None})
        return Schedule(scheduler, every="metric", metric=f"validation/{name}")
    return Schedule(scheduler, every="step" if config.get("interval") == "step" else "epoch")
