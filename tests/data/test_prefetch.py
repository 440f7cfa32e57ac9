"""Step batches are copied to the device while the previous one is computed."""

import pytest
import torch

from tests.marks import on_gpu
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.data.prefetch import prefetched
from trainkit.tree import to_device


def step_batches(num_steps):
    for number in range(num_steps):
        made.append(number)
        batch = [torch.full((2,), float(number))]
        yield StepBatch([MicroBatch(batch, 2), MicroBatch(batch, 2)], 4, 4, number == num_steps - 1)


made = []


def test_on_the_cpu_step_batches_are_moved_one_by_one_as_they_are_needed():
    made.clear()
    moved = prefetched(
        step_batches(3),
        lambda batch: to_device(batch, torch.device("cpu"), dtype=torch.float64),
        device=torch.device("cpu"),
        pin_memory=True,
    )
    first = next(moved)
    assert made == [0]
    assert first.micro_batches[1].batch[0].dtype == torch.float64
    assert (first.num_samples, first.num_items, first.ends_epoch) == (4, 4, False)
    assert [step_batch.ends_epoch for step_batch in moved] == [False, True]


@on_gpu
@pytest.mark.parametrize("pin_memory", [True, False])
def test_on_cuda_every_step_batch_comes_once_in_order_and_one_is_read_ahead(pin_memory):
    made.clear()
    device = torch.device("cuda")
    moved = prefetched(step_batches(4), lambda batch: to_device(batch, device), device=device, pin_memory=pin_memory)
    seen = []
    for step_batch in moved:
        assert len(made) == min(len(seen) + 2, 4)
        seen.append([float(micro_batch.batch[0].sum()) / 2 for micro_batch in step_batch.micro_batches])
        assert step_batch.micro_batches[0].batch[0].is_cuda
    assert seen == [[n, n] for n in range(4)]
