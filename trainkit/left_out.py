"""Steps whose gradient is not finite, or a spike: they change nothing, and the next log point tells of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from trainkit.optimization import Optimization
    from trainkit.run import Run
    from trainkit.step_output import StepOutput
    from trainkit.task import TaskModule
    from trainkit.window import Window

_FOLD_AT = 512
"""Flags that are kept one by one before the steps among them are picked out, which waits for the device."""


class LeftOutSteps:
    """Surrounds forward, backward and update of each step; nothing waits for the device.

    buffers    before ---- forward, backward ---> after
    gradient                                      not finite, or a spike: a flag on the device
    buffers    where(flag, before, after)         batch-norm statistics are as if there had been no such batch
    """

    def __init__(self, run: Run) -> None:
        self._state = run.state
        self._before: dict[str, KeptBuffers] = {}  # of each phase that is in its step
        self._task = run.task
        self._flags: list[tuple[int, Tensor]] = []
        self._steps: list[int] = []

    def forward_backward(
        self, train: Callable[[TaskModule, Window], list[StepOutput]]
    ) -> Callable[[TaskModule, Window], list[StepOutput]]:
        """Return the function with the buffers kept before it."""

        def keeping(task: TaskModule, window: Window) -> list[StepOutput]:
            self.keep("")
            return train(task, window)

        return keeping

    def optimizer_step(
        self, update: Callable[[Optimization], Tensor | None]
    ) -> Callable[[Optimization], Tensor | None]:
        """Return the function with the buffers put back after it where the step was left out."""

        def putting_back(optimization: Optimization) -> Tensor | None:
            norm = update(optimization)
            self.put_back(optimization)
            return norm

        return putting_back

    def keep(self, phase: str) -> None:
        """Remember the buffers, if the step of this phase begins."""
        if phase not in self._before:
            self._before[phase] = KeptBuffers(self._task)

    def put_back(self, optimization: Optimization) -> None:
        """Let buffers be as they were when the step began, if it was left out."""
        before, flag = self._before.pop(optimization.phase, None), optimization.left_out
        if flag is None:
            return
        if before is not None:
            before.put_back(flag)
        self._flags.append((self._state.step + 1, flag))
        if len(self._flags) >= _FOLD_AT:
            self._steps += self._picked()

    def take(self) -> list[int]:
        """Return the steps that were left out since the last call, the same on every rank; waits for the device."""
        steps = self._steps + self._picked()
        self._steps = []
        return list(dict.fromkeys(steps))

    def _picked(self) -> list[int]:
        flags, self._flags = self._flags, []
        if not flags:
            return []
        left_out = torch.stack([flag for _, flag in flags]).tolist()
        return [step for (step, _), was_left_out in zip(flags, left_out, strict=True) if was_left_out]


class KeptBuffers:
    """A copy of a module's buffers, one flat tensor for each device and type."""

    def __init__(self, module: nn.Module) -> None:
        buffers = sorted((buffer for buffer in module.buffers() if _has_values(buffer)), key=_kind)
        self._groups = [list(group) for _, group in groupby(buffers, key=_kind)]
        self._before = [_flat(group) for group in self._groups]

    def put_back(self, flag: Tensor) -> None:
        """Leave the buffers as they were if the flag is set, without waiting to know whether it is."""
        with torch.no_grad():
            for group, before in zip(self._groups, self._before, strict=True):
                chosen = torch.where(flag.to(before.device), before, _flat(group))
                pieces = chosen.split([buffer.numel() for buffer in group])
                torch._foreach_copy_(
                    group, [piece.view_as(buffer) for piece, buffer in zip(pieces, group, strict=True)]
                )


def _flat(buffers: list[Tensor]) -> Tensor:
    return torch.cat([buffer.detach().reshape(-1) for buffer in buffers])  # a copy, also of one buffer


def _has_values(buffer: Tensor) -> bool:
    """Return whether a step may write here: not to what only stands for the buffer of another stage."""
    if buffer.is_meta or buffer.layout != torch.strided or buffer.numel() == 0:
        return False
    return all(stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True))


def _kind(buffer: Tensor) -> Any:
    return str(buffer.device), str(buffer.dtype)
