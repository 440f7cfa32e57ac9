"""The buffers that are rank 0's on every rank, also where a module puts new tensors in their place.

    prepared     self.mean ──> tensor a                            agreed by all ranks: names, shapes, dtypes
    step 1       self.mean = 0.9 * self.mean + 0.1 * x.mean()      self.mean ──> tensor b, which is sent
    step 2       self.mean = torch.cat(...)                        of another shape: b is sent in its place

What is sent has the agreed shapes whatever a module does: messages of unequal size would end in a crash or a hang. So
a buffer of another shape, such as a cache that has grown, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class SharedBuffers:
    """The buffers that a module had when ranks agreed on them, as they are now."""

    def __init__(self, module: nn.Module, *, is_shared: Callable[[str], bool] = lambda name: True) -> None:
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._tensors: list[Tensor] = []  # one for each place, of the agreed shape
        for prefix, owner in module.named_modules():
            for name, tensor in owner._buffers.items():
                if tensor is not None and is_shared(f"{prefix}.{name}" if prefix else name):
                    self._places.append((owner._buffers, name))
                    self._tensors.append(tensor)

    def now(self) -> list[Tensor]:
        """Return the tensors that lie in the buffers' places now."""
        for index, (table, name) in enumerate(self._places):
            tensor, before = table.get(name), self._tensors[index]
            if tensor is not before and tensor is not None and _is_alike(tensor, before):
                self._tensors[index] = tensor
        return self._tensors


def _is_alike(tensor: Tensor, before: Tensor) -> bool:
    return tensor.shape == before.shape and tensor.dtype == before.dtype and tensor.device == before.device
