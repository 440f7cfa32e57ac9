"""Communication between the stages of one replica: tensors, missing gradients and step outputs."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.metrics.step_output import StepOutput

HEADER_TAG = 1 << 28


@dataclass(slots=True)
class PendingReceive:
    """A tensor that another rank sends, or has sent."""

    tensor: Tensor | None
    """In host memory: the ranks of a pipeline talk through gloo."""
    work: dist.Work | None
    local: deque[Tensor | None] | None
    """Source of the tensor if this rank itself sends it."""
    device: torch.device

    def open(self, what: str) -> Tensor:
        """Return the tensor once it is here; `what` is named in the error if it does not come."""
        tensor = self._awaited(what)
        assert tensor is not None
        return tensor.to(self.device)

    def open_gradient(self, what: str) -> Tensor | None:
        """Return the gradient once it is here, or `None` for word that there is none."""
        tensor = self._awaited(what)
        if tensor is None or (self.local is None and tensor.numel() and is_missing_gradient(tensor)):
            return None
        return tensor.to(self.device)

    def _awaited(self, what: str) -> Tensor | None:
        if self.local is not None:
            return self.local.popleft()
        assert self.tensor is not None
        if self.work is not None:
            _wait(self.work, f"waiting for {what}")
        return self.tensor


class StageChannel:
    """Point-to-point messages within one replica, by stage rank and tag; messages of one tag keep their order."""

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
        self.send(missing_gradient(of) if gradient is None else gradient, to=to, tag=tag)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype, *, source: int, tag: int) -> PendingReceive:
        """Return the pending receive of what rank `source` sends with `tag`; receiving goes on in the background."""
        if source == self._rank:
            return PendingReceive(None, None, self._local[tag], self._device)
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel() == 0:
            return PendingReceive(tensor, None, None, self._device)
        work = dist.irecv(tensor, group=self._group, group_src=source, tag=tag)
        return PendingReceive(tensor, work, None, self._device)

    def send_header(self, header: Any, *, to: int, tag: int) -> None:
        """Start sending a small object."""
        content = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        self.send(torch.tensor([content.numel()]), to=to, tag=HEADER_TAG + 2 * tag)
        self.send(content, to=to, tag=HEADER_TAG + 2 * tag + 1)

    def receive_header(self, *, source: int, tag: int, what: str) -> Any:
        """Return the object that rank `source` sends with `tag`."""
        size = self.expect((1,), torch.int64, source=source, tag=HEADER_TAG + 2 * tag).open(what)
        pending = self.expect((int(size),), torch.uint8, source=source, tag=HEADER_TAG + 2 * tag + 1)
        return pickle.loads(pending.open(what).cpu().numpy().tobytes())

    def finish(self) -> None:
        """Return when everything sent has left."""
        while self._under_way:
            work, tensor = self._under_way.popleft()
            _wait(work, f"sending a tensor of shape {tuple(tensor.shape)}")


def _wait(work: dist.Work, what: str) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        outcome = "timed out" if "imed out" in str(error) else "failed"
        raise RuntimeError(f"rank {dist.get_rank()} {outcome} {what}: {error}") from error


_BYTES = {1: [0x7D], 2: [0xD5, 0x7F], 4: [0x55, 0x55, 0xD5, 0x7F], 8: [0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0xFD, 0x7F]}


def missing_gradient(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory that stands for a missing gradient of `tensor`.

    A parameter with a gradient of zeros is moved by weight decay and momentum, one without is not. So all elements are
    one particular NaN, whose bits no computation leaves: what computes sets all of the lowest bits, or none of them.
    """
    pattern = torch.tensor(_pattern(tensor), dtype=torch.uint8)
    return pattern.repeat(tensor.numel()).view(tensor.dtype).view(tensor.shape)


