"""Evaluation counts every sample exactly once, with the weight it has (contract C5)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from trainkit.strategies.single import SingleStrategy

from tests.tasks import (
    FakeRank,
    NumberStream,
    Recorder,
    Regression,
    RegressionStream,
    Seen,
    WeightedRegression,
    regression_data,
    weighted_data,
)
from trainkit import Data, UserError
from trainkit.data.loader import open_loader


def mean_error(task, dataset):
    inputs, targets = dataset.tensors
    return (task(inputs) - targets).square().mean().item()


@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 50])
@pytest.mark.parametrize("strategy", [{}, {"accumulate": 3}, {"micro_batch_size": 2}], ids=str)
def test_the_metrics_do_not_depend_on_the_batch_size(make_trainer, batch_size, strategy):
    task, dataset = Regression(hidden=8, dropout=0.5), regression_data(11)
    trainer = make_trainer(SingleStrategy(device="cpu", **strategy))
    metrics = trainer.validate(task, Data(validation=dataset, batch_size=batch_size))
    assert set(metrics) == {"validation/loss", "validation/absolute"}
    assert metrics["validation/loss"] == pytest.approx(mean_error(task.eval(), dataset), rel=1e-6)


def samples_of_all_ranks(data, world_size):
    seen = []
    for rank in range(world_size):
        loader = open_loader(data.stage_data("validation"), FakeRank(rank, world_size), seed=0)
        for micro_batch in loader.batches():
            rows = micro_batch.batch if isinstance(micro_batch.batch, torch.Tensor) else micro_batch.batch[0]
            assert len(rows) == micro_batch.num_samples
            seen += rows.tolist()
    return sorted(seen)


@given(num_samples=st.integers(1, 40), batch_size=st.integers(1, 17), world_size=st.integers(1, 5))
def test_over_all_ranks_each_sample_of_a_dataset_or_stream_comes_once(num_samples, batch_size, world_size):
    for samples in (TensorDataset(torch.arange(num_samples)), NumberStream(num_samples)):
        data = Data(validation=samples, batch_size=batch_size)
        assert samples_of_all_ranks(data, world_size) == list(range(num_samples))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), world_size=st.integers(1, 5))
def test_over_all_ranks_each_row_of_ready_made_batches_comes_once(sizes, world_size):
    data = Data(validation=list(torch.arange(sum(sizes)).split(sizes)))
    assert samples_of_all_ranks(data, world_size) == list(range(sum(sizes)))


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_change_nothing(make_trainer, workers):
    task, dataset = Regression(), regression_data(11)
    metrics = make_trainer().validate(task, Data(validation=dataset, batch_size=4, num_workers=workers))
    assert metrics["validation/loss"] == pytest.approx(mean_error(task, dataset), rel=1e-6)


def test_the_weights_of_the_task_count_in_evaluation(make_trainer):
    task, dataset = WeightedRegression(), weighted_data(11)
    metrics = make_trainer().validate(task, Data(validation=dataset, batch_size=4))
    inputs, targets, tokens = dataset.tensors
    losses = (task(inputs) - targets).square().squeeze(1)
    expected = ((losses * tokens).sum() / tokens.sum()).item()
    assert metrics == {"validation/loss": pytest.approx(expected, rel=1e-6)}


@pytest.mark.parametrize("data", [regression_data(11), RegressionStream(11)], ids=["dataset", "stream"])
def test_predictions_come_in_the_order_of_the_data(make_trainer, data):
    task = Regression()
    predictions = make_trainer(SingleStrategy(device="cpu", micro_batch_size=3)).predict(
        task, Data(predict=data, batch_size=4)
    )
    torch.testing.assert_close(predictions, task(regression_data(11).tensors[0]).detach())
    assert not predictions.requires_grad


def test_predictions_of_any_kind_are_joined(make_trainer):
    class Kinds(Regression):
        def predict_step(self, batch):
            outputs = self(batch[0])
            return {"both": (outputs, -outputs), "words": [f"{value:.3f}" for value in outputs.flatten()]}

    task = Kinds()
    predictions = make_trainer().predict(task, Data(predict=regression_data(11), batch_size=4))
    expected = task(regression_data(11).tensors[0]).detach()
    torch.testing.assert_close(predictions["both"], (expected, -expected))
    assert predictions["words"] == [f"{value:.3f}" for value in expected.flatten()]


def test_test_step_is_validation_step_by_default(make_trainer):
    class Tested(Regression):
        def test_step(self, batch):
            return {"answer": 42.0}

    data = Data(test=regression_data(6), batch_size=4)
    assert set(make_trainer().test(Regression(), data)) == {"test/loss", "test/absolute"}
    assert make_trainer().test(Tested(), data) == {"test/answer": 42.0}


def test_evaluation_runs_in_evaluation_mode_without_gradients(make_trainer):
    class Looking(Regression):
        def validation_step(self, batch):
            assert not self.training
            assert not torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            return super().validation_step(batch)

        def training_step(self, batch):
            assert self.training
            return super().training_step(batch)

    data = Data(train=regression_data(8), validation=regression_data(4), batch_size=4)
    make_trainer(evaluate_every="1step", num_sanity_batches=2, max_duration="2epoch").fit(Looking(), data)


@pytest.mark.parametrize(
    ("setting", "call", "stage"),
    [
        ("limit_validation_batches", "validate", "validation"),
        ("limit_test_batches", "test", "test"),
        ("limit_predict_batches", "predict", "predict"),
    ],
)
@pytest.mark.parametrize("kind", ["dataset", "stream", "ready"])
def test_a_limit_counts_global_batches(make_trainer, setting, call, stage, kind):
    made = {
        "dataset": regression_data(11),
        "stream": RegressionStream(11),
        "ready": [list(batch) for batch in zip(*(t.split(4) for t in regression_data(11).tensors), strict=True)],
    }
    data = Data(**{stage: made[kind]}, batch_size=None if kind == "ready" else 4)
    task = Seen()
    getattr(make_trainer(**{setting: 2}), call)(task, data)
    assert [len(batch[0]) for batch in task.validated + task.predicted] == [4, 4]


def test_validation_during_training_has_the_numbers_of_validation_by_itself(make_trainer):
    recorder, task = Recorder(), Regression()
    data = Data(train=regression_data(18), validation=regression_data(7, seed=1), batch_size=4)
    make_trainer(callbacks=[recorder]).fit(task, data)
    assert recorder.evaluations == [(5, "validation", make_trainer().validate(task, data))]


def test_each_of_several_validation_sets_has_metrics_under_its_name(make_trainer):
    sets = {"near": regression_data(7, seed=1), "far": regression_data(5, seed=2)}
    task, trainer = Regression(), make_trainer()
    alone = {
        f"validation/{name}/{metric.removeprefix('validation/')}": value
        for name, one in sets.items()
        for metric, value in trainer.validate(task, Data(validation=one, batch_size=4)).items()
    }
    assert trainer.validate(task, Data(validation=sets, batch_size=4)) == alone
    assert alone["validation/near/loss"] != alone["validation/far/loss"]


def test_a_loader_for_evaluation_keeps_its_batch_size(make_trainer):
    task = Seen()
    data = Data(train=regression_data(8), validation=DataLoader(regression_data(7), batch_size=5), batch_size=4)
    make_trainer().fit(task, data)
    assert [len(batch[0]) for batch in task.validated] == [5, 2]


def test_evaluating_writes_no_folder_and_leaves_the_weights_alone(make_trainer):
    trainer, task = make_trainer(), Regression()
    before = task.network[0].weight.detach().clone()
    trainer.validate(task, Data(validation=regression_data(7), batch_size=4))
    assert torch.equal(task.network[0].weight, before)
    assert not trainer.run_dir.exists()


def test_validation_can_use_the_weights_of_a_checkpoint(make_trainer):
    from tests.tasks import StopAt

    trained, data = Regression(), Data(train=regression_data(18), validation=regression_data(7, seed=1), batch_size=4)
    trainer = make_trainer(callbacks=[StopAt(3)])
    trainer.fit(trained, data)
    fresh = Regression(init_seed=5)
    metrics = make_trainer().validate(fresh, data, checkpoint=trainer.run_dir)
    assert metrics == make_trainer().validate(trained, data)


@pytest.mark.parametrize("call", ["validate", "predict"])
def test_a_stream_that_gives_nothing_is_an_error(make_trainer, call):
    stage = "validation" if call == "validate" else call
    with pytest.raises(UserError, match=f"the {stage} IterableDataset gave no sample"):
        getattr(make_trainer(), call)(Regression(), Data(**{stage: RegressionStream(0)}, batch_size=4))
