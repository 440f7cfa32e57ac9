"""Prefetching: the next step batch is copied to the device while the current one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import current_stream, has_streams, pin
from trainkit.tree import map_tensors


def prefetched(
    step_batches: Iterator[StepBatch], move: Callable[[Any], Any], *, device: torch.device, pin_memory: bool
) -> Iterator[StepBatch]:
    """Yield step batches moved by `move`; on a GPU one ahead, from pinned memory on a separate stream."""
    if not has_streams(device):
        for step_batch in step_batches:
            yield _moved(step_batch, move)
        return
    copy_stream = torch.Stream(device)

    def copied(step_batch: StepBatch | None) -> tuple[StepBatch, StepBatch] | None:
        """Return the batch on the device, and what is copied to it."""
        if step_batch is None:
            return None
        # A copy from memory that is not pinned would make the host wait for it.
        source = _moved(step_batch, lambda batch: map_tensors(batch, pin)) if pin_memory else step_batch
        # A dataset may make tensors on the training stream; and copies take the memory of dropped batches, which that
        # stream may still read. So it needs no record of what a batch of any type holds.
        copy_stream.wait_stream(current_stream(device))
        with copy_stream:
            return _moved(source, move), source

    ahead = copied(next(step_batches, None))
    while ahead is not None:
        # The device waits for the copy, not the host.
        current_stream(device).wait_stream(copy_stream)
        # The source was kept until here: the training stream may use its memory from now on.
        current, _ = ahead
        # The next copy starts before the current batch is computed, so that both overlap.
        ahead = copied(next(step_batches, None))
        yield current


def _moved(step_batch: StepBatch, move: Callable[[Any], Any]) -> StepBatch:
    micro_batches = [MicroBatch(move(item.batch), item.num_samples) for item in step_batch.micro_batches]
    return replace(step_batch, micro_batches=micro_batches)
