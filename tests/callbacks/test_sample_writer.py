from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trainkit.callbacks.ema import EMA
from trainkit.callbacks.sample_writer import SampleWriter

from tests.tasks import Regression, data, regression_data
from trainkit import Callback


def test_predictions_use_the_evaluated_weights(make_trainer: Any, media_logger: Any, tmp_path: Path) -> None:
    task = Regression()
    callbacks = [EMA(decay=0.9), SampleWriter(num_samples=3)]
    trainer = make_trainer(callbacks=callbacks, loggers=[media_logger], run_dir=tmp_path / "run")

    trainer.fit(task, data())

    ((name, text, step),) = media_logger.texts
    expected = task.eval()(regression_data(8, seed=1).tensors[0][:3]).flatten().tolist()
    assert (name, step) == ("samples", 4)
    assert text.splitlines() == [f"{row}: [{value}]" for row, value in enumerate(expected)]
    assert (tmp_path / "run" / "samples" / "step_00000004.txt").read_text() == f"{text}\n"


def test_a_task_may_describe_its_samples_and_training_is_unaffected(make_trainer: Any, media_logger: Any) -> None:
    class Describes(Regression):
        def describe_sample(self, sample: Any, prediction: Any) -> str:
            return f"{tuple(sample[0].shape)} -> {tuple(prediction.shape)}"

        def predict_step(self, batch: Any) -> Any:
            torch.rand(1)  # as one who samples from what is predicted
            return super().predict_step(batch)

    class Observer(Callback):
        def on_evaluation_start(self, run: Any, stage: str) -> None:
            assert run.task.training  # until the evaluation begins

    task, plain = Describes(hidden=4, dropout=0.5), Regression(hidden=4, dropout=0.5)
    make_trainer(
        callbacks=[SampleWriter(num_samples=2), Observer()], loggers=[media_logger], evaluate_every="2step"
    ).fit(task, data())
    make_trainer(evaluate_every="2step").fit(plain, data())

    assert [text for _, text, _ in media_logger.texts] == ["(4,) -> (1,)\n(4,) -> (1,)"] * 2
    assert torch.equal(task.network[0].weight, plain.network[0].weight)
