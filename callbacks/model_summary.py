"""What is about to be trained, where and how: one screen at the start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.callback import Callback
from trainkit.errors import UserError
from trainkit.model.flops import StepCost, cost_of_step, steps_of
from trainkit.optim.lr_schedule import linear_scaling
from trainkit.run_dir.console import Table, say, show
from trainkit.strategy import local_state
from trainkit.tree import to_device

if TYPE_CHECKING:
    from trainkit.loops.run import Run

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class ModelSummary(Callback):
    """Shows the run's strategy, device, precision and batch plan, and the size of the task's sub-modules.

    With `costs` the training step, or that of each phase, runs once on the main rank, in evaluation mode, before
    training begins: the table then has each module's floating-point operations of a forward, and the memory that it
    keeps for backward, for the samples of one micro-batch. Streams are not read for it.

    Args:
        max_rows: Sub-modules to list, at most.
        depth: How deep sub-modules are listed: 1 for the task's own, 2 for theirs too.
        costs: Whether operations and memory are measured.

    """

    def __init__(self, *, max_rows: int = 20, depth: int = 1, costs: bool = False) -> None:
        for name, value in (("max_rows", max_rows), ("depth", depth)):
            if value < 1:
                raise UserError(f"model_summary.{name} must be at least 1, got {value}.")
        self.max_rows = max_rows
        self.depth = depth
        self.costs = costs

    def on_fit_start(self, run: Run) -> None:
        if run.is_main:
            say("\n".join(f"{name:<13}{value}" for name, value in _header(run)))
            show(summary(run.task, max_rows=self.max_rows, depth=self.depth, cost=self._cost(run)))

    def _cost(self, run: Run) -> StepCost | None:
        whole = [*run.task.named_parameters(), *run.task.named_buffers()]
        if not self.costs or run.loader is None or len(local_state(run.strategy, run.task)) < len(whole):
            return None
        steps, example = steps_of(run.task, run.phase_optimizers), run.loader.first_micro_batch()
        if example is None or not steps:
            return None
        batch = to_device(example.batch, run.strategy.device, dtype=run.precision.batch_type)
        with run.precision.forward():
            return cost_of_step(run.task, batch, steps=steps)


def summary(task: nn.Module, *, max_rows: int, depth: int = 1, cost: StepCost | None = None) -> Table:
    """Return one row for each sub-module, and the sum; what several share counts once in the sum."""
    columns = ["module", "type", "parameters", "trainable", "buffers", "size"]
    table = Table(type(task).__name__, columns if cost is None else [*columns, "operations", "kept for backward"])
    modules = [(name, module) for name, module in task.named_modules() if name and name.count(".") < depth]
    for name, module in modules[:max_rows]:
        sizes = _sizes(module.parameters(), module.buffers())
        table.rows.append([name, type(module).__name__, *sizes, *_costs(cost, name)])
    blank = [""] * (len(table.columns) - 1)
    if len(modules) > max_rows:
        table.rows.append([f"{len(modules) - max_rows} more", *blank])
    own = list(task.parameters(recurse=False)), list(task.buffers(recurse=False))
    if any(own):
        table.rows.append(["(its own)", "", *_sizes(*own), *(["", ""] if cost is not None else [])])
    table.rows.append(["total", "", *_sizes(task.parameters(), task.buffers()), *_costs(cost, "")])
    return table


def _costs(cost: StepCost | None, name: str) -> list[str]:
    return [] if cost is None else [_operations(cost.flops[name]), in_bytes(cost.saved_bytes[name])]


def _operations(count: float) -> str:
    for unit in ("", "k", "M", "G"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} T"


def _header(run: Run) -> list[tuple[str, str]]:
    strategy = run.strategy
    lines = [
        ("task", type(run.task).__name__),
        ("strategy", f"{type(strategy).__name__} on {strategy.device}"),
        ("precision", run.precision.name),
        ("batches", "ready-made" if run.plan is None else f"{run.plan}; the same global batch on any devices"),
        ("steps", "until the time is up" if run.max_steps is None else f"{run.max_steps:,}"),
        ("run folder", "none, nothing is written" if run.run_dir is None else str(run.run_dir)),
    ]
    rates = [rate for phase_optimizer in run.phase_optimizers for rate in phase_optimizer.initial_learning_rates()]
    scaled = None if run.plan is None else linear_scaling(run.plan.batch_size, rates, run.reference_batch_size)
    if scaled is not None:
        lines.append(("lr scaling", scaled))
    if run.resumed_from is not None:
        lines.append(("resumed", f"from {run.resumed_from} at step {run.state.step:,}"))
    return lines


def _sizes(parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor]) -> Sequence[str]:
    known = [parameter for parameter in parameters if not is_lazy(parameter)]
    trainable = sum(parameter.numel() for parameter in known if parameter.requires_grad)
    kept = [buffer for buffer in buffers if not is_lazy(buffer)]
    counts = (sum(parameter.numel() for parameter in known), trainable, sum(buffer.numel() for buffer in kept))
    return [*(f"{count:,}" for count in counts), in_bytes(sum(tensor.nbytes for tensor in [*known, *kept]))]


def in_bytes(size: float) -> str:
    """Return a size in binary units."""
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
