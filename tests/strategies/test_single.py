"""The strategy `single`: any split into micro-batches gives the weights of one big batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.single import SingleStrategy

from tests.tasks import (
    Recorder,
    Regression,
    WeightedRegression,
    assert_close,
    assert_same_bits,
    regression_data,
    weighted_data,
    weights,
)
from trainkit import Callback, Data, TaskModule, UserError


class Tutorial(TaskModule):
    """The model of the tutorial on equal results of DP, DDP and accumulation: a line through the origin, loss = sum."""

    def __init__(self, num_features=16):
        super().__init__()
        self.line = nn.Linear(num_features, 1, bias=False)
        nn.init.ones_(self.line.weight)

    def training_step(self, batch):
        (inputs,) = batch
        return self.line(inputs).sum() / len(inputs)  # the mean over samples of the tutorial's sum

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class TutorialSum(Tutorial):
    """The tutorial's own loss, the plain sum over a micro-batch."""

    def training_step(self, batch):
        (inputs,) = batch
        return self.line(inputs).sum()


class EpochWeights(Callback):
    """Records the weights at the end of every epoch, as the tutorial prints them."""

    def __init__(self):
        self.weights = []

    def on_epoch_end(self, run):
        self.weights.append(run.task.line.weight.detach().clone())


def tutorial_data(num_samples):
    return TensorDataset(torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(1)))


def by_hand(num_samples, *, batch_size, epochs, loss_of):
    """Train the tutorial's model without trainkit on whole global batches, in DistributedSampler's order."""
    (inputs,) = tutorial_data(num_samples).tensors
    task = Tutorial()
    optimizer = task.configure_optimizers()
    printed = []
    for epoch in range(epochs):
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))
        for indices in order.split(batch_size):
            optimizer.zero_grad()
            loss_of(task.line(inputs[indices])).backward()
            optimizer.step()
        printed.append(task.line.weight.detach().clone())
    return printed


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [32, 34, 33], ids=["full batches", "last batch of two", "last batch of one"])
def test_the_tutorial_has_the_same_weights_after_every_epoch_with_any_accumulation(
    make_trainer, accumulate, num_samples
):
    seen = EpochWeights()
    trainer = make_trainer(SingleStrategy(device="cpu", accumulate=accumulate), max_duration="2epoch", callbacks=[seen])
    trainer.fit(Tutorial(), Data(train=tutorial_data(num_samples), batch_size=4))
    expected = by_hand(num_samples, batch_size=4, epochs=2, loss_of=torch.Tensor.mean)
    assert len(seen.weights) == 2
    for actual, wanted in zip(seen.weights, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-7)


def accumulated_by_hand(num_samples, *, num_micro_batches, epochs):
    """Train as the tutorial does: micro-batches of 4 from perm[r::N], loss = sum / N, backward N times, one step."""
    (inputs,) = tutorial_data(num_samples).tensors
    task = Tutorial()
    optimizer = task.configure_optimizers()
    printed = []
    for epoch in range(epochs):
        order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(epoch))
        shards = [order[rank::num_micro_batches].split(4) for rank in range(num_micro_batches)]
        for micro_batches in zip(*shards, strict=True):
            for indices in micro_batches:
                (task.line(inputs[indices]).sum() / num_micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
        printed.append(task.line.weight.detach().clone())
    return printed


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_loop_of_the_tutorial_prints_the_same_weights(make_trainer, accumulate):
    seen = EpochWeights()
    trainer = make_trainer(SingleStrategy(device="cpu", accumulate=accumulate), max_duration="2epoch", callbacks=[seen])
    trainer.fit(TutorialSum(), Data(train=tutorial_data(32), batch_size=4 * accumulate))
    expected = accumulated_by_hand(32, num_micro_batches=accumulate, epochs=2)
    for actual, wanted in zip(seen.weights, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"accumulate": 4}, {"accumulate": 8}, {"micro_batch_size": 3}])
@pytest.mark.parametrize("num_samples", [24, 21, 17], ids=["full batches", "short last batch", "last batch of one"])
def test_accumulation_gives_the_weights_of_one_big_batch(make_trainer, settings, num_samples):
    task, expected = Regression(hidden=8), Regression(hidden=8)
    data = Data(train=regression_data(num_samples), batch_size=8)
    make_trainer(SingleStrategy(device="cpu", **settings), max_duration="3epoch").fit(task, data)
    make_trainer(max_duration="3epoch").fit(expected, data)
    assert_close(task, expected)


@pytest.mark.parametrize("settings", [{"accumulate": 2}, {"accumulate": 8}, {"micro_batch_size": 3}])
@pytest.mark.parametrize("num_samples", [24, 21], ids=["full batches", "short last batch"])
def test_micro_batches_with_token_weights_give_the_weights_of_one_big_batch(make_trainer, settings, num_samples):
    task, expected = WeightedRegression(hidden=8), WeightedRegression(hidden=8)
    data = Data(train=weighted_data(num_samples), batch_size=8)
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
    class Sizes(Regression):
        def __init__(self):
            super().__init__()
            self.seen = []

        def training_step(self, batch):
            self.seen[-1].append(len(batch[0]))
            return super().training_step(batch)

    class NewStep(Callback):
        def on_fit_start(self, run):
            run.task.seen.append([])

        on_step_end = on_fit_start

    task = Sizes()
    trainer = make_trainer(SingleStrategy(device="cpu", **settings), callbacks=[NewStep()])
    trainer.fit(task, Data(train=regression_data(21), batch_size=8))
    assert task.seen == [*sizes, []]


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
