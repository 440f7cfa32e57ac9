"""The pretended device itself: what is missing in a program gives wrong numbers, and nothing else does."""

from __future__ import annotations

import io
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainkit.testing import run_ranks

if "pretended_torch" not in sys.modules:
    pytest.skip("`make test-gpu-pretended` runs it", allow_module_level=True)

import pretended_torch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True, params=pretended_torch.POLICIES)
def policy(request):
    before = os.environ["TRAINKIT_PRETENDED_CUDA"].split(":")[1]
    pretended_torch.set_policy(request.param, seed=3)
    yield request.param
    pretended_torch.set_policy(before)


def test_a_stream_that_waits_for_another_sees_what_it_wrote():
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ones = torch.ones(100, device=CUDA)
    torch.cuda.current_stream().wait_stream(side)
    assert (ones + 1).sum().item() == 200


def test_a_missing_wait_gives_nan(policy):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ones = torch.ones(100, device=CUDA)
    assert ones.sum().isnan().item() == (policy == "late") or policy == "random"


def test_a_side_stream_that_does_not_wait_for_the_default_stream_reads_nan(policy):
    ones = torch.ones(100, device=CUDA)
    with torch.cuda.stream(torch.cuda.Stream()):
        total = ones.sum()
        found = total.isnan().item()
    assert found == (policy in ("late", "side_first")) or policy == "random"


@pytest.mark.parametrize("is_recorded", [True, False])
def test_memory_that_another_stream_reads_is_nan_once_it_is_freed_without_record_stream(policy, is_recorded):
    side = torch.cuda.Stream()
    ones = torch.ones(1000, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = ones.sum() if policy != "late" else (ones + 0).sum()
        if is_recorded:
            ones.record_stream(side)
    del ones
    if policy == "late":  # the default stream, which owns the memory, goes first
        torch.cuda.current_stream().synchronize()
    side.synchronize()
    is_sound = total.cpu().item() == 1000
    assert is_sound or not is_recorded
    if policy == "late":
        assert is_sound == is_recorded


def test_pinned_memory_is_read_when_the_copy_runs(policy):
    source = torch.ones(10).pin_memory()
    copied = source.to(CUDA, non_blocking=True)
    source.fill_(5)
    assert copied.sum().item() == (10 if policy == "in_order" else 50) or policy == "random"


def test_pinned_memory_that_is_freed_stays_until_the_copy_has_run():
    copied = torch.ones(10).pin_memory().to(CUDA, non_blocking=True)
    others = [torch.zeros(10).pin_memory() for _ in range(4)]
    assert copied.sum().item() == 10 and len(others) == 4


def test_a_copy_to_the_host_that_is_not_waited_for_is_nan(policy):
    found = torch.ones(10, device=CUDA).to("cpu", non_blocking=True)
    early = found.sum().item()
    torch.cuda.synchronize()
    assert found.sum().item() == 10
    assert early == 10 or policy != "in_order"
    assert early != 10 or policy not in ("late", "side_first")


def test_each_device_draws_from_its_own_generator_and_not_from_the_cpu():
    state = torch.get_rng_state()
    torch.cuda.manual_seed_all(7)
    first = [torch.rand(4, device=f"cuda:{index}").cpu() for index in range(torch.cuda.device_count())]
    saved = torch.cuda.get_rng_state(0)
    nn.functional.dropout(torch.ones(50, device=CUDA)).sum().item()
    one = torch.randn(4, device=CUDA)
    torch.cuda.set_rng_state(saved, 0)
    nn.functional.dropout(torch.ones(50, device=CUDA))
    assert torch.equal(torch.randn(4, device=CUDA), one)
    torch.cuda.manual_seed_all(7)
    for index, values in enumerate(first):  # as CUDA: a seed gives the same numbers on every device
        assert torch.equal(values, first[0])
        assert torch.equal(torch.rand(4, device=f"cuda:{index}").cpu(), values)
    assert torch.equal(torch.get_rng_state(), state)
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert torch.randperm(5, generator=generator, device=CUDA).sort().values.tolist() == list(range(5))


def test_a_state_is_saved_and_loaded_to_both_devices():
    model = nn.Linear(4, 4).to(CUDA)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "part": model.weight[1:]}, file)
    for device in ("cpu", "cuda:0"):
        file.seek(0)
        loaded = torch.load(file, map_location=device)
        assert loaded["part"].device == torch.device(device)
        assert torch.equal(loaded["part"].cpu(), model.weight[1:].cpu())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_cells_and_attention_have_the_values_of_the_cpu(kind):
    cell, x = kind(4, 4, batch_first=True), torch.randn(2, 3, 4)
    expected = nn.functional.scaled_dot_product_attention(*[cell(x)[0]] * 3, is_causal=True)
    expected.sum().backward()
    gradients = [parameter.grad.clone() for parameter in cell.parameters()]
    cell.zero_grad()
    cell.to(CUDA)
    found = nn.functional.scaled_dot_product_attention(*[cell(x.to(CUDA))[0]] * 3, is_causal=True)
    found.sum().backward()
    torch.testing.assert_close(found.cpu(), expected)
    for parameter, gradient in zip(cell.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient)


