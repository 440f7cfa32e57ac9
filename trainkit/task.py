"""TaskModule: a model with its loss, metrics and optimizer, which users subclass."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainkit.errors import UserError, nearest

StepReturn = Tensor | Mapping[str, Tensor | float]
OptimizerSpec = Optimizer | tuple[Optimizer, Any]
"""An optimizer, or an optimizer and an LRScheduler, a `trainkit.LRSchedule`, or a list of them."""
DEFERRED = "_deferred_init"
"""The attribute of modules that were built in `deferred_init`: how their tensors get their values."""


class TaskModule(nn.Module):
    """A model with its steps. They know no trainer, rank or device: a unit test calls them with a batch.

    Steps return the loss (a scalar tensor), or a dict with `"loss"` and metrics: scalars, logged as means over all
    samples. The entry `"weight"` is the weight of the micro-batch in these means, for example its number of tokens;
    by default its number of samples.

    A task with several optimizers declares phases, each with its loss and parameters; with `manual = True` it drives
    them itself.
    """

    loss_reduction: Literal["mean", "sum"] = "mean"
    """What the loss of a training step is over the samples of its batch. The sum over the global batch is trained with
    "sum", and logged; the `loss` of an evaluation is divided by the number of samples."""
    manual: bool = False
    """True if `manual_step` drives the phases of a step; by default they run one after the other."""

    def training_step(self, batch: Any) -> StepReturn:
        """Return the mean loss over `batch`, which is on the task's device.

        Ranks and micro-batches have parts of a global batch, whose means are averaged. So the loss must be a mean over
        samples, or over something else that is returned as `weight`, or a sum with `loss_reduction = "sum"`. A loss
        between samples (contrastive, batch statistics) sees those of one micro-batch only.
        """
        raise UserError(f"{type(self).__name__} has no training_step; define training_step(self, batch).")

    def validation_step(self, batch: Any) -> StepReturn:
        """Return the metrics of `batch`; called in evaluation mode and without gradients."""
        raise UserError(f"{type(self).__name__} has no validation_step; define validation_step(self, batch).")

    def test_step(self, batch: Any) -> StepReturn:
        """Return the metrics of `batch`; by default those of `validation_step`."""
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """Return the predictions for `batch`: tensors whose first dimension is the batch, or containers of them."""
        return self(batch)

    def place_on(self, devices: Sequence[torch.device]) -> None:
        """Move the parts of the task to the devices of its rank, in its process; by default all to the first.

        Called by `ddp` with `devices_per_rank` above 1. Steps get their batch on the first device.
        """
        self.to(devices[0])

    def configure_optimizers(self, *args: Any, **kwargs: Any) -> OptimizerSpec:
        """Return an optimizer, or an optimizer and a schedule.

        Declare it as `configure_optimizers(self)`, or as `configure_optimizers(self, total_steps)` to get the number
        of optimizer steps of the run. A schedule is an `LRScheduler`, which steps after every optimizer step, or a
        `trainkit.LRSchedule`, which defines when it steps.
        """
        raise UserError(
            f"{type(self).__name__} has no configure_optimizers; define "
            "configure_optimizers(self): return torch.optim.AdamW(self.parameters(), lr=1e-3)."
        )

    def configure_phases(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        """Return the phases of a step, each a `trainkit.Phase`, in order; may ask for `total_steps`."""
        raise UserError(f"{type(self).__name__} has no configure_phases.")

    def manual_step(self, control: Any) -> None:
        """Make one step of a task with `manual = True` through `control`, a `trainkit.PhaseControl`; collective."""
        raise UserError(f"{type(self).__name__} has manual = True; define manual_step(self, control).")

    def configure_callbacks(self) -> Sequence[Any]:
        """Return the task's own callbacks (`trainkit.Callback`); they are called after the trainer's."""
        return ()

    def log(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UserError: what a step returns is logged."""
        raise UserError(
            f"{type(self).__name__} calls self.log({name!r}), but a TaskModule logs what its steps return; write "
            "return {'loss': loss, 'accuracy': accuracy}. An unmodified LightningModule runs as "
            "trainkit.integrations.lightning.LightningTask(module)."
        )

    def log_dict(self, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UserError: what a step returns is logged."""
        self.log(", ".join(metrics))


def check_loss_reduction(task: TaskModule) -> None:
    """Raise UserError for a `loss_reduction` that is neither mean nor sum."""
    value = task.loss_reduction
    if value not in ("mean", "sum"):
        raise UserError(
            f"{type(task).__name__} has loss_reduction = {value!r}.{nearest(str(value), ('mean', 'sum'))} Set it to "
            "'mean' or 'sum', which is what training_step returns over the samples of its batch."
        )


def check_shapes(task: nn.Module) -> None:
    """Raise UserError for a parameter of a lazy module that has not run: it has no shape yet."""
    for name, parameter in task.named_parameters():
        if is_lazy(parameter):
            raise UserError(
                f"{name} of {type(task).__name__} has no shape before its lazy module runs. Run it on "
                "an example at the end of __init__: self.layers(torch.zeros(1, 8))."
            )


def begin_training(task: TaskModule) -> None:
    """Leave the task in training mode; modules that its constructor put into evaluation mode stay in it.

    A task that is in evaluation mode as a whole was evaluated before: all its modules begin to train.
    """
    if not task.training:
        task.train()


def is_deferred(task: nn.Module) -> bool:
    """Return True if any tensor of a task was built in `deferred_init` and has no value yet."""
    return any(DEFERRED in vars(module) for module in task.modules())


def has_meta_tensors(task: nn.Module) -> bool:
    """Return True if any parameter or buffer of a task is on the meta device."""
    return any(tensor.is_meta for tensor in chain(task.parameters(), task.buffers()))


@contextmanager
def count_registrations(of: Container[int] | None = None) -> Iterator[list[int]]:
    """Count the parameters and modules that modules register in the context: any, or those whose id is in `of`."""
    # A list, so that the caller sees it grow.
    registrations = [0]

    def count(module: nn.Module, name: str, value: object) -> None:
        if of is None or id(module) in of:
            registrations[0] += 1

    # torch's hooks for all modules of the process: other modules register too, so `of` selects.
    hooks = [register_module_parameter_registration_hook(count), register_module_module_registration_hook(count)]
    try:
        yield registrations
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def evaluation_mode(root: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and give each the mode of before at the end of the block."""
    modes = [(module, module.training) for module in root.modules()]
    root.eval()
    try:
        yield
    finally:
        # By `train`, which some modules override to merge or split their weights; parents come first, so that a frozen
        # part goes back into evaluation mode after its parent has begun to train.
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)


def has_phases(task: TaskModule) -> bool:
    """Return True if a task is trained in phases; raises UserError for `manual` without any."""
    # Looked up on the object: LightningTask sets it there, if its module drives several optimizers.
    declared = getattr(task.configure_phases, "__func__", None) is not TaskModule.configure_phases
    if task.manual and not declared:
        raise UserError(
            f"{type(task).__name__} has manual = True, which needs named optimizers; define configure_phases(self): "
            "return [Phase('model', torch.optim.AdamW(self.parameters()))]."
        )
    return declared


@runtime_checkable
class ChecksSettings(Protocol):
    """A task that cannot be trained under every strategy or setting."""

    def check_settings(self, strategy: Any, config: Any) -> None:
        """Raise UserError for a strategy, or a FitConfig, that cannot train the task.

        Called before any process is started.
        """
