"""Memory by kind, and a report when it runs out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.checkpoint.files import write_text
from trainkit.run_dir.console import Table, plain, show
from trainkit.strategy import local_state

from .model_summary import in_bytes

if TYPE_CHECKING:
    from trainkit.loops.run import Run


class MemoryReport(Callback):
    """Prints after the first step, and at the end, the memory of weights, gradients and optimizer, and the peak.

    A rank that runs out of memory writes `out_of_memory_rank_<k>.txt` to the run folder: what was in memory, module by
    module, and what to change. With `record_history` torch's record of all allocations is written beside it, for
    pytorch.org/memory_viz.

    Args:
        record_history: Record CUDA allocations, which costs a few microseconds each.

    """

    def __init__(self, *, record_history: bool = False) -> None:
        self.record_history = record_history
        self._is_recording = False
        self._has_shown = False

    def on_fit_start(self, run: Run) -> None:
        self._has_shown = False
        if self.record_history and run.strategy.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=100_000)
            self._is_recording = True

    def on_step_end(self, run: Run) -> None:
        if not self._has_shown:
            self._has_shown = True
            if run.is_main:
                show(memory_table(run))

    def on_fit_end(self, run: Run) -> None:
        if run.is_main and run.strategy.device.type == "cuda":
            show(memory_table(run))

    def on_exception(self, run: Run, error: BaseException) -> None:
        if not isinstance(error, torch.OutOfMemoryError) or run.run_dir is None:
            return
        path = Path(run.run_dir) / f"out_of_memory_rank_{run.strategy.comm.process}.txt"
        write_text(path, post_mortem(run, error))
        if self._is_recording:
            torch.cuda.memory._dump_snapshot(str(path.with_suffix(".pickle")))

    def close(self) -> None:
        if self._is_recording:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._is_recording = False


def memory_table(run: Run) -> Table:
    """Return what this process holds for training, by kind."""
    held = local_state(run.strategy, run.task).values()
    parameters = [tensor for tensor in held if isinstance(tensor, torch.nn.Parameter)]
    buffers = [tensor for tensor in held if not isinstance(tensor, torch.nn.Parameter)]
    gradients = sum(tensor.nbytes for tensor in parameters if tensor.requires_grad)
    table = Table("Memory of one process", ["what", "size"])
    table.rows += [
        ["parameters", in_bytes(_size(parameters))],
        ["buffers", in_bytes(_size(buffers))],
        ["gradients, in a step", in_bytes(gradients)],
        ["optimizer", in_bytes(_size(_optimizer_tensors(run)))],
    ]
    if run.strategy.device.type == "cuda":
        peak = run.peak_memory.of_run()
        table.rows.append(["peak of the device", in_bytes(peak)])
        rest = peak - _size(parameters) - _size(buffers) - gradients - _size(_optimizer_tensors(run))
        table.rows.append(["activations and others, at the peak", in_bytes(max(0, rest))])
    return table


def post_mortem(run: Run, error: BaseException) -> str:
    """Return what was in memory when it ran out, and what to change."""
    lines = [f"out of memory at step {run.state.step + 1} on process {run.strategy.comm.process}: {error}", ""]
    lines += [plain(memory_table(run)), ""]
    modules = Table("Parameters by module", ["module", "size"])
    for name, module in run.task.named_children():
        modules.rows.append([name, in_bytes(_size(module.parameters()))])
    lines += [plain(modules), "", "What to change, the cheapest first:"]
    lines += [f"  {advice}" for advice in _advice(run)]
    if run.strategy.device.type == "cuda":
        lines += ["", torch.cuda.memory_summary(run.strategy.device)]
    return "\n".join([*lines, ""])


def _advice(run: Run) -> Iterable[str]:
    if run.plan is not None:
        size = run.plan.micro_batch_size
        yield f"now: {run.plan}"
        if size > 1:
            yield f"strategy.micro_batch_size={max(1, size // 2)}: the same global batch and weights, in smaller parts"
            yield "strategy.micro_batch_size=auto: halved by itself when memory runs out"
    if run.precision.name == "fp32":
        yield "trainer.precision=bf16-mixed: half the memory of activations"
    yield "trainer.activation_checkpointing=['<pattern of your blocks>']: a third more time, much less memory"
    if _size(_optimizer_tensors(run)) > 0:
        yield "strategy=fusion strategy.shard_optimizer=true: each rank keeps its part of the optimizer's state only"


def _optimizer_tensors(run: Run) -> list[Tensor]:
    states = [state for one in run.phase_optimizers for state in one.optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
