"""Exponential moving average of the weights, and the base class of weight averages."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt, Unit
from torch import Tensor, nn

from trainkit.callback import Callback
from trainkit.checkpoint.serialization import storage_key
from trainkit.duration import Duration
from trainkit.errors import UserError
from trainkit.run import Run
from trainkit.settings import check_arguments
from trainkit.strategy import local_state

_LOW_PRECISION = (torch.bfloat16, torch.float16)
AVERAGE = "average"


class WeightAveraging(Callback):
    """Base class of weight averages: evaluations use the average, training does not, checkpoints hold both.

        training      w1   w2   w3   w4 . . . . . . w4   w5
        average       a1   a2   a3   a4             a4   a5
        evaluation                        a4 a4 a4
        checkpoint                        task: w4, evaluation_weights: a4

    Every process averages its local weights, without communication. Floating-point buffers (batch-norm statistics) are
    averaged too, others are copied. Subclasses define `update_weight`.
    """

    loads_from_disk = True

    def __init__(self, *, load_average_at_end: bool) -> None:
        self.load_average_at_end = load_average_at_end
        self._reset()

    def _reset(self) -> None:
        self._average: dict[str, Tensor] = {}  # of the local weights
        self._pairs: tuple[list[Tensor], list[Tensor]] | None = None  # average and weights, if all are parameters
        self._restored: Mapping[str, Tensor] = {}  # the average of the full task, in the file of a checkpoint
        self._updates = 0
        self._seen_step = 0
        self._is_swapped = False
        self._state: dict[str, Any] = {}

    def update_weight(self, run: Run) -> float | None:
        """Return the weight of the current parameters in the average after this step; `None` skips the update."""
        raise NotImplementedError

    def on_fit_start(self, run: Run) -> None:
        if run.resumed_from is None:
            self._reset()
        self._seen_step = run.state.step
        averaging = next(
            (phase_optimizer.optimizer for phase_optimizer in run.phase_optimizers if phase_optimizer.has_mode), None
        )
        if averaging is not None:
            raise UserError(
                f"{type(self).__name__} and {type(averaging).__name__} both evaluate with an average of the weights; "
                "remove the callback."
            )
        low = [name for name, tensor in local_state(run.strategy, run.task).items() if tensor.dtype in _LOW_PRECISION]
        if low:
            raise UserError(
                f"{type(self).__name__} cannot average 16-bit weights ({low[0]}): small changes would be rounded away. "
                "Set trainer.precision=bf16-mixed, which keeps the weights in fp32."
            )

    def on_step_end(self, run: Run) -> None:
        self._restore_weights(run)  # after an evaluation that a signal interrupted
        self._update(run)

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        if run.phase_optimizers and not self._is_swapped:
            self._swap(run)

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._restore_weights(run)

    def on_save(self, run: Run, payload: dict[str, Any]) -> None:
        was_swapped = self._is_swapped
        self._restore_weights(run)
        self._update(run)
        self._state.update(updates=self._updates, seen_step=self._seen_step)
        if was_swapped:  # training has ended
            payload["task"] = _copy_state(run.strategy.state_dict(run.task))
        if self._updates:
            self._swap(run)
            self._state[AVERAGE] = payload["evaluation_weights"] = _copy_state(run.strategy.state_dict(run.task))
            if not was_swapped:
                self._restore_weights(run)  # `payload` may hold the task's own tensors

    def on_fit_end(self, run: Run) -> None:
        self._restore_weights(run)
        if self.load_average_at_end:
            self._swap(run)

    def close(self) -> None:
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        # Filled in `on_save`, which is collective.
        self._state = {}
        return self._state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._reset()
        self._updates, self._seen_step = saved["updates"], saved["seen_step"]
        self._restored = saved.get(AVERAGE, {})

    def _update(self, run: Run) -> None:
        """Update the average once per step: a callback may save a checkpoint before this one's `on_step_end`."""
        if self._restored:
            self._aligned_weights(run)  # before the file may be replaced
        if run.state.step == self._seen_step:
            return
        self._seen_step = run.state.step
        weight = self.update_weight(run)
        if weight is None:
            return
        with torch.no_grad():
            if self._pairs is not None:
                # Private: one call for all weights; torch has no public function that interpolates a list of tensors.
                torch._foreach_lerp_(*self._pairs, weight)
            else:
                self._update_by_name(run, weight)
        self._updates += 1

    def _update_by_name(self, run: Run, weight: float) -> None:
        weights = self._aligned_weights(run)
        if self._updates == 0:
            self._average = {name: tensor.detach().clone() for name, tensor in weights.items()}
        elif weights:  # a stage of a pipeline may have no parameters
            floating = [name for name, tensor in weights.items() if tensor.is_floating_point()]
            average = [self._average[name] for name in floating]
            torch._foreach_lerp_(average, [weights[name] for name in floating], weight)
            for name in weights.keys() - floating:
                self._average[name].copy_(weights[name])
        if weights and all(isinstance(tensor, nn.Parameter) for tensor in weights.values()):
            # Parameters stay the same objects; buffers may be replaced in every forward.
            self._pairs = list(self._average.values()), list(weights.values())

    def _aligned_weights(self, run: Run) -> dict[str, Tensor]:
        """Return the local weights, with an average of the same names on the same devices.

        A checkpoint holds the average of the full task, of which every process keeps what it has of the weights.
        """
        weights, average = local_state(run.strategy, run.task), self._average
        if self._updates and (
            average.keys() != weights.keys() or any(average[name].device != weights[name].device for name in weights)
        ):
            if average:
                self._average = {name: average[name].to(tensor.device, copy=True) for name, tensor in weights.items()}
            else:
                self._average = self._local_average(run, weights)
            self._restored, self._pairs = {}, None
        return weights

    def _local_average(self, run: Run, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what this process has of the restored average, loaded in place of the weights for a moment."""
        # Copied: the strategy knows how to distribute a full state only by loading it into the task.
        present = {name: tensor.detach().clone() for name, tensor in weights.items()}
        run.strategy.load_state_dict(run.task, dict(self._restored))
        average = {name: tensor.detach().clone() for name, tensor in weights.items()}
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(present[name])
        return average

    def _swap(self, run: Run) -> None:
        """Swap the weights of the task and the average."""
        if self._updates == 0:
            return
        with torch.no_grad():
            for name, tensor in self._aligned_weights(run).items():
                weights = tensor.detach().clone()
                tensor.copy_(self._average[name])
                self._average[name].copy_(weights)
        self._is_swapped = not self._is_swapped

    def _restore_weights(self, run: Run) -> None:
        if self._is_swapped:
            self._swap(run)


class EMA(WeightAveraging):
    """Evaluates with `average = decay * average + (1 - decay) * weights`, updated after every step.

    The average begins as the weights after the first step that it counts, as that of torch's `AveragedModel` does.

    Args:
        decay: Decay per step.
        every: Steps between updates of the average; an update applies the decay of all of them.
        start: Duration after which averaging starts, such as `"1epoch"`; `None` starts with the first step.
        warm_up: Limit the decay of update n to (1 + n) / (10 + n), so that early weights are soon forgotten. With a
            decay of 0.999 and without it the first weights still count by 37 % after 1000 steps.
        load_average_at_end: Load the average into the task when training ends.

    """

    def __init__(
        self,
        *,
        decay: Annotated[float, Gt(0), Lt(1), "0.999 remembers about 1000 steps"] = 0.999,
        every: Annotated[int, Ge(1), Unit("steps")] = 1,
        start: str | Duration | None = None,
        warm_up: bool = False,
        load_average_at_end: bool = True,
    ) -> None:
        check_arguments(EMA.__init__, locals(), of="ema")
        super().__init__(load_average_at_end=load_average_at_end)
        self.decay = decay
        self.every = every
        self.start = None if start is None else Duration.parse(start, where="ema.start")
        if self.start is not None and self.start.is_time:
            raise UserError("ema.start must be in steps, epochs or samples: clocks differ on ranks.")
        self.warm_up = warm_up

    def update_weight(self, run: Run) -> float | None:
        if run.state.step % self.every or (self.start is not None and not self.start.reached(run.state)):
            return None
        decay = self.decay**self.every
        if self.warm_up:
            decay = min(decay, (1 + self._updates) / (10 + self._updates))
        return 1.0 - decay


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state dict; tied weights stay tied."""
    copies: dict[tuple[object, ...], Tensor] = {}
    copied = copy(state)  # with the versions of modules
    for name, value in state.items():
        if isinstance(value, Tensor):
            copied[name] = copies.setdefault(storage_key(value), value.detach().clone())
    return copied
