"""What is written of the task: predictions, histograms, its graph; and functions as callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit.callbacks.ema import EMA
from trainkit.callbacks.histograms import Histograms
from trainkit.callbacks.lambda_callback import LambdaCallback
from trainkit.callbacks.model_graph import ModelGraph
from trainkit.callbacks.sample_writer import SampleWriter

from tests.tasks import MemoryLogger, Recorder, Regression, regression_data
from trainkit import Callback, Data, UserError


class Keeps(MemoryLogger):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[tuple[str, str, int]] = []
        self.histograms: list[tuple[str, Any, int]] = []
        self.graphs: list[Any] = []

    def write_text(self, name: str, text: str, *, step: int) -> None:
        self.texts.append((name, text, step))

    def write_histogram(self, name: str, histogram: Any, *, step: int) -> None:
        self.histograms.append((name, histogram, step))

    def write_graph(self, graph: Any) -> None:
        self.graphs.append(graph)


def data() -> Data:
    return Data(train=regression_data(32), validation=regression_data(8, seed=1), batch_size=8)


def test_predictions_of_the_first_samples_are_those_of_the_weights_that_are_evaluated(
    make_trainer: Any, tmp_path: Path
) -> None:
    keeps, task = Keeps(), Regression()
    callbacks = [EMA(decay=0.9, warm_up=False), SampleWriter(num_samples=3)]
    trainer = make_trainer(callbacks=callbacks, loggers=[keeps], run_dir=tmp_path / "run")

    trainer.fit(task, data())

    ((name, text, step),) = keeps.texts
    expected = task.eval()(regression_data(8, seed=1).tensors[0][:3]).flatten().tolist()
    assert (name, step) == ("samples", 4)
    assert text.splitlines() == [f"{row}: [{value}]" for row, value in enumerate(expected)]
    assert (tmp_path / "run" / "samples" / "step_00000004.txt").read_text() == f"{text}\n"


def test_a_task_may_say_its_samples_itself_and_training_does_not_notice(make_trainer: Any) -> None:
    class Describes(Regression):
        def describe_sample(self, sample: Any, prediction: Any) -> str:
            return f"{tuple(sample[0].shape)} -> {tuple(prediction.shape)}"

        def predict_step(self, batch: Any) -> Any:
            torch.rand(1)  # as one who samples from what is predicted
            return super().predict_step(batch)

    class Looks(Callback):
        def on_evaluation_start(self, run: Any, stage: str) -> None:
            assert run.task.training  # until the evaluation begins

    keeps, task, plain = Keeps(), Describes(hidden=4, dropout=0.5), Regression(hidden=4, dropout=0.5)
    make_trainer(callbacks=[SampleWriter(num_samples=2), Looks()], loggers=[keeps], evaluate_every="2step").fit(
        task, data()
    )
    make_trainer(evaluate_every="2step").fit(plain, data())

    assert [text for _, text, _ in keeps.texts] == ["(4,) -> (1,)\n(4,) -> (1,)"] * 2
    assert torch.equal(task.network[0].weight, plain.network[0].weight)


def test_histograms_are_of_the_parameters_that_fit_at_their_times(make_trainer: Any) -> None:
    keeps, task = Keeps(), Regression(hidden=3)
    callbacks = [Histograms(every="2step", pattern="*.weight")]

    make_trainer(callbacks=callbacks, loggers=[keeps]).fit(task, data())

    names = ["network.0.weight", "network.3.weight"]
    kinds = [("weights", 2), ("gradients", 2), ("weights", 4)]  # no step has a gradient of the last weights
    expected = [(f"{kind}/{name}", step) for kind, step in kinds for name in names]
    assert [(name, step) for name, _, step in keeps.histograms] == expected
    assert keeps.histograms[-2][1].num_elements == 12
    assert keeps.histograms[2][1].num_elements == 12
    with pytest.raises(UserError, match=r"histograms\.pattern='encoder' matches no parameter"):
        make_trainer(callbacks=[Histograms(pattern="encoder")]).fit(task, data())


def test_the_graph_is_written_once_and_training_does_not_notice(make_trainer: Any) -> None:
    keeps, task, plain = Keeps(), Regression(hidden=4, dropout=0.5), Regression(hidden=4, dropout=0.5)
    make_trainer(callbacks=[ModelGraph()], loggers=[keeps]).fit(task, data())
    make_trainer().fit(plain, data())

    (graph,) = keeps.graphs
    assert "network/0/linear" in [operation.name for operation in graph.operations]
    assert torch.equal(task.network[0].weight, plain.network[0].weight)


def test_functions_are_called_at_their_moments_alone(make_trainer: Any) -> None:
    steps: list[int] = []
    callback = LambdaCallback({"on_step_end": lambda run: steps.append(run.state.step)})

    make_trainer(callbacks=[callback, Recorder()]).fit(Regression(), data())

    assert steps == [1, 2, 3, 4]


def test_a_function_may_be_a_dotted_path_and_mistakes_are_told() -> None:
    assert LambdaCallback({"on_step_end": "gc.collect"}).on_step_end.__name__ == "collect"
    with pytest.raises(UserError, match=r"not a hook of a callback\. Did you mean 'on_step_end'"):
        LambdaCallback({"on_step_ended": print})
    with pytest.raises(UserError, match=r"functions\.on_step_end: 'gc\.colect' cannot be imported"):
        LambdaCallback({"on_step_end": "gc.colect"})
    with pytest.raises(UserError, match="is a int, not a function"):
        LambdaCallback({"on_step_end": "gc.DEBUG_STATS"})
