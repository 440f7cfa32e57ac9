"""A window's micro-batches through the stages of a pipeline, in the order that a schedule gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch

from . import python_generators
from .failures import Failures
from .messages import Messages
from .recording import Step
from .schedules import Action, Span
from .staged_step import StagedStep
from .window_run import ReadLoss, WindowRun

AHEAD = 2
"""Receives are posted so many actions before they are needed, so that messages travel while others compute."""
Around = Callable[[int], AbstractContextManager[Any]]


class Runtime:
    """Carries out the actions of one rank."""

    def __init__(self, messages: Messages, *, device: torch.device, failures: Failures):
        self.spans: list[Span] = []
        self.waited_seconds = 0.0  # for other stages, in all windows of training
        """When each action of the last window ran, in seconds from its start; waiting is not part of it."""
        self.began = 0.0
        """When the last window began, by the machine's clock."""
        self._messages = messages
        self._failures = failures
        self._device = device

    def train(
        self,
        staged: StagedStep,
        step: Step,
        batches: Sequence[Any],
        *,
        actions: Iterable[Action],
        seed: int,
        read_loss: ReadLoss,
        around: Around | None = None,
    ) -> None:
        """Add to the gradients of this rank's parameters those of all micro-batches.

        `around(index)` gives a context for each action, such as a session that reduces gradients.
        `read_loss(micro_batch, returned)` gives the scalar that backward starts from, in the last stage. Every rank
        of the pipeline calls this with the same batches and its own actions of one schedule.
        """
        with generators_kept(self._device):
            run = WindowRun(self._messages, self._device, staged, step, batches, seed, read_loss)
            self._carry_out(run, actions, around)
        busy = sum(span.end - span.start for span in self.spans)
        self.waited_seconds += perf_counter() - self.began - busy

    @torch.no_grad()
    def forward(
        self, staged: StagedStep, step: Step, batches: Sequence[Any], *, actions: Iterable[Action], seed: int
    ) -> dict[int, Any]:
        """Return what the step returned for each micro-batch, on the rank of the last stage; elsewhere nothing."""
        with generators_kept(self._device):
            run = WindowRun(self._messages, self._device, staged, step, batches, seed, None)
            self._carry_out(run, actions)
        return run.returned

    def _carry_out(self, run: WindowRun, actions: Iterable[Action], around: Around | None = None) -> None:
        todo = list(actions)
        self.spans = []
        self.began = begin = perf_counter()
        with run.staged.player.interception.installed():
            for index, action in enumerate(todo):
                for later in todo[index : index + 1 + AHEAD]:
                    if not run.post(later):
                        break  # or a later message would be received in place of an earlier one
                with around(index) if around is not None else nullcontext():
                    try:  # inside of `around`, which would tell the others less
                        start = run.carry_out(action)
                    except Exception as error:
                        self._failures.explain(error, where=action.place())
                        raise
                self.spans.append(Span(action, start - begin, perf_counter() - begin))
        self._messages.finish()


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Put the random generators back at the end: each stage draws differently, and ranks must stay in step."""
    torch_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    python_state = python_generators.state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
        python_generators.restore(python_state)
