"""Prefetching: the next step batch is copied to the device while the current one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.tree import map_tensors, tensors_in


def prefetched(
    step_batches: Iterator[StepBatch], move: Callable[[Any], Any], *, device: torch.device, pin_memory: bool
) -> Iterator[StepBatch]:
    """Yield step batches moved by `move`; on CUDA one ahead, from pinned memory on a separate CUDA stream."""
    if device.type != "cuda":
        for step_batch in step_batches:
            yield _moved(step_batch, move)
        return
    copy_stream = torch.cuda.Stream(device)

    def copied(step_batch: StepBatch | None) -> StepBatch | None:
        if step_batch is None:
            return None
        # A copy from memory that is not pinned would make the host wait for it.
        if pin_memory:
            step_batch = _moved(step_batch, _pinned)
        with torch.cuda.stream(copy_stream):
            return _moved(step_batch, move)

    ahead = copied(next(step_batches, None))
    while ahead is not None:
        compute_stream = torch.cuda.current_stream(device)
        # The device waits for the copy, not the host.
        compute_stream.wait_stream(copy_stream)
        for micro_batch in ahead.micro_batches:
            for tensor in tensors_in(micro_batch.batch):
                # The allocator must not reuse this memory for a copy while the compute stream still reads it.
                tensor.record_stream(compute_stream)
        # The next copy starts before the current batch is computed, so that both overlap.
        current, ahead = ahead, copied(next(step_batches, None))
        yield current


def _moved(step_batch: StepBatch, move: Callable[[Any], Any]) -> StepBatch:
    micro_batches = [MicroBatch(move(item.batch), item.num_samples) for item in step_batch.micro_batches]
    return replace(step_batch, micro_batches=micro_batches)


def _pinned(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory())
