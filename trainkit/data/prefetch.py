"""Copying the next window to the device while the present one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.tree import map_tensors, tensors_in

Move = Callable[[Any], Any]


def prefetched(
    step_batches: Iterator[StepBatch], move: Move, *, device: torch.device, pin_memory: bool
) -> Iterator[StepBatch]:
    """Yield windows moved by `move`; on CUDA one window ahead, on a stream of its own and from pinned memory."""
    if device.type == "cuda":
        return _one_ahead(step_batches, move, device=device, pin_memory=pin_memory)
    return (_moved(step_batch, move) for step_batch in step_batches)


def _one_ahead(
    step_batches: Iterator[StepBatch], move: Move, *, device: torch.device, pin_memory: bool
) -> Iterator[StepBatch]:
    side = torch.cuda.Stream(device)

    def copy(step_batch: StepBatch) -> StepBatch:
        if pin_memory:
            step_batch = _moved(step_batch, _pinned)
        with torch.cuda.stream(side):
            return _moved(step_batch, move)

    ahead = next(step_batches, None)
    ahead = copy(ahead) if ahead is not None else None
    while ahead is not None:
        main = torch.cuda.current_stream(device)
        main.wait_stream(side)
        for micro_batch in ahead.micro_batches:
            for tensor in tensors_in(micro_batch.batch):
                # The allocator must not hand this memory to the side stream while the main one still reads it.
                tensor.record_stream(main)
        present, following = ahead, next(step_batches, None)
        ahead = copy(following) if following is not None else None
        yield present


def _moved(step_batch: StepBatch, move: Move) -> StepBatch:
    micro_batches = [MicroBatch(move(item.batch), item.num_samples) for item in step_batch.micro_batches]
    return StepBatch(micro_batches, step_batch.num_samples, step_batch.num_items, step_batch.ends_epoch)


def _pinned(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory())
