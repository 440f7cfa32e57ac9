"""Facts of the Reducer as strategies use it: sums over ranks, with the backward marked by a session."""

from __future__ import annotations

import copy
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from trainkit.strategies.ddp.comm_hooks import average_hook
from trainkit.strategies.reducer.bucket_plan import MIB
from trainkit.strategies.reducer.reducer import Reducer, ReducerSettings
from trainkit.strategies.reducer.reductions import BucketReductions
from trainkit.strategies.reducer.unused_parameters import unreached_parameters
from trainkit.strategies.transports.selection import open_transport

from trainkit.testing import run_ranks

SMALL_BUCKET = 300 / MIB


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](torch.relu(self.stem(x)))


def batch(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def make(**settings: object) -> tuple[nn.Module, nn.Module, Reducer]:
    torch.manual_seed(0)
    model = Branches()
    options = ReducerSettings(
        **{"average": False, "bucket_cap_mb": SMALL_BUCKET, "first_bucket_cap_mb": SMALL_BUCKET, **settings}
    )
    return (
        model,
        copy.deepcopy(model),
        Reducer(list(model.named_parameters()), group=dist.group.WORLD, settings=options),
    )


def gap(model: nn.Module, reference: nn.Module) -> float:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs if b.grad is not None)


def sums_are_left_in_views_of_the_buckets() -> None:
    model, reference, reducer = make()
    for _ in range(3):
        model.zero_grad()
        with reducer.session():
            model(batch(dist.get_rank()), 0).sum().backward()
    for rank in range(dist.get_world_size()):
        reference(batch(rank), 0).sum().backward()
    assert gap(model, reference) < 1e-5
    used = [entry for entry in reducer.entries if entry.parameter.grad is not None]
    assert len(used) == 4, "parameters that no rank used have no gradient"
    for entry in used:
        flat = entry.bucket.flat
        assert entry.parameter.grad is entry.view
        assert flat.data_ptr() <= entry.view.data_ptr() < flat.data_ptr() + flat.nbytes, "one set of gradients"
    reducer.close()


def a_second_session_adds_to_the_first() -> None:
    model, reference, reducer = make()
    for branch in (0, 1):
        with reducer.session():
            model(batch(dist.get_rank()), branch).sum().backward()
    with reducer.no_sync():
        model(batch(dist.get_rank()), 2).sum().backward()
    with reducer.session():
        model(batch(dist.get_rank()), 0).sum().backward()
    for rank in range(dist.get_world_size()):
        for branch in (0, 1, 2, 0):
            reference(batch(rank), branch).sum().backward()
    assert gap(model, reference) < 2e-5
    reducer.close()


def a_backward_outside_a_session_stays_on_its_rank() -> None:
    model, reference, reducer = make()
    for _ in range(3):
        if dist.get_rank() == 0:
            model(batch(7), 1).sum().backward()
        model.zero_grad()
        with reducer.session():
            model(batch(dist.get_rank()), 0).sum().backward()
    assert reducer.step == 3
    for rank in range(dist.get_world_size()):
        reference(batch(rank), 0).sum().backward()
    assert gap(model, reference) < 1e-5
    reducer.close()


def the_first_reduction_takes_along_what_was_only_added_up() -> None:
    model, reference, reducer = make()
    with reducer.no_sync():
        model(batch(dist.get_rank()), 2).sum().backward()
    with reducer.session():
        model(batch(dist.get_rank()), 0).sum().backward()
    for rank in range(dist.get_world_size()):
        for branch in (2, 0):
            reference(batch(rank), branch).sum().backward()
    assert gap(model, reference) < 1e-5
    reducer.close()


def buckets_are_rebuilt_in_rank_0s_order_of_arrival() -> None:
    model, _, reducer = make()
    assert reducer.plan.draw().startswith("[7 6"), "reverse order, before anything is known"
    with reducer.session():
        model(batch(0), dist.get_rank() % 3).sum().backward()  # each rank another branch
    plans: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, reducer.plan.draw())
    assert len(set(plans)) == 1, plans
    seen = [i for bucket in reducer.plan.buckets for i in bucket.parameters]
    assert set(seen[:4]) == {0, 1, 2, 3}, "rank 0 has seen the stem and branch 0"
    assert set(seen[4:]) == {4, 5, 6, 7}
    reducer.close()


def ranks_may_have_different_unused_parameters(find_unused: str) -> None:
    model, reference, reducer = make(find_unused_parameters=find_unused)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(4):
        model.zero_grad()
        with reducer.session():
            loss = model(batch(rank), (step + rank) % 2).sum()
            if find_unused == "graph":
                reducer.mark_unused(unreached_parameters([loss], reducer.parameters))
            loss.backward()
    for other in range(world_size):
        reference(batch(other), (3 + other) % 2).sum().backward()
    assert gap(model, reference) < 1e-5
    assert model.branches[2].weight.grad is None
    all_in_backward = all(bucket.launched_at < reducer.backward_ended_at for bucket in reducer.buckets)
    assert all_in_backward == (find_unused == "graph"), "what is found beforehand holds up no bucket"
    reducer.close()


