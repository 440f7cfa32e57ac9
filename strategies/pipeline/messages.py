"""Tensors on their way between the ranks of a pipeline; nothing waits for a send."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .no_gradient import is_no_gradient, no_gradient

HEADER_TAG = 1 << 28


@dataclass(slots=True)
class Parcel:
    """A tensor that another rank sends, or has sent."""

    tensor: Tensor | None
    """In host memory: the ranks of a pipeline talk through gloo."""
    work: dist.Work | None
    local: deque[Tensor | None] | None
    """Where the tensor comes from, if this very rank sends it."""
    device: torch.device

    def open(self, what: str) -> Tensor:
        """Return the tensor once it is here; `what` is named in the error if it does not come."""
        tensor = self._awaited(what)
        assert tensor is not None
        return tensor.to(self.device)

    def open_gradient(self, what: str) -> Tensor | None:
        """Return the gradient once it is here, or `None` for word that there is none."""
        tensor = self._awaited(what)
        if tensor is None or (self.local is None and tensor.numel() and is_no_gradient(tensor)):
            return None
        return tensor.to(self.device)

    def _awaited(self, what: str) -> Tensor | None:
        if self.local is not None:
            return self.local.popleft()
        assert self.tensor is not None
        if self.work is not None:
            _wait(self.work, f"waited in vain for {what}")
        return self.tensor


class Messages:
    """Point-to-point messages within one pipeline, by rank in it and tag; messages of one tag keep their order."""

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, device: torch.device):
        self._group = group
        self._rank = rank
        self._device = device
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        self._local: dict[int, deque[Tensor | None]] = defaultdict(deque)

    def send(self, tensor: Tensor, *, to: int, tag: int) -> None:
        """Start sending; the tensor is kept until it has left."""
        if to == self._rank:
            self._local[tag].append(tensor)
            return
        if tensor.numel() == 0:
            return
        tensor = tensor.cpu().contiguous()
        work = dist.isend(tensor, group=self._group, group_dst=to, tag=tag)
        if work is not None:
            self._under_way.append((work, tensor))
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def send_gradient(self, gradient: Tensor | None, *, of: Tensor, to: int, tag: int) -> None:
        """Start sending the gradient of a tensor, or word that there is none."""
        if gradient is None and to == self._rank:
            self._local[tag].append(None)
            return
        self.send(no_gradient(of) if gradient is None else gradient, to=to, tag=tag)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype, *, source: int, tag: int) -> Parcel:
        """Return the parcel that rank `source` sends with `tag`; receiving goes on in the background."""
        if source == self._rank:
            return Parcel(None, None, self._local[tag], self._device)
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel() == 0:
            return Parcel(tensor, None, None, self._device)
        work = dist.irecv(tensor, group=self._group, group_src=source, tag=tag)
        return Parcel(tensor, work, None, self._device)

    def send_header(self, header: Any, *, to: int, tag: int) -> None:
        """Start sending a small object."""
        content = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        self.send(torch.tensor([content.numel()]), to=to, tag=HEADER_TAG + 2 * tag)
        self.send(content, to=to, tag=HEADER_TAG + 2 * tag + 1)

    def receive_header(self, *, source: int, tag: int, what: str) -> Any:
        """Return the object that rank `source` sends with `tag`."""
        size = self.expect((1,), torch.int64, source=source, tag=HEADER_TAG + 2 * tag).open(what)
        parcel = self.expect((int(size),), torch.uint8, source=source, tag=HEADER_TAG + 2 * tag + 1)
        return pickle.loads(parcel.open(what).cpu().numpy().tobytes())

    def finish(self) -> None:
        """Return when everything sent has left."""
        while self._under_way:
            work, tensor = self._under_way.popleft()
            _wait(work, f"could not send a tensor of shape {tuple(tensor.shape)}")


def _wait(work: dist.Work, what: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()} {what}: {error}") from error
