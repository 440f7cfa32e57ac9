"""The user's own step, run again with only one stage's events executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from trainkit.errors import UserError
from trainkit.metrics.sync import metrics_in

from . import python_generators
from .event_mode import EventMode
from .events import RETURN, Event, Held, Number, Opaque, Recording, Slot
from .interception import Call, Interception
from .metric_updates import updates_watched
from .numbers import changed, decoded
from .recording import Step
from .segments import Segment
from .structures import rebuild, tensors

Shapes = list[tuple[int, ...] | None]


class Departure(UserError):
    """The step did not make the calls that were recorded."""


class _StageDone(BaseException):
    """Ends a step after the stage's last event; no `except Exception` of the user's stops it."""


@dataclass(slots=True)
class StageResult:
    """What a stage's part of a step comes to."""

    returned: Any
    """What the step returned, in the last stage."""
    values: dict[int, Tensor]
    """The values made or received."""


class Player:
    """Runs segments of a recorded step."""

    def __init__(self, recording: Recording, task: nn.Module, device: torch.device):
        units = {event.name for event in recording.events if event.is_unit}
        self.recording = recording
        self.interception = Interception({name: task.get_submodule(name) for name in units})
        self.device = device
        self.metrics = metrics_in(task)
        self.held: dict[str, Tensor] = {**dict(task.named_parameters()), **dict(task.named_buffers())}
        self.checkpoint_starts = _checkpoint_starts(recording.events)
        """For each event, whether a checkpoint begins with it that draws random numbers."""
        self._placeholders: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def run(
        self,
        segment: Segment,
        step: Step,
        batch: Any,
        *,
        received: Mapping[int, Tensor],
        shapes: Shapes,
        seed: int,
    ) -> StageResult:
        """Run `step` up to the end of `segment`; the interception must be installed.

        `shapes` are those of all values for a batch like this, `None` where they are not known yet; what the segment
        makes must have them. Random events draw from generators seeded by `seed` and their own names.
        """
        if segment.start == segment.stop:  # this phase of the task has nothing to do here, and passes numbers on
            return StageResult(None, dict(received))
        replay = _Replay(self, segment, received, shapes, seed)
        python_generators.seed(seed)
        with ExitStack() as stack:
            stack.enter_context(self.interception.session(replay))
            if segment.is_last:
                stack.enter_context(replay.watching(self.metrics))
            stack.enter_context(replay)
            try:
                returned = step(batch)
            except _StageDone:
                returned = None
            else:
                replay.check_end()
        if self.recording.numbers is not None:
            replay.values[self.recording.numbers] = replay.numbers()
        return StageResult(returned, replay.values)

    def placeholder(self, value: int, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of one element that looks like the value."""
        key = (value, shape)
        if key not in self._placeholders:
            dtype = self.recording.values[value].dtype
            self._placeholders[key] = torch.zeros((), dtype=dtype, device=self.device).expand(shape)
        return self._placeholders[key]

    def seed(self, seed: int, event: Event) -> None:
        """Seed torch's generators for one event of one micro-batch."""
        mixed = _mixed(seed, event)
        torch.default_generator.manual_seed(mixed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(mixed)


def _mixed(seed: int, event: Event) -> int:
    return (seed * 0x9E3779B97F4A7C15 + event.key * 0xBF58476D1CE4E5B9) % 2**63


def _checkpoint_starts(events: list[Event]) -> list[bool]:
    random_ones = {event.checkpoint for event in events if event.is_random and event.checkpoint is not None}
    seen: set[int] = set()
    starts = []
    for event in events:
        starts.append(event.checkpoint in random_ones and event.checkpoint not in seen)
        if event.checkpoint is not None:
            seen.add(event.checkpoint)
    return starts


def _codes_of(recording: Recording, received: Mapping[int, Tensor]) -> list[int]:
    """Return the numbers that earlier stages have sent, with zeros where none has come to yet."""
    if recording.numbers is None:
        return []
    if recording.numbers in received:
        found: list[int] = received[recording.numbers].tolist()
        return found
    return [0] * recording.values[recording.numbers].shape[0]


class _Replay(EventMode):
    """One run of a step, event by event."""

    def __init__(
        self,
        player: Player,
        segment: Segment,
        received: Mapping[int, Tensor],
        shapes: Shapes,
        seed: int,
    ):
        super().__init__()
        self.values: dict[int, Tensor] = dict(received)
        self._player = player
        self._events = player.recording.events
        self._starts = player.checkpoint_starts
        self._segment = segment
        self._shapes = shapes
        self._seed = seed
        self._numbers = _codes_of(player.recording, received)
        self._next = 0
        self._inside = False
        self._seed_checkpoint(0)

    def watching(self, metrics: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Return a context in which metrics are refused that count in another stage."""
        return updates_watched(metrics, position=lambda: self._next, executes=self._segment.executes)

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a unit."""
        event = self._expect(name)
        if not self._segment.executes[event.index]:
            return self._end(event, self._skip(event))
        with self._player.interception.session(None):
            if _get_current_function_mode() is not self:
                return self._end(event, self._run_inside(event, call, args, kwargs))
            self.__exit__(None, None, None)  # so that torch calls inside the unit cost nothing
            try:
                result = self._execute(event, call, args, kwargs)
            finally:
                self.__enter__()
        return self._end(event, result)

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a torch function between units."""
        if self._inside:
            return call(*args, **kwargs)
        if self._next >= len(self._events) or self._events[self._next].name != name:
            if not tensors((args, kwargs)):
                result = call(*args, **kwargs)
                if not tensors(result):
                    return result  # such as `torch.is_grad_enabled()`: no event
            raise self._departure(f"`{name}`")
        event = self._expect(name)
        if not self._segment.executes[event.index]:
            return self._end(event, self._skip(event))
        return self._end(event, self._execute(event, call, args, kwargs))

    def numbers(self) -> Tensor:
        """Return the numbers that modules have returned up to here, for the next stage."""
        return torch.tensor(self._numbers, dtype=torch.int64, device=self._player.device)

    def check_end(self) -> None:
        """Raise unless the step has come to its recorded end."""
        if self._events[self._next].name != RETURN:
            raise self._departure("the end of the step")

    def _expect(self, name: str) -> Event:
        event = self._events[min(self._next, len(self._events) - 1)]
        if event.name != name:
            raise self._departure(f"'{name}'")
        self._next += 1
        return event

    def _end(self, event: Event, result: Any) -> Any:
        following = event.index + 1
        if following == self._segment.stop and not self._segment.is_last:
            raise _StageDone
        if self._starts[following]:
            self._seed_checkpoint(following)
        return result

    def _seed_checkpoint(self, start: int) -> None:
        """Seed a checkpoint that begins with the event `start`.

        A checkpoint keeps the generators' state of its beginning, and runs its calls again from there. So this is
        where it is seeded, and nothing in it is seeded again.
        """
        if self._starts[start]:
            self._player.seed(self._seed, self._events[start])

    def _run_inside(self, event: Event, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit under a mode of the user's own, which lies above this one and so cannot be left."""
        self._inside = True
        try:
            return self._execute(event, call, args, kwargs)
        finally:
            self._inside = False

    def _execute(self, event: Event, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if event.is_random and event.checkpoint is None:
            self._player.seed(self._seed, event)
        if event.index in self._segment.given:
            self._check_given(event, tensors((args, kwargs)))
        if event.draws_in_python:
            with python_generators.seeded(_mixed(self._seed, event)):
                result = call(*args, **kwargs)
        else:
            result = call(*args, **kwargs)
        if event.name == "__iter__":
            result = list(result)
        if event.has_plain:
            self._note_numbers(event, result)
        made = self._segment.made_by.get(event.index)
        if made is not None:
            self._keep(event, *made, tensors(result))
        return iter(result) if event.name == "__iter__" else result

    def _check_given(self, event: Event, given: list[Tensor]) -> None:
        """Raise unless the call is given what this stage received for it."""
        identities = {id(tensor) for tensor in given}
        for value in self._segment.given[event.index]:
            if id(self.values[value]) not in identities:
                maker = next(
                    (e for e in self._events if any(product.value == value for product in e.products)), "the batch"
                )
                raise Departure(
                    f"{event} was given another tensor than the one that {maker} made. A hook or an attribute carries "
                    "it past the step, and that does not happen in this stage. Return the tensor from the module's "
                    "forward, and use what the call returns."
                )

    def _note_numbers(self, event: Event, result: Any) -> None:
        try:
            for number, codes in changed(event, result):
                self._numbers[number.start : number.start + number.count] = codes
        except ValueError as error:
            raise Departure(
                f"{event} has {error}, and the other stages would not know. Return the same structure for every "
                "batch, with what changes in tensors or numbers, or train with strategy=ddp."
            ) from None

    def _keep(self, event: Event, count: int, places: list[tuple[int, int]], made: list[Tensor]) -> None:
        if len(made) != count:
            raise Departure(
                f"{event} has {len(made)} tensors in its result, and the recorded step has {count} there. Return the "
                "same structure for every batch, or train with strategy=ddp."
            )
        for place, value in places:
            tensor = made[place]
            shape = self._shapes[value]
            if shape is not None and not self._segment.is_last and tensor.shape != shape:
                raise Departure(
                    f"{event} made a tensor of shape {tuple(tensor.shape)} where {shape} was expected "
                    "for a batch like this: its shape depends on the values, and the next stage cannot know it. Move "
                    "what depends on values into one module's forward, or begin no stage between them."
                )
            self.values[value] = tensor

    def _skip(self, event: Event) -> Any:
        if isinstance(event.outputs, Slot):
            return self._look_up(event.outputs)
        result = rebuild(event.outputs, self._look_up)
        return iter(result) if event.name == "__iter__" else result

    def _look_up(self, leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            found = self.values.get(leaf.value)
            if found is not None:
                return found
            shape = self._shapes[leaf.value]
            assert shape is not None, f"the shape of value {leaf.value} was not passed on"
            outer, self._inside = self._inside, True  # what makes a placeholder is no event
            try:
                return self._player.placeholder(leaf.value, shape)
            finally:
                self._inside = outer
        if isinstance(leaf, Number):
            return decoded(leaf, self._numbers)
        if isinstance(leaf, Held):
            return self._player.held[leaf.name]
        return None if isinstance(leaf, Opaque) else leaf

    def _departure(self, met: str) -> Departure:
        expected = self._events[min(self._next, len(self._events) - 1)]
        return Departure(
            f"the step came to {met} where the recorded step has {expected}. A pipeline needs a step that makes the "
            "same calls for every batch. Move the branch into one module's forward, where anything may happen, or "
            "train with strategy=ddp."
        )
