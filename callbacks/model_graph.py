"""Graph of the training step, for TensorBoard."""

from __future__ import annotations

from trainkit.callback import Callback
from trainkit.model.graph import record_graph
from trainkit.run import Run
from trainkit.strategy import check_whole_parameters

from .model_summary import example_batch, steps_of


class ModelGraph(Callback):
    """Writes the graph of the training step, or that of each phase, when training starts.

    The main rank runs the step once for it, in evaluation mode. Nothing is written for a stream, or for a stage of a
    pipeline.
    """

    def on_fit_start(self, run: Run) -> None:
        check_whole_parameters(run.strategy, "model_graph")
        batch = example_batch(run) if run.loggers else None
        if batch is not None:
            # In the precision of the run: casts are operations of the graph too.
            with run.precision.forward():
                graph = record_graph(run.task, batch, steps=steps_of(run))
            for destination in run.loggers:
                destination.write_graph(graph)
