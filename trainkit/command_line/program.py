"""A trained task as one program file, which runs without the task's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from trainkit.checkpoints.store import load_from
from trainkit.command_line.assembly import assemble
from trainkit.command_line.composition import Settings
from trainkit.command_line.export import whole_file
from trainkit.data import Data
from trainkit.errors import UserError
from trainkit.feed import make_feed
from trainkit.strategy import Strategy
from trainkit.task import TaskModule

_STAGES = ("predict", "test", "validation", "train")


def export_program(settings: Settings, run: Path, out: Path, *, which: str = "last") -> str:
    """Write the task's `predict_step`, with a checkpoint's weights, to `out` by torch.export; return a line saying so.

    It is recorded on the CPU with one batch of the run's own data, of which only the number of rows may differ later:

        program = torch.export.load("model.pt2").module()
        predictions = program(batch)
    """
    assembly = assemble(settings, run_dir=None, loggers=False)
    loaded = load_from(run, which)
    assembly.task.load_state_dict(loaded.payload.get("evaluation_weights", loaded.payload["task"]))
    batch, num_samples = _first_batch(assembly.data)
    program = _recorded(assembly.task, batch, num_samples)
    with whole_file(out) as part, open(part, "wb") as file:
        torch.export.save(program, file)
    name = type(assembly.task).__name__
    return f"{name}.predict_step of step {loaded.entry.step} in {out}; torch.export.load('{out}').module() runs it"


class _Predicting(nn.Module):
    """A module whose forward is the task's `predict_step`."""

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, batch: Any) -> Any:
        """Return the task's predictions."""
        return self.task.predict_step(batch)


def _first_batch(data: Data) -> tuple[Any, int]:
    """Return one batch to record with, and how many samples it has."""
    stage = next((stage for stage in _STAGES if data.has(stage)), None)
    if stage is None:
        raise UserError("the run's data has nothing to record a program with; pass data for predictions.")
    feed = make_feed(data.source(stage), Strategy(device="cpu"), seed=0, limit=1)
    micro_batch = next(iter(feed.batches()))
    return micro_batch.batch, micro_batch.num_samples


def _recorded(task: TaskModule, batch: Any, num_samples: int) -> torch.export.ExportedProgram:
    def rows_may_differ(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == num_samples
        return {0: torch.export.Dim.AUTO} if has_rows else None

    try:
        return torch.export.export(
            _Predicting(task.eval()), (batch,), dynamic_shapes=(tree_map(rows_may_differ, batch),), strict=False
        )
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{type(task).__name__}.predict_step cannot be recorded as one program: {type(error).__name__}: {first} "
            "Take branches on the values of tensors out of it, or write the weights alone: out=model.safetensors."
        ) from error
