"""The drop-in against PyTorch's own DistributedDataParallel, and against one process where that one fails."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.nn.modules.module import _global_parameter_registration_hooks
from torch.nn.parallel import DistributedDataParallel as StockDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.utils.checkpoint import checkpoint
from trainkit.strategies.ddp import DistributedDataParallel
from trainkit.strategies.ddp.comm_hooks import average_hook

from tests.strategies.ddp.models import Checkpointed, SparseEmbedding
from trainkit.testing import run_ranks

STEPS = 8

# ---- Small models in which gradients arrive in every way that a Reducer must cope with


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class ConvBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        ).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        images = x.repeat(1, 8).view(-1, 1, 8, 8)
        return self.head(self.body(images).mean((2, 3)))


class TiedGpt(nn.Module):
    """Token embedding shared with the output layer, one attention block."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.abs() * 10).long() % 11  # (batch, 8)
        return self.head(self.block(self.tokens(ids))).mean(1)


class Branches(nn.Module):
    """Branches of which the first element of the input selects one; the last is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[int(x[0, 0].abs() * 10) % 3](torch.relu(self.stem(x)))


class TwoTypes(nn.Module):
    """float32 and float64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).double()).float()


@dataclass(frozen=True)
class Case:
    """A model, and how both implementations wrap it."""

    make: Callable[[], nn.Module]
    arguments: dict[str, Any]
    autocast: bool = False
    micro_batches: int = 1


