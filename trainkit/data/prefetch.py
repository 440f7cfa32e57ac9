"""Copying the next window to the device while the present one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.tree import map_tensors, tensors_in

Move = Callable[[Any], Any]


def prefetched(
    windows: Iterator[StepBatch], move: Move, *, device: torch.device, pin_memory: bool
) -> Iterator[StepBatch]:
    """Yield windows moved by `move`; on CUDA one window ahead, on a stream of its own and from pinned memory."""
    if device.type == "cuda":
        return _one_ahead(windows, move, device=device, pin_memory=pin_memory)
    return (_moved(window, move) for window in windows)


def _one_ahead(
    windows: Iterator[StepBatch], move: Move, *, device: torch.device, pin_memory: bool
) -> Iterator[StepBatch]:
    side = torch.cuda.Stream(device)

    def copy(window: StepBatch) -> StepBatch:
        if pin_memory:
            window = _moved(window, _pinned)
        with torch.cuda.stream(side):
            return _moved(window, move)

    ahead = next(windows, None)
    ahead = copy(ahead) if ahead is not None else None
    while ahead is not None:
        main = torch.cuda.current_stream(device)
        main.wait_stream(side)
        for micro_batch in ahead.micro_batches:
            for tensor in tensors_in(micro_batch.batch):
                # The allocator must not hand this memory to the side stream while the main one still reads it.
                tensor.record_stream(main)
        present, following = ahead, next(windows, None)
        ahead = copy(following) if following is not None else None
        yield present


def _moved(window: StepBatch, move: Move) -> StepBatch:
    micro_batches = [MicroBatch(move(item.batch), item.num_samples) for item in window.micro_batches]
    return StepBatch(micro_batches, window.num_samples, window.num_items, window.ends_epoch)


def _pinned(batch: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory())
