"""StepOutput: what a task's step returned, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainkit.devices import widest_float
from trainkit.errors import UserError
from trainkit.metrics.sync import is_metric


class MetricUpdate(NamedTuple):
    """A metric object that a step has updated."""

    name: str
    metric: nn.Module | None
    """`None` where another process of this rank holds it."""
    num_samples: int


@dataclass(slots=True)
class StepOutput:
    """One micro-batch's loss and metrics with their weight."""

    loss: Tensor | None
    """Scalar, never scaled; without its graph once backward has run. `None` if an evaluation has no loss."""
    weight: float | Tensor
    """The number of samples, or what the task returned as `weight` (for example tokens)."""
    metrics: dict[str, Tensor | float] = field(default_factory=dict)
    """The other values that the task returned."""
    own_weight: bool = False
    """Whether the task gave the weight."""
    objects: Sequence[MetricUpdate] = ()
    """The metric objects that the task returned."""


def read_training_output(
    returned: Any, num_samples: int, task: object, step_name: str = "training_step", *, of: int | None = None
) -> StepOutput:
    """Return the checked output of a `training_step` or of a phase's step; raises UserError for no usable loss.

    `of` is the number of samples of the global batch. A loss that is a sum over samples is multiplied by the ratio to
    this micro-batch: the weighted mean over the global batch, of which all gradients are, is then the sum over it.
    """
    if isinstance(returned, Tensor):
        output = StepOutput(returned, num_samples)
    else:
        output = _read_output(returned, num_samples, task, step_name)
    loss = output.loss
    if loss is None:
        raise UserError(
            f"{_name(task)}.{step_name} returned {_kind(returned)} without a loss; return the loss, or a dict "
            "with the key 'loss': return {'loss': loss, 'accuracy': accuracy}."
        )
    if loss.dim() != 0:
        raise UserError(
            f"the loss of {_name(task)}.{step_name} has shape {tuple(loss.shape)}, but must be a scalar; "
            "return loss.mean()."
        )
    # Here, with the names of task and step: backward's own error names neither.
    if not loss.requires_grad:
        in_phase = (
            f" While a phase runs, the parameters of other phases need no gradient: what {step_name} uses of a tensor "
            "that another phase has computed leads to none, so compute it again here."
        )
        raise UserError(
            f"the loss of {_name(task)}.{step_name} has no gradient: nothing that requires one leads to it. "
            f"Do not detach it, and check that the parameters have requires_grad=True."
            f"{'' if step_name == 'training_step' else in_phase}"
        )
    if _is_sum(task):
        if output.own_weight:
            raise UserError(
                f"{_name(task)}.{step_name} returned a weight, which a mean has, but loss_reduction = 'sum' says that "
                "the loss is a sum. Return the loss without a weight, or set loss_reduction = 'mean'."
            )
        # Not multiplied by 1: that is a kernel for each step.
        if of is not None and of != num_samples:
            output.loss = loss * (of / num_samples)
    return output


def read_evaluation_output(returned: Any, num_samples: int, task: object, step_name: str) -> StepOutput:
    """Return the checked output of a `validation_step` or `test_step`; raises UserError for values of other types.

    A loss that is a sum over samples is divided by their number.
    """
    output = _read_output(returned, num_samples, task, step_name)
    if output.loss is not None and _is_sum(task) and not output.own_weight:
        output.loss = output.loss / num_samples
    return output


def _read_output(returned: Any, num_samples: int, task: object, step_name: str) -> StepOutput:
    if isinstance(returned, Tensor):
        returned = {"loss": returned}
    if not isinstance(returned, Mapping):
        raise UserError(
            f"{_name(task)}.{step_name} returned {_kind(returned)}; return the loss as a tensor, or a dict of "
            "scalars such as {'loss': loss, 'accuracy': accuracy}."
        )
    metrics: dict[str, Tensor | float] = {}
    objects: list[MetricUpdate] = []
    for name, value in returned.items():
        if not isinstance(value, (Tensor, int, float)):
            if not is_metric(value) or name == "weight":
                raise UserError(
                    f"{_name(task)}.{step_name} returned {name!r} = {_kind(value)}; metrics are numbers or scalar "
                    "tensors, or metric objects: a trainkit.Metric, or one of torchmetrics."
                )
            objects.append(MetricUpdate(name, value, num_samples))
            continue
        # Shapes only: to look at a value here would wait for the device in each step.
        if isinstance(value, Tensor) and value.numel() != 1:
            raise UserError(
                f"{_name(task)}.{step_name} returned {name!r} with shape {tuple(value.shape)}, but must be a scalar; "
                f"return {name}.mean()."
            )
        # Metrics are kept until they are logged: with its graph each would hold the activations of its step.
        metrics[name] = value.detach() if isinstance(value, Tensor) and name != "loss" else value
    loss = metrics.pop("loss", None)
    weight = metrics.pop("weight", None)
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        # Numbers of tokens divide exactly in fp64; in fp32 they would leave errors of 1e-7 in gradients of fp64.
        weight = weight.to(widest_float(weight.device))
    if loss is not None and not isinstance(loss, Tensor):
        raise UserError(f"{_name(task)}.{step_name} returned {_kind(loss)} as the loss; return a tensor.")
    # What the task gives replaces the number of samples: a mean over tokens weighs by tokens.
    counts = num_samples if weight is None else weight
    return StepOutput(loss, counts, metrics, own_weight=weight is not None, objects=objects)


def _is_sum(task: object) -> bool:
    return getattr(task, "loss_reduction", "mean") == "sum"


def _name(task: object) -> str:
    return type(task).__name__


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
