"""Identities of the memory of tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

# Private: torch exports fake tensors nowhere else.
from torch._subclasses.fake_tensor import FakeTensor

from .graph import (
    num_bytes,
)


class Memories:
    """Memories of tensors, numbered, with their bytes: 0 for those of the batch, which are there without a step."""

    def __init__(self, batch: Sequence[Tensor]) -> None:
        self.saved: dict[int, dict[int, None]] = defaultdict(dict)
        """By node: what autograd saves for its backward."""
        self._seen: set[int] = set()
        self._indices = {key: index for index, key in enumerate({memory_of(tensor): None for tensor in batch})}
        self.sizes = [0] * len(self._indices)

    def index(self, tensor: Tensor) -> int:
        """Return the number of a tensor's memory, which its views share."""
        key = memory_of(tensor)
        if key not in self._indices:
            self._indices[key] = len(self.sizes)
            is_strided = tensor.layout is torch.strided
            self.sizes.append(tensor.untyped_storage().nbytes() if is_strided else num_bytes(tensor))
        return self._indices[key]

    def save(self, tensor: Tensor, node: int) -> int:
        """Note that autograd saves a tensor for a node, and return the bytes of its memory if no node has saved it."""
        memory = self.index(tensor)
        is_new = memory not in self._seen
        self._seen.add(memory)
        self.saved[node][memory] = None
        return self.sizes[memory] if is_new else 0


def memory_of(tensor: Tensor) -> int:
    """Return an identity of the memory of a tensor, which its views share; sparse ones have several memories."""
    # Private: the public `data_ptr()` is 0 for every tensor that is empty or on the meta device.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def address_of(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor, which arrays share too; of tensors without one their identity."""
    if tensor.layout is not torch.strided or tensor.is_meta or isinstance(tensor, FakeTensor):
        return id(base_of(tensor))
    return tensor.untyped_storage().data_ptr() or id(base_of(tensor))


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which another one is a view; one that is no view itself."""
    # Private: no public attribute has the tensor of which another one is a view.
    base = tensor._base
    return tensor if base is None else base


def version_of(tensor: Tensor) -> int:
    """Return a number that counts up when a tensor is written in place."""
    # Private: torch has no public count of writes in place. An inference tensor has none, and asking for it raises.
    return 0 if tensor.is_inference() else tensor._version
