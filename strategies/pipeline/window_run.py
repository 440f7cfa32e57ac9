"""One window on its way through a rank: what each action receives, runs, sends and keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .messages import Messages, Parcel
from .recording import Step
from .replay import Departure, Shapes
from .schedules import BACKWARD, FORWARD, Action
from .segments import Segment, Transfer
from .staged_step import StagedStep
from .structures import Signature, signature

ReadLoss = Callable[[int, Any], Tensor]
HEADERS = 1 << 8
"""Tags below are kept for other uses of the group."""


@dataclass(slots=True)
class _Held:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    inputs: list[tuple[Transfer, Tensor]]
    outputs: dict[int, Tensor]
    loss: Tensor | None


@dataclass(slots=True)
class WindowRun:
    """One window under way."""

    messages: Messages
    device: torch.device
    staged: StagedStep
    step: Step
    batches: Sequence[Any]
    seed: int
    read_loss: ReadLoss | None
    returned: dict[int, Any] = field(default_factory=dict)
    _signatures: dict[int, Signature] = field(default_factory=dict)
    _held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    _parcels: dict[Action, list[tuple[Transfer, Parcel]]] = field(default_factory=dict)

    def post(self, action: Action) -> bool:
        """Start receiving what an action needs, unless it has been started; return false if its shapes are unknown."""
        if action in self._parcels:
            return True
        segment = self.staged.segments[action.stage]
        shapes = self.staged.shapes.get((segment.index, self._signature(action.micro_batch)))
        if shapes is None:
            return False
        if action.kind == FORWARD:
            transfers = segment.receives
        else:
            transfers = [transfer for transfer in segment.sends if transfer.differentiable]
        self._parcels[action] = [(transfer, self._expect(transfer, action.kind, shapes)) for transfer in transfers]
        return True

    def _signature(self, micro_batch: int) -> Signature:
        if micro_batch not in self._signatures:
            self._signatures[micro_batch] = signature(self.batches[micro_batch])
        return self._signatures[micro_batch]

    def carry_out(self, action: Action) -> float:
        """Run an action, and return when it had all it needed."""
        try:
            return self._forward(action) if action.kind == FORWARD else self._backward(action)
        except Departure as error:
            raise Departure(f"{action.place()}: {error}") from None

    def _expect(self, transfer: Transfer, kind: str, shapes: Shapes) -> Parcel:
        other = transfer.source if kind == FORWARD else transfer.destination
        shape = shapes[transfer.value]
        assert shape is not None
        return self.messages.expect(
            shape,
            self.staged.recording.values[transfer.value].dtype,
            source=self.staged.segments[other].rank,
            tag=self._tag(transfer, kind),
        )

    def _send(self, tensor: Tensor, transfer: Transfer) -> None:
        if tensor.requires_grad and not transfer.differentiable:
            raise self._unexpected_gradient(transfer)
        to = self.staged.segments[transfer.destination].rank
        self.messages.send(tensor.detach(), to=to, tag=self._tag(transfer, FORWARD))

    def _send_gradient(self, of: Tensor, transfer: Transfer) -> None:
        to = self.staged.segments[transfer.source].rank
        self.messages.send_gradient(of.grad, of=of, to=to, tag=self._tag(transfer, BACKWARD))

    def _unexpected_gradient(self, transfer: Transfer) -> Departure:
        events = self.staged.recording.events
        maker = next(event for event in events if any(product.value == transfer.value for product in event.products))
        return Departure(
            f"{maker} made a tensor that needs a gradient, and made one that needs none in the recorded step. Freeze "
            "parameters, and detach tensors, for the whole run or not at all, or train with strategy=ddp."
        )

    def _tag(self, transfer: Transfer, kind: str) -> int:
        """Return a number of its own for each value on each way; within it, micro-batches keep their order."""
        way = (transfer.destination * 2 + (kind == BACKWARD)) * len(self.staged.recording.values)
        return HEADERS + way + transfer.value

    # -- Forward

    def _forward(self, action: Action) -> float:
        segment = self.staged.segments[action.stage]
        batch = self.batches[action.micro_batch]
        key = (segment.index, self._signature(action.micro_batch))
        is_new = key not in self.staged.shapes
        shapes = self._learn_shapes(segment, action) if is_new else self.staged.shapes[key]
        if is_new:
            self.staged.shapes[key] = shapes
        self.post(action)
        received, inputs = self._open_inputs(action, segment)
        start = perf_counter()
        result = self.staged.player.run(
            segment, self.step, batch, received=received, shapes=shapes, seed=self._seed_of(action)
        )
        if is_new:
            self._pass_on_shapes(segment, shapes, result.values, batch)
        for transfer in segment.sends:
            self._send(result.values[transfer.value], transfer)
        loss = None
        if segment.is_last:
            if self.read_loss is None:
                self.returned[action.micro_batch] = result.returned
            else:
                loss = self.read_loss(action.micro_batch, result.returned)
        if self.read_loss is not None:
            outputs = {
                transfer.value: result.values[transfer.value] for transfer in segment.sends if transfer.differentiable
            }
            self._held[action.stage, action.micro_batch] = _Held(inputs, outputs, loss)
        return start

    def _open_inputs(self, action: Action, segment: Segment) -> tuple[dict[int, Tensor], list[tuple[Transfer, Tensor]]]:
        received: dict[int, Tensor] = {}
        inputs = []
        for transfer, parcel in self._parcels.pop(action):
            tensor = parcel.open(_description(action, transfer.source))
            received[transfer.value] = tensor
            if transfer.differentiable and self.read_loss is not None:
                tensor.requires_grad_()
                inputs.append((transfer, tensor))
                if transfer.value in segment.cloned:
                    received[transfer.value] = tensor.clone()  # a leaf must not be written in place
        return received, inputs

    def _learn_shapes(self, segment: Segment, action: Action) -> Shapes:
        """Return the shapes that the stages before know for this new kind of batch."""
        shapes: Shapes = [None] * len(self.staged.recording.values)
        if segment.index > 0:
            source = self.staged.segments[segment.index - 1].rank
            header = self.messages.receive_header(
                source=source, tag=segment.index, what=_description(action, segment.index - 1)
            )
            for value, shape in header.items():
                shapes[value] = shape
        return shapes

    def _pass_on_shapes(self, segment: Segment, shapes: Shapes, made: dict[int, Tensor], batch: Any) -> None:
        for value, tensor in made.items():
            shapes[value] = tuple(tensor.shape)
        if not segment.is_last:
            header = {value: shape for value, shape in enumerate(shapes) if shape is not None}
            following = self.staged.segments[segment.index + 1]
            self.messages.send_header(header, to=following.rank, tag=following.index)

    def _seed_of(self, action: Action) -> int:
        return (self.seed * 1_000_003 + action.micro_batch * 7_919) % 2**63

    # -- Backward

    def _backward(self, action: Action) -> float:
        held = self._held.pop((action.stage, action.micro_batch))
        gradients: dict[int, Tensor] = {}
        for transfer, parcel in self._parcels.pop(action):
            gradient = parcel.open_gradient(_description(action, transfer.destination))
            if gradient is not None:
                known = gradients.get(transfer.value)
                gradients[transfer.value] = gradient if known is None else known + gradient
        start = perf_counter()
        roots: list[Tensor] = [] if held.loss is None else [held.loss]
        root_gradients: list[Tensor | None] = [None] * len(roots)
        for value, gradient in gradients.items():
            if held.outputs[value].requires_grad:  # else it was detached for this batch alone
                roots.append(held.outputs[value])
                root_gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, root_gradients)
        for transfer, tensor in held.inputs:
            self._send_gradient(tensor, transfer)
        return start


def _description(action: Action, other: int) -> str:
    work = "forward" if action.kind == FORWARD else "backward"
    return f"stage {other}'s part of micro-batch {action.micro_batch}, for the {work} of stage {action.stage}"
