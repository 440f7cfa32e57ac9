"""Waits of the library that a strategy's weights may not show: prefetched batches, copies, snapshots."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from trainkit.strategies.transports.host_copy import StreamHostCopier

from trainkit.checkpoint.background_save import CpuSnapshot
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.data.prefetch import prefetched
from trainkit.tree import to_device

if "pretended_torch" not in sys.modules:
    pytest.skip("`make test-gpu-pretended` runs it", allow_module_level=True)

import pretended_torch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def _prefetched(make, *, steps=6, pin_memory=True):
    batches = (StepBatch([MicroBatch(make(step), 4)], 4, 4, False) for step in range(steps))
    return prefetched(batches, partial(to_device, device=CUDA), device=CUDA, pin_memory=pin_memory)


@pytest.mark.parametrize("pin_memory", [True, False])
def test_every_prefetched_batch_is_read_whole(pin_memory):
    totals = []
    for step_batch in _prefetched(lambda step: torch.full((256,), step + 1.0), pin_memory=pin_memory):
        totals.append(step_batch.micro_batches[0].batch.sum())
        del step_batch
    assert torch.stack(totals).tolist() == [256.0 * (step + 1) for step in range(6)]


def test_batches_are_copied_from_pinned_memory_on_a_stream_of_their_own():
    seen = []

    def move(batch):
        seen.append((batch.is_pinned(), torch.cuda.current_stream() != torch.cuda.default_stream()))
        return to_device(batch, CUDA)

    batches = (StepBatch([MicroBatch(torch.ones(8), 4)], 4, 4, False) for _ in range(3))
    assert len(list(prefetched(batches, move, device=CUDA, pin_memory=True))) == 3
    assert seen == [(True, True)] * 3


def test_the_host_does_not_wait_for_prefetched_batches():
    batches = _prefetched(lambda step: torch.full((256,), 1.0))
    before = pretended_torch.syncs()
    for step_batch in batches:
        step_batch.micro_batches[0].batch.mul_(2)
    assert pretended_torch.syncs() == before


def test_a_batch_that_is_no_longer_read_is_not_overwritten_while_the_compute_stream_lags():
    kept = []
    for step_batch in _prefetched(lambda step: torch.full((256,), step + 1.0), steps=8):
        batch = step_batch.micro_batches[0].batch
        kept.append(batch * 1)
        del batch, step_batch
        # The copies of later batches go first, as where the compute stream has much to do.
        torch.cuda.Event().query()
    assert [values.mean().item() for values in kept] == [float(step + 1) for step in range(8)]


def test_copies_to_the_host_and_back_wait_for_what_fills_them():
    copier = StreamHostCopier(CUDA)
    for value in (1.0, 2.0):
        source, host = torch.full((512,), value, device=CUDA), copier.empty(512, torch.float32)
        assert host.is_pinned()  # or a copy would wait for the device
        copied = copier.to_host(source, host, after=copier.mark())
        source.mul_(1)
        copied.synchronize()
        assert host.eq(value).all()
        back = torch.empty(512, device=CUDA)
        torch.cuda.current_stream().wait_event(copier.to_device(host + 1, back))
        assert back.eq(value + 1).all().item()
    copier.close()


def test_copies_do_not_make_the_host_wait():
    copier = StreamHostCopier(CUDA)
    source, host = torch.ones(512, device=CUDA), copier.empty(512, torch.float32)
    before = pretended_torch.syncs()
    copier.to_host(source, host, after=copier.mark())
    copier.to_device(host, source)
    assert pretended_torch.syncs() == before
    copier.close()


def test_a_copier_that_closes_has_read_the_memory_it_unpins():
    copier, memory = StreamHostCopier(CUDA), torch.ones(512)
    copier.pin(memory)
    target = torch.empty(512, device=CUDA)
    end = copier.to_device(memory, target)
    copier.close()
    memory.fill_(float("nan"))
    torch.cuda.current_stream().wait_event(end)
    assert target.eq(1).all().item()


def test_a_snapshot_holds_the_values_of_its_moment():
    snapshot, weight = CpuSnapshot(), torch.zeros(4096, device=CUDA)
    for step in range(4):
        weight.add_(1)
        taken = snapshot.take({"weight": weight})["weight"]
        assert taken.eq(step + 1).all() and taken.is_pinned()
        weight.mul_(1)
    snapshot.close()
