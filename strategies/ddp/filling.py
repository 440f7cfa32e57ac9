"""Gradients on their way into the buckets: copied once, scaled on the way, and from then on `.grad` is the copy."""

from __future__ import annotations

import torch

from .gradient_bucket import Bucket, Slot


class Filling:
    """Puts the gradients of one rank into its buckets."""

    def __init__(self, *, scale: float, as_view: bool) -> None:
        self.scale = scale  # by which each gradient is multiplied on its way
        self.as_view = as_view

    def fill(self, slot: Slot) -> None:
        """Leave the parameter's gradient in its bucket, scaled; where there is none, add nothing."""
        gradient, view = slot.parameter.grad, slot.view
        if gradient is None:  # its hook fired with an undefined gradient
            assert slot.bucket is not None
            self.add_nothing(slot, slot.bucket, kept=None)
            return
        gradient = gradient.detach()
        with torch.no_grad():
            if view is None:
                slot.sparse_dim = gradient.sparse_dim()
                if self.scale != 1.0:
                    slot.parameter.grad = gradient * self.scale
                return
            torch.mul(gradient, self.scale, out=view) if self.scale != 1.0 else view.copy_(gradient)
        if self.as_view:
            slot.parameter.grad = view

    def move(self, slot: Slot) -> None:
        """Let a gradient that was only added up lie in its bucket, unscaled."""
        gradient, view = slot.parameter.grad, slot.view
        if not self.as_view or gradient is None or view is None or gradient is view or gradient.requires_grad:
            return
        view.copy_(gradient)
        slot.parameter.grad = view

    def add_nothing(self, slot: Slot, bucket: Bucket, *, kept: torch.Tensor | None, zeros: bool = False) -> None:
        """Let this rank use the parameter not at all: a gradient from before is added again, and given back as `kept`.

        With `zeros` it is not even added: this rank only stands in for the others' backward.
        """
        gradient, view = slot.parameter.grad, slot.view
        bucket.absent.append(bucket.slots.index(slot))
        slot.kept = kept
        if view is None:
            return
        if gradient is None or zeros:
            view.zero_()
        elif gradient is not view:
            torch.mul(gradient, self.scale, out=view)
        elif self.scale != 1.0:
            view.mul_(self.scale)
