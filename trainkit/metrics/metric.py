"""Metric: states that steps update, and a number computed from them at the end of a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from trainkit.errors import UserError, nearest

Reduction = Literal["sum", "mean", "min", "max", "cat"]
_REDUCTIONS = get_args(Reduction)


class Metric(nn.Module):
    """A metric over a whole pass, on any number of ranks, that is not a mean over batches.

        class F1(Metric):
            def __init__(self):
                super().__init__()
                self.add_state("hits", torch.zeros((), dtype=torch.int64))
                self.add_state("named", torch.zeros((), dtype=torch.int64))

            def update(self, predicted, classes):
                self.hits += (predicted & classes).sum()
                self.named += predicted.sum() + classes.sum()

            def compute(self):
                return 2 * self.hits / self.named

    A task holds it as an attribute; its steps call `update` with the batch and return the object under a name, as in
    `{"loss": loss, "f1": self.f1}`.

    At the end of an evaluation, and in training whenever means are logged, the states of all ranks are merged,
    `compute` returns the number (or a dict of numbers), and the states are reset. They are not in the `state_dict`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._states: dict[str, tuple[Tensor | None, Reduction]] = {}  # name -> default (None: a list), reduction

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Run `update` without gradients: states outlive the step."""
        super().__init_subclass__(**kwargs)
        if "update" in vars(cls):
            cls.update = torch.no_grad()(cls.update)  # type: ignore[method-assign]

    def add_state(self, name: str, default: Tensor | Sequence[Any], reduction: Reduction = "sum") -> None:
        """Add an attribute `name` that starts as `default` and is merged over ranks by `reduction`.

        `cat` goes with an empty list, to which `update` appends tensors. Where they have one row for each sample,
        `compute` finds them in the order of the dataset. A `mean` weighs each rank by its samples.
        """
        if reduction not in _REDUCTIONS:
            raise UserError(
                f"reduction={reduction!r} of the state {name!r} is unknown.{nearest(reduction, _REDUCTIONS)} Choose "
                f"one of {', '.join(_REDUCTIONS)}."
            )
        if (reduction == "cat") != (not isinstance(default, Tensor) and len(default) == 0):
            raise UserError(
                f"the state {name!r} with reduction={reduction!r} begins as {default!r}; begin with an empty list for "
                "'cat', and with a tensor for the others."
            )
        self._states[name] = (default if isinstance(default, Tensor) else None, reduction)
        setattr(self, name, self._initial(name))

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add the samples of one batch to the states."""
        raise NotImplementedError(f"{type(self).__name__} has no update; define update(self, predicted, targets).")

    def compute(self) -> Any:
        """Return a number, or a dict of numbers, from the states over all samples."""
        raise NotImplementedError(f"{type(self).__name__} has no compute; define compute(self).")

    def reset(self) -> None:
        """Set every state to its default."""
        for name in self._states:
            setattr(self, name, self._initial(name))

    def reductions(self) -> dict[str, Reduction]:
        """Return the reduction of each state."""
        return {name: reduction for name, (_, reduction) in self._states.items()}

    def _initial(self, name: str) -> Any:
        default, _ = self._states[name]
        # A copy: `update` may add in place, which must not change the default.
        return [] if default is None else default.detach().clone()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Metric:
        """Move the states where the module goes; their types are the metric's own and stay."""
        # Private: to(), cuda() and half() all go through it, and torch has no public hook for them.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Only the device is taken: half() would round counts.
        device = fn(torch.zeros(1)).device
        for name, (default, reduction) in self._states.items():
            self._states[name] = (None if default is None else default.to(device), reduction)
            state = getattr(self, name)
            moved = state.to(device) if isinstance(state, Tensor) else [tensor.to(device) for tensor in state]
            setattr(self, name, moved)
        return self
