"""Memory in use by kind, and a report when memory runs out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from trainkit.callback import Callback
from trainkit.console import Table, plain, show, size
from trainkit.devices import (
    has_streams,
    is_cuda,
    is_out_of_memory,
    memory_summary,
    record_memory_history,
    write_memory_history,
)
from trainkit.files import optional_file, write_optional
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.strategy import local_state
from trainkit.tree import num_bytes


class MemoryReport(Callback):
    """Prints the memory of weights, gradients and optimizer after the first step, and on CUDA the peak at the end.

    A rank that runs out of memory writes `out_of_memory_rank_<k>.txt` to the run folder: the memory in use, by kind and
    by module, and what to change. With `record_history` torch's record of all allocations is written next to it, for
    pytorch.org/memory_viz.

    Args:
        record_history: Record CUDA allocations, at a few microseconds each.

    """

    def __init__(self, *, record_history: bool = False) -> None:
        check_arguments(MemoryReport.__init__, locals(), of="memory_report")
        self.record_history = record_history
        self._is_recording = False
        self._has_shown = False

    def on_fit_start(self, run: Run) -> None:
        self._has_shown = False
        if self.record_history and is_cuda(run.strategy.device):
            record_memory_history(enabled=True)
            self._is_recording = True

    def on_step_end(self, run: Run) -> None:
        if not self._has_shown:
            self._has_shown = True
            if run.is_main:
                show(memory_table(run))

    def on_fit_end(self, run: Run) -> None:
        if run.is_main and has_streams(run.strategy.device):
            show(memory_table(run))

    def on_exception(self, run: Run, error: BaseException) -> None:
        if not is_out_of_memory(error) or run.run_dir is None:
            return
        path = Path(run.run_dir) / f"out_of_memory_rank_{run.strategy.comm.process}.txt"
        write_optional(path, out_of_memory_report(run, error))
        if self._is_recording:
            # A full disk must not hide the out-of-memory error.
            with optional_file(path):
                write_memory_history(path.with_suffix(".pickle"))

    def close(self) -> None:
        if self._is_recording:
            record_memory_history(enabled=False)
            self._is_recording = False


def memory_table(run: Run) -> Table:
    """Return the memory that this process uses for training, by kind."""
    tensors = local_state(run.strategy, run.task).values()
    parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    rows = {
        "parameters": num_bytes(parameters),
        "buffers": num_bytes(tensors) - num_bytes(parameters),
        "gradients, in a step": num_bytes(parameter for parameter in parameters if parameter.requires_grad),
        "optimizer": num_bytes(_optimizer_tensors(run)),
    }
    if has_streams(run.strategy.device):
        peak = run.peak_memory.of_run()
        activations = max(0, peak - sum(rows.values()))
        rows |= {"peak of the device": peak, "activations and others, at the peak": activations}
    return Table("Memory of one process", ["what", "size"], [[name, size(value)] for name, value in rows.items()])


def out_of_memory_report(run: Run, error: BaseException) -> str:
    """Return the memory in use by kind and by module, and what to change, as text."""
    lines = [f"out of memory at step {run.state.step + 1} on process {run.strategy.comm.process}: {error}", ""]
    lines += [plain(memory_table(run)), ""]
    modules = Table("Parameters by module", ["module", "size"])
    modules.rows += [[name, size(num_bytes(module.parameters()))] for name, module in run.task.named_children()]
    lines += [plain(modules), "", "What to change, cheapest first:"]
    lines += [f"  {advice}" for advice in _advice(run)]
    lines += ["", memory_summary(run.strategy.device)]
    return "\n".join([*lines, ""])


def _advice(run: Run) -> Iterable[str]:
    if run.plan is not None:
        samples = run.plan.micro_batch_size
        yield f"now: {run.plan}"
        if samples > 1:
            yield f"strategy.micro_batch_size={samples // 2}: the same global batch, in smaller micro-batches"
            if not run.strategy.auto_micro_batch:
                yield "strategy.micro_batch_size=auto: a size that fits is found automatically"
    if run.precision.name == "fp32":
        yield "trainer.precision=bf16-mixed: half the memory of activations"
    yield "trainer.activation_checkpointing=['<pattern of your blocks>']: a third more time, much less memory"
    if is_cuda(run.strategy.device):
        yield "trainer.offload_activations=true: activations are kept in host memory until backward"
    if not run.strategy.shards_parameters:
        yield "strategy=fsdp: each rank keeps its shard of parameters, gradients and optimizer state only"


def _optimizer_tensors(run: Run) -> list[Tensor]:
    states = [state for phase_optimizer in run.phase_optimizers for state in phase_optimizer.optimizer.state.values()]
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]
