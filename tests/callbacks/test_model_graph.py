from __future__ import annotations

from typing import Any

import torch
from trainkit.callbacks.model_graph import ModelGraph

from tests.tasks import Regression, data


def test_the_graph_is_written_once_and_training_is_unaffected(make_trainer: Any, media_logger: Any) -> None:
    task, plain = Regression(hidden=4, dropout=0.5), Regression(hidden=4, dropout=0.5)
    make_trainer(callbacks=[ModelGraph()], loggers=[media_logger]).fit(task, data())
    make_trainer().fit(plain, data())

    (graph,) = media_logger.graphs
    assert "network/0/linear" in [operation.name for operation in graph.operations]
    assert torch.equal(task.network[0].weight, plain.network[0].weight)
