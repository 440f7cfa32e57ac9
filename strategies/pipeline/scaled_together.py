"""An fp16 step that all stages take, or none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trainkit.optimization import Optimization


class ScaledTogether(Optimization):
    """An optimization whose scaler hears of an overflow on any stage."""

    def __init__(self, inner: Optimization, agree: Callable[[Tensor], Tensor]):
        self.__dict__ = inner.__dict__
        self._agree_on_overflow = agree

    def unscale(self) -> None:
        """Unscale this stage's gradients, and let all stages know of an overflow."""
        super().unscale()
        assert self._scaler is not None
        found = self._scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        device = next(iter(found), self.parameters[0].device)
        worst = sum(found.values(), start=torch.zeros((), device=device))
        found.clear()
        found[device] = self._agree_on_overflow(worst)
