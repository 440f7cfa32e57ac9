"""What a checkpoint may hold: tensors, and plain Python values and containers."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import UserError

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_SEQUENCES: tuple[type, ...] = (list, tuple, set)
_MAPPINGS: tuple[type, ...] = (dict, OrderedDict, Counter)


def plain(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the payload as it can be saved: without numpy's types, and with each tensor's own bytes only.

    A view of a larger storage (a gradient bucket, a fusion buffer) is copied, since `torch.save` would write the whole
    storage; tensors that are the same bytes stay one. Raises UserError with the place of a value that would need
    code to be read back.
    """
    copies: dict[tuple[object, ...], Tensor] = {}

    def own_bytes(tensor: Tensor, place: str) -> Tensor:
        if tensor.layout is not torch.strided or _bytes_of(tensor) >= tensor.untyped_storage().nbytes():
            return tensor
        identity = identity_of(tensor)
        if identity not in copies:
            copies[identity] = tensor.clone()
        return copies[identity]

    converted: dict[str, Any] = PayloadWalk(own_bytes).convert(payload, "")
    return converted


def payload_bytes(payload: object) -> int:
    """Return about how many bytes the payload takes in a file."""
    if isinstance(payload, Tensor):
        return _bytes_of(payload) + 256
    if isinstance(payload, dict):
        return sum(payload_bytes(key) + payload_bytes(value) for key, value in payload.items())
    if isinstance(payload, (list, tuple, set)):
        return sum(map(payload_bytes, payload))
    return len(payload) + 8 if isinstance(payload, (str, bytes)) else 8


def identity_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common exactly when they are the same bytes in the same arrangement."""
    storage = tensor.untyped_storage()
    return (
        storage.device,
        storage.data_ptr(),
        storage.nbytes(),
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


class PayloadWalk:
    """Converts a payload, container by container, and gives every tensor to `take` with its place in the payload."""

    def __init__(self, take: Callable[[Tensor, str], Tensor]) -> None:
        self._take = take
        self._open: set[int] = set()

    def convert(self, value: Any, place: str) -> Any:
        """Return the value with its tensors as `take` returned them; raise UserError for what cannot be saved."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._take(_plain_tensor(value, place), place)
        if type(value) in _SEQUENCES or type(value) in _MAPPINGS:
            return self._container(value, place)
        if type(value) is torch.Size:
            return tuple(value)
        return self._foreign(value, place)

    def _container(self, value: Any, place: str) -> Any:
        if id(value) in self._open:
            raise UserError(f"The checkpoint's value at '{place}' contains itself and cannot be saved.")
        self._open.add(id(value))
        try:
            if type(value) in _MAPPINGS:
                return self._mapping(value, place)
            return type(value)([self.convert(item, f"{place}[{index}]") for index, item in enumerate(value)])
        finally:
            self._open.discard(id(value))

    def _mapping(self, value: Any, place: str) -> Any:
        converted = type(value)()
        for key, item in value.items():
            inner = f"{place}.{key}" if place else str(key)
            # What follows a key is a name, so a key is never a tensor.
            if isinstance(key, Tensor):
                raise _refused(key, f"{inner} (the key)")
            plain_key = self.convert(key, f"{inner} (the key)")
            converted[plain_key] = self.convert(item, inner)
        versions = getattr(value, "_metadata", None)  # of a module's state dict: load_state_dict reads it
        if versions is not None:
            converted._metadata = self.convert(versions, f"{place}._metadata")
        return converted

    def _foreign(self, value: Any, place: str) -> Any:
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            item = value.item()
            if type(item) in _PLAIN:
                return item
        if numpy is not None and type(value) is numpy.ndarray:
            try:
                return self._take(torch.from_numpy(value.copy()), place)
            except TypeError:
                raise _refused(value, place) from None
        raise _refused(value, place)


def _plain_tensor(tensor: Tensor, place: str) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta:
        raise _refused(tensor, place)
    return tensor.detach()


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _refused(value: Any, place: str) -> UserError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, Tensor) and value.is_meta:
        name = "a tensor without data (device 'meta')"
    return UserError(
        f"A checkpoint cannot hold the value at '{place}': {name}. Only tensors, numbers, text, bytes, None and "
        f"list, tuple, set, dict of these can be read back without running code: save str(value), float(value), "
        f"a dict of its attributes, or value.state_dict() instead."
    )
