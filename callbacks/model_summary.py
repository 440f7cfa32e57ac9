"""Summary of the run and the model, printed before training."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from annotated_types import Ge
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.callback import Callback
from trainkit.console import Table, say, show, size
from trainkit.model.flops import StepCost, cost_of_step
from trainkit.optim.lr_schedule import linear_scaling
from trainkit.registry import name_of
from trainkit.report.html import short
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.strategy import check_whole_parameters, local_state, named_state
from trainkit.tree import num_bytes, to_device


class ModelSummary(Callback):
    """Prints the run's strategy, device, precision and batch plan, and the size of the task's sub-modules.

    With `costs` the main rank runs the training step, or that of each phase, once in evaluation mode. The table then
    shows for each module the floating-point operations of a forward and the memory kept for backward, for one
    micro-batch. Costs are not measured for a stream, or for a stage of a pipeline.

    Args:
        max_rows: Maximum number of sub-modules to list.
        depth: Depth of the listed sub-modules: 1 for the task's direct ones.
        costs: Measure operations and memory.

    """

    def __init__(
        self, *, max_rows: Annotated[int, Ge(1)] = 20, depth: Annotated[int, Ge(1)] = 1, costs: bool = False
    ) -> None:
        check_arguments(ModelSummary.__init__, locals(), of="model_summary")
        self.max_rows = max_rows
        self.depth = depth
        self.costs = costs

    def on_fit_start(self, run: Run) -> None:
        if self.costs:
            check_whole_parameters(run.strategy, "model_summary with costs=true")
        if run.is_main and not run.strategy.attempt:  # the former ranks have said it
            say("\n".join(f"{name:<13}{value}" for name, value in _header(run)))
            show(summary(run.task, max_rows=self.max_rows, depth=self.depth, cost=self._cost(run)))

    def _cost(self, run: Run) -> StepCost | None:
        batch = example_batch(run) if self.costs else None
        if batch is None:
            return None
        # The dtypes of the forward decide how much is kept for backward.
        with run.precision.forward():
            return cost_of_step(run.task, batch, steps=steps_of(run))


def example_batch(run: Run) -> Any:
    """Return the first batch, on the device; `None` for a stream, a stage of a pipeline, or a task without steps."""
    # A stage holds a part of the task and cannot run the whole step.
    is_complete = len(local_state(run.strategy, run.task)) == len(named_state(run.task))
    if run.loader is None or not is_complete or not steps_of(run):
        return None
    example = run.loader.first_micro_batch()
    return example and to_device(example.batch, run.strategy.device, dtype=run.precision.batch_type)


def steps_of(run: Run) -> list[str]:
    """Return the names of the methods that a training step calls; those of a manual task if it declares them."""
    names = [phase_optimizer.step_name for phase_optimizer in run.phase_optimizers]
    return [name for name in names if callable(getattr(run.task, name, None))]


def summary(task: nn.Module, *, max_rows: int, depth: int = 1, cost: StepCost | None = None) -> Table:
    """Return one row per sub-module, and the total, in which shared parameters count once."""
    columns = ["module", "type", "parameters", "trainable", "buffers", "size"]
    table = Table(type(task).__name__, columns if cost is None else [*columns, "operations", "kept for backward"])
    modules = [(name, module) for name, module in task.named_modules() if name and name.count(".") < depth]
    for name, module in modules[:max_rows]:
        sizes = _sizes(module.parameters(), module.buffers())
        table.rows.append([name, type(module).__name__, *sizes, *_costs(cost, name)])
    blank = [""] * (len(table.columns) - 1)
    if len(modules) > max_rows:
        table.rows.append([f"{len(modules) - max_rows} more", *blank])
    direct_tensors = list(task.parameters(recurse=False)), list(task.buffers(recurse=False))
    if any(direct_tensors):
        table.rows.append(["(its own)", "", *_sizes(*direct_tensors), *(["", ""] if cost is not None else [])])
    table.rows.append(["total", "", *_sizes(task.parameters(), task.buffers()), *_costs(cost, "")])
    return table


def _costs(cost: StepCost | None, name: str) -> list[str]:
    return [] if cost is None else [short(cost.flops[name]), size(cost.saved_bytes[name])]


def _steps(run: Run) -> str:
    if run.max_steps is not None:
        return f"{run.max_steps:,}"
    has_length = run.loader is None or run.loader.epoch_length is not None
    return "until the time limit" if has_length else "not known, as the data has no length"


def _header(run: Run) -> list[tuple[str, str]]:
    strategy = run.strategy
    rows = [
        ("task", type(run.task).__name__),
        ("strategy", f"{name_of('strategy', strategy)} on {strategy.device}"),
        ("precision", run.precision.name),
        ("batches", "pre-batched" if run.plan is None else str(run.plan)),
        ("steps", _steps(run)),
        ("run folder", "none (nothing is written)" if run.run_dir is None else str(run.run_dir)),
    ]
    rates = [rate for phase_optimizer in run.phase_optimizers for rate in phase_optimizer.initial_learning_rates()]
    scaled = None if run.plan is None else linear_scaling(run.plan.batch_size, rates, run.reference_batch_size)
    if scaled is not None:
        rows.append(("lr scaling", scaled))
    # The recipe is what the others change, and the folder stands above.
    changes = [text for text in run.overrides if not text.startswith(("recipe=", "run_dir="))]
    if changes:
        rows.append(("changed", shlex.join(changes)))
    if run.resumed_from is not None:
        rows.append(("resumed", f"from {run.resumed_from} at step {run.state.step:,}"))
    return rows


def _sizes(parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor]) -> Sequence[str]:
    # A lazy parameter has no shape before the first forward.
    made = [[tensor for tensor in tensors if not is_lazy(tensor)] for tensors in (parameters, buffers)]
    trainable = [parameter for parameter in made[0] if parameter.requires_grad]
    counts = [f"{sum(tensor.numel() for tensor in tensors):,}" for tensors in (made[0], trainable, made[1])]
    return [*counts, size(num_bytes([*made[0], *made[1]]))]
