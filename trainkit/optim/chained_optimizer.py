"""ChainedOptimizer: several optimizers of different parameters as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from trainkit.errors import UserError


class ChainedOptimizer(Optimizer):
    """Several optimizers of one loss, each with its own parameters, such as Muon for matrices and AdamW for the rest.

    One schedule changes the learning rate of all, each from its own; clipping and skipped steps are of all together.
    Each parameter group names its optimizer by index, as `optimizer`.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if any(isinstance(one, LBFGS) for one in optimizers):
            raise UserError(
                "ChainedOptimizer steps each optimizer once, and LBFGS evaluates the loss several times in its step; "
                "make it the optimizer of a phase, or use torch.optim.AdamW."
            )
        numbered = enumerate(optimizers)
        super().__init__([{**group, "optimizer": index} for index, one in numbered for group in one.param_groups], {})
        self.optimizers = optimizers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer whose index it names as `optimizer`."""
        if "optimizer" not in param_group:
            raise UserError(
                "a group that is added to a ChainedOptimizer names its optimizer by index; write "
                "add_param_group({'params': parameters, 'optimizer': 0})."
            )
        is_made = "optimizers" in vars(self)  # else the groups are complete
        super().add_param_group(
            {**(self.optimizers[param_group["optimizer"]].defaults if is_made else {}), **param_group}
        )

    def check_members(self) -> None:
        """Raise UserError for a group that was added to one of the optimizers: the next step would drop it."""
        for index, member in enumerate(self.optimizers):
            if len(member.param_groups) > sum(group["optimizer"] == index for group in self.param_groups):
                raise UserError(
                    f"a group was added to the {type(member).__name__} inside of a ChainedOptimizer; add it to the "
                    f"ChainedOptimizer: add_param_group({{'params': parameters, 'optimizer': {index}}})."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:  # type: ignore[override] # torch overloads it
        """Step each optimizer with its parameter groups and the common state, which strategies may have replaced."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, optimizer in enumerate(self.optimizers):
            optimizer.param_groups = [group for group in self.param_groups if group["optimizer"] == index]
            optimizer.state = self.state
            optimizer.step()
        return loss


def members(optimizer: Optimizer) -> Sequence[Optimizer]:
    """Return the optimizers of a ChainedOptimizer, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