def a_gradient_that_nobody_adds_to_stays_as_it_is(average: bool) -> None:
    model, _, reducer = make(average=average)
    with reducer.session():
        model(batch(dist.get_rank()), 2).sum().backward()
    kept = model.branches[2].weight.grad.clone()
    for _ in range(2):
        with reducer.session():
            model(batch(dist.get_rank()), 0).sum().backward()
    assert torch.equal(model.branches[2].weight.grad, kept)
    reducer.close()


def a_rank_without_samples_adds_zeros() -> None:
    model, reference, reducer = make()
    for _ in range(3):
        model.zero_grad()
        if dist.get_rank() == 0:
            with reducer.session():
                model(batch(0), 0).sum().backward()
        else:
            reducer.reduce_zeros()
    reference(batch(0), 0).sum().backward()
    assert gap(model, reference) == 0.0
    reducer.close()


class Table(nn.Module):
    """A table with sparse gradients, which not every rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 2)


def a_sparse_gradient_that_only_the_last_rank_has_reaches_all(average: bool, with_hook: bool) -> None:
    torch.manual_seed(0)
    model, world_size = Table(), dist.get_world_size()
    reducer = Reducer(list(model.named_parameters()), group=dist.group.WORLD, settings=ReducerSettings(average=average))
    if with_hook:  # which sparse gradients bypass
        reducer.register_hook(dist.group.WORLD, average_hook)
    is_last = dist.get_rank() == world_size - 1
    for _ in range(2):
        model.zero_grad()
        with reducer.session():
            rows = model.table(torch.tensor([[1, 1, 7]])) if is_last else torch.ones(1, 4)
            model.head(rows).sum().backward()
    share = 1 / world_size if average else 1.0
    sums = share * model.head.weight.detach().sum(0)  # what each looked-up row gets
    assert torch.allclose(model.table.weight.grad.to_dense()[[1, 7]], torch.stack([2 * sums, sums]))
    assert torch.allclose(model.head.bias.grad, torch.full((2,), share * world_size))
    kept = model.table.weight.grad.to_dense()
    with reducer.session():
        model.head(torch.ones(1, 4)).sum().backward()
    assert torch.equal(model.table.weight.grad.to_dense(), kept), "nobody has added to it"
    reducer.close()


def a_static_graph_learns_what_is_used() -> None:
    model, reference, reducer = make(static_graph=True)
    for _ in range(3):
        model.zero_grad()
        with reducer.session():
            model(batch(dist.get_rank()), 1).sum().backward()
    assert [entry.expected for entry in reducer.entries] == [1, 1, 0, 0, 1, 1, 0, 0]
    for rank in range(dist.get_world_size()):
        reference(batch(rank), 1).sum().backward()
    assert gap(model, reference) < 1e-5
    model.zero_grad()
    expected = pytest.raises(RuntimeError, match=r"'branches\.0\.(bias|weight)'.*0 expected")
    with expected, reducer.session():
        model(batch(dist.get_rank()), 0).sum().backward()
    reducer.close()


def a_static_graph_may_differ_by_rank() -> None:
    model, reference, reducer = make(static_graph=True)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(3):
        model.zero_grad()
        with reducer.session():
            model(batch(rank), rank % 2).sum().backward()
    for other in range(world_size):
        reference(batch(other), other % 2).sum().backward()
    assert gap(model, reference) < 1e-5
    assert model.branches[2].weight.grad is None
    used = ("stem", *(f"branches.{other % 2}" for other in range(world_size)))
    sent = [bucket.launched_at > reducer.began_at for bucket in reducer.buckets]
    assert sent == [bucket.entries[0].name.startswith(used) for bucket in reducer.buckets], "nothing else is sent"
    reducer.close()


def buckets_are_gone_on_with_while_backward_runs(transport: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    settings = ReducerSettings(average=False, bucket_cap_mb=200 / MIB)  # one for each layer
    opened = partial(open_transport, name=transport)
    reducer = Reducer(list(layers.named_parameters()), group=dist.group.WORLD, settings=settings, open_transport=opened)
    completed: list[int] = []
    in_backward: list[int] = []
    reducer.after_bucket = lambda bucket: completed.append(bucket.index)

    def wait_for_launched(gradient: Tensor) -> None:
        in_backward.append(len(completed))
        for bucket in reducer.buckets:
            while bucket.reduction is not None and not bucket.is_done():
                reducer.transport.progress()
                time.sleep(1e-3)

    for _ in range(2):
        completed.clear()
        with reducer.session():
            x = batch(dist.get_rank())
            for layer in layers:
                x = layer(x)
                x.register_hook(wait_for_launched)
            x.sum().backward()
        assert completed == list(range(len(reducer.buckets))), "each once, in their order"
    assert len(reducer.buckets) == 4
    assert in_backward[:4] == [0] * 4, "the first backward is reduced at its end"
    assert in_backward[-1] >= 2, "before the gradients of the first layer are computed"
    *others, last = range(dist.get_world_size())
    store = dist.distributed_c10d._get_default_store()

    def wait_for_the_others(gradient: Tensor) -> None:
        store.wait([f"{transport}: backward of rank {rank} has ended" for rank in others])

    with reducer.session():
        outputs = layers(batch(dist.get_rank()))
        if others and dist.get_rank() == last:
            outputs.register_hook(wait_for_the_others)  # for ever, if their backwards waited for this one
        outputs.sum().backward()
        store.set(f"{transport}: backward of rank {dist.get_rank()} has ended", "")
    reducer.close()


def the_end_of_a_reduction_is_noted_though_nobody_waits_for_it_yet(transport: str) -> None:
    if dist.get_world_size() == 1:
        return
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    settings = ReducerSettings(average=False, bucket_cap_mb=200 / MIB)  # one for each layer
    opened = partial(open_transport, name=transport)
    reducer = Reducer(list(layers.named_parameters()), group=dist.group.WORLD, settings=settings, open_transport=opened)
    reducer.after_step.append(lambda _: None)  # somebody wants to know the times
    moments: list[float] = []

    def see_launched_end(gradient: Tensor) -> None:
        while any(bucket.reduction is not None and not bucket.is_done() for bucket in reducer.buckets):
            reducer.transport.progress()
            time.sleep(1e-3)
        time.sleep(0.02)
        moments.append(time.perf_counter())

    for _ in range(2):
        with reducer.session():
            x = layers[0](batch(dist.get_rank()))
            x.register_hook(see_launched_end)
            layers[1:](x).sum().backward()
    earlier = [bucket for bucket in reducer.buckets if bucket.launched_at < moments[-1]]
    assert len(earlier) == 3, "the last layer's, and those before it"
    assert all(bucket.launched_at <= bucket.finished_at < moments[-1] for bucket in earlier)
    reducer.close()


def the_norm_is_that_of_all_gradients() -> None:
    model, _, reducer = make(bucket_cap_mb=100 / MIB)
    for _ in range(2):
        model.zero_grad()
        with reducer.session():
            model(batch(dist.get_rank()), 0).sum().backward()
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    expected = torch.cat([gradient.reshape(-1) for gradient in gradients]).norm().item()
    assert reducer.gradient_norm().item() == pytest.approx(expected, rel=1e-6)
    assert len({id(entry.bucket) for entry in reducer.entries if entry.parameter.grad is not None}) > 1
    reducer.close()


def an_exception_before_any_reduction_leaves_no_session() -> None:
    model, reference, reducer = make()
    for attempt in range(2):
        with pytest.raises(KeyError), reducer.session():
            raise KeyError(attempt)
        assert not reducer.is_open
        model.zero_grad()
        with reducer.session():
            model(batch(dist.get_rank()), 0).sum().backward()
    for rank in range(dist.get_world_size()):
        reference(batch(rank), 0).sum().backward()
    assert gap(model, reference) < 1e-5
    reducer.close()


FACTS = [
    sums_are_left_in_views_of_the_buckets,
    a_second_session_adds_to_the_first,
    a_backward_outside_a_session_stays_on_its_rank,
    the_first_reduction_takes_along_what_was_only_added_up,
    buckets_are_rebuilt_in_rank_0s_order_of_arrival,
    a_rank_without_samples_adds_zeros,
    the_norm_is_that_of_all_gradients,
    an_exception_before_any_reduction_leaves_no_session,
    a_static_graph_learns_what_is_used,
    a_static_graph_may_differ_by_rank,
]


def all_facts() -> None:
    for fact in FACTS:
        fact()
    for average in (True, False):
        a_gradient_that_nobody_adds_to_stays_as_it_is(average)
        for with_hook in (False, True):
            a_sparse_gradient_that_only_the_last_rank_has_reaches_all(average, with_hook)
    for find_unused in ("auto", "graph"):
        ranks_may_have_different_unused_parameters(find_unused)
    for transport in ("auto", "process_group"):
        buckets_are_gone_on_with_while_backward_runs(transport)
        the_end_of_a_reduction_is_noted_though_nobody_waits_for_it_yet(transport)


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_facts_of_the_reducer(num_ranks):
    run_ranks(all_facts, num_ranks)


def test_the_flags_beside_a_hook_are_known_once_the_hook_has_ended():
    collective = SimpleNamespace(device=torch.device("cpu"), group=SimpleNamespace(size=lambda: 2))
    reductions, flat, flags = BucketReductions(ReducerSettings(), collective), torch.ones(3), Mock()
    reductions.register_hook(None, average_hook)
    pending = SimpleNamespace(advance=lambda: True, result=flat)
    reductions.run_hooks([SimpleNamespace(pending_hook=pending, flat=flat, flags=flags)])
    flags.wait.assert_called_once()
