"""LightningModule as a task: its steps, optimizers and data."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from trainkit.callback import Callback
from trainkit.data.data import Data
from trainkit.errors import UserError, nearest
from trainkit.integrations.lightning_hooks import (
    LightningHooks,
    TrainerProxy,
    capture_logged,
    log_value,
    log_values,
    overrides,
    without_stage,
)
from trainkit.optim.lr_schedule import LRSchedule
from trainkit.task import OptimizerSpec, StepReturn, TaskModule

_LOADERS = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
_MOMENTS = {"validation": "validate", "test": "test", "predict": "predict"}
"""The argument of `setup` for a stage by itself."""
_HOOKS_USED = frozenset(
    f"on_{moment}_{edge}"
    for moment in ("fit", "train", "train_epoch", "validation", "validation_epoch", "test", "test_epoch")
    for edge in ("start", "end")
) | {"configure_model", "on_after_batch_transfer", "prepare_data", "setup", "teardown", *_LOADERS.values()}
_REFUSED_METHODS = {
    "backward": "scale the loss in training_step",
    "optimizer_step": "write a TaskModule with manual = True",
    "optimizer_zero_grad": "write a TaskModule with manual = True",
    "lr_scheduler_step": "return a torch LRScheduler from configure_optimizers",
    "configure_gradient_clipping": "pass Trainer(max_grad_norm=1.0) or Trainer(max_grad_value=1.0)",
    "on_before_batch_transfer": "change the batch in the collate function, or in on_after_batch_transfer",
    "transfer_batch_to_device": "change the batch in the collate function, or in on_after_batch_transfer",
    "configure_sharded_model": "call it configure_model",
}
"""Methods without which a module would be trained otherwise, and what to write instead."""
_REFUSED_CALLS = (
    "optimizers",
    "lr_schedulers",
    "toggle_optimizer",
    "untoggle_optimizer",
    "manual_backward",
    "clip_gradients",
    "all_gather",
)


class LightningTask(TaskModule):
    """Runs an unmodified LightningModule with automatic optimization.

    Used are its steps, `configure_optimizers`, `self.log` and `self.log_dict`, `configure_model`, `prepare_data` and
    `setup`, and the hooks at the start and end of fit, training, epochs and evaluations; a warning names hooks that
    are overridden and are not called. What would train the module otherwise is refused by name. Every logged value is a
    weighted mean over samples and ranks; `on_step`, `on_epoch`, `sync_dist` and `batch_size` have no effect. `train_`,
    `val_` and `test_` in front of a name are dropped, as the name of the stage is put there: `val_acc` becomes
    `validation/acc`.

    Of `self.trainer` there are `current_epoch`, `global_step`, `estimated_stepping_batches`, `sanity_checking`,
    `world_size`, `global_rank` and `is_global_zero`; nothing else can be read or set. `batch_idx` counts the
    micro-batches of this rank.

    Args:
        module: The LightningModule. Its parameters are called `module.<name>` in checkpoints.

    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        _check(module)
        module.trainer = self.trainer_proxy = TrainerProxy()
        module.log, module.log_dict = log_value, log_values  # Lightning's own need its Trainer
        for name in _REFUSED_CALLS:
            if not overrides(module, name):
                setattr(module, name, partial(_refuse, name))
        module.prepare_data()
        module.configure_model()
        module.setup("fit")
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def training_step(self, batch: Any) -> StepReturn:
        return self._step("training_step", batch)

    def validation_step(self, batch: Any) -> StepReturn:
        return self._step("validation_step", batch)

    def test_step(self, batch: Any) -> StepReturn:
        return self._step("test_step", batch)

    def predict_step(self, batch: Any) -> Any:
        batch = self.module.on_after_batch_transfer(batch, self.trainer_proxy.loader)
        return _call(self.module.predict_step, batch, self.trainer_proxy)

    def configure_optimizers(self, total_steps: int | None = None) -> OptimizerSpec:
        self.trainer_proxy.total_steps = total_steps
        return read_optimizers(self.module.configure_optimizers(), of=type(self.module).__name__)

    def configure_callbacks(self) -> Sequence[Callback]:
        return [LightningHooks(self.module, self.trainer_proxy)]

    def _step(self, name: str, batch: Any) -> StepReturn:
        with capture_logged() as logged:
            batch = self.module.on_after_batch_transfer(batch, self.trainer_proxy.loader)
            returned = _call(getattr(self.module, name), batch, self.trainer_proxy)
        if isinstance(returned, Mapping):
            returned = returned.get("loss")
        if name == "training_step":
            if returned is None:
                raise UserError(
                    f"{type(self.module).__name__}.training_step returned no loss, which Lightning takes as a skipped "
                    "step; return the loss, times 0 for a batch that should not count."
                )
            return without_stage({"loss": returned, **_without_loss(logged, returned)})
        metrics = without_stage(logged)
        if isinstance(returned, Tensor):
            metrics.setdefault("loss", returned)
        elif isinstance(metrics.get("loss"), int | float):
            metrics["loss"] = torch.tensor(metrics["loss"])
        return metrics


