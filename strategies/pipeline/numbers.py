"""Python numbers that modules return: they go from stage to stage with the tensors, as each batch may give others."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .events import Event, Held, Number, Opaque, Slot
from .structures import leaves

LARGEST = 1 << 63


def is_number(value: Any) -> bool:
    """Return whether a value can be sent as whole numbers of 64 bits: a number or truth value, or a shape."""
    if isinstance(value, (torch.Size, float)):
        return True
    return isinstance(value, int) and -LARGEST <= value < LARGEST


def encoded(value: Any) -> list[int]:
    """Return a number, truth value or shape as whole numbers of 64 bits."""
    if isinstance(value, torch.Size):
        return list(value)
    if isinstance(value, float):
        return list(struct.unpack("<q", struct.pack("<d", value)))
    return [int(value)]


def decoded(number: Number, codes: Sequence[int]) -> Any:
    """Return the value of `number` among all numbers of the step."""
    own = codes[number.start : number.start + number.count]
    if number.kind is torch.Size:
        return torch.Size(own)
    if issubclass(number.kind, float):
        return number.kind(*struct.unpack("<d", struct.pack("<q", own[0])))
    return number.kind(own[0])


def changed(event: Event, result: Any) -> Iterator[tuple[Number, list[int]]]:
    """Yield the numbers in the result of an event, encoded; raises ValueError where it is not built as recorded."""
    recorded, found = list(leaves(event.outputs)), list(leaves(result))
    if len(recorded) != len(found):
        raise ValueError(f"{len(found)} values in its result in place of {len(recorded)}")
    for expected, value in zip(recorded, found, strict=True):
        if isinstance(expected, Number):
            codes = encoded(value) if is_number(value) and type(value) is expected.kind else []
            if len(codes) != expected.count:
                raise ValueError(f"{value!r:.80} in its result where {expected} was")
            yield expected, codes
        elif isinstance(expected, (Slot, Held)) != isinstance(value, torch.Tensor):
            raise ValueError(f"{type(value).__name__} in its result where {_described(expected)} was")
        elif isinstance(expected, (Slot, Held, Opaque)):
            continue
        elif type(value) is not type(expected) or value != expected:
            raise ValueError(f"{value!r:.80} in its result where {expected!r:.80} was")


def _described(recorded: Any) -> str:
    return "a tensor" if isinstance(recorded, (Slot, Held)) else f"{type(recorded).__name__}"
