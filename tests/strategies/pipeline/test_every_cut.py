"""Calls beside a cut have the gradients of one process, wherever a stage begins."""

import warnings

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


def _twice(inputs: torch.Tensor) -> torch.Tensor:
    return inputs * 2 + inputs.sin()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    _scripted = torch.jit.script(_twice)


_compiled = torch.compile(_twice, backend="eager")


def _captured(task, hidden):
    """Keep the argument and the result of a module by hooks that the step registers and removes."""
    kept = []
    handles = [
        task.second.register_forward_pre_hook(lambda module, args: kept.append(args[0])),
        task.second.register_forward_hook(lambda module, args, output: kept.append(output)),
        task.second.register_forward_hook(lambda module, args, output: kept.append(output * 2)),
    ]
    out = task.second(hidden)
    for handle in handles:
        handle.remove()
    return out + kept[0] * kept[1] + kept[2]


def _doubled(task, hidden):
    """Change the result of a module by a hook that the step registers and removes."""
    handle = task.second.register_forward_hook(lambda module, args, output: output * 2)
    out = task.second(hidden)
    handle.remove()
    return task.second(out)


def _per_sample(task, hidden):
    """Weigh samples by the norm of their own gradients."""

    def loss(parameters, sample):
        return torch.func.functional_call(task.second, parameters, (sample,)).square().sum()

    parameters = dict(task.second.named_parameters())
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, hidden)
    return hidden * gradients["weight"].square().sum((1, 2)).tanh()[:, None]


def _slope(task, hidden):
    """Ask for the gradient of a tensor that the step itself makes a leaf."""
    moved = torch.zeros_like(hidden).requires_grad_()
    (slope,) = torch.autograd.grad(task.second(hidden.detach() + moved).square().sum(), moved)
    return hidden + 0.1 * slope + 2 * hidden.sin().detach().requires_grad_()


def _seen_by_numpy(task, hidden):
    return hidden * torch.from_numpy(hidden.detach().numpy() * 2.0) * torch.Tensor([2.0]).double()


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
OPAQUE = {
    "vmap": lambda task, hidden: torch.vmap(lambda row: task.second(row) * row.sum())(hidden),
    "vmap with a closure": lambda task, hidden: torch.vmap(lambda row: row * hidden.sum())(hidden),
    "torch.func.grad": lambda task, hidden: torch.func.grad(lambda x: task.second(x).square().sum())(hidden),
    "gradients of each sample": _per_sample,
    "torch.jit.script": lambda task, hidden: _scripted(hidden),
    "torch.compile": lambda task, hidden: _compiled(hidden),
    "hooks that capture": _captured,
    "a hook that changes a result": _doubled,
    "requires_grad_": _slope,
    "from_numpy": _seen_by_numpy,
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


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile itself reads
@pytest.mark.parametrize("name", OPAQUE)
def test_a_call_that_hides_others_has_the_gradients_of_one_process_at_every_cut(name):
    torch.manual_seed(0)

    _assert_equal_at_every_cut(_Task(OPAQUE[name]), at_least=4)


class _Sequential(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)])

    def training_step(self, batch):
        return checkpoint_sequential(self.net, 3, batch, use_reentrant=False).square().mean()


def test_checkpointed_parts_of_a_sequential_have_the_gradients_of_one_process_at_every_cut():
    torch.manual_seed(0)

    _assert_equal_at_every_cut(_Sequential(), at_least=4)


class _Centered(nn.Module):
    """Subtracts a running mean that it updates in place, and multiplies by it, which saves it for backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))

    def training_step(self, batch):
        hidden = self.first(batch)
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.5)
        return self.second(hidden * self.mean.view(1, 4)).square().mean()


def test_a_buffer_that_is_updated_in_place_is_saved_for_each_backward():
    torch.manual_seed(0)

    _assert_equal_at_every_cut(_Centered(), at_least=2)