def is_missing_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor in host memory stands for a missing gradient."""
    pattern = _pattern(tensor)
    flat = tensor.view(-1)
    if flat[:1].view(torch.uint8).tolist() != pattern:
        return False
    rows = flat.view(torch.uint8).view(-1, len(pattern))
    return bool((rows == torch.tensor(pattern, dtype=torch.uint8)).all())


def _pattern(tensor: Tensor) -> list[int]:
    size = tensor.element_size()
    return _BYTES.get(size) or _BYTES[8] * (size // 8)


_UNCHANGED, _CHANGED = 0.0, 1.0


@dataclass(slots=True)
class _OutputLayout:
    """Outputs without their numbers: what to fill numbers into."""

    outputs: list[StepOutput]

    def fill(self, numbers: list[Tensor]) -> list[StepOutput]:
        rest = iter(numbers)
        filled = []
        for output in self.outputs:
            loss = None if output.loss is None else next(rest).to(output.loss.dtype)
            weight = next(rest)
            metrics: dict[str, Tensor | float] = {}
            for name, kind in output.metrics.items():
                number = next(rest)
                metrics[name] = number.to(kind.dtype) if isinstance(kind, Tensor) else float(number)
            kept = weight.to(output.weight.dtype) if isinstance(output.weight, Tensor) else float(weight)
            filled.append(replace(output, loss=loss, weight=kept, metrics=metrics))
        return filled


class OutputBroadcast:
    """Broadcasts step outputs from one rank of a pipeline to the others.

    The numbers travel as one float64 tensor; names and types only when they change.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, device: torch.device):
        self._group = group
        self._rank = rank
        self._device = device
        self._layouts: dict[str, _OutputLayout] = {}
        self._sizes: dict[str, int] = {}

    def share(self, outputs: list[StepOutput] | None, *, source: int, kind: str) -> list[StepOutput]:
        """Return the outputs of rank `source`, which alone gives them; `kind` names a sequence of like outputs."""
        if self._group is None or self._group.size() == 1:
            assert outputs is not None
            return outputs
        if self._rank == source:
            assert outputs is not None
            self._send(outputs, source, kind)
            return outputs
        return self._receive(source, kind)

    def _send(self, outputs: list[StepOutput], source: int, kind: str) -> None:
        numbers = _numbers(outputs)
        layout = _OutputLayout([_blank(output) for output in outputs])
        known = self._layouts.get(kind)
        is_new = known is None or repr(known) != repr(layout)
        if known is None or not is_new:
            if known is not None:
                self._broadcast(torch.cat([torch.tensor([_UNCHANGED], dtype=torch.float64), numbers]), source)
        else:
            self._broadcast(torch.full((1 + self._sizes[kind],), _CHANGED, dtype=torch.float64), source)
        if is_new:
            dist.broadcast_object_list([(layout, numbers)], group=self._group, group_src=source)
            self._layouts[kind], self._sizes[kind] = layout, numbers.numel()

    def _receive(self, source: int, kind: str) -> list[StepOutput]:
        if kind in self._layouts:
            numbers = torch.empty(1 + self._sizes[kind], dtype=torch.float64)
            self._broadcast(numbers, source)
            if float(numbers[0]) == _UNCHANGED:
                return self._layouts[kind].fill(list(numbers[1:].to(self._device)))
        box: list[tuple[_OutputLayout, Tensor] | None] = [None]
        dist.broadcast_object_list(box, group=self._group, group_src=source)
        assert box[0] is not None
        layout, numbers = box[0]
        self._layouts[kind], self._sizes[kind] = layout, numbers.numel()
        return layout.fill(list(numbers.to(self._device)))

    def _broadcast(self, numbers: Tensor, source: int) -> None:
        dist.broadcast(numbers, group=self._group, group_src=source)


def _numbers(outputs: list[StepOutput]) -> Tensor:
    found: list[Tensor | float] = []
    for output in outputs:
        if output.loss is not None:
            found.append(output.loss)
        found += [output.weight, *output.metrics.values()]
    return (
        torch.stack([torch.as_tensor(number).detach().reshape(()).to("cpu", torch.float64) for number in found])
        if found
        else torch.zeros(0, dtype=torch.float64)
    )


def _blank(output: StepOutput) -> StepOutput:
    """Return the output with zeros for its numbers."""
    return replace(
        output,
        loss=None if output.loss is None else torch.zeros((), dtype=output.loss.dtype),
        weight=torch.zeros((), dtype=output.weight.dtype) if isinstance(output.weight, Tensor) else 0.0,
        metrics={
            name: torch.zeros((), dtype=value.dtype) if isinstance(value, Tensor) else 0.0
            for name, value in output.metrics.items()
        },
        objects=[counted._replace(metric=None) for counted in output.objects],
    )
