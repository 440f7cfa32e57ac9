"""Compressed reductions: near the mean, equal on every rank, and as good as the mean over many steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from trainkit.strategies.ddp.comm_hooks import PowerSGD, average_hook, make_comm_hook, power_sgd_hook
from trainkit.strategies.reducer.bucket_plan import MIB
from trainkit.strategies.reducer.reducer import Reducer, ReducerSettings

from trainkit.testing import run_ranks

WIDTH = 32


def batch(seed: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))


def make(average: bool = True) -> tuple[nn.Module, Reducer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    settings = ReducerSettings(average=average, bucket_cap_mb=2000 / MIB, first_bucket_cap_mb=2000 / MIB)
    return model, Reducer(list(model.named_parameters()), group=dist.group.WORLD, settings=settings)


def backward(model: nn.Module, reducer: Reducer, seed: int) -> Tensor:
    model.zero_grad()
    with reducer.session():
        loss = model(batch(seed)).square().mean()
        loss.backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def distance_between_ranks(gradient: Tensor) -> float:
    others = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(others, gradient)
    return max((other - gradient).abs().max().item() for other in others)


def error_in_first_steps(average: bool) -> tuple[float, float]:
    """Return the relative error of power_sgd, and its distance between ranks."""
    rank = dist.get_rank()
    model, reducer = make(average)
    exact = backward(model, reducer, rank)
    model, reducer = make(average)
    choice = make_comm_hook("power_sgd", state=None, options=None)
    reducer.register_hook(choice.state(dist.group.WORLD), choice.hook)
    for _ in range(2):
        gradient = backward(model, reducer, rank)
    return ((gradient - exact).norm() / exact.norm()).item(), distance_between_ranks(gradient)


@pytest.mark.parametrize("average", [True, False])
def test_power_sgd_sends_the_mean_or_the_sum_whole_in_its_first_steps(average):
    for error, between in run_ranks(error_in_first_steps, 2, average):
        assert error < 1e-6
        assert between == 0.0


class OneMatrix:
    """A bucket with one gradient of 32 x 32."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.gradients_in(self.flat)

    def gradients_in(self, flat: Tensor) -> list[Tensor]:
        return [flat.view(WIDTH, WIDTH)]

    def names(self) -> list[str]:
        return ["weight"]


def test_power_sgd_continues_on_another_device_with_the_factors_of_a_checkpoint(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: None)
    state = PowerSGD(SimpleNamespace(size=lambda: 2), rank=2)
    with FakeTensorMode():  # refuses a product of tensors on two devices, without a GPU
        state.load_state_dict({"steps": 20, "factors": {"weight": torch.ones(WIDTH, 2)}, "errors": {}})
        *_, reduced = with_result(power_sgd_hook(state, OneMatrix(torch.zeros(WIDTH * WIDTH, device="meta"))))
    assert reduced.device.type == state.factors["weight"].device.type == "meta"


def with_result(steps):
    """Yield what a generator yields, then what it returns."""
    yield (yield from steps)


class Branches(nn.Module):
    """A branch for each rank, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(dist.get_world_size() + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[dist.get_rank()](x)


def gradients_of_branches() -> list[list[float] | None]:
    """Return the gradients of each branch's bias."""
    model = Branches()
    reducer = Reducer(list(model.named_parameters()), group=dist.group.WORLD)
    reducer.register_hook(dist.group.WORLD, average_hook)
    for _ in range(2):
        model.zero_grad()
        with reducer.session():
            model(batch(0)).mean(0).sum().backward()
    return [None if branch.bias.grad is None else branch.bias.grad.tolist() for branch in model.branches]


def test_a_hook_reduces_gradients_of_other_ranks_and_leaves_unused_parameters_without_one():
    assert run_ranks(gradients_of_branches, 2) == [[[0.5] * 4, [0.5] * 4, None]] * 2


def power_sgd_steps() -> tuple[float, float, float]:
    """Return the error of one compressed step and of the sum of 40, and the distance between ranks."""
    model, reducer = make()
    exact = backward(model, reducer, dist.get_rank())
    model, reducer = make()
    reducer.register_hook(PowerSGD(dist.group.WORLD, rank=2, start_step=1), power_sgd_hook)
    backward(model, reducer, dist.get_rank())
    gradients = [backward(model, reducer, dist.get_rank()) for _ in range(40)]
    mean = torch.stack(gradients).mean(0)
    once, in_sum = (((one - exact).norm() / exact.norm()).item() for one in (gradients[0], mean))
    return once, in_sum, distance_between_ranks(mean)


def test_power_sgd_corrects_its_errors_in_later_steps():
    for once, in_sum, between in run_ranks(power_sgd_steps, 2):
        assert 0.02 < once < 1.0, "rank 2 of 32 loses something"
        assert in_sum < once / 4
        assert between == 0.0


def gradients_after_overflow() -> Tensor:
    """Return the gradients of the third step, after one whose gradients are not finite on one rank."""
    model, reducer = make()
    choice = make_comm_hook("power_sgd", state=None, options={"rank": 2, "start_step": 0})
    reducer.register_hook(choice.state(dist.group.WORLD), choice.hook)
    for step, factor in enumerate((1.0, float("inf"), 1.0)):
        model.zero_grad()
        with reducer.session():
            (model(batch(step)).square().mean() * (factor if dist.get_rank() else 1.0)).backward()
        gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        assert gradients.isfinite().all() == (step != 1)
    return gradients


def test_a_step_that_is_not_finite_leaves_no_error_behind():
    assert all(gradients.isfinite().all() for gradients in run_ranks(gradients_after_overflow, 2))


def wrong_hooks() -> list[str]:
    messages = []
    for hook in (lambda state, bucket: bucket.buffer(), lambda state, bucket: None):
        model, reducer = make()
        reducer.register_hook(None, hook)
        with pytest.raises(RuntimeError) as raised:
            backward(model, reducer, 0)
        messages.append(str(raised.value))
        with pytest.raises(RuntimeError, match="already registered"):
            reducer.register_hook(None, hook)
    return messages


def test_a_hook_that_does_not_return_a_future_is_rejected():
    for messages in run_ranks(wrong_hooks, 2):
        assert "returned Tensor" in messages[0]
        assert "returned NoneType" in messages[1]
