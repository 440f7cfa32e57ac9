"""A window that one rank may have to give up for want of memory, in the middle of a step of all ranks.

    rank 0    forward  backward  forward  backward |  reduce  | gradients are NaN: ask  | all give up
    rank 1    forward  out of memory   NaN as gradient        | gradients are NaN: ask  | all give up

Gradients are only added up until every micro-batch is done, and then reduced: so no rank is inside a reduction when
another runs out of memory. That one takes part with gradients of NaN, which is how the others learn of it on the CPU,
without a collective in any other step. A loss that is NaN by itself costs one question more. On GPUs reading a gradient
would wait for the device: there ranks ask each other in every step through host memory once the reduction is under way,
since each knows on the host whether it ran out of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainkit.metrics.step_output import StepOutput, read_training_output
from trainkit.task import TaskModule
from trainkit.window import Window

if TYPE_CHECKING:
    from .process_group import ProcessGroupStrategy


def forward_backward_within_memory(
    strategy: ProcessGroupStrategy, task: TaskModule, window: Window
) -> list[StepOutput]:
    """Leave the reduced gradients of the window; raises torch.OutOfMemoryError on all ranks if it does on one.

    Collective. Where ranks cannot ask each other through host memory, reading whether gradients are NaN waits for the
    device.
    """
    outputs: list[StepOutput] = []
    reason: str | None = None
    try:
        for micro_batch in window.micro_batches:
            with strategy.gradient_session(sync=False):
                with strategy.precision.forward():
                    returned = task.training_step(micro_batch.batch)
                output = read_training_output(returned, micro_batch.num_samples, task)
                strategy.backward(output, micro_batch, window)
            outputs.append(output)
    except torch.OutOfMemoryError as error:
        reason = str(error)
    parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
    if reason is not None:
        outputs.clear()
        _spoil(strategy, parameters)
    if window.micro_batches:
        with strategy.gradient_session(sync=True):
            pass
    else:
        strategy.precision.scale(torch.zeros((), device=strategy.device))  # a scaler must have seen a loss
        strategy.contribute_nothing()
    if _is_given_up(strategy, parameters, reason is not None):
        raise torch.OutOfMemoryError(reason or "on another rank")
    strategy.finish_gradients(outputs, window)
    return outputs


def _is_given_up(strategy: ProcessGroupStrategy, parameters: list[torch.nn.Parameter], here: bool) -> bool:
    """Return whether a rank is out of memory; `here` says whether this one is. Collective."""
    if strategy.num_processes == 1:
        return here
    if strategy.asks_on_host:
        return strategy.agree_on_host(here)
    return _is_spoilt(parameters) and strategy.agree(here)


def _spoil(strategy: ProcessGroupStrategy, parameters: list[torch.nn.Parameter]) -> None:
    """Leave gradients of NaN, as a backward does."""
    for parameter in parameters:
        parameter.grad = None
    if strategy.device.type == "cuda":
        torch.cuda.empty_cache()
    nothing = [torch.full_like(parameter, torch.nan) for parameter in parameters]
    with strategy.gradient_session(sync=False):
        torch.autograd.backward(parameters, nothing)


def _is_spoilt(parameters: list[torch.nn.Parameter]) -> bool:
    """Return whether the reduced gradients are NaN; the same on every rank, since the gradients are."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.numel() and not gradient.is_sparse:
            return bool(torch.isnan(gradient[(0,) * gradient.dim()]))  # the layout may be any
    return False