def test_tensors_of_two_devices_and_devices_that_are_not_there_are_errors():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=CUDA) + torch.ones(2)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:99")


def test_waits_of_the_host_are_counted_and_forbidden():
    ones, before = torch.ones(3, device=CUDA), pretended_torch.syncs()
    ones.sum().item()
    assert pretended_torch.syncs() == before + 1
    torch.cuda.set_sync_debug_mode("error")
    try:
        (ones * 2).div_(3)
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            ones.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams_and_events_of_any_accelerator_and_its_memory():
    assert torch.accelerator.current_accelerator().type == "cuda"
    stream = torch.Stream(device=CUDA)
    before = torch.accelerator.memory_allocated(0)
    with stream:
        ones = torch.ones(2000, device=CUDA)
        end = stream.record_event()
    torch.accelerator.current_stream().wait_event(end)
    assert ones.sum().item() == 2000
    assert torch.accelerator.memory_allocated(0) - before == torch.cuda.memory_allocated(0) - before == 8192


def test_out_of_memory_is_torchs_error():
    pretended_torch.device.set_memory_limit(1 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            torch.empty(1 << 20, device=CUDA)
    finally:
        pretended_torch.device.set_memory_limit(8 << 30)


# ---- Ranks


def _on_device(backend):
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return dist.new_group(backend=backend), device


def _collectives(backend):
    (group, device), rank = _on_device(backend), dist.get_rank()
    total = torch.full((4,), rank + 1.0, device=device)
    work = dist.all_reduce(total, group=group, async_op=True)
    early = total + 0
    work.wait()
    both = [torch.empty(2, device=device) for _ in range(2)]
    dist.all_gather(both, torch.full((2,), float(rank), device=device), group=group)
    from_one = torch.full((2,), float(rank), device=device)
    dist.broadcast(from_one, src=1, group=group)
    future = dist.all_reduce(torch.ones(2, device=device), group=group, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    return early.tolist(), total.tolist(), torch.cat(both).tolist(), from_one.tolist(), doubled.tolist()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_collectives_on_the_device(backend):
    for rank, (early, *found) in enumerate(run_ranks(_collectives, 2, backend, timeout=60)):
        assert found == [[3.0] * 4, [0.0, 0.0, 1.0, 1.0], [1.0] * 2, [4.0] * 2]
        # What does not wait for the work sees any part of it: none under late policies.
        assert set(early) <= {rank + 1.0, 3.0}


def _sent_in_a_ring():
    (group, device), rank = _on_device("nccl"), dist.get_rank()
    received = torch.empty(3, device=device)
    sent = torch.full((3,), float(rank), device=device)
    ends = [
        dist.P2POp(dist.isend, sent, 1 - rank, group=group),
        dist.P2POp(dist.irecv, received, 1 - rank, group=group),
    ]
    for work in dist.batch_isend_irecv(ends):
        work.wait()
    return received.tolist()


def test_a_batch_of_sends_and_receives_waits_for_none_of_them():
    assert run_ranks(_sent_in_a_ring, 2, timeout=60) == [[1.0] * 3, [0.0] * 3]


def _called(name):
    group, device = _on_device("nccl")
    tensor = torch.ones(3, device=device)
    if name == "late":
        pretended_torch.device.set_limit_seconds(0.5)
        if dist.get_rank() == 1:
            return time.sleep(2)
    if name == "different" and dist.get_rank() == 1:
        dist.broadcast(tensor, src=0, group=group)
    else:
        dist.all_reduce(tensor, group=group)
    return tensor.tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("different", "rank 0: #1 all_reduce .3. Float\n  rank 1: #1 broadcast from 0 .3. Float"),
        ("late", "rank 0 of 2 in nccl group .* has waited 0.5 s in #1 all_reduce .3. Float; rank 1 has not begun it"),
    ],
)
def test_ranks_that_call_different_collectives_are_told_who_waits_for_what(name, message):
    with pytest.raises(AssertionError, match=message):
        run_ranks(_called, 2, name, timeout=60)
