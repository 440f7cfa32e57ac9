"""Optimizers and step hooks whose update of a parameter depends on other parameters."""

import random

import pytest
import torch
from torch import nn

from trainkit.optim.chained_optimizer import ChainedOptimizer
from trainkit.optim.separable import coupled_by


class Normalised(torch.optim.SGD):
    """SGD along the gradient of all parameters, with length 1."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Sign(torch.optim.Optimizer):
    """An own optimizer that looks at one parameter at a time, and has attributes that it needs in a step."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.factor = torch.tensor(2.0)
        self.slow = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter, slow in zip(group["params"], self.slow, strict=True):
                if parameter.grad is not None:
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow - group["lr"] * self.factor * parameter.grad.sign())


class PerTensor(torch.optim.SGD):
    """Clips each gradient by its own norm, as LARS and AGC do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        return super().step(closure)


class LateStatistics(Sign):
    """Adapts its factor by the gradients of all parameters, as Prodigy does from its second step on."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        gradients = [p.grad.sum() for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.factor = self.factor + torch.stack(gradients).sum().abs()


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, whose groups and state it shares."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure=None):
        self.inner.step()


class Noisy(torch.optim.SGD):
    """Adds noise to each parameter in turn, as Langevin dynamics do."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(torch.randn_like(parameter))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: Sign(parameters, lr=0.1),
        lambda parameters: PerTensor(parameters, lr=0.1, momentum=0.9),
        lambda parameters: Wrapper(torch.optim.Adagrad(parameters, lr=0.1)),
        lambda parameters: ChainedOptimizer(torch.optim.SGD(parameters[:2], lr=0.1), Sign(parameters[2:], lr=0.1)),
    ],
)
def test_optimizers_of_one_parameter_at_a_time_are_coupled_by_nothing(make):
    assert coupled_by(make(list(layers().parameters()))) is None


@pytest.mark.parametrize("kind", [Normalised, LateStatistics, Noisy])
def test_an_optimizer_that_looks_at_several_parameters_is_named(kind):
    assert coupled_by(kind(layers().parameters(), lr=0.1)) == kind.__name__


def test_a_wrapped_optimizer_that_looks_at_several_parameters_is_found():
    assert coupled_by(Wrapper(Normalised(layers().parameters(), lr=0.1))) == "Wrapper or Normalised"


def clip_all(optimizer, args, kwargs):
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)


def test_step_hooks_are_tried_with_the_objects_that_they_refer_to():
    model, steps = layers(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    assert coupled_by(optimizer) is None and steps == []
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert "the step hook" in coupled_by(optimizer)


def test_a_hook_of_the_optimizer_alone_is_named_also_with_a_schedule():
    optimizer = torch.optim.SGD(layers().parameters(), lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert coupled_by(optimizer) is None
    optimizer.register_step_pre_hook(clip_all)
    assert coupled_by(optimizer) == "the step hook clip_all"


def test_an_optimizer_that_cannot_be_tried_is_returned_with_the_reason():
    class Native(torch.optim.SGD):
        def step(self, closure=None):
            raise NotImplementedError("kernel needs 4096 elements")

    assert "kernel needs 4096 elements" in coupled_by(Native(layers().parameters(), lr=0.1))


def test_the_trial_leaves_optimizer_and_generators_as_they_are():
    model = layers()
    optimizer = Noisy(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    values = [tensor.clone() for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    states = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    generators = torch.get_rng_state(), random.getstate()
    coupled_by(optimizer)
    assert all(map(torch.equal, values, [t for p in model.parameters() for t in (p, p.grad)]))
    assert all(map(torch.equal, states, [state["momentum_buffer"] for state in optimizer.state.values()]))
    assert torch.equal(generators[0], torch.get_rng_state()) and generators[1] == random.getstate()


def test_the_steps_of_a_trial_grow_with_the_logarithm_of_the_number_of_parameters():
    class Counted(PerTensor):
        steps = 0

        def step(self, closure=None):
            Counted.steps += 1  # of copies too
            return super().step(closure)

    counts = []
    for number in (16, 64):
        Counted.steps = 0
        assert coupled_by(Counted([nn.Parameter(torch.zeros(4, 4)) for _ in range(number)], lr=0.1)) is None
        counts.append(Counted.steps)
    assert 0 < counts[0] < counts[1] < 2 * counts[0]
