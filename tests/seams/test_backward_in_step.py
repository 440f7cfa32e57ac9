"""A backward inside of a step: as in a plain loop with one micro-batch on one device, else refused by name."""

import pytest
import torch
from torch import nn
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.seams.training import BATCH_SIZE, BOUND, EVERY, Layers, batches, difference, samples, trained
from trainkit import Data, Trainer
from trainkit.errors import UserError

SPLIT = [
    lambda: SingleStrategy(device="cpu", accumulate=2),
    lambda: DDPStrategy(device="cpu", devices=2, accumulate=2),
    lambda: FSDPStrategy(device="cpu", devices=2, accumulate=2),
]


class Twice(Layers):
    """A step that was moved from a loop with its `backward`."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        loss.backward(retain_graph=True)
        return loss


class OfAPart(Layers):
    """A second loss of one layer, with a graph of its own."""

    def training_step(self, batch):
        torch.autograd.backward(self.a(batch[0]).square().mean())
        return super().training_step(batch)


class Removed(Layers):
    """Gradients of the inputs, after which those of the weights are removed."""

    def training_step(self, batch):
        inputs, targets = batch
        inputs = inputs.clone().requires_grad_()
        self(inputs).sum().backward()
        self.zero_grad()
        return nn.functional.mse_loss(self(inputs.detach() + 0.1 * inputs.grad), targets)


class ByGrad(Removed):
    """The same by torch.autograd.grad."""

    def training_step(self, batch):
        inputs, targets = batch
        inputs = inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self(inputs).sum(), inputs)
        return nn.functional.mse_loss(self(inputs.detach() + 0.1 * gradient), targets)


def by_loop(task_class):
    task = task_class()
    optimizer = task.configure_optimizers()
    for batch in batches():
        optimizer.zero_grad()
        task.training_step(batch).backward()
        optimizer.step()
    return task.state_dict()


@pytest.mark.parametrize(("strategy", "task_class"), [*((name, Twice) for name in EVERY), ("ddp", OfAPart)])
def test_a_backward_inside_of_a_step_is_refused_by_name(strategy, task_class, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"calls `?backward`? itself"):
        trained(strategy, task_class())


@pytest.mark.parametrize("task_class", [Twice, OfAPart, Removed])
def test_one_micro_batch_on_one_device_has_the_gradients_of_a_plain_loop(task_class, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = task_class()
    data = Data(train=samples(), batch_size=BATCH_SIZE, shuffle=False)
    Trainer(SingleStrategy(device="cpu"), max_duration="1epoch", callbacks=[], loggers=[]).fit(task, data)
    assert difference(task.state_dict(), by_loop(task_class)) < BOUND


@pytest.mark.parametrize("make_strategy", SPLIT)
def test_removing_the_gradients_of_other_micro_batches_is_refused_by_name(make_strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(make_strategy(), max_duration="1epoch", callbacks=[], loggers=[])
    with pytest.raises(UserError, match="removes the gradient of"):
        trainer.fit(Removed(), Data(train=samples(), batch_size=BATCH_SIZE, shuffle=False))


@pytest.mark.parametrize("strategy", EVERY)
def test_a_gradient_by_autograd_grad_is_that_of_a_plain_loop(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert difference(trained(strategy, ByGrad()), by_loop(ByGrad)) < BOUND


def test_a_gradient_that_a_scaler_would_not_scale_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(SingleStrategy(device="cpu"), max_duration="1epoch", precision="fp16-mixed", loggers=[])
    with pytest.raises(UserError, match=r"calls backward itself: a\.weight has a gradient"):
        trainer.fit(Twice(), Data(train=samples(), batch_size=BATCH_SIZE, shuffle=False))


class HeadOnly(Layers):
    """A step that begins as a loop does; the parameters of `a` and `b` keep gradients that no optimizer uses."""

    def training_step(self, batch):
        self.zero_grad()
        return super().training_step(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.c.parameters(), lr=0.1)


def test_gradients_that_no_optimizer_uses_may_be_removed_before_the_first_micro_batch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert difference(trained("ddp", HeadOnly()), by_loop(HeadOnly)) < BOUND
