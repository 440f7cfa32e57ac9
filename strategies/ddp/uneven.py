"""What a rank does that has run out of batches while others go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from trainkit.distributed.collectives import broadcast

if TYPE_CHECKING:
    from .module import DistributedDataParallel


class Shadow(JoinHook):
    """Takes the place of the forwards and backwards of a rank that has run out of batches."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.wrapper = wrapper

    def main_hook(self) -> None:
        """Answer each collective of the others' forward and backward, with zeros where values are asked for."""
        wrapper = self.wrapper
        counts = torch.zeros(2, device=wrapper.join_device)  # ranks that will reduce, ranks with a batch
        dist.all_reduce(counts, group=wrapper.process_group)
        if not counts[0].item():
            return
        if wrapper.forward_sync_buffers and wrapper.buffers_to_share():
            source = wrapper.common_rank(-1)
            broadcast(wrapper.buffers_to_share(), wrapper.process_group, source=source)
        with _gradients_kept(wrapper.reducer.parameters):
            wrapper.reducer.reduce_nothing()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave on every rank the state of one that had batches to the end."""
        wrapper = self.wrapper
        source = wrapper.common_rank(wrapper.process_group.rank() if is_last_joiner else -1)
        broadcast(wrapper.whole_state(), wrapper.process_group, source=source)
        wrapper.note_equal_buffers(equal=False)  # all ranks alike, whichever forward was their last


@contextmanager
def _gradients_kept(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Leave the gradients as they were: nobody asked for those of the others, or will set them to zero."""
    before = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
