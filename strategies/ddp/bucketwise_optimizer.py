"""BucketwiseOptimizer: updates the parameters of one bucket at a time."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from .bucket import Bucket


class BucketwiseOptimizer:
    """Steps an optimizer for the parameters of a bucket as soon as that is reduced.

        bucket 0   reduced | step
        bucket 1             reduced | step        the step of one bucket hides behind the next one's reduction

    On the CPU this runs inside backward. Hooks on the optimizer's step run once for each bucket.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._home = {id(p): index for index, params in enumerate(self._groups) for p in params}
        self._parts: dict[int, list[list[nn.Parameter]]] = {}  # by bucket: its parameters in each group

    def step(self, bucket: Bucket) -> None:
        """Update the bucket's parameters."""
        parts = self._parts.get(bucket.index)
        if parts is None:
            parts = self._parts[bucket.index] = self._split(bucket)
        groups = self.optimizer.param_groups
        try:
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            self.optimizer.step()
        finally:
            for group, params in zip(groups, self._groups, strict=True):
                group["params"] = params

    def _split(self, bucket: Bucket) -> list[list[nn.Parameter]]:
        parts: list[list[nn.Parameter]] = [[] for _ in self._groups]
        for entry in bucket.entries:
            home = self._home.get(id(entry.parameter))
            if home is not None:
                parts[home].append(entry.parameter)
        return parts
