"""Communication between the stages of one replica: tensors, missing gradients and step outputs."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.devices import has_streams, pin, widest_float
from trainkit.metrics.step_output import StepOutput

from ...transports.host_copy import Event, open_host_copier
from ..plan.schedules import Action

# Above the tags of all values: a header or a flag must never be taken for a tensor between the same two ranks.
HEADER_TAG = 1 << 28
FLAG_TAG = 1 << 27


class Lane(NamedTuple):
    """A way of messages from one stage to another, in the order of the actions on both."""

    source: int
    destination: int
    kind: str
    """`FORWARD` for activations, `BACKWARD` for gradients."""
    ranks: tuple[int, int]
    """The stage ranks that send and receive."""


def lane_backend(configured: str, devices: Sequence[str]) -> str | None:
    """Return the backend of lanes; `None` if messages go through host memory.

    `configured` is the backend of all ranks, such as `cpu:gloo,cuda:nccl`, and `devices` the CUDA device of each. NCCL
    refuses ranks that share one.
    """
    return "nccl" if "nccl" in configured and len(set(devices)) == len(devices) else None


@dataclass(slots=True)
class PendingReceive:
    """A tensor that a rank sends, this one or another."""

    tensor: Tensor | None  # in host memory, as stages use gloo
    work: dist.Work | None
    local: deque[Tensor | None] | None  # source of the tensor if this rank itself sends it
    device: torch.device

    def open(self, what: str) -> Tensor:
        """Return the received tensor on the device; `what` names it in the error of a timeout."""
        tensor = self._wait_for(what)
        assert tensor is not None
        return tensor.to(self.device, non_blocking=True)  # pinned, as the copy would wait for the device otherwise

    def open_gradient(self, what: str) -> Tensor | None:
        """Return the received gradient on the device, or `None` if the other stage has none."""
        tensor = self._wait_for(what)
        # A rank that sends to itself passes `None`; the scan of the elements is for what came by a message.
        if tensor is None or (self.local is None and tensor.numel() and is_missing_gradient(tensor)):
            return None
        return tensor.to(self.device, non_blocking=True)

    def _wait_for(self, what: str) -> Tensor | None:
        if self.local is not None:
            return self.local.popleft()
        if self.work is not None:
            _wait(self.work.wait, f"waiting for {what}")
        return self.tensor


class StageChannel:
    """Point-to-point messages within one replica, by stage rank and tag; messages of one tag keep their order.

    On a CUDA device tensors are copied to pinned memory on a separate stream, and a thread sends them once they are
    there, in their order: neither a send nor a receive waits for the device.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, device: torch.device):
        self._group, self._rank, self._device = group, rank, device
        self._sending: list[_Sending] = []
        # A rank with several stages sends to itself through queues: `isend` refuses the rank of the caller.
        self._local: dict[int, deque[Tensor | None]] = defaultdict(deque)
        self._copier = open_host_copier(device)
        # One thread, as messages of one tag must start in the order of the calls of `send`.
        self._sender = ThreadPoolExecutor(max_workers=1) if has_streams(device) else None

    def send(self, tensor: Tensor, *, to: int, tag: int, user: Action | None = None, lane: Lane | None = None) -> None:
        """Start sending; the tensor stays in memory until `user`, the action that needs it, is known to have it.

        Without a user it stays until `finish`: gloo does not tell when a tensor is sent unless one waits for it.
        """
        if to == self._rank:
            self._local[tag].append(tensor)
            return
        # `expect` skips empty tensors too; a message from one side alone would be received as a later tensor.
        if tensor.numel() == 0:
            return
        start: Callable[[Tensor], Any] = partial(dist.isend, group=self._group, group_dst=to, tag=tag)
        tensor = tensor.contiguous()  # gloo sends one range of memory, without strides
        if self._sender is None:
            self._sending.append(_Sending(start(tensor).wait, tensor, to, user))
            return
        # Headers and flags are in host memory already, but take the thread as well, for their order.
        on_host, copied = tensor, None
        if tensor.device.type == self._device.type:
            on_host = self._copier.empty(tensor.numel(), tensor.dtype).view(tensor.shape)
            # The copy runs on another stream, and must wait for the kernels that make the tensor.
            copied = self._copier.to_host(tensor, on_host, after=self._copier.mark())
        started = self._sender.submit(_send_once_copied, start, tensor, on_host, copied)
        self._sending.append(_Sending(lambda: started.result().wait(), on_host, to, user))

    def release(self, *, to: int, begun: Collection[Action]) -> None:
        """Drop the tensors for actions of rank `to` that have begun: it has received them."""
        unreleased = []
        for sending in self._sending:
            if sending.to == to and sending.user in begun:
                sending.wait()  # does not block, as the receiver has the tensor; raises what went wrong
            else:
                unreleased.append(sending)
        self._sending = unreleased

    def send_gradient(
        self, gradient: Tensor | None, *, of: Tensor, to: int, tag: int, user: Action, lane: Lane | None = None
    ) -> None:
        """Start sending the gradient of a tensor, or the sign of a missing one."""
        if gradient is None and to == self._rank:
            self._local[tag].append(None)
            return
        self.send(missing_gradient(of) if gradient is None else gradient, to=to, tag=tag, user=user)

    def expect(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, source: int, tag: int, lane: Lane | None = None
    ) -> PendingReceive:
        """Start receiving in the background what rank `source` sends with `tag`, and return the pending receive."""
        # The queue, not its first item: a rank posts receives before it has made what it sends to itself.
        if source == self._rank:
            return PendingReceive(None, None, self._local[tag], self._device)
        tensor = torch.empty(shape, dtype=dtype, pin_memory=has_streams(self._device))
        if tensor.numel() == 0:
            return PendingReceive(tensor, None, None, self._device)
        work = dist.irecv(tensor, group=self._group, group_src=source, tag=tag)
        return PendingReceive(tensor, work, None, self._device)

    def expect_gradient(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, source: int, tag: int, lane: Lane | None = None
    ) -> PendingReceive:
        """Start receiving a gradient in the background, or the sign of a missing one."""
        return self.expect(shape, dtype, source=source, tag=tag, lane=lane)

    def send_header(self, header: Any, *, to: int, tag: int) -> None:
        """Start sending a small object."""
        # The receiver cannot know the size of an object, so it goes first. Bytes are copied, as `frombuffer` warns of
        # memory that is read-only.
        content = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        self.send(torch.tensor([content.numel()]), to=to, tag=HEADER_TAG + 2 * tag)
        self.send(content, to=to, tag=HEADER_TAG + 2 * tag + 1)

    def receive_header(self, *, source: int, tag: int, what: str) -> Any:
        """Return the object that rank `source` sends with `tag`."""
        size = self.expect((1,), torch.int64, source=source, tag=HEADER_TAG + 2 * tag).open(what)
        pending = self.expect((int(size),), torch.uint8, source=source, tag=HEADER_TAG + 2 * tag + 1)
        # From a rank of the same run, which could run any code anyway.
        return pickle.loads(pending.open(what).cpu().numpy().tobytes())

    def close(self) -> None:
        """End the thread, and finish copies; may be called twice."""
        if self._sender is not None:
            self._sender.shutdown(wait=False, cancel_futures=True)  # after an error a send may never end
        self._copier.close()

    def finish(self) -> None:
        """Wait until everything is sent."""
        while self._sending:
            self._sending.pop(0).wait()  # not a loop over the list: each tensor is freed once it is sent


