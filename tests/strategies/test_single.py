"""The strategy `single`: any split into micro-batches gives the weights of one big batch."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.single import SingleStrategy

from tests.tasks import (
    EachStep,
    Recorder,
    Regression,
    Seen,
    WeightedRegression,
    assert_close,
    assert_same_bits,
    regression_data,
    weighted_data,
    weights,
)
from trainkit import Data, UserError


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"accumulate": 4}, {"accumulate": 8}, {"micro_batch_size": 3}])
@pytest.mark.parametrize("num_samples", [24, 21, 17], ids=["full batches", "short last batch", "last batch of one"])
@pytest.mark.parametrize(("kind", "samples"), [(Regression, regression_data), (WeightedRegression, weighted_data)])
def test_micro_batches_give_the_weights_of_one_big_batch(make_trainer, settings, num_samples, kind, samples):
    task, expected = kind(hidden=8), kind(hidden=8)
    data = Data(train=samples(num_samples), batch_size=8)
    make_trainer(SingleStrategy(device="cpu", **settings), max_duration="3epoch").fit(task, data)
    make_trainer(max_duration="3epoch").fit(expected, data)
    assert_close(task, expected)


def test_token_weights_may_be_python_numbers(make_trainer):
    class Numbers(WeightedRegression):
        def training_step(self, batch):
            output = super().training_step(batch)
            return {**output, "weight": float(output["weight"])}

    task, expected = Numbers(), WeightedRegression()
    data = Data(train=weighted_data(21), batch_size=8)
    for each in (task, expected):
        make_trainer(SingleStrategy(device="cpu", accumulate=4), max_duration="2epoch").fit(each, data)
    assert_close(task, expected)


def test_a_micro_batch_of_weight_zero_changes_nothing(make_trainer):
    class FirstOnly(Regression):
        def training_step(self, batch):
            inputs, targets, tokens = batch
            loss = (self(inputs) - targets).square().mean()
            return {"loss": loss, "weight": tokens.sum()}

    inputs, targets = regression_data(8).tensors
    tokens = torch.tensor([1.0] * 4 + [0.0] * 4)
    task, expected = FirstOnly(), Regression()
    data = Data(train=TensorDataset(inputs, targets, tokens), batch_size=8, shuffle=False)
    make_trainer(SingleStrategy(device="cpu", accumulate=2)).fit(task, data)
    half = Data(train=TensorDataset(inputs[:4], targets[:4]), batch_size=4, shuffle=False)
    make_trainer().fit(expected, half)
    assert_close(task, expected)


@pytest.mark.parametrize("weight", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_batch_of_weight_zero_changes_nothing(make_trainer, weight, accumulate):
    class Padding(Regression):
        def training_step(self, batch):
            return {"loss": super().training_step(batch), "weight": weight}

    task = Padding()
    before = weights(task)
    strategy = SingleStrategy(device="cpu", accumulate=accumulate)
    make_trainer(strategy).fit(task, Data(train=regression_data(8), batch_size=4))
    assert_same_bits(task, before)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    token_weights=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_gradient_of_any_step_batch_is_that_of_the_weighted_mean_over_its_samples(sizes, token_weights, seed):
    from trainkit.data.batch import MicroBatch, StepBatch
    from trainkit.optim.precision import Precision

    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    batch = [torch.randn(total, 4, generator=generator, dtype=torch.float64)]
    batch.append(torch.randn(total, 1, generator=generator, dtype=torch.float64))
    tokens = torch.randint(1, 9, (total,), generator=generator).double()
    task = (WeightedRegression if token_weights else Regression)().double()
    if token_weights:
        batch.append(tokens)
    splits = zip(*(tensor.split(sizes) for tensor in batch), strict=True)
    step_batch = StepBatch([MicroBatch(list(split), len(split[0])) for split in splits], total, total, False)
    strategy = SingleStrategy(device="cpu")
    strategy.setup(Precision())
    strategy.prepare(task)

    strategy.forward_backward(task, step_batch)

    counts = tokens if token_weights else torch.ones(total, dtype=torch.float64)
    losses = (task(batch[0]) - batch[1]).square().squeeze(1)
    expected = torch.autograd.grad((losses * counts).sum() / counts.sum(), list(task.parameters()))
    for parameter, gradient in zip(task.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)


def test_the_logged_loss_is_the_mean_over_samples_with_a_short_last_batch(make_trainer):
    recorder = Recorder()
    task = Regression(lambda task: torch.optim.SGD(task.parameters(), lr=0.0))
    data = regression_data(21)
    trainer = make_trainer(
        SingleStrategy(device="cpu", accumulate=4), callbacks=[recorder], log_every="1epoch", max_duration="1epoch"
    )
    trainer.fit(task, Data(train=data, batch_size=8))
    expected = nn.functional.mse_loss(task(data.tensors[0]), data.tensors[1])
    assert recorder.logged[0]["train/loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_the_logged_loss_is_not_scaled_by_accumulation(make_trainer):
    class Constant(Regression):
        def training_step(self, batch):
            return {"loss": super().training_step(batch) * 0 + 3.0, "one": 1.0}

    recorder = Recorder()
    trainer = make_trainer(SingleStrategy(device="cpu", accumulate=4), callbacks=[recorder], log_every="1step")
    trainer.fit(Constant(), Data(train=regression_data(16), batch_size=8))
    assert [logged["train/loss"] for logged in recorder.logged] == [3.0, 3.0]
    assert [logged["train/one"] for logged in recorder.logged] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [[8], [8], [5]]),
        ({"accumulate": 4}, [[2, 2, 2, 2], [2, 2, 2, 2], [2, 2, 1]]),
        ({"micro_batch_size": 3}, [[3, 3, 2], [3, 3, 2], [3, 2]]),
        ({"micro_batch_size": 100}, [[8], [8], [5]]),
        ({"accumulate": 8}, [[1] * 8, [1] * 8, [1] * 5]),
    ],
)
def test_a_global_batch_is_split_into_the_planned_micro_batches(make_trainer, settings, sizes):
    task, counts = Seen(), EachStep(lambda run: len(run.task.trained))
    trainer = make_trainer(SingleStrategy(device="cpu", **settings), callbacks=[counts])
    trainer.fit(task, Data(train=regression_data(21), batch_size=8))
    steps = [task.trained[first:last] for first, last in pairwise([0, *counts.seen])]
    assert [[len(batch[0]) for batch in step] for step in steps] == sizes


def test_the_printed_plan_multiplies_to_the_global_batch():
    assert str(SingleStrategy(accumulate=4).plan(32)) == "global batch 32 = 1 rank x 4 micro-batches x 8 samples"
    assert str(SingleStrategy().plan(32)) == "global batch 32 = 1 rank x 1 micro-batch x 32 samples"


@pytest.mark.parametrize("accumulate", [3, 5, 16])
def test_accumulate_that_does_not_divide_the_batch_raises_an_error_with_one_that_does(make_trainer, accumulate):
    trainer = make_trainer(SingleStrategy(device="cpu", accumulate=accumulate))
    task = Regression()
    before = weights(task)
    with pytest.raises(UserError, match=r"batch_size=8 .*accumulate=(2|4|8), or micro_batch_size=\d") as caught:
        trainer.fit(task, Data(train=regression_data(16), batch_size=8))
    suggested = int(str(caught.value).split("set accumulate=")[1].split(",")[0])
    assert SingleStrategy(accumulate=suggested).plan(8).micro_batches == suggested
    assert_same_bits(task, before)


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("name", ["accumulate", "micro_batch_size"])
def test_accumulate_and_micro_batch_size_are_whole_numbers_above_zero(name, value):
    with pytest.raises(UserError, match=rf"{name} must be .*a whole number, at least 1, got"):
        SingleStrategy(**{name: value})


def test_accumulate_and_micro_batch_size_exclude_each_other():
    with pytest.raises(UserError, match=r"accumulate=2 and micro_batch_size=3 .*set one of them"):
        SingleStrategy(accumulate=2, micro_batch_size=3)


def test_accumulation_does_not_split_validation_batches(make_trainer):
    trainer = make_trainer(SingleStrategy(device="cpu", accumulate=4))
    data = Data(train=regression_data(16), validation=regression_data(10), batch_size=8, evaluation_batch_size=10)
    result = trainer.fit(Regression(), data)
    assert result.steps == 2
    assert "validation/loss" in result.metrics


def test_pre_batched_data_with_a_short_last_batch_accumulates_exactly(make_trainer):
    inputs, targets = regression_data(22).tensors
    batches = [list(rows) for rows in zip(inputs.split(8), targets.split(8), strict=True)]  # 8, 8 and 6 rows
    task, expected = Regression(hidden=8), Regression(hidden=8)
    data = Data(train=batches)
    make_trainer(SingleStrategy(device="cpu", accumulate=4), max_duration="2epoch").fit(task, data)
    make_trainer(max_duration="2epoch").fit(expected, data)
    assert_close(task, expected)


def test_gradients_from_before_training_are_dropped(make_trainer):
    task, expected = Regression(), Regression()
    task(torch.ones(1, 4)).sum().backward()
    for each in (task, expected):
        make_trainer().fit(each, Data(train=regression_data(8), batch_size=4))
    assert_same_bits(task, expected)


def test_no_gradient_is_left_after_training(make_trainer):
    task = Regression()
    make_trainer(SingleStrategy(device="cpu", accumulate=2)).fit(task, Data(train=regression_data(8), batch_size=4))
    assert all(parameter.grad is None for parameter in task.parameters())
