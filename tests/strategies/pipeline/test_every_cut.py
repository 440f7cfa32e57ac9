"""Calls beside a cut have the gradients of one process, wherever a stage begins."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.strategies.pipeline.training import differences_at_every_cut

TOLERANCE = 1e-9


class _Task(nn.Module):
    """Calls `function` between its modules, in the step itself and inside a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch):
        hidden = self.function(self, self.first(batch))
        hidden = self.function(self, self.second(hidden) + hidden)
        return self.third(hidden).square().mean()


class _Reverse(torch.autograd.Function):
    """The gradient reversal of domain-adversarial training."""

    @staticmethod
    def forward(ctx, inputs, scale):
        ctx.scale = scale
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.mul(4.0).round().div(4.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Affine(torch.autograd.Function):
    """Uses a parameter, saves tensors, and returns two results."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight, inputs.sum()

    @staticmethod
    def backward(ctx, gradient, gradient_of_sum):
        inputs, weight = ctx.saved_tensors
        return gradient @ weight.T + gradient_of_sum, 2.0 * inputs.T @ gradient


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        ctx.mark_dirty(inputs)
        return inputs.mul_(0.5)

    @staticmethod
    def backward(ctx, gradient):
        return 3.0 * gradient


class _WithContext(torch.autograd.Function):
    @staticmethod
    def forward(inputs, scale=2.0):
        return inputs.sin() * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].cos() * gradient * 5.0, None


class _Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return _Reverse.apply(inputs.tanh(), 2.0) + 1.0

    @staticmethod
    def backward(ctx, gradient):
        return 7.0 * gradient


reverse = _Reverse.apply  # as users keep it


def _affine(task, hidden):
    out, total = _Affine.apply(hidden, task.second.weight)
    return out + total


FUNCTIONS = {
    "gradient reversal": lambda task, hidden: reverse(hidden, 0.7),
    "straight-through": lambda task, hidden: _StraightThrough.apply(hidden) + hidden,
    "a parameter and two results": _affine,
    "written in place": lambda task, hidden: _InPlace.apply(hidden * 1.0),
    "setup_context": lambda task, hidden: _WithContext.apply(hidden),
    "nested": lambda task, hidden: _Nested.apply(hidden),
    "reentrant checkpoint": lambda task, hidden: checkpoint(
        lambda given: task.second(given).sin() * given, hidden, use_reentrant=True
    ),
    "checkpoint": lambda task, hidden: checkpoint(
        lambda given: task.second(reverse(given.sin(), 2.0)) * given, hidden, use_reentrant=False
    ),
}


def _batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2)]


def _assert_equal_at_every_cut(task, *, at_least):
    differences = differences_at_every_cut(task.double(), _batches())

    assert len(differences) >= at_least
    assert {place: value for place, value in differences.items() if not value <= TOLERANCE} == {}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_with_its_own_backward_has_the_gradients_of_one_process_at_every_cut(name):
    torch.manual_seed(0)

    _assert_equal_at_every_cut(_Task(FUNCTIONS[name]), at_least=4)