CASES: dict[str, Case] = {
    "mlp": Case(Mlp, {}),
    "mlp, views": Case(Mlp, {"gradient_as_bucket_view": True}),
    "conv": Case(ConvBatchNorm, {}),
    "gpt": Case(TiedGpt, {}),
    "gpt, views, static": Case(TiedGpt, {"gradient_as_bucket_view": True, "static_graph": True}),
    "sparse": Case(lambda: SparseEmbedding(4), {}),
    "unused": Case(Branches, {"find_unused_parameters": True}),
    "unused, views": Case(Branches, {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "unused, no_sync": Case(Branches, {"find_unused_parameters": True}, micro_batches=3),
    "checkpoint": Case(lambda: Checkpointed(4, reentrant=False), {}),
    "checkpoint, reentrant": Case(lambda: Checkpointed(4, reentrant=True), {}),
    "checkpoint twice, static": Case(lambda: Checkpointed(4, reentrant=True, repeats=3), {"static_graph": True}),
    "two types": Case(TwoTypes, {}),
    "no_sync": Case(Mlp, {"gradient_as_bucket_view": True}, micro_batches=3),
    "no_sync, copies": Case(Mlp, {}, micro_batches=3),
    "sparse, no_sync": Case(lambda: SparseEmbedding(4), {}, micro_batches=2),
    "mixed precision": Case(Mlp, {}, autocast=True),
}


def train(wrapped: nn.Module, *, case: Case, rank: int, steps: int, seed: int = 0) -> None:
    """Train with momentum; every rank draws its own batches."""
    optimizer = torch.optim.SGD(
        wrapped.parameters(), lr=0.05, momentum=0.0 if isinstance(wrapped.module, SparseEmbedding) else 0.9
    )
    generator = torch.Generator().manual_seed(100 * seed + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(case.micro_batches):
            x = torch.randn(4, 8, generator=generator)
            if micro_batch < case.micro_batches - 1:
                with wrapped.no_sync():
                    backward(wrapped, x, case)
            else:
                backward(wrapped, x, case)
        optimizer.step()


def backward(wrapped: nn.Module, x: Tensor, case: Case) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        loss = wrapped(x).float().square().mean()
    loss.backward()


# ---- Weights against stock


def differences(transports: list[str]) -> dict[str, tuple[float, float]]:
    """Train each case with both; return the largest difference to stock, and between ranks, of any weight."""
    found, rank = {}, dist.get_rank()
    for name, case in CASES.items():
        torch.manual_seed(0)
        stock = case.make()
        models = {transport: copy.deepcopy(stock) for transport in transports}
        train(StockDDP(stock, bucket_cap_mb=0.001, **case.arguments), case=case, rank=rank, steps=STEPS)
        for transport, ours in models.items():
            wrapped = DistributedDataParallel(ours, bucket_cap_mb=0.001, transport=transport, **case.arguments)
            train(wrapped, case=case, rank=rank, steps=STEPS)
            pairs = zip(ours.state_dict().values(), stock.state_dict().values(), strict=True)
            to_stock = max((a - b).abs().max().item() for a, b in pairs if a.is_floating_point())
            found[f"{name}, {transport}"] = (to_stock, distance_between_ranks(ours))
    return found


def distance_between_ranks(module: nn.Module) -> float:
    flat = torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return max((other - flat).abs().max().item() for other in others)


def test_weights_after_8_steps_are_those_of_stock_ddp_bit_for_bit_on_two_ranks():
    for rank in run_ranks(differences, 2, ["process_group", "shared_memory"]):
        assert len(rank) == 2 * len(CASES)
        assert rank == dict.fromkeys(rank, (0.0, 0.0))


@pytest.mark.slow
def test_weights_after_8_steps_are_those_of_stock_ddp_on_three_ranks():
    for rank in run_ranks(differences, 3, ["auto"], timeout=150):
        assert len(rank) == len(CASES)
        for name, (to_stock, between_ranks) in rank.items():
            assert to_stock <= 1e-6, name
            assert between_ranks == 0.0, name


# ---- Facts, checked by name in one process group


def batch(rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def one_process_gradient(model: nn.Module, losses: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    """Return the mean over ranks of the gradient, computed here."""
    world_size = dist.get_world_size()
    for rank in range(world_size):
        (losses(model, batch(rank)) / world_size).backward()
    return [p.grad for p in model.parameters()]


def distance(module: nn.Module, expected: list[Tensor]) -> float:
    return max((p.grad - g).abs().max().item() for p, g in zip(module.parameters(), expected, strict=True))


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between the parameters of two models."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def wrapped_pair(**arguments: Any) -> tuple[DistributedDataParallel, nn.Module]:
    torch.manual_seed(0)
    model = Mlp()
    reference = copy.deepcopy(model)
    return DistributedDataParallel(model, bucket_cap_mb=0.001, **arguments), reference


def two_forwards_before_two_backwards(views: bool) -> float:
    wrapped, reference = wrapped_pair(gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad()
        x = batch(dist.get_rank())
        first, second = wrapped(x).square().mean(), wrapped(2 * x).abs().mean()
        first.backward()
        second.backward()
    return distance(wrapped, one_process_gradient(reference, lambda m, x: m(x).square().mean() + m(2 * x).abs().mean()))


def two_backwards_of_a_retained_graph(views: bool) -> float:
    wrapped, reference = wrapped_pair(gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad()
        loss = wrapped(batch(dist.get_rank())).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    return distance(wrapped, one_process_gradient(reference, lambda m, x: 2 * m(x).square().mean()))


class EndsInCheckpoint(nn.Module):
    """The first gradients arrive in the inner backward of a reentrant checkpoint, whose end is not the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.stem(x), use_reentrant=True)


def two_backwards_of_a_retained_graph_that_ends_in_a_checkpoint(views: bool) -> float:
    torch.manual_seed(0)
    model = EndsInCheckpoint()
    reference = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=0.0001)
    for step in range(3):
        wrapped.zero_grad()
        loss = wrapped(batch(dist.get_rank())).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        assert wrapped.reducer.step == 2 * step + 2
    return distance(wrapped, one_process_gradient(reference, lambda m, x: 2 * m(x).square().mean()))


def a_gradient_penalty(views: bool) -> float:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return outputs.square().mean() + slope.square().mean()

    wrapped, reference = wrapped_pair(gradient_as_bucket_view=views)
    for _ in range(2):
        wrapped.zero_grad()
        loss(wrapped, batch(dist.get_rank())).backward()
    expected = [torch.zeros_like(p) for p in reference.parameters()]
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in wrapped.parameters()]
    for rank in range(dist.get_world_size()):
        reference.zero_grad()
        loss(reference, batch(rank)).backward()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in reference.parameters()]
        expected = [total + g / dist.get_world_size() for total, g in zip(expected, gradients, strict=True)]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def gradients_left_in_place_are_added_to(views: bool) -> float:
    wrapped, reference = wrapped_pair(gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped(batch(dist.get_rank())).square().mean().backward()
    return distance(wrapped, one_process_gradient(reference, lambda m, x: 3 * m(x).square().mean()))


def zeroed_gradients_are_reduced_in_place(views: bool) -> float:
    wrapped, reference = wrapped_pair(gradient_as_bucket_view=views)
    for _ in range(3):
        wrapped.zero_grad(set_to_none=False)
        wrapped(batch(dist.get_rank())).square().mean().backward()
    return distance(wrapped, one_process_gradient(reference, lambda m, x: m(x).square().mean()))


def a_backward_in_no_sync_is_reduced_since_its_forward_came_before(views: bool) -> float:
    wrapped, reference = wrapped_pair(gradient_as_bucket_view=views)
    for step in range(2):
        wrapped.zero_grad()
        loss = wrapped(batch(dist.get_rank())).square().mean()
        with wrapped.no_sync():
            loss.backward()
        assert wrapped.reducer.step == 2 * step + 1
        wrapped(batch(dist.get_rank())).abs().mean().backward()
    return distance(wrapped, one_process_gradient(reference, lambda m, x: m(x).square().mean() + m(x).abs().mean()))


def gradients_of_inputs_alone_are_not_reduced(views: bool) -> float:
    torch.manual_seed(0)
    # One bucket for each parameter: the first is complete before any gradient, where its branch is unused.
    wrapped = DistributedDataParallel(
        Branches(), find_unused_parameters=True, gradient_as_bucket_view=views, bucket_cap_mb=0.0001
    )
    error = 0.0
    for step in range(3):
        wrapped(torch.full((4, 8), 0.15)).sum().backward()
        before = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
        inputs = torch.full((4, 8), 0.05).requires_grad_()  # through another branch
        torch.autograd.grad(wrapped(inputs).sum(), inputs)
        assert wrapped.reducer.step == step + 1
        after = [p.grad for p in wrapped.parameters() if p.grad is not None]
        error = max(error, *((a - b).abs().max().item() for a, b in zip(after, before, strict=True)))
    return error


def an_exception_ends_no_sync(views: bool) -> float:
    wrapped, reference = wrapped_pair(gradient_as_bucket_view=views)
    with pytest.raises(KeyError), wrapped.no_sync():
        raise KeyError("in the session")
    assert wrapped.require_backward_grad_sync
    wrapped(batch(dist.get_rank())).square().mean().backward()
    return distance(wrapped, one_process_gradient(reference, lambda m, x: m(x).square().mean()))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


class FailsInTheMiddle(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.failing = model, False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model:
            x = Fails.apply(layer(x)) if self.failing and layer is self.model[1] else layer(x)
        return x


def an_exception_in_backward_before_any_reduction_is_forgotten(views: bool) -> float:
    torch.manual_seed(0)
    reference = Mlp()
    wrapped = DistributedDataParallel(FailsInTheMiddle(copy.deepcopy(reference)), gradient_as_bucket_view=views)
    for step in range(2):  # before the buckets are made, and after
        wrapped.module.failing = True
        with pytest.raises(ArithmeticError):
            wrapped(batch(dist.get_rank())).square().mean().backward()
        with pytest.raises(RuntimeError, match="no backward completed"):
            wrapped._check_reducer_finalized()
        assert not wrapped.reducer.is_open
        wrapped.module.failing = False
        if dist.get_rank() == 0:  # alone: a backward of the module itself is not reduced
            wrapped.module(batch(0)).sum().backward()
        assert wrapped.reducer.step == step
        wrapped.zero_grad()
        wrapped(batch(dist.get_rank())).square().mean().backward()
        wrapped._check_reducer_finalized()
    return distance(wrapped, one_process_gradient(reference, lambda m, x: m(x).square().mean()))


FACTS = [
    two_forwards_before_two_backwards,
    two_backwards_of_a_retained_graph,
    two_backwards_of_a_retained_graph_that_ends_in_a_checkpoint,
    a_gradient_penalty,
    gradients_left_in_place_are_added_to,
    zeroed_gradients_are_reduced_in_place,
    a_backward_in_no_sync_is_reduced_since_its_forward_came_before,
    gradients_of_inputs_alone_are_not_reduced,
    an_exception_ends_no_sync,
    an_exception_in_backward_before_any_reduction_is_forgotten,
]


def all_facts() -> dict[str, float]:
    return {f"{fact.__name__} {views}": fact(views) for fact in FACTS for views in (False, True)}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_process_also_where_stock_ddp_diverges(num_ranks):
    for rank in run_ranks(all_facts, num_ranks):
        for name, error in rank.items():
            assert error < 1e-6, name


# ---- Backwards that count


def weights_with_backwards_of_the_module(arguments: dict[str, Any]) -> float:
    """Return the difference to stock DDP where rank 0 alone runs backwards of the module itself, as Grad-CAM does."""
    torch.manual_seed(0)
    start = Mlp()
    trained = []
    for wrap in (DistributedDataParallel, StockDDP):
        model = copy.deepcopy(start)
        wrapped = wrap(model, **arguments)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for step in range(4):
            for zeroed in (True, False):  # and the gradients of the module's own backward are averaged too
                if dist.get_rank() == 0:
                    wrapped.module(batch(50 + step)).abs().sum().backward()
                if zeroed:
                    optimizer.zero_grad()
                wrapped(batch(10 * step + dist.get_rank())).square().mean().backward()
                optimizer.step()
        assert distance_between_ranks(model) == 0.0
        trained.append(model)
    return apart(*trained)


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_a_backward_of_the_module_itself_on_one_rank_is_not_reduced(arguments):
    assert run_ranks(weights_with_backwards_of_the_module, 2, arguments) == [0.0, 0.0]


def grown_after_the_wrapper() -> list[str]:
    """Return the messages of forwards after a layer was added: frozen, then trained."""
    found = []
    for is_trained in (False, True):
        wrapped, _ = wrapped_pair()
        wrapped(batch(0)).sum().backward()
        wrapped.module.extra = nn.Linear(4, 4).requires_grad_(is_trained)
        try:
            wrapped(batch(0))
        except RuntimeError as error:
            found.append(str(error))
    del wrapped
    gc.collect()
    assert not _global_parameter_registration_hooks
    return found


def test_a_trained_parameter_that_is_added_to_the_module_is_refused_by_name():
    for found in run_ranks(grown_after_the_wrapper, 2):
        (message,) = found
        assert message.startswith("the parameter extra.weight was added or replaced after the module was wrapped")


def called_with_other_parameters() -> list[float]:
    """Return the difference to stock DDP of calls with other parameters: first of all, and after a layer was made."""
    found, start = [], Mlp()
    for makes_layer in (False, True):
        outputs = []
        for wrap in (DistributedDataParallel, StockDDP):
            wrapped = wrap(copy.deepcopy(start))
            if makes_layer:
                wrapped(batch(0)).sum().backward()
                nn.Linear(1, 1)
            others = {name: nn.Parameter(value + 1.0) for name, value in wrapped.named_parameters()}
            outputs.append(torch.func.functional_call(wrapped, others, (batch(0),)).detach())
        found.append((outputs[0] - outputs[1]).abs().max().item())
    return found


def test_a_functional_call_with_other_parameters_is_that_of_stock():
    assert run_ranks(called_with_other_parameters, 2) == [[0.0, 0.0]] * 2


def grown_in_a_frozen_layer() -> str:
    """Return the message of a forward after a layer was added that got a trained parameter later."""
    wrapped, _ = wrapped_pair()
    wrapped(batch(0)).sum().backward()
    wrapped.module.extra = nn.Sequential()
    wrapped(batch(0)).sum().backward()
    wrapped.module.extra.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError) as caught:
        wrapped(batch(0))
    return str(caught.value)


def test_a_parameter_of_a_module_that_was_added_before_is_refused_by_name():
    for message in run_ranks(grown_in_a_frozen_layer, 2):
        assert message.startswith("the parameter extra.weight was added or replaced after the module was wrapped")


def gradients_by_place(views: bool) -> dict[str, float]:
    """Return the difference to stock DDP with forward and backward inside and outside of `no_sync`."""
    found = {}
    for forward_inside in (False, True):
        for backward_inside in (False, True):
            torch.manual_seed(0)
            gradients = []
            start = Mlp()
            for wrap in (DistributedDataParallel, StockDDP):
                wrapped = wrap(copy.deepcopy(start), gradient_as_bucket_view=views)
                for _ in range(3):
                    with wrapped.no_sync() if forward_inside else nullcontext():
                        loss = wrapped(batch(dist.get_rank())).square().mean()
                    with wrapped.no_sync() if backward_inside else nullcontext():
                        loss.backward()
                gradients.append([p.grad.clone() for p in wrapped.parameters()])
            pairs = zip(*gradients, strict=True)
            found[f"{forward_inside} {backward_inside}"] = max((a - b).abs().max().item() for a, b in pairs)
    return found


@pytest.mark.parametrize("views", [False, True])
def test_the_place_of_the_forward_decides_if_gradients_are_reduced_as_in_stock_ddp(views):
    for rank in run_ranks(gradients_by_place, 2, views):
        assert set(rank.values()) == {0.0}, rank


# ---- The interface


def upstream_hooks() -> dict[str, float]:
    found = {}
    for name in ("allreduce_hook", "fp16_compress_hook", "ALLREDUCE", "FP16_COMPRESS"):
        torch.manual_seed(0)
        ours = Mlp()
        stock = copy.deepcopy(ours)
        for wrapped in (DistributedDataParallel(ours), StockDDP(stock)):
            if name.isupper():
                kind = getattr(dist.BuiltinCommHookType, name)
                wrapped._register_builtin_comm_hook(kind)
                assert wrapped._get_ddp_logging_data()["comm_hook"] == str(kind)
            else:
                wrapped.register_comm_hook(dist.group.WORLD, getattr(default_hooks, name))
            train(wrapped, case=CASES["mlp"], rank=dist.get_rank(), steps=5)
        found[name] = apart(ours, stock)
    return found


def test_pytorchs_own_communication_hooks_and_built_in_ones_give_the_same_weights():
    for rank in run_ranks(upstream_hooks, 2):
        assert len(rank) == 4 and rank == dict.fromkeys(rank, 0.0)


def states_of_both() -> list[list[str]]:
    found = []
    for wrap in (DistributedDataParallel, StockDDP):
        torch.manual_seed(0)
        wrapped = wrap(Mlp())
        assert isinstance(wrapped, StockDDP)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        wrapped(batch(0)).sum().backward()
        optimizer.step()
        state = get_model_state_dict(wrapped)
        found.append([*state, *get_optimizer_state_dict(wrapped, optimizer)["state"]])
        plain = Mlp()
        plain.load_state_dict(state)
        set_model_state_dict(wrapped, Mlp().state_dict())
    return found


def test_distributed_checkpoints_have_the_keys_of_stock_ddp_and_of_the_module():
    ((ours, stock),) = run_ranks(states_of_both, 1)
    assert ours == stock
    assert "0.weight" in ours and not any(name.startswith("module.") for name in ours)


def attributes_of_both() -> None:
    ours, stock = DistributedDataParallel(Mlp()), StockDDP(Mlp())
    names = (
        "device",
        "device_type",
        "device_ids",
        "require_backward_grad_sync",
        "require_forward_param_sync",
        "mixed_precision",
        "bucket_bytes_cap",
        "broadcast_buffers",
        "bucket_bytes_cap_list",  # not in torch 2.8
        "join_device",
        "join_process_group",
    )
    known = [name for name in names if hasattr(stock, name)]
    assert len(known) >= len(names) - 1
    for name in known:
        assert getattr(ours, name) == getattr(stock, name), name
    for wrapped in (ours, stock):
        wrapped(batch(0))
        assert wrapped.require_forward_param_sync
        with wrapped.no_sync():
            assert not wrapped.require_backward_grad_sync
            wrapped(batch(0))
        assert wrapped.require_backward_grad_sync and not wrapped.require_forward_param_sync
    sized = DistributedDataParallel(Mlp(), bucket_cap_mb_list=[0.0001, 0.001])
    for step in range(2):
        sized(batch(step)).sum().backward()
    assert sized.bucket_bytes_cap_list == [104, 1048]
    sizes = [int(size) for size in sized._get_ddp_logging_data()["bucket_sizes"].split(", ")]
    assert len(sizes) == 3 and sizes[0] < 1048 <= sizes[1], sizes
    with pytest.raises(ValueError, match="bucket_cap_mb_list must be above 0"):
        DistributedDataParallel(Mlp(), bucket_cap_mb_list=[1, 0])
    alone = DistributedDataParallel(Mlp(), process_group=dist.new_group([0]))
    with pytest.raises(RuntimeError, match="default process group"):
        copy.deepcopy(alone)


def test_attributes_are_those_of_stock_ddp():
    run_ranks(attributes_of_both, 1)


def with_buffer_hook(location: _BufferCommHookLocation, futures: bool) -> tuple[list[float], list[float]]:
    """Return the buffer after each of three steps in which the hook sums it over ranks, of ours and of stock."""

    def hook(state: object, buffers: dict[str, Tensor]) -> list[Any] | None:
        works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers.values()]
        if futures:
            return [work.get_future() for work in works]
        for work in works:
            work.wait()
        return None

    found = []
    for wrap in (DistributedDataParallel, StockDDP):
        model = nn.Linear(8, 4)
        model.register_buffer("count", torch.zeros(()))
        wrapped = wrap(model)
        wrapped._register_buffer_comm_hook(None, hook, location)
        seen = []
        for index in range(3):
            model.count.fill_(10.0**index * (1 + dist.get_rank()))
            wrapped(batch(index)).sum().backward()
            seen.append(model.count.item())
        found.append(seen)
    return found[0], found[1]


@pytest.mark.parametrize("location", _BufferCommHookLocation)
@pytest.mark.parametrize("futures", [False, True])
def test_a_buffer_hook_replaces_the_broadcast_as_in_stock_ddp(location, futures):
    for ours, stock in run_ranks(with_buffer_hook, 2, location, futures):
        assert ours == stock == [3.0, 30.0, 300.0]


def logging_data_of_both() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what both log after each of 13 steps, the later ones sampled every second time."""
    wrapped = [wrap(Mlp(), bucket_cap_mb=0.001) for wrap in (DistributedDataParallel, StockDDP)]
    found = []
    for one in wrapped:
        one._set_ddp_runtime_logging_sample_rate(2)
    for step in range(13):
        for one in wrapped:
            one.zero_grad()
            one(batch(step)).square().mean().backward()
        found.append((wrapped[0]._get_ddp_logging_data(), wrapped[1]._get_ddp_logging_data()))
    return found


def test_logging_data_has_settings_buckets_and_times_of_sampled_steps():
    for rank in run_ranks(logging_data_of_both, 2):
        assert [ours["iteration"] for ours, _ in rank] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 12]
        ours, stock = rank[-1]
        same = ("world_size", "rank", "module_name", "backend_name", "dtypes", "num_parameter_tensors", "device_ids")
        for name in (*same, "total_parameter_size_bytes", "bucket_cap_bytes", "output_device", "broadcast_buffers"):
            assert ours[name] == stock[name], name
        for name in ("has_rebuilt_buckets", "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices"):
            assert ours[name] == stock[name], name
        assert ours["prev_iteration_grad_ready_order_indices"] == stock["prev_iteration_grad_ready_order_indices"]
        times = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
        for name in (*times, "backward_compute_comm_overlap_time"):
            assert name in stock and f"avg_{name}" in stock
            assert (ours[name] > 0 and ours[f"avg_{name}"] > 0) or name.endswith("overlap_time")
        assert ours["backward_compute_comm_overlap_time"] <= ours["backward_comm_time"]
        arrivals = list(ours["gradient_arrival_times"].values())
        assert arrivals == sorted(arrivals) and arrivals[0] > 0
        assert len(arrivals) == 6


class TurnsAround(nn.Module):
    """Uses its two layers in one order in the first step, and in the other one in all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        layers = (self.first, self.second) if self.steps == 1 else (self.second, self.first)
        return layers[1](layers[0](x))


def buckets_of_a_model_that_turns_around() -> tuple[str, str, list[str]]:
    wrapped = DistributedDataParallel(TurnsAround(), bucket_cap_mb=0.0002)
    for step in range(3):
        wrapped(batch(step)).sum().backward()
    data = wrapped._get_ddp_logging_data()
    return (
        data["rebuilt_per_bucket_param_indices"],
        data["ideal_bucket_param_indices"],
        wrapped.timeline.ideal_buckets(),
    )


def test_the_ideal_buckets_follow_the_arrival_of_gradients():
    for real, ideal, names in run_ranks(buckets_of_a_model_that_turns_around, 2):
        assert {frozenset(bucket.split()) for bucket in real.split(", ")} == {frozenset("23"), frozenset("01")}
        assert real.split(", ")[0] in ("2 3", "3 2") and ideal.split(", ")[0] in ("0 1", "1 0")
        assert {name.split(".")[0] for name in names[0]} == {"first"}


def joined(divide_by_initial: bool) -> tuple[float, float]:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    stock = copy.deepcopy(ours)
    rank = dist.get_rank()
    for wrapped in (DistributedDataParallel(ours), StockDDP(stock)):
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        with wrapped.join(divide_by_initial_world_size=divide_by_initial):
            for index in range(3 + 2 * rank):
                optimizer.zero_grad()
                wrapped(batch(10 * rank + index)).square().mean().backward()
                optimizer.step()
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (ours, stock)]
    pairs = zip(
        [*ours.state_dict().values(), *gradients[0]], [*stock.state_dict().values(), *gradients[1]], strict=True
    )
    return max((a - b).abs().max().item() for a, b in pairs), distance_between_ranks(ours)


@pytest.mark.parametrize("divide_by_initial", [True, False])
def test_ranks_with_fewer_batches_join_as_in_stock_ddp(divide_by_initial):
    for to_stock, between in run_ranks(joined, 2, divide_by_initial):
        assert to_stock < 1e-6
        assert between == 0.0


def with_hooks(name: str) -> tuple[float, float]:
    """Train with an all_reduce as the hook, and with none; return the differences of weights to stock."""
    torch.manual_seed(0)
    rank, found = dist.get_rank(), []
    for hook in (None, default_hooks.allreduce_hook):
        start = SparseEmbedding(4) if name == "sparse" else Mlp()
        ours, stock = copy.deepcopy(start), copy.deepcopy(start)
        for wrapped in (DistributedDataParallel(ours), StockDDP(stock)):
            if hook is not None:
                wrapped.register_comm_hook(dist.group.WORLD, hook)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            with wrapped.join(enable=name == "join"):
                for index in range(3 + (rank if name == "join" else 0)):
                    optimizer.zero_grad()
                    wrapped(batch(10 * rank + index)).square().mean().backward()
                    optimizer.step()
        found.append(apart(ours, stock))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["sparse", "join"])
def test_gradients_are_divided_once_with_a_hook(name):
    for without, with_hook in run_ranks(with_hooks, 2, name):
        assert without < 1e-6
        assert with_hook < 1e-6


def annotated(**annotations: Any) -> Callable[..., Any]:
    def hook(state, bucket):
        raise NotImplementedError

    hook.__annotations__ = annotations  # not as text, which stock DDP does not read
    return hook


def errors_of_hooks_and_time_limits() -> tuple[list[tuple[str, str]], list[float]]:
    kinds = []
    for hook in (annotated(bucket=Tensor), annotated(**{"return": Tensor}), annotated(), average_hook):
        found = []
        for wrapped in (DistributedDataParallel(Mlp()), StockDDP(Mlp())):
            try:
                wrapped.register_comm_hook(dist.group.WORLD, hook)
            except (ValueError, TypeError) as error:
                found.append(f"{type(error).__name__}: {str(error).split(',')[0].rstrip('.')}")
            else:
                found.append("accepted")
        kinds.append(tuple(found))
    quick = dist.new_group(timeout=timedelta(seconds=33))
    limits = [DistributedDataParallel(Mlp(), process_group=g).reducer.settings.timeout_seconds for g in (None, quick)]
    return kinds, limits


def test_wrong_hooks_are_rejected_as_by_stock_ddp_and_the_groups_timeout_is_used():
    ((wrong, result, bare, own), limits) = run_ranks(errors_of_hooks_and_time_limits, 1, timeout=555)[0]
    assert wrong[0].startswith("ValueError: Communication hook: bucket annotation") and wrong[0] == wrong[1]
    assert result[0].startswith("ValueError: Communication hook: return annotation") and result[0] == result[1]
    assert bare == ("accepted", "accepted")
    assert own[0] == "accepted", "built-in hooks are generators over our GradBucket"
    assert limits == [555, 33]


def buffers_in_each_forward(forwards: str) -> list[list[float]]:
    """Return the buffer after forwards in training (t), evaluation (e) or no_sync (n), before which it was changed."""
    found = []
    for wrap in (DistributedDataParallel, StockDDP):
        model = nn.Linear(4, 4)
        model.register_buffer("scale", torch.zeros(()))
        wrapped, seen = wrap(model), []
        for index, forward in enumerate(forwards):
            model.scale.fill_(10.0 * index + dist.get_rank())
            with torch.set_grad_enabled(forward != "e"), wrapped.no_sync() if forward == "n" else nullcontext():
                output = wrapped(torch.ones(1, 4))
                if forward != "e":
                    output.sum().backward()
            seen.append(model.scale.item())
        found.append(seen)
    return found


def test_buffers_are_broadcast_in_the_same_forwards_as_by_stock_ddp():
    for ours, stock in run_ranks(buffers_in_each_forward, 2, "tteetnnteet"):
        assert ours == stock


def untrained_differences() -> list[str]:
    messages = []
    for what in ("frozen", "buffer"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + (what == "frozen") * dist.get_rank()))
        model[1].requires_grad_(False)
        model.register_buffer("scale", torch.ones(1 + (what == "buffer") * dist.get_rank()))
        with pytest.raises(RuntimeError) as raised:
            DistributedDataParallel(model)
        messages.append(str(raised.value))
    return messages


def test_frozen_parameters_and_buffers_are_compared_before_the_broadcast():
    for frozen, buffer in run_ranks(untrained_differences, 2):
        assert "frozen parameter 0 is 1.weight (4, 4) torch.float32, frozen on rank 0, but 1.weight (5, 4)" in frozen
        assert "buffer 0 is scale (1,) torch.float32 on rank 0, but scale (2,)" in buffer


def interface() -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    wrapped = DistributedDataParallel(module)
    assert distance_between_ranks(module) == 0.0, "rank 0's weights are everybody's"
    assert all(name.startswith("module.") for name in wrapped.state_dict())
    assert wrapped.module is module
    wrapped(batch(rank)).sum().backward()
    with torch.no_grad():
        module[1].running_mean.fill_(rank)
    wrapped.eval()
    wrapped(batch(rank))
    assert module[1].running_mean.sum() == 0.0, "buffers are rank 0's in forward"

    file = io.BytesIO()
    torch.save(wrapped, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    for copied in (wrapped, again):
        copied.zero_grad()
        copied(batch(rank)).sum().backward()
    assert distance(again, [p.grad for p in wrapped.parameters()]) < 1e-6

    settings = {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 3,
        "transport": "process_group",
    }
    for arguments in (settings, {"static_graph": True, "forward_sync_buffers": False}):
        unusual = DistributedDataParallel(Mlp(), **arguments)
        file = io.BytesIO()
        torch.save(unusual, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert again.reducer.settings == unusual.reducer.settings
        assert again.forward_sync_buffers == unusual.forward_sync_buffers

    half = dist.new_group([rank])  # a process group of one: nothing is averaged with the others
    alone = DistributedDataParallel(Mlp(), process_group=half)
    alone(batch(rank)).sum().backward()

    ignoring = Mlp()
    ignoring._ddp_params_and_buffers_to_ignore = ["0.weight"]
    wrapped = DistributedDataParallel(ignoring)
    wrapped(batch(rank)).sum().backward()
    sums = [p.grad.sum().item() for p in ignoring.parameters()]
    others: list[Any] = [None, None]
    dist.all_gather_object(others, sums)
    assert others[0][0] != others[1][0] and others[0][1:] == others[1][1:]

    plain = Mlp()
    wrapped = DistributedDataParallel(plain)
    del wrapped
    gc.collect()
    plain(batch(rank)).sum().backward()  # no hook is left that would wait for the others
    sums = [p.grad.sum().item() for p in plain.parameters()]
    dist.all_gather_object(others, sums)
    assert others[0][0] != others[1][0], "each rank has its own gradient"

    with pytest.raises(RuntimeError, match="no parameter that requires a gradient"):
        DistributedDataParallel(nn.ReLU())
    with pytest.raises(ValueError, match="device_ids must be None"):
        DistributedDataParallel(Mlp(), device_ids=[0])
    with pytest.raises(TypeError, match="callable"):
        DistributedDataParallel(Mlp()).register_comm_hook(None, "fp16")


def test_the_interface_is_that_of_stock_ddp():
    run_ranks(interface, 2)


def mistakes() -> list[str]:
    messages = []
    unused = DistributedDataParallel(Branches())
    with pytest.raises(RuntimeError) as raised:
        unused(torch.full((4, 8), 0.05)).sum().backward()
    messages.append(str(raised.value))
    twice = DistributedDataParallel(Checkpointed(4, reentrant=True, repeats=2))
    with pytest.raises(RuntimeError) as raised:
        twice(batch(dist.get_rank())).sum().backward()
    messages.append(str(raised.value))
    with pytest.raises(RuntimeError) as raised:
        DistributedDataParallel(nn.Linear(8, 4 + dist.get_rank()))
    messages.append(str(raised.value))
    return messages


def test_mistakes_are_named_in_the_same_backward_on_every_rank():
    for unused, twice, different in run_ranks(mistakes, 2):
        assert "'branches.1.weight'" in unused and "find_unused_parameters=True" in unused
        assert "'block.0." in twice and "ready only once" in twice
        assert "parameter 0 is weight (4, 8) torch.float32 on rank 0, but weight (5, 8)" in different


# ---- Arguments


def refusals() -> list[str]:
    from torch.distributed.optim import _apply_optimizer_in_backward  # its import warns

    found = []
    for name in ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"):
        with pytest.raises(ValueError, match=f"{name} is not supported here; .*, or use PyTorch's own class") as raised:
            DistributedDataParallel(Mlp(), **{name: [1]})
        found.append(str(raised.value))
    wrapped = DistributedDataParallel(Mlp())
    for name in ("_update_process_group", "_set_sparse_metadata"):
        with pytest.raises(ValueError, match=f"{name} is not supported here; .*, or use PyTorch's own class"):
            getattr(wrapped, name)(None)
    model = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    wrapped = DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"_apply_optimizer_in_backward is not supported here: .*optimizer.step\(\)"):
        wrapped(batch(0))
    return found


def test_unsupported_arguments_are_rejected_with_advice():
    (found,) = run_ranks(refusals, 1)
    assert "torch.autocast" in found[0]


def buffers_of_ranks(arguments: dict[str, Any]) -> list[float]:
    """The buffer after construction, and after a forward before which it was made to differ."""
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.tensor(float(dist.get_rank())))
    wrapped = DistributedDataParallel(model, **arguments)
    first = model.scale.item()
    model.scale.fill_(10.0 + dist.get_rank())
    wrapped(torch.ones(1, 4)).sum().backward()
    return [first, model.scale.item()]


@pytest.mark.parametrize(
    ("arguments", "rank_1_has"),
    [
        ({}, [0, 10]),
        ({"forward_sync_buffers": False}, [0, 11]),
        ({"broadcast_buffers": False}, [1, 11]),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, [0, 10]),
    ],
)
def test_buffers_are_broadcast_at_construction_and_in_forwards_as_configured(arguments, rank_1_has):
    assert run_ranks(buffers_of_ranks, 2, arguments)[1] == rank_1_has
