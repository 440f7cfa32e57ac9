"""What is about to be trained, where and how: one screen at the start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainkit.callback import Callback
from trainkit.console import Table, say, show
from trainkit.errors import UserError
from trainkit.linear_scaling import linear_scaling

if TYPE_CHECKING:
    from trainkit.run import Run

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class ModelSummary(Callback):
    """Shows the run's strategy, device, precision and batch plan, and the size of the task's direct sub-modules.

    Args:
        max_rows: Sub-modules to list, at most.

    """

    def __init__(self, *, max_rows: int = 20) -> None:
        if max_rows < 1:
            raise UserError(f"model_summary.max_rows must be at least 1, got {max_rows}.")
        self.max_rows = max_rows

    def on_fit_start(self, run: Run) -> None:
        if run.is_main:
            say("\n".join(f"{name:<13}{value}" for name, value in _header(run)))
            show(summary(run.task, max_rows=self.max_rows))


def summary(task: nn.Module, *, max_rows: int) -> Table:
    """Return one row for each direct sub-module, and the sum; what several share counts once in the sum."""
    table = Table(type(task).__name__, ["module", "type", "parameters", "trainable", "size"])
    children = list(task.named_children())
    for name, child in children[:max_rows]:
        table.rows.append([name, type(child).__name__, *_sizes(child.parameters(), child.buffers())])
    if len(children) > max_rows:
        table.rows.append([f"{len(children) - max_rows} more", "", "", "", ""])
    own = list(task.parameters(recurse=False)), list(task.buffers(recurse=False))
    if any(own):
        table.rows.append(["(its own)", "", *_sizes(*own)])
    table.rows.append(["total", "", *_sizes(task.parameters(), task.buffers())])
    return table


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
    rates = [rate for optimization in run.optimizations for rate in optimization.initial_learning_rates()]
    scaled = None if run.plan is None else linear_scaling(run.plan.batch_size, rates, run.usual_batch)
    if scaled is not None:
        lines.append(("lr scaling", scaled))
    if run.resumed_from is not None:
        lines.append(("resumed", f"from {run.resumed_from} at step {run.state.step:,}"))
    return lines


def _sizes(parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor]) -> Sequence[str]:
    known = [parameter for parameter in parameters if not is_lazy(parameter)]
    trainable = sum(parameter.numel() for parameter in known if parameter.requires_grad)
    size = sum(tensor.nbytes for tensor in [*known, *(buffer for buffer in buffers if not is_lazy(buffer))])
    return [f"{sum(parameter.numel() for parameter in known):,}", f"{trainable:,}", _bytes(size)]


def _bytes(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
