"""A window's micro-batches through the stages of a pipeline, in the order that a schedule gives."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .events import Recording
from .messages import Messages, Parcel
from .recording import Step
from .replay import Departure, Player, Shapes
from .schedules import BACKWARD, FORWARD, Action, Span
from .segments import Segment, Transfer
from .structures import Signature, signature

AHEAD = 2
"""Receives are posted so many actions before they are needed, so that messages travel while others compute."""
ReadLoss = Callable[[int, Any], Tensor]
Around = Callable[[int], AbstractContextManager[Any]]


@dataclass(slots=True)
class StagedStep:
    """One step of the task, cut into segments, and the shapes that its values have for each kind of batch."""

    player: Player
    segments: list[Segment]
    shapes: dict[tuple[int, Signature], Shapes] = field(default_factory=dict)
    """By segment and batch; filled as batches of new shapes come."""

    @classmethod
    def of(cls, player: Player, segments: list[Segment], recorded: Signature) -> StagedStep:
        """Return the step with the shapes of the batch that was recorded."""
        known: Shapes = [value.shape for value in player.recording.values]
        return cls(player, segments, {(segment.index, recorded): known for segment in segments})

    @property
    def recording(self) -> Recording:
        """What was recorded of the step."""
        return self.player.recording


@dataclass(slots=True)
class _Held:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    inputs: list[tuple[Transfer, Tensor]]
    outputs: dict[int, Tensor]
    loss: Tensor | None


class Runtime:
    """Carries out the actions of one rank."""

    def __init__(self, messages: Messages, *, device: torch.device):
        self.spans: list[Span] = []
        """When each action of the last window ran, in seconds from its start; waiting is not part of it."""
        self.began = 0.0
        """When the last window began, by the machine's clock."""
        self._messages = messages
        self._device = device

    def train(
        self,
        staged: StagedStep,
        step: Step,
        batches: Sequence[Any],
        *,
        actions: Iterable[Action],
        seed: int,
        read_loss: ReadLoss,
        around: Around | None = None,
    ) -> None:
        """Add to the gradients of this rank's parameters those of all micro-batches.

        `around(index)` gives a context for each action, such as a session that reduces gradients.
        `read_loss(micro_batch, returned)` gives the scalar that backward starts from, in the last stage. Every rank
        of the pipeline calls this with the same batches and its own actions of one schedule.
        """
        with generators_kept(self._device):
            run = _Run(self._messages, self._device, staged, step, batches, seed, read_loss)
            self._carry_out(run, actions, around)

    @torch.no_grad()
    def forward(
        self, staged: StagedStep, step: Step, batches: Sequence[Any], *, actions: Iterable[Action], seed: int
    ) -> dict[int, Any]:
        """Return what the step returned for each micro-batch, on the rank of the last stage; elsewhere nothing."""
        with generators_kept(self._device):
            run = _Run(self._messages, self._device, staged, step, batches, seed, None)
            self._carry_out(run, actions)
        return run.returned

    def _carry_out(self, run: _Run, actions: Iterable[Action], around: Around | None = None) -> None:
        todo = list(actions)
        self.spans = []
        self.began = begin = perf_counter()
        with run.staged.player.interception.installed():
            for index, action in enumerate(todo):
                for later in todo[index : index + 1 + AHEAD]:
                    if not run.post(later):
                        break  # or a later message would be received in place of an earlier one
                with around(index) if around is not None else nullcontext():
                    start = run.carry_out(action)
                self.spans.append(Span(action, start - begin, perf_counter() - begin))
        self._messages.finish()


@dataclass(slots=True)
class _Run:
    """One window under way."""

    messages: Messages
    device: torch.device
    staged: StagedStep
    step: Step
    batches: Sequence[Any]
    seed: int
    read_loss: ReadLoss | None
    returned: dict[int, Any] = field(default_factory=dict)
    _held: dict[tuple[int, int], _Held] = field(default_factory=dict)
    _parcels: dict[Action, list[tuple[Transfer, Parcel]]] = field(default_factory=dict)

    def post(self, action: Action) -> bool:
        """Start receiving what an action needs, unless it has been started; return false if its shapes are unknown."""
        if action in self._parcels:
            return True
        segment = self.staged.segments[action.stage]
        shapes = self.staged.shapes.get((segment.index, signature(self.batches[action.micro_batch])))
        if shapes is None:
            return False
        if action.kind == FORWARD:
            transfers = segment.receives
        else:
            transfers = [transfer for transfer in segment.sends if transfer.differentiable]
        self._parcels[action] = [(transfer, self._expect(transfer, action.kind, shapes)) for transfer in transfers]
        return True

    def carry_out(self, action: Action) -> float:
        """Run an action, and return when it had all it needed."""
        try:
            return self._forward(action) if action.kind == FORWARD else self._backward(action)
        except Departure as error:
            where = f"micro-batch {action.micro_batch} in stage {action.stage}"
            raise Departure(f"{where}: {error}") from None

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

    def _send(self, tensor: Tensor, transfer: Transfer, kind: str) -> None:
        other = transfer.destination if kind == FORWARD else transfer.source
        self.messages.send(tensor, to=self.staged.segments[other].rank, tag=self._tag(transfer, kind))

    def _tag(self, transfer: Transfer, kind: str) -> int:
        """Return a number of its own for each value on each way; within it, micro-batches keep their order."""
        way = (transfer.destination * 2 + (kind == BACKWARD)) * len(self.staged.recording.values)
        return HEADERS + way + transfer.value

    # -- Forward

    def _forward(self, action: Action) -> float:
        segment = self.staged.segments[action.stage]
        batch = self.batches[action.micro_batch]
        key = (segment.index, signature(batch))
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
            self._send(result.values[transfer.value].detach(), transfer, FORWARD)
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
            gradient = parcel.open(_description(action, transfer.destination))
            known = gradients.get(transfer.value)
            gradients[transfer.value] = gradient if known is None else known + gradient
        start = perf_counter()
        roots: list[Tensor] = [] if held.loss is None else [held.loss]
        root_gradients: list[Tensor | None] = [None] * len(roots)
        for value, tensor in held.outputs.items():
            roots.append(tensor)
            root_gradients.append(gradients[value])
        if roots:
            torch.autograd.backward(roots, root_gradients)
        for transfer, tensor in held.inputs:
            found = tensor.grad
            self._send(torch.zeros_like(tensor) if found is None else found, transfer, BACKWARD)
        return start


HEADERS = 1 << 8
"""Tags below are kept for other uses of the group."""


def _description(action: Action, other: int) -> str:
    work = "forward" if action.kind == FORWARD else "backward"
    return f"stage {other}'s part of micro-batch {action.micro_batch}, for the {work} of stage {action.stage}"


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Put the random generators back at the end: each stage draws differently, and ranks must stay in step."""
    torch_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
