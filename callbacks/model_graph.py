"""The operations of the task's training step, for TensorBoard's tab GRAPHS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.batches import to_device
from trainkit.callback import Callback
from trainkit.model_graph import record_graph

if TYPE_CHECKING:
    from trainkit.run import Run


class ModelGraph(Callback):
    """Runs the training step once on the main rank when training begins, in evaluation mode, and writes its graph.

    Streams are not read for it, and a pipeline's stage shows no graph, as it holds a part of the task only.
    """

    def on_fit_start(self, run: Run) -> None:
        whole = [*run.task.named_parameters(), *run.task.named_buffers()]
        if not run.loggers or run.feed is None or len(run.strategy.held(run.task)) < len(whole):
            return
        batch = run.feed.example()
        if batch is not None:
            device, dtype = run.strategy.device, run.precision.batch_type
            with run.precision.forward():
                graph = record_graph(run.task, to_device(batch.batch, device, dtype=dtype))
            for destination in run.loggers:
                destination.write_graph(graph)