class DeviceChannel(StageChannel):
    """A channel whose tensors stay on the device: each lane is a process group of two ranks, such as one of NCCL.

    NCCL has no tags, and its messages in one group wait for each other: both directions in one group could hang.
    Whether there is a gradient goes through host memory, so that nothing waits for the device. What has no lane, such
    as the messages of evaluations, goes as in `StageChannel`.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, rank: int, device: torch.device, lanes: Mapping[Lane, dist.ProcessGroup]
    ):
        super().__init__(group, rank=rank, device=device)
        self._lanes = lanes
        # NCCL connects two ranks at the first message of a lane, and the first of them waits for the other one. Here
        # all ranks meet in the order of `lanes`; the orders of the first step may differ, and would hang.
        for lane in lanes.values():
            dist.all_reduce(torch.zeros(1, device=device), group=lane)

    def send(self, tensor: Tensor, *, to: int, tag: int, user: Action | None = None, lane: Lane | None = None) -> None:
        if lane is None or lane not in self._lanes or tensor.numel() == 0:
            super().send(tensor, to=to, tag=tag, user=user)
            return
        tensor = tensor.contiguous()
        self._sending.append(_Sending(self._start(dist.isend, tensor, lane).wait, tensor, to, user))

    def send_gradient(
        self, gradient: Tensor | None, *, of: Tensor, to: int, tag: int, user: Action, lane: Lane | None = None
    ) -> None:
        if lane is None or lane not in self._lanes:
            super().send_gradient(gradient, of=of, to=to, tag=tag, user=user)
            return
        # The receiver cannot post a receive of NCCL that may find no sender: that would block its stream forever.
        super().send(torch.tensor([gradient is not None]), to=to, tag=FLAG_TAG + tag, user=user)
        if gradient is not None:
            self.send(gradient, to=to, tag=tag, user=user, lane=lane)

    def expect(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, source: int, tag: int, lane: Lane | None = None
    ) -> PendingReceive:
        # The same condition as in `send`, or one side would use NCCL and the other one gloo.
        if lane is None or lane not in self._lanes or 0 in shape:
            return super().expect(shape, dtype, source=source, tag=tag)
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        return PendingReceive(tensor, self._start(dist.irecv, tensor, lane), None, self._device)

    def expect_gradient(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, source: int, tag: int, lane: Lane | None = None
    ) -> PendingReceive:
        if lane is None or lane not in self._lanes:
            return super().expect_gradient(shape, dtype, source=source, tag=tag)
        flag = super().expect((1,), torch.bool, source=source, tag=FLAG_TAG + tag)
        receive = partial(self.expect, shape, dtype, source=source, tag=tag, lane=lane)
        return _PendingGradient(None, None, None, self._device, flag, receive)

    def _start(self, operation: Callable[..., Any], tensor: Tensor, lane: Lane) -> dist.Work:
        group = self._lanes[lane]
        # In a batch NCCL uses the communicator of the lane; a single send makes another one for the pair of ranks.
        # A lane has two ranks, so that the peer is the other one.
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=1 - group.rank())])
        return work


@dataclass(slots=True)
class _PendingGradient(PendingReceive):
    """A gradient of which a flag in host memory comes first, and which is received only if there is one."""

    flag: PendingReceive
    receive: Callable[[], PendingReceive]

    def open_gradient(self, what: str) -> Tensor | None:
        self.flag.device = torch.device("cpu")  # on the device `item` would wait for all kernels before it
        return self.receive().open(what) if self.flag.open(what).item() else None


@dataclass(frozen=True, slots=True)
class _Sending:
    """A tensor that is being sent to rank `to` for an action of it."""

    wait_for_work: Callable[[], object]
    tensor: Tensor
    to: int
    user: Action | None

    def wait(self) -> None:
        _wait(self.wait_for_work, f"sending a tensor of shape {tuple(self.tensor.shape)}")


def _send_once_copied(start: Callable[[Tensor], Any], tensor: Tensor, on_host: Tensor, copied: Event) -> Any:
    """Start to send the copy of a tensor, which stays in memory until it is copied."""
    if copied is not None:
        copied.synchronize()  # waits on the sender's thread; training goes on
    return start(on_host)


def _wait(wait_for_work: Callable[[], object], what: str) -> None:
    try:
        wait_for_work()
    except RuntimeError as error:
        # Backends write "Timed out" and "timed out". The text of torch stays in the message: `is_lost` looks for it.
        outcome = "timed out" if "imed out" in str(error) else "failed"
        raise RuntimeError(f"rank {dist.get_rank()} {outcome} {what}: {error}") from error


# By element size, lowest byte first. 0x7FD5 is a NaN as float16 and as bfloat16; a complex number is a pair of floats.
_BYTES = {1: [0x7D], 2: [0xD5, 0x7F], 4: [0x55, 0x55, 0xD5, 0x7F], 8: [0x55, 0x55, 0x55, 0x55, 0x55, 0x55, 0xFD, 0x7F]}


def missing_gradient(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory that represents a missing gradient of `tensor`.

    Weight decay and momentum change a parameter with a gradient of zeros, but not one without a gradient. So all
    elements are one particular NaN that no computation produces: its lowest bits are neither all set nor all clear.
    """
    pattern = torch.tensor(_pattern(tensor), dtype=torch.uint8)
    return pattern.repeat(tensor.numel()).view(tensor.dtype).view(tensor.shape)


