"""Exponential moving average of the weights, and the base class of weight averages."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainkit.callback import Callback
from trainkit.checkpoint.serialization import storage_key
from trainkit.duration import Duration
from trainkit.errors import UserError
from trainkit.strategy import local_state

if TYPE_CHECKING:
    from trainkit.loops.run import Run

_LOW_PRECISION = (torch.bfloat16, torch.float16)
AVERAGE = "average"


class WeightAveraging(Callback):
    """Base class of weight averages: evaluations use the average, training does not, checkpoints hold both.

        training      w1   w2   w3   w4 . . . . . . w4   w5
        average       a1   a2   a3   a4             a4   a5
        evaluation                        a4 a4 a4
        checkpoint                        task: w4, evaluation_weights: a4

    Every process averages its local weights, without communication. Floating-point buffers (batch-norm statistics) are
    averaged too, others are copied. Subclasses define `share`.
    """

    def __init__(self, *, load_average_at_end: bool) -> None:
        self.load_average_at_end = load_average_at_end
        self._forget()

    def _forget(self) -> None:
        self._average: dict[str, Tensor] = {}  # what this process holds, once there is an average
        self._lined_up: tuple[list[Tensor], list[Tensor]] | None = None  # the average, and the parameters
        self._saved: Mapping[str, Tensor] = {}  # the whole average that a resumed run goes on with
        self._updates = 0
        self._seen_step = 0
        self._is_exchanged = False
        self._state: dict[str, Any] = {}

    def share(self, run: Run) -> float | None:
        """Return the share of the current weights in the average after this step; `None` skips the update."""
        raise NotImplementedError

    def on_fit_start(self, run: Run) -> None:
        if run.resumed_from is None:
            self._forget()
        self._seen_step = run.state.step
        low = [name for name, tensor in local_state(run.strategy, run.task).items() if tensor.dtype in _LOW_PRECISION]
        if low:
            raise UserError(
                f"{type(self).__name__} cannot average weights of 16 bits ({low[0]}): small changes would be rounded "
                "away. Set trainer.precision=bf16-mixed, which keeps the weights in fp32."
            )

    def on_step_end(self, run: Run) -> None:
        self._put_back(run)  # an evaluation that a signal broke off has not
        self._look(run)

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        if run.phase_optimizers and not self._is_exchanged:
            self._look(run)
            self._exchange(run)

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._put_back(run)

    def on_save(self, run: Run, payload: dict[str, Any]) -> None:
        was_exchanged = self._is_exchanged
        self._put_back(run)
        self._look(run)
        self._state.update(updates=self._updates, seen_step=self._seen_step)
        if was_exchanged:  # training has ended
            payload["task"] = _copied(run.strategy.state_dict(run.task))
        if self._updates:
            self._exchange(run)
            self._state[AVERAGE] = payload["evaluation_weights"] = _copied(run.strategy.state_dict(run.task))
            if not was_exchanged:
                self._put_back(run)  # what `payload` shares with the task is then as it was

    def on_fit_end(self, run: Run) -> None:
        self._put_back(run)
        self._look(run)
        if self.load_average_at_end:
            self._exchange(run)

    def close(self) -> None:
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        # Filled in `on_save`, where the parts of all processes are put together.
        self._state = {}
        return self._state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._forget()
        self._updates, self._seen_step = saved["updates"], saved["seen_step"]
        self._saved = saved.get(AVERAGE, {})

    def _look(self, run: Run) -> None:
        """Update the average once per step: an evaluation comes before the end of its step."""
        if run.state.step == self._seen_step:
            return
        self._seen_step = run.state.step
        share = self.share(run)
        if share is None:
            return
        if self._lined_up is not None:
            with torch.no_grad():
                torch._foreach_lerp_(*self._lined_up, share)
        else:
            self._update(run, share)
        self._updates += 1

    def _update(self, run: Run, share: float) -> None:
        held = self._held_beside_average(run)
        if self._updates == 0:
            self._average = {name: tensor.detach().clone() for name, tensor in held.items()}
        elif held:  # a stage of a pipeline may have no parameters
            _blend(self._average, held, share)
        if held and all(isinstance(tensor, nn.Parameter) for tensor in held.values()):
            # Buffers may be other tensors after every forward; parameters stay the objects that they are.
            self._lined_up = list(self._average.values()), list(held.values())

    def _held_beside_average(self, run: Run) -> dict[str, Tensor]:
        """Return the local weights, and match the average to them.

        The average of a checkpoint is that of the whole task; a pipeline stage keeps its own entries.
        """
        held = local_state(run.strategy, run.task)
        average = self._average
        if self._updates and (
            average.keys() != held.keys() or any(average[name].device != held[name].device for name in held)
        ):
            known = average or self._saved
            self._average = {name: known[name].to(tensor.device, copy=True) for name, tensor in held.items()}
            self._saved, self._lined_up = {}, None
        return held

    def _exchange(self, run: Run) -> None:
        """Swap the weights of the task and the average."""
        if self._updates == 0:
            return
        held = self._held_beside_average(run)
        with torch.no_grad():
            for name, tensor in held.items():
                weights = tensor.detach().clone()
                tensor.copy_(self._average[name])
                self._average[name].copy_(weights)
        self._is_exchanged = not self._is_exchanged

    def _put_back(self, run: Run) -> None:
        if self._is_exchanged:
            self._exchange(run)


class EMA(WeightAveraging):
    """Evaluates with `average = decay * average + (1 - decay) * weights`, taken after every step.

    Args:
        decay: Weight of the average in one update; with `every=n` the decay of n steps.
        every: Steps between updates of the average.
        start: Duration after which averaging starts, such as `"1epoch"`; `None` starts with the first step.
        warm_up: Limit the decay of update n to (1 + n) / (10 + n), so that early weights are soon forgotten.
        load_average_at_end: Load the average into the task when training ends.

    """

    def __init__(
        self,
        *,
        decay: float = 0.999,
        every: int = 1,
        start: str | Duration | None = None,
        warm_up: bool = True,
        load_average_at_end: bool = True,
    ) -> None:
        if not 0 < decay < 1:
            raise UserError(f"ema.decay must lie between 0 and 1, got {decay}; 0.999 remembers about 1000 steps.")
        if isinstance(every, bool) or every < 1:
            raise UserError(f"ema.every must be at least 1 step, got {every}.")
        super().__init__(load_average_at_end=load_average_at_end)
        self.decay = decay
        self.every = every
        self.start = None if start is None else Duration.parse(start, where="ema.start")
        if self.start is not None and self.start.unit in ("second", "minute", "hour"):
            raise UserError("ema.start is counted in steps, epochs or samples: clocks differ on ranks.")
        self.warm_up = warm_up

    def share(self, run: Run) -> float | None:
        if run.state.step % self.every or (self.start is not None and not self.start.reached(run.state)):
            return None
        decay = self.decay**self.every
        if self.warm_up:
            decay = min(decay, (1 + self._updates) / (10 + self._updates))
        return 1.0 - decay


def _blend(average: dict[str, Tensor], present: dict[str, Tensor], share: float) -> None:
    """Move the average towards the current weights by `share` of the difference."""
    names = [name for name, tensor in present.items() if tensor.is_floating_point()]
    with torch.no_grad():
        for name, tensor in present.items():
            if not tensor.is_floating_point():
                average[name].copy_(tensor)
        torch._foreach_lerp_([average[name] for name in names], [present[name] for name in names], share)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict; tied weights stay tied."""
    copies: dict[tuple[object, ...], Tensor] = {}
    copied = copy(state)  # with what modules note of their versions
    for name, value in state.items():
        if isinstance(value, Tensor):
            identity = storage_key(value)
            copies.setdefault(identity, value.detach().clone())
            copied[name] = copies[identity]
    return copied
