"""Training with a Trainer gives the weights of the loop that one would write by hand, to the bit."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DistributedSampler

from tests.tasks import Regression, assert_close, assert_same_bits, regression_data
from trainkit import Data

EPOCHS, BATCH_SIZE = 3, 4


def make_order(dataset, epoch):
    """Return the samples of an epoch as torch's DistributedSampler gives them to the only rank."""
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    return torch.tensor(list(sampler))


def train_by_hand(task, dataset, *, clip=lambda parameters: None, autocast=False):
    """The loop that trainkit replaces."""
    torch.manual_seed(0)
    returned = task.configure_optimizers()
    optimizer, schedule = returned if isinstance(returned, tuple) else (returned, None)
    inputs, targets = dataset.tensors
    task.train()
    for epoch in range(EPOCHS):
        for indices in make_order(dataset, epoch).split(BATCH_SIZE):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = task.training_step([inputs[indices], targets[indices]])
            loss.backward()
            clip(task.parameters())
            optimizer.step()
            if schedule is not None:
                schedule.step()


def dropout_task(optimizer):
    return Regression(optimizer, hidden=8, dropout=0.5)


def fitted(make_trainer, optimizer, dataset, **settings):
    task = dropout_task(optimizer)
    trainer = make_trainer(max_duration=f"{EPOCHS}epoch", fused_optimizer=False, **settings)
    trainer.fit(task, Data(train=dataset, batch_size=BATCH_SIZE))
    return task


OPTIMIZERS = {
    "SGD": lambda task: torch.optim.SGD(task.parameters(), lr=0.05),
    "SGD with momentum": lambda task: torch.optim.SGD(task.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": lambda task: torch.optim.AdamW(task.parameters(), lr=0.01),
    "Adagrad": lambda task: torch.optim.Adagrad(task.parameters(), lr=0.05),
    "RMSprop": lambda task: torch.optim.RMSprop(task.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_samples", [16, 18], ids=["whole batches", "short last batch"])
def test_fit_has_the_weights_of_the_hand_written_loop_to_the_bit(make_trainer, name, num_samples):
    expected = dropout_task(OPTIMIZERS[name])
    train_by_hand(expected, regression_data(num_samples))
    assert_same_bits(fitted(make_trainer, OPTIMIZERS[name], regression_data(num_samples)), expected)


def test_a_schedule_of_every_step_steps_as_in_the_hand_written_loop(make_trainer):
    def optimizer(task):
        sgd = OPTIMIZERS["SGD"](task)
        return sgd, lr_scheduler.CosineAnnealingLR(sgd, T_max=12)

    expected = dropout_task(optimizer)
    train_by_hand(expected, regression_data(16))
    assert_same_bits(fitted(make_trainer, optimizer, regression_data(16)), expected)


@pytest.mark.parametrize(
    ("setting", "clip", "limit"),
    [
        ("max_grad_norm", nn.utils.clip_grad_norm_, 0.3),
        ("max_grad_value", nn.utils.clip_grad_value_, 0.1),
    ],
)
def test_clipping_is_that_of_the_hand_written_loop(make_trainer, setting, clip, limit):
    expected = dropout_task(OPTIMIZERS["SGD"])
    train_by_hand(expected, regression_data(16), clip=lambda parameters: clip(parameters, limit))
    assert_same_bits(fitted(make_trainer, OPTIMIZERS["SGD"], regression_data(16), **{setting: limit}), expected)


def test_mixed_bf16_is_that_of_the_hand_written_loop(make_trainer):
    expected = dropout_task(OPTIMIZERS["SGD"])
    train_by_hand(expected, regression_data(16), autocast=True)
    task = fitted(make_trainer, OPTIMIZERS["SGD"], regression_data(16), precision="bf16-mixed")
    assert_same_bits(task, expected)
    full = dropout_task(OPTIMIZERS["SGD"])
    train_by_hand(full, regression_data(16))
    with pytest.raises(AssertionError):
        assert_same_bits(task, full)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_kernels_give_the_same_weights_to_float_tolerance(make_trainer, name):
    tasks = [dropout_task(OPTIMIZERS[name]) for _ in range(2)]
    for task, fused in zip(tasks, (True, False), strict=True):
        trainer = make_trainer(max_duration="3epoch", fused_optimizer=fused)
        trainer.fit(task, Data(train=regression_data(18), batch_size=4))
    assert_close(*tasks, rtol=1e-4)


def test_another_seed_gives_another_order_and_the_same_seed_the_same(make_trainer):
    tasks = [dropout_task(OPTIMIZERS["SGD"]) for _ in range(4)]
    for task, seed in zip(tasks, (5, 5, 6), strict=False):
        make_trainer(seed=seed).fit(task, Data(train=regression_data(16), batch_size=4))
    assert_same_bits(tasks[0], tasks[1])
    with pytest.raises(AssertionError):
        assert_same_bits(tasks[0], tasks[2])


def test_the_seed_of_the_data_chooses_the_order_and_that_of_the_trainer_the_rest(make_trainer):
    class Seen(Regression):
        def training_step(self, batch):
            self.seen = [*getattr(self, "seen", []), *batch[1].flatten().tolist()]
            self.drawn = torch.rand(()).item()
            return super().training_step(batch)

    tasks = [Seen() for _ in range(3)]
    for task, seed, data_seed in zip(tasks, (1, 2, 1), (7, 7, 8), strict=True):
        make_trainer(seed=seed).fit(task, Data(train=regression_data(16), batch_size=4, seed=data_seed))
    assert tasks[0].seen == tasks[1].seen != tasks[2].seen
    assert tasks[0].drawn == tasks[2].drawn != tasks[1].drawn


@pytest.mark.parametrize(
    "settings", [{"num_sanity_batches": 2}, {"evaluate_every": "1step"}, {"evaluate_every": "1epoch"}]
)
def test_validation_does_not_change_training(make_trainer, settings):
    class Random(Regression):
        def validation_step(self, batch):
            torch.rand(3)
            return super().validation_step(batch)

    tasks = [Random(OPTIMIZERS["AdamW"], hidden=8, dropout=0.5) for _ in range(2)]
    train, validation = regression_data(18), regression_data(6, seed=1)
    make_trainer(max_duration="2epoch").fit(tasks[0], Data(train=train, batch_size=4))
    make_trainer(max_duration="2epoch", **settings).fit(
        tasks[1], Data(train=train, validation=validation, batch_size=4)
    )
    assert_same_bits(tasks[1], tasks[0])


@pytest.mark.parametrize("log_every", ["1step", "3step", "1epoch", "1000step"])
def test_how_often_is_logged_does_not_change_training(make_trainer, log_every):
    tasks = [dropout_task(OPTIMIZERS["SGD"]) for _ in range(2)]
    for task, interval in zip(tasks, (log_every, "50step"), strict=True):
        make_trainer(max_duration="2epoch", log_every=interval).fit(task, Data(train=regression_data(18), batch_size=4))
    assert_same_bits(*tasks)