def _without_loss(logged: Mapping[str, Any], loss: Any) -> dict[str, Any]:
    """Return the logged values but the loss itself; raises UserError if another value is called so."""
    others = {
        name: value
        for name, value in logged.items()
        if set(without_stage({name: None})) != {"loss"} or not _is_same(value, loss)
    }
    if "loss" in others:
        raise UserError(
            "training_step logs 'loss' with another value than the returned loss, which has this name; log the loss "
            "itself, or the value under another name."
        )
    return others


def _is_same(value: Any, loss: Any) -> bool:
    """Return True if a value is the loss, detached or not; nothing waits for the device."""
    if value is loss:
        return True
    both = isinstance(value, Tensor) and isinstance(loss, Tensor)
    return both and bool(value.untyped_storage()._cdata == loss.untyped_storage()._cdata)


def _refuse(call: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UserError(
        f"self.{call} needs Lightning's own loop, and is not offered to a LightningModule that runs as a task; write a "
        "TaskModule, with manual = True if it drives its optimizers."
    )


def data_of(source: Any, *, batch_size: int | None = None) -> Data:
    """Return the data of a LightningDataModule, or of a LightningModule that has its own loaders.

    `batch_size` is the global batch; without it, the batch size of the training loader is. Several validation or test
    loaders are sets by name, `dataloader_0` and so on, or by their own names in a dict.
    """
    source.prepare_data()
    return _LoadersOf(source, batch_size=batch_size)


class _LoadersOf(Data):
    """Calls `setup` and makes loaders when a stage is first read."""

    def __init__(self, source: Any, *, batch_size: int | None) -> None:
        super().__init__(batch_size=batch_size)
        self._source = source
        self._are_set_up: set[str] = set()
        self._made: dict[str, Any] = {}

    def has(self, stage: str) -> bool:
        """Return True if the loaders of a stage are defined; validation loaders must also not be `None`."""
        is_defined = overrides(self._source, _LOADERS[stage])
        return is_defined and (stage != "validation" or self.dataset(stage) is not None)

    def dataset(self, stage: str) -> Any:
        """Return a stage's loader, several by name, or `None`."""
        if stage not in self._made:
            self._made[stage] = self._make(stage) if overrides(self._source, _LOADERS[stage]) else None
        return self._made[stage]

    def _make(self, stage: str) -> Any:
        # As in Lightning, what is validated on while training is set up with what is trained on.
        in_fit = stage == "train" or (stage == "validation" and "fit" in self._are_set_up)
        moment = "fit" if in_fit else _MOMENTS[stage]
        if moment not in self._are_set_up:
            self._source.setup(moment)
            self._are_set_up.add(moment)
        made = getattr(self._source, _LOADERS[stage])()
        return _named(made, where=f"{type(self._source).__name__}.{_LOADERS[stage]}")


def _named(made: Any, *, where: str) -> Any:
    """Return one loader, or several by name; raises UserError for anything else."""
    if isinstance(made, (list, tuple)):
        if len(made) <= 1:
            return next(iter(made), None)
        made = {f"dataloader_{index}": loader for index, loader in enumerate(made)}
    loaders = list(made.values()) if isinstance(made, dict) else [] if made is None else [made]
    for loader in loaders:
        if not isinstance(loader, DataLoader):
            raise UserError(f"{where} returned a {type(loader).__name__}; return a DataLoader, or a list of them.")
    return made


def _check(module: Any) -> None:
    name = type(module).__name__
    if "LightningModule" not in {cls.__name__ for cls in type(module).__mro__}:
        raise UserError(f"LightningTask takes a LightningModule, got a {name}.")
    if not module.automatic_optimization:
        raise UserError(
            f"{name} has automatic_optimization=False, which only Lightning's own loop can drive; write it as a "
            "TaskModule with configure_phases, or with manual = True."
        )
    mixins = [cls for cls in type(module).__mro__ if cls.__name__ in ("ModelHooks", "DataHooks", "CheckpointHooks")]
    hooks = {hook for cls in mixins for hook in vars(cls) if not hook.startswith("_")} | {"configure_callbacks"}
    for method, remedy in _REFUSED_METHODS.items():
        if overrides(module, method):
            raise UserError(f"{name} overrides {method}, which only Lightning's own loop calls; {remedy}.")
    uncalled = sorted(hook for hook in hooks - _HOOKS_USED if overrides(module, hook))
    if uncalled:
        warnings.warn(f"{name} overrides hooks that are not called here: {', '.join(uncalled)}.", stacklevel=3)


def _call(step: Callable[..., Any], batch: Any, proxy: TrainerProxy) -> Any:
    """Call a step with the index of its batch, and that of its loader, if it asks for them."""
    proxy.batch += 1
    asked = len(inspect.signature(step).parameters)
    return step(batch, *(proxy.batch, proxy.loader)[: asked - 1])


def read_optimizers(returned: Any, *, of: str) -> OptimizerSpec:
    """Return the optimizer and schedules of what a module's configure_optimizers returned; `of` names the module."""
    optimizers, schedulers = _parts(returned)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise UserError(
            f"{of}.configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization has one; "
            "train several with TaskModule.configure_phases."
        )
    return optimizers[0], [_schedule(item, of) for item in schedulers]


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedulers in one of the forms that Lightning knows."""
    if isinstance(returned, Mapping):
        _check_keys(returned, ("optimizer", "lr_scheduler", "monitor"))
        scheduler = returned.get("lr_scheduler")
        if scheduler is not None and "monitor" in returned and not isinstance(scheduler, Mapping):
            scheduler = {"scheduler": scheduler, "monitor": returned["monitor"]}
        return [returned["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(returned, tuple | list):
        if len(returned) == 2 and all(isinstance(item, list | tuple) for item in returned):
            return list(returned[0]), list(returned[1])
        if len(returned) == 1:
            return _parts(returned[0])
        return list(returned), []
    return [] if returned is None else [returned], []


def _check_keys(config: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in config:
        if key not in known:
            raise UserError(
                f"configure_optimizers returned the key {key!r}, which is unknown here.{nearest(key, known)}"
            )


def _schedule(item: Any, of: str) -> LRSchedule:
    """Return one of Lightning's schedules: a scheduler, stepped each epoch, or a mapping that says when."""
    config = item if isinstance(item, Mapping) else {"scheduler": item}
    _check_keys(config, ("scheduler", "interval", "frequency", "monitor", "strict", "name"))
    scheduler, interval = config.get("scheduler"), config.get("interval", "epoch")
    if not isinstance(scheduler, LRScheduler) or interval not in ("step", "epoch"):
        raise UserError(
            f"{of}.configure_optimizers returned a {type(scheduler).__name__} as a scheduler, with "
            f"interval={interval!r}; return a torch LRScheduler with 'step' or 'epoch'."
        )
    if config.get("frequency", 1) != 1:
        raise UserError(
            f"{of}.configure_optimizers asks for a scheduler with frequency={config['frequency']}; schedules step "
            "after every step or every epoch. Scale the scheduler's own step size instead."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        monitor = config.get("monitor")
        if monitor is None:
            raise UserError(f"{of}.configure_optimizers: ReduceLROnPlateau needs a monitor, such as 'val_loss'.")
        if interval != "epoch" or monitor.startswith("train"):
            raise UserError(
                f"{of}.configure_optimizers: ReduceLROnPlateau steps after a validation, by one of its metrics; "
                f"interval={interval!r} with monitor={monitor!r} is not offered."
            )
        (name,) = without_stage({monitor: None})
        return LRSchedule(scheduler, every="metric", metric=f"validation/{name}")
    return LRSchedule(scheduler, every=interval)