def is_missing_gradient(tensor: Tensor) -> bool:
    """Return True if a tensor in host memory represents a missing gradient."""
    pattern = _pattern(tensor)
    flat = tensor.view(-1)
    # One element is compared before the rest: nearly every gradient is a real one, and this runs for each that comes.
    if flat[:1].view(torch.uint8).tolist() != pattern:
        return False
    rows = flat.view(torch.uint8).view(-1, len(pattern))
    return bool((rows == torch.tensor(pattern, dtype=torch.uint8)).all())


def _pattern(tensor: Tensor) -> list[int]:
    size = tensor.element_size()
    return _BYTES.get(size) or _BYTES[8] * (size // 8)


class OutputBroadcast:
    """Broadcasts step outputs from one rank of a pipeline to the others.

    The numbers are sent as one float64 tensor; names and types only when they change.
    """

    def __init__(self, group: dist.ProcessGroup, *, rank: int, device: torch.device):
        self._group, self._rank, self._device = group, rank, device
        self._layouts: dict[str, tuple[list[StepOutput], int]] = {}  # outputs with zeros, and their count of numbers

    def broadcast(self, outputs: list[StepOutput], *, source: int, key: str) -> list[StepOutput]:
        """Return the outputs of rank `source`; `key` names a sequence of outputs with the same names and types.

        Collective over the stages.
        """
        if self._group.size() == 1:
            return outputs
        is_source = self._rank == source
        box: list[Any] = [_layout_and_numbers(outputs) if is_source else None]
        # Every rank has the same keys here, since each adds one after the same broadcast of objects.
        if key in self._layouts:
            layout, size = self._layouts[key]
            message = torch.ones(1 + size, dtype=torch.float64)  # the first number is 0 for the same layout
            # Numbers are zeros in layouts, so that `repr` shows names and dtypes alone; `==` would compare tensors.
            if is_source and repr(box[0][0]) == repr(layout):
                message[0], message[1:] = 0.0, box[0][1]
            dist.broadcast(message, group=self._group, group_src=source)
            if message[0] == 0.0:
                return outputs if is_source else _filled(layout, message[1:], self._device)
        # All ranks come here together, as the first number told them, or the first call of this key.
        dist.broadcast_object_list(box, group=self._group, group_src=source)
        layout, numbers = box[0]
        self._layouts[key] = layout, numbers.numel()
        return outputs if is_source else _filled(layout, numbers, self._device)


Number = Tensor | float


def _layout_and_numbers(outputs: list[StepOutput]) -> tuple[list[StepOutput], Tensor]:
    """Return the outputs with zeros for their numbers and without metrics, and the numbers in host memory."""
    numbers: list[Number] = []

    def take(number: Number) -> Number:
        numbers.append(number)
        return torch.zeros((), dtype=number.dtype) if isinstance(number, Tensor) else 0.0

    layout = [_with_numbers(output, take) for output in outputs]
    for output in layout:
        # A metric object may hold all samples of an evaluation; it stays on the stage that updated it.
        output.objects = [update._replace(metric=None) for update in output.objects]
    return layout, _on_host(numbers)


def _on_host(numbers: Sequence[Number]) -> Tensor:
    """Return numbers as one float64 tensor in host memory; waits once for each device that has some of them."""
    values = torch.zeros(len(numbers), dtype=torch.float64)
    places: dict[torch.device, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            places[number.device].append(place)
        else:
            values[place] = number
    for device, indices in places.items():
        scalars = [torch.as_tensor(numbers[index]).detach().reshape(()).to(widest_float(device)) for index in indices]
        values[indices] = torch.stack(scalars).to("cpu", torch.float64)
    return values


def _filled(layout: list[StepOutput], numbers: Tensor, device: torch.device) -> list[StepOutput]:
    """Return the outputs of a layout with numbers from host memory; tensors are on the device, without waiting."""
    # One copy, and no number of a plain float is read back.
    values: list[float] = numbers.tolist()
    copied = (pin(numbers) if has_streams(device) else numbers).to(device, non_blocking=True)
    remaining = zip(copied, values, strict=True)

    def fill(kind: Number) -> Number:
        on_device, value = next(remaining)
        return on_device.to(kind.dtype) if isinstance(kind, Tensor) else value

    return [_with_numbers(output, fill) for output in layout]


def _with_numbers(output: StepOutput, function: Callable[[Number], Any]) -> StepOutput:
    """Return the output with `function` applied to its loss, weight and metrics, in this order."""
    return replace(
        output,
        loss=None if output.loss is None else function(output.loss),
        weight=function(output.weight),
        metrics={name: function(value) for name, value in output.metrics.items()},
    )
