"""The operations of the task's training step, for TensorBoard's tab GRAPHS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.callback import Callback
from trainkit.model.flops import steps_of
from trainkit.model.graph import record_graph
from trainkit.strategy import local_state
from trainkit.tree import to_device

if TYPE_CHECKING:
    from trainkit.loops.run import Run


class ModelGraph(Callback):
    """Runs the training step, or that of each phase, once on the main rank, and writes the graph of it.

    That is when training begins, and in evaluation mode.
    Streams are not read for it, and a pipeline's stage shows no graph, as it holds a part of the task only.
    """

    def on_fit_start(self, run: Run) -> None:
        whole = [*run.task.named_parameters(), *run.task.named_buffers()]
        if not run.loggers or run.loader is None or len(local_state(run.strategy, run.task)) < len(whole):
            return
        steps, batch = steps_of(run.task, run.phase_optimizers), run.loader.first_micro_batch()
        if batch is not None and steps:
            device, dtype = run.strategy.device, run.precision.batch_type
            with run.precision.forward():
                moved = to_device(batch.batch, device, dtype=dtype)
                graph = record_graph(run.task, moved, steps=steps)
            for destination in run.loggers:
                destination.write_graph(graph)
