"""Steps whose gradient is not finite, or a spike: they change nothing, and the next log point tells of them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.left_out_words import Told, what_was_seen, why_left_out
from trainkit.rng import rng_untouched
from trainkit.step_replay import Call, Finding, StepReplay, generators_of
from trainkit.strategy import SupportsPhases

if TYPE_CHECKING:
    from trainkit.feed import Feed
    from trainkit.optimization import Optimization
    from trainkit.run import Run
    from trainkit.step_output import StepOutput
    from trainkit.task import TaskModule
    from trainkit.window import Window

logger = logging.getLogger(__name__)

STEPS_SHOWN = 5
"""Steps that are looked at and named between two log points."""
_CALLS_KEPT = 16  # forwards and backwards of one phase before its update
_FOLD_AT = 512
"""Flags that are kept one by one before the steps among them are picked out, which waits for the device."""


class LeftOutSteps:
    """Surrounds forward, backward and update of each step; nothing waits for the device, unless a step is looked at.

    buffers    before ---- forward, backward ---> after
    gradient                                      not finite, or a spike: a flag on the device
    buffers    where(flag, before, after)         batch-norm statistics are as if there had been no such batch

    Where the host knows of the flag at once, the step is looked at then, with the weights as they were: they are what
    the step left them. Otherwise that is done when training logs, with those of then.
    """

    def __init__(self, run: Run, replay: StepReplay) -> None:
        self._run = run
        self._replay = replay
        self._before: dict[str, KeptBuffers] = {}  # of each phase that is in its step
        self._calls: dict[str, deque[Call]] = {}  # likewise
        self._flags: list[tuple[int, str, Tensor]] = []
        self._steps: dict[int, str] = {}  # -> the phase
        self._found: dict[int, Finding] = {}

    def forward_backward(
        self, train: Callable[[TaskModule, Window], list[StepOutput]]
    ) -> Callable[[TaskModule, Window], list[StepOutput]]:
        """Return the function with the buffers kept before it."""

        def keeping(task: TaskModule, window: Window) -> list[StepOutput]:
            self.keep("", window, "training_step")
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

    def keep(self, phase: str, window: Window, step_name: str) -> None:
        """Remember the buffers, if the step of this phase begins, and what its gradient is about to come from."""
        if phase not in self._before:
            self._before[phase] = KeptBuffers(self._run.task)
            self._calls[phase] = deque(maxlen=_CALLS_KEPT)
        self._calls[phase].append(Call(window, step_name, generators_of(self._run.strategy.device)))

    def put_back(self, optimization: Optimization) -> None:
        """Let buffers be as they were when the step began, if it was left out, and look at it; collective."""
        phase = optimization.phase
        before, calls, flag = self._before.pop(phase, None), self._calls.pop(phase, None), optimization.left_out
        if flag is None:
            return
        if before is not None:
            before.put_back(flag)
        step = self._run.state.step + 1
        if optimization.left_out_on_host and calls and len(self._found) < STEPS_SHOWN:
            self._found.setdefault(step, self._replay.look(optimization, calls))
        self._flags.append((step, phase, flag))
        if len(self._flags) >= _FOLD_AT:
            self._fold()

    def tell(self, bad: Sequence[int], feed: Feed) -> None:
        """Warn of the steps that were left out since the last call, of which `bad` had a bad loss here; collective.

        Waits for the device.
        """
        self._fold()
        steps, self._steps = self._steps, {}
        found, self._found = self._found, {}
        shown = list(steps)[:STEPS_SHOWN]
        if not shown:
            return
        late = [step for step in shown if step not in found]  # the same on every rank, as the flags are
        for step in late:
            found[step] = self._look_late(step, steps[step], feed)
        run = self._run
        own = {step: Told(step in bad, feed.samples_of(step, run.state), found[step]) for step in shown}
        told = run.strategy.comm.all_gather_object((run.strategy.comm.rank, own))
        if not run.is_main:
            return
        told.sort(key=itemgetter(0))
        said = [why_left_out(step, {rank: known[step] for rank, known in told}) for step in shown]
        more = f"; and {len(steps) - len(shown)} more" * (len(steps) > len(shown))
        seen = [
            what_was_seen(step, [known[step].found for _, known in told], late=run.state.step if step in late else None)
            for step in shown
        ]
        logger.warning("left out since the last log: %s%s.%s", "; ".join(said), more, "".join(seen))

    def _look_late(self, step: int, phase: str, feed: Feed) -> Finding:
        """Return what is not finite in a step that is read again, with the weights as they are now."""
        run = self._run
        if not self._replay.sees_modules:
            return Finding()
        with rng_untouched():
            window = feed.window_of(step, run.state)
        if window is None:
            return Finding()
        optimization = next(part for part in run.optimizations if part.phase == phase)
        if not hasattr(run.task, optimization.step_name):  # a manual step called others
            return Finding()
        try:
            return self._replay.look(
                optimization,
                [
                    Call(moved, optimization.step_name)
                    for moved in run.strategy.step_batches(iter([window]), pin_memory=feed.source.pin_memory)
                ],
            )
        finally:
            if phase and isinstance(run.strategy, SupportsPhases):
                run.strategy.end_phases()

    def _fold(self) -> None:
        """Pick out the steps that were left out, which waits for the device."""
        flags, self._flags = self._flags, []
        if not flags:
            return
        left_out = torch.stack([flag for _, _, flag in flags]).tolist()
        for (step, phase, _), was_left_out in zip(flags, left_out, strict=True):
            if was_left_out:
                self._steps.setdefault(step, phase)


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
