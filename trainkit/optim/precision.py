"""Precision: the dtypes of parameters and forward, autocast and the gradient scaler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from trainkit.devices import set_tf32
from trainkit.errors import UserError, nearest

_TRUE_TYPES = {"fp32": torch.float32, "bf16-true": torch.bfloat16, "fp64": torch.float64}
_MIXED_TYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
NAMES = (*_TRUE_TYPES, *_MIXED_TYPES)

_NOTHING = nullcontext()  # one for all forwards: it has no state, and `surround` asks for it by identity


class Precision:
    """One of `fp32`, `bf16-mixed`, `fp16-mixed` (with a gradient scaler), `bf16-true`, `fp64`."""

    def __init__(self, name: str = "fp32", *, tf32: bool = False) -> None:
        if name not in NAMES:
            raise UserError(f"unknown precision {name!r}.{nearest(name, NAMES)} Choose one of {', '.join(NAMES)}.")
        self.name = name
        self.tf32 = tf32
        self.scaler: GradScaler | None = None
        """The scaler of the present phase; `None` without fp16."""
        self._scalers: dict[str, GradScaler] = {}  # by phase
        self._autocast: Callable[[], AbstractContextManager[Any]] = _nothing
        self._dtype = _TRUE_TYPES.get(name, torch.float32)

    def setup(self, device: torch.device) -> None:
        """Set up the autocast context, the gradient scaler and TF32 for `device`."""
        # Of the whole process, so it is set in any case: an earlier run may have set the other value.
        set_tf32(device, enabled=self.tf32)
        if self.name in _MIXED_TYPES:
            dtype = _MIXED_TYPES[self.name]
            self._autocast = lambda: torch.autocast(device.type, dtype=dtype)
        if self.name == "fp16-mixed":
            self.scaler = GradScaler(device.type)
            self._scalers = {}

    def prepare(self, task: nn.Module) -> None:
        """Convert floating-point parameters and buffers to the dtype of the precision."""
        if self._dtype is not torch.float32:
            task.to(dtype=self._dtype)

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self._autocast()

    def surround(self, outer: Callable[[], AbstractContextManager[Any] | None]) -> Callable[[], None]:
        """Enter the context that `outer` returns around each forward; return a function that undoes this."""
        inner = self._autocast

        def both() -> AbstractContextManager[Any]:
            around, within = outer(), inner()
            if around is None:
                return within
            return around if within is _NOTHING else _nested(around, within)

        def release() -> None:
            # Not if another context was put around this one since: setting `inner` would remove that one too.
            if self._autocast is both:
                self._autocast = inner

        self._autocast = both
        return release

    @property
    def batch_type(self) -> torch.dtype | None:
        """The dtype for floating-point tensors of a batch; `None` keeps theirs."""
        return None if self._dtype is torch.float32 else self._dtype

    @property
    def compute_type(self) -> torch.dtype:
        """The dtype of products of matrices in a forward."""
        return _MIXED_TYPES.get(self.name, self._dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss that backward starts from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def scaler_of(self, phase: str) -> GradScaler | None:
        """Return the scaler of a phase, which grows and shrinks with the steps of this phase only."""
        if self.scaler is None or not phase:
            return self.scaler
        # `_device` is private: a GradScaler has no public attribute for its device.
        return self._scalers.setdefault(phase, GradScaler(self.scaler._device))

    def begin_phase(self, phase: str) -> None:
        """Make `scale` use the scaler of a phase."""
        self.scaler = self.scaler_of(phase)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, or the states of several by phase."""
        if self._scalers:
            return {"phases": {phase: scaler.state_dict() for phase, scaler in self._scalers.items()}}
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved scale; a state without a scaler changes nothing."""
        if self.scaler is None or not saved:
            return
        # A state without phases is that of one scaler, from which all begin.
        for phase, scaler in self._scalers.items() or [("", self.scaler)]:
            scaler.load_state_dict(saved.get("phases", {}).get(phase, saved))


@contextmanager
def _nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _nothing() -> AbstractContextManager[Any]:
    return _NOTHING
