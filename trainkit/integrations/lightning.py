"""LightningModule as a task: its steps, optimizers and data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from trainkit.callback import Callback
from trainkit.data.data import Data
from trainkit.errors import UserError, nearest
from trainkit.integrations.lightning_hooks import (
    BATCH_HOOKS,
    GRADIENT_HOOKS,
    MOMENTS,
    LightningHooks,
    TrainerProxy,
    capture_logged,
    log_value,
    log_values,
    overrides,
    without_stage,
)
from trainkit.integrations.lightning_manual import ManualOptimization, check_manual
from trainkit.metrics.step_output import read_evaluation_output
from trainkit.metrics.sync import is_metric
from trainkit.optim.lr_schedule import LRSchedule
from trainkit.optim.phase import Phase
from trainkit.task import OptimizerSpec, StepReturn, TaskModule

if TYPE_CHECKING:
    from trainkit.loops.fit_config import FitConfig
    from trainkit.optim.precision import Precision
    from trainkit.phases import PhaseControl
    from trainkit.strategy import Strategy

_LOADERS = {
    "train": "train_dataloader",
    "validation": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}
_HOOKS_CALLED = frozenset(
    f"on_{moment}_{edge}"
    for stage in ("train", "validation", "test", "predict")
    for moment in (stage, f"{stage}_epoch", f"{stage}_batch")
    for edge in ("start", "end")
) | {
    *("on_fit_start", "on_fit_end", *GRADIENT_HOOKS),
    *("configure_model", "on_after_batch_transfer", "prepare_data", "setup", "teardown", *_LOADERS.values()),
}
_MANUAL_HOOKS = frozenset(("backward", "on_before_backward"))
"""Methods that are called only in manual optimization."""
_IN_COLLATE = "change the batch in the collate function, or in on_after_batch_transfer of the module"
_REFUSED_METHODS = {
    "backward": "scale the loss in training_step",
    "optimizer_step": "set automatic_optimization = False, and step the optimizers in training_step",
    "optimizer_zero_grad": "set automatic_optimization = False, and call optimizer.zero_grad() in training_step",
    "lr_scheduler_step": "return a torch LRScheduler from configure_optimizers",
    "configure_gradient_clipping": "pass Trainer(max_grad_norm=1.0) or Trainer(max_grad_value=1.0)",
    "configure_callbacks": "pass trainkit's callbacks: Trainer(callbacks=[...])",
    "configure_sharded_model": "call it configure_model",
    "on_before_batch_transfer": _IN_COLLATE,
    "transfer_batch_to_device": _IN_COLLATE,
    "on_before_backward": "write it at the end of training_step",
    "on_before_zero_grad": "write it in on_before_optimizer_step, or at the end of training_step",
    "on_save_checkpoint": "keep what it saves in a buffer: self.register_buffer(name, tensor)",
    "on_load_checkpoint": "keep what it loads in a buffer: self.register_buffer(name, tensor)",
    "training_epoch_end": "call it on_train_epoch_end",
    "validation_epoch_end": "call it on_validation_epoch_end",
    "test_epoch_end": "call it on_test_epoch_end",
}
"""Methods that are not called, without which a module would be trained or saved otherwise; what to write instead."""
_REFUSED_OF_DATA = {
    "on_before_batch_transfer": _IN_COLLATE,
    "transfer_batch_to_device": _IN_COLLATE,
    "on_after_batch_transfer": _IN_COLLATE,
    "state_dict": "make the data depend on the arguments of its constructor only",
    "load_state_dict": "make the data depend on the arguments of its constructor only",
}
_REFUSED_CALLS = (
    "optimizers",
    "lr_schedulers",
    "toggle_optimizer",
    "untoggle_optimizer",
    "manual_backward",
    "clip_gradients",
)


class LightningTask(TaskModule):
    """Runs an unmodified LightningModule.

    Used are its steps, `configure_optimizers`, `self.log` and `self.log_dict`, `configure_model`, `prepare_data`,
    `setup` and `teardown`, and the hooks of fit, epochs, batches and evaluations. What would train or save the module
    otherwise is refused by name. Every logged value is a weighted mean over samples and ranks; `on_step`, `on_epoch`,
    `sync_dist` and `batch_size` have no effect. `train_`, `val_` and `test_` in front of a name are dropped, as the
    name of the stage is put there: `val_acc` becomes `validation/acc`.

    A module with `automatic_optimization = False` makes its own backward and steps, under `strategy=single` and without
    accumulation. Each of its optimizers is a phase: `optimizer_0` and so on. A step of trainkit is one training batch,
    and `self.global_step` counts the steps of all optimizers.

    Of `self.trainer` there are `current_epoch`, `global_step`, `estimated_stepping_batches`, `sanity_checking`,
    `world_size`, `global_rank` and `is_global_zero`; nothing else can be read or set. `batch_idx` counts the
    micro-batches of this rank.

    Args:
        module: The LightningModule. Its parameters are called `module.<name>` in checkpoints.

    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        _check(module)
        self.manual = not module.automatic_optimization
        # Before any hook below, as the module's own code may read `self.trainer` and log.
        module.trainer = self.trainer_proxy = TrainerProxy()
        self.trainer_proxy.manual = self.manual
        module.log, module.log_dict = log_value, log_values  # Lightning's own need its Trainer
        # What the module defines itself needs no Lightning and stays.
        for name in ("all_gather",) if self.manual else (*_REFUSED_CALLS, "all_gather"):
            if not overrides(module, name):
                setattr(module, name, partial(_refuse, name))
        module.prepare_data()
        # In Lightning's order: a module may create its layers in the last two.
        module.setup("fit")
        module.configure_model()
        self.module = module
        # Of the task itself, where a pipeline follows what a step changes; the callback refers to the whole run.
        self.train_batch_idx = self.batch_idx = -1
        self.last_batch: tuple[Any, Any] | None = None
        """What the last training step returned, and its batch, if a hook asks for them."""
        self.precision: Precision | None = None
        """That of the run whose training has started, if the module drives its optimizers."""
        # On the object alone: a class that declares it would give every module phases.
        if self.manual:
            self.configure_phases = self._phases  # type: ignore[method-assign] # a module declares phases only then

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's `forward`, which its steps call; raises UserError if it has none."""
        if not overrides(self.module, "forward"):
            raise UserError(
                f"{type(self.module).__name__} has no forward that could be compiled; name the modules in it, such as "
                "compile={'blocks': ['module.*']}."
            )
        self.module.compile(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LightningTask:
        """Move or convert the module, and let `self.device` and `self.dtype` say so, which Lightning sets in `to`."""
        # Private: to(), cuda() and half() all go through it. Lightning overrides the public methods, which are not
        # called for a module inside a task.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # torch has no types there
        for part in self.module.modules():
            # Private: LightningModule keeps under these names what its properties return.
            if hasattr(part, "_device") and hasattr(part, "_dtype"):
                # What `fn` does to tensors is known only from its result; this one has no element.
                probe = fn(torch.empty(0, device=part._device, dtype=part._dtype))
                part._device, part._dtype = probe.device, probe.dtype
        return self

    def training_step(self, batch: Any) -> StepReturn:
        return self._step("train", batch)

    def validation_step(self, batch: Any) -> StepReturn:
        return self._step("validation", batch)

    def test_step(self, batch: Any) -> StepReturn:
        return self._step("test", batch)

    def predict_step(self, batch: Any) -> Any:
        return self._call_step("predict", batch)

    def manual_step(self, control: PhaseControl) -> None:
        """Let the module make its own backward and steps with the one micro-batch of a step."""
        if self.precision is None:
            raise UserError(
                f"{type(self.module).__name__} has automatic_optimization=False, and drives its optimizers in training "
                "only; remove callbacks that make steps before it, such as learning_rate_finder."
            )
        # `check_manual` has refused any other number of micro-batches.
        (micro_batch,) = control.batch.micro_batches
        self.trainer_proxy.strategy.start_step()
        with self.precision.forward():
            returned = self.training_step(micro_batch.batch)
        control.outputs.append(read_evaluation_output(returned, micro_batch.num_samples, self, "training_step"))

    def configure_optimizers(self, total_steps: int | None = None) -> OptimizerSpec:
        self.trainer_proxy.total_steps = total_steps
        return read_optimizers(self.module.configure_optimizers(), of=type(self.module).__name__)

    def _phases(self, total_steps: int | None = None) -> list[Phase]:
        """Return a phase for each optimizer of a module that drives them."""
        self.trainer_proxy.total_steps = total_steps
        phases, schedulers = read_phases(self.module.configure_optimizers(), of=type(self.module).__name__)
        optimizers = [phase.optimizer[0] for phase in phases]  # type: ignore[index] # each with its schedules
        ManualOptimization(self.module, self.trainer_proxy, optimizers, schedulers)
        return phases

    def configure_callbacks(self) -> Sequence[Callback]:
        return [LightningHooks(self, self.trainer_proxy)]

    def check_settings(self, strategy: Strategy, config: FitConfig) -> None:
        """Raise UserError for a strategy or setting under which the module would be trained otherwise."""
        if self.manual:
            check_manual(self.module, strategy, config)
            return
        one_batch = strategy.num_micro_batches == 1
        honoured = {
            **dict.fromkeys(
                BATCH_HOOKS, one_batch and strategy.supports_module_hooks and not strategy.compile_obstacle
            ),
            **dict.fromkeys(GRADIENT_HOOKS, one_batch and strategy.supports_manual_backward),
            "on_after_backward": one_batch
            and strategy.supports_manual_backward
            and config.precision.name != "fp16-mixed",
        }
        for hook, is_honoured in honoured.items():
            if not is_honoured and overrides(self.module, hook):
                raise UserError(
                    f"{type(self.module).__name__} overrides {hook}, which cannot be called at Lightning's moment with "
                    f"{type(strategy).__name__} and these settings. Set strategy=single without accumulate and "
                    "micro_batch_size, and trainer.precision=bf16-mixed instead of fp16-mixed, or remove the hook."
                )

    def _step(self, stage: str, batch: Any) -> StepReturn:
        """Return the metrics of a module's step, and in training its loss."""
        with capture_logged() as logged:
            returned = self._call_step(stage, batch)
        name, training = type(self.module).__name__, stage == "train"
        # In the forms of Lightning: the loss itself, a mapping with it, or None.
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if training and loss is None and not self.manual:
            raise UserError(
                f"{name}.training_step returned no loss, which Lightning takes as a skipped step; return the loss, "
                "times 0 for a batch that should not count."
            )
        if training and loss is not None:
            # Without its graph: the module has made its backward already.
            loss = loss.detach() if self.manual else loss
            return without_stage({"loss": loss, **_without_loss(logged, loss)})
        metrics = without_stage(logged)
        if isinstance(loss, Tensor):
            metrics.setdefault("loss", loss)
        elif "loss" in metrics and not is_metric(metrics["loss"]):
            # A loss that was only logged may have a graph, and nothing would free it.
            metrics["loss"] = torch.as_tensor(metrics["loss"]).detach()
        return metrics

    def _call_step(self, stage: str, batch: Any) -> Any:
        """Return what a module's step returned, called between its hooks."""
        proxy, module = self.trainer_proxy, self.module
        training = stage == "train"
        # Training has a count of its own, which a validation within an epoch must not reset.
        if training:
            self.train_batch_idx += 1
        else:
            self.batch_idx += 1
        loader = 0 if training else proxy.loader
        index = (self.train_batch_idx if training else self.batch_idx, loader)
        batch = module.on_after_batch_transfer(batch, loader)
        start, end = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        if overrides(module, start) and _outside_autocast(module, getattr(module, start), batch, *index) == -1:
            raise UserError(
                f"{type(module).__name__}.{start} returned -1, which skips the rest of the epoch in Lightning; set "
                "limit_train_batches instead."
            )
        step = "training_step" if training else f"{stage}_step"
        # The step alone, as in Lightning: hooks run outside of its precision.
        with _default_dtype(module.dtype):
            returned = _call(getattr(module, step), batch, *index)
        if overrides(module, end):
            if training:  # called when the optimizer has stepped
                self.last_batch = (_outputs(returned), batch)
            else:
                _outside_autocast(module, getattr(module, end), returned, batch, *index)
        return returned


def _outputs(returned: Any) -> Any:
    """Return the `outputs` of on_train_batch_end: the loss, detached, and what else a training step returned."""
    others = returned if isinstance(returned, Mapping) else {} if returned is None else {"loss": returned}
    return {name: value.detach() if name == "loss" else value for name, value in others.items()}


def _without_loss(logged: Mapping[str, Any], loss: Any) -> dict[str, Any]:
    """Return the logged values but the loss itself; raises UserError if another value is called so.

    A metric object under the name of the loss is its mean, which is logged for every loss.
    """
    others = {
        name: value
        for name, value in logged.items()
        if set(without_stage({name: None})) != {"loss"} or not (_is_same(value, loss) or is_metric(value))
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
    # Private: the storage itself, which a tensor and its detached alias share.
    return both and bool(value.untyped_storage()._cdata == loss.untyped_storage()._cdata)


def _refuse(call: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UserError(
        f"self.{call} needs Lightning's own loop, and is not offered to a LightningModule that runs as a task; write a "
        "TaskModule, or set automatic_optimization = False in a module that drives its optimizers."
    )


def data_of(source: Any, *, batch_size: int | None = None) -> Data:
    """Return the data of a LightningDataModule, or of a LightningModule that has its own loaders.

    `batch_size` is the global batch; without it, the batch size of the training loader is. Several validation or test
    loaders are sets by name, `dataloader_0` and so on, or by their own names in a dict.
    """
    # Private: the property `trainer` raises without a trainer.
    if _is_module(source) and isinstance(source._trainer, TrainerProxy):  # prepared by its LightningTask
        return _LoadersOf(source, source.trainer.set_up, batch_size=batch_size)
    # Of a data module only: LightningTask checks the hooks of a module.
    if not _is_module(source):
        _refuse_overridden(source, _REFUSED_OF_DATA)
    source.prepare_data()
    return _LoadersOf(source, set(), batch_size=batch_size)


class _LoadersOf(Data):
    """Calls `setup` and makes loaders when a stage is first read."""

    def __init__(self, source: Any, are_set_up: set[str], *, batch_size: int | None) -> None:
        super().__init__(batch_size=batch_size)
        self._source = source
        self._are_set_up = are_set_up
        self._made: dict[str, Any] = {}

    def has(self, stage: str) -> bool:
        """Return True if the loaders of a stage are defined; validation loaders must also not be `None`."""
        is_defined = overrides(self._source, _LOADERS[stage])
        return is_defined and (stage != "validation" or self.dataset(stage) is not None)

    def dataset(self, stage: str) -> Any:
        """Return a stage's loader, several by name, or `None`."""
        if stage not in self._made:
            # Made once: a loader may have a random order and workers.
            self._made[stage] = self._make(stage) if overrides(self._source, _LOADERS[stage]) else None
        return self._made[stage]

    def _make(self, stage: str) -> Any:
        # As in Lightning, what is validated on while training is set up with what is trained on.
        in_fit = stage == "train" or (stage == "validation" and "fit" in self._are_set_up)
        moment = "fit" if in_fit else MOMENTS[stage]
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


def _is_module(source: Any) -> bool:
    # By name: `lightning` and `pytorch_lightning` have two classes of this name, and neither is imported here.
    return "LightningModule" in {cls.__name__ for cls in type(source).__mro__}


def _check(module: Any) -> None:
    """Raise UserError for a module with a method that would have to be called, and is not."""
    name = type(module).__name__
    if not _is_module(module):
        raise UserError(f"LightningTask takes a LightningModule, got a {name}.")
    manual = not module.automatic_optimization
    refused = {hook: remedy for hook, remedy in _REFUSED_METHODS.items() if not (manual and hook in _MANUAL_HOOKS)}
    mixins = [cls for cls in type(module).__mro__ if cls.__name__ in ("ModelHooks", "DataHooks", "CheckpointHooks")]
    # All hooks of the installed Lightning, so that one of a newer version is refused by name and not left out.
    hooks = [hook for hook in chain.from_iterable(map(vars, mixins)) if not hook.startswith("_")]
    others = dict.fromkeys(hooks, "write what it does in a hook that is called")
    _refuse_overridden(module, refused | _only(others, set(others) - set(_REFUSED_METHODS) - _HOOKS_CALLED))
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UserError(f"{name}.training_step takes dataloader_iter; write training_step(self, batch, batch_idx).")


def _only(remedies: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: remedies[name] for name in sorted(names)}


def _refuse_overridden(source: Any, remedies: Mapping[str, str]) -> None:
    for method, remedy in remedies.items():
        if overrides(source, method):
            raise UserError(
                f"{type(source).__name__} overrides {method}, which only Lightning's own loop calls; {remedy}."
            )


def _call(step: Callable[..., Any], *arguments: Any) -> Any:
    """Call a step or hook with as many of the arguments as it takes; the last is the index of the loader."""
    parameters = inspect.signature(step).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    return step(*arguments[: -1 if takes_any else len(parameters)])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors that a step creates have the dtype of the parameters, as Lightning does for `bf16-true` and fp64."""
    default = torch.get_default_dtype()
    # In fp32 it is the default; replicas in other threads would change that of each other.
    if dtype is default or current_thread() is not main_thread():
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _outside_autocast(module: Any, hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook without the autocast of the step around it."""
    with torch.autocast(module.device.type, enabled=False):
        return _call(hook, *arguments)


def read_optimizers(returned: Any, *, of: str) -> OptimizerSpec:
    """Return the optimizer and schedules of what a module's configure_optimizers returned; `of` names the module."""
    optimizers, schedulers = _parts(returned)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise UserError(
            f"{of}.configure_optimizers returned {len(optimizers)} optimizers, and automatic optimization has one; "
            "set automatic_optimization = False, or train several with TaskModule.configure_phases."
        )
    return optimizers[0], [_schedule(item, of) for item in schedulers]


def read_phases(returned: Any, *, of: str) -> tuple[list[Phase], list[LRScheduler]]:
    """Return a phase for each optimizer of a module that drives them, and all schedulers, which it steps itself."""
    optimizers, items = _parts(returned)
    schedulers = [item["scheduler"] if isinstance(item, Mapping) else item for item in items]
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "no optimizer"
        raise UserError(f"{of}.configure_optimizers returned {kinds}; return torch optimizers.")
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise UserError(
            f"{of}.configure_optimizers returned LBFGS, which does not work with automatic_optimization=False; use "
            "another optimizer, such as torch.optim.AdamW, or automatic optimization."
        )
    for scheduler in schedulers:
        if not isinstance(scheduler, LRScheduler) or not any(
            scheduler.optimizer is candidate for candidate in optimizers
        ):
            raise UserError(
                f"{of}.configure_optimizers returned a {type(scheduler).__name__} as a scheduler, which is not a torch "
                "LRScheduler of one of the returned optimizers."
            )
    phases = []
    for index, optimizer in enumerate(optimizers):
        schedules = [
            LRSchedule(candidate, every="manual") for candidate in schedulers if candidate.optimizer is optimizer
        ]
        phases.append(Phase(f"optimizer_{index}", (optimizer, schedules)))
    return phases, schedulers


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
        if returned and all(isinstance(item, Mapping) for item in returned):
            parts = [_parts(item) for item in returned]
            return [item for optimizers, _ in parts for item in optimizers], [
                item for _, many in parts for item in many
            ]
        return list(returned), []
    return [] if returned is None else [returned], []


def _check_keys(config: Mapping[str, Any], valid_keys: Sequence[str]) -> None:
    for key in config:
        if key not in valid_keys:
            raise UserError(
                f"configure_optimizers returned the key {key!r}, which is unknown here.{nearest(key, valid_keys)}"
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
