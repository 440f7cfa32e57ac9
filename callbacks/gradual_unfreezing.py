"""Gradual unfreezing of parameters, for fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from trainkit.callback import Callback
from trainkit.duration import Duration
from trainkit.errors import UserError
from trainkit.model.transforms import freeze_statistics, frozen_batch_norms
from trainkit.run import Run
from trainkit.strategy import PARTIAL_GRADIENTS, has_full_gradients, local_state


class GradualUnfreezing(Callback):
    """Freezes parameters for a given duration.

        encoder.layers.0.*    --------------------================     unfreeze_at: {"encoder.layers.0.*": 4epoch,
        encoder.*             ----------==========================          "encoder.*": 2epoch}
        head                  ====================================

    Patterns are matched against the names of parameters; if several match, the longest duration counts. Gradients are
    computed and reduced all the time, since strategies expect those of the same parameters in every step, and dropped
    before they are clipped: neither the optimizer nor the norm sees them. Batch norms among them keep their statistics
    and normalize with them. `trainer.freeze` freezes parameters for the whole run, and saves the computation too.

    Args:
        unfreeze_at: For each pattern of parameter names (`encoder.*`), the duration for which they stay frozen.

    """

    def __init__(self, *, unfreeze_at: Mapping[str, str | Duration] | None = None) -> None:
        if unfreeze_at is not None and not isinstance(unfreeze_at, Mapping):
            raise UserError(f"unfreeze_at={unfreeze_at!r} is not a mapping; write {{'encoder.*': '2epoch'}}.")
        self.unfreeze_at = {
            pattern: Duration.parse(text, where=f"unfreeze_at.{pattern}")
            for pattern, text in (unfreeze_at or {}).items()
        }
        for pattern, duration in self.unfreeze_at.items():
            if duration.is_time:
                raise UserError(f"unfreeze_at.{pattern} must be in steps, epochs or samples: clocks differ on ranks.")
        self._frozen: list[tuple[Duration, list[Tensor]]] = []  # whose gradients are dropped
        self._norms: list[tuple[list[Duration], Callable[[bool], None]]] = []  # with the function that unfreezes each

    def on_fit_start(self, run: Run) -> None:
        if not has_full_gradients(run.strategy):
            settings = " and ".join(f"strategy.{setting}=false" for setting in PARTIAL_GRADIENTS)
            raise UserError(
                f"gradual_unfreezing needs complete gradients before the optimizer's step, which this strategy does "
                f"not have; set {settings}."
            )
        # What this process holds: under fsdp the shards, whose gradients are the ones to drop.
        named, local = dict(run.task.named_parameters()), local_state(run.strategy, run.task)
        self.close()
        norms: dict[nn.Module, list[Duration]] = {}
        for pattern, duration in sorted(self.unfreeze_at.items(), key=lambda item: item[1].value):
            matching = [name for name in named if fnmatchcase(name, pattern)]
            if not matching:
                raise UserError(
                    f"unfreeze_at.{pattern} matches no parameter. There are: {', '.join(list(named)[:20])}."
                )
            parameters = [named[name] for name in matching]
            self._frozen.append((duration, [local[name] for name in matching if name in local]))
            for norm in frozen_batch_norms(run.task, parameters, [pattern]):
                norms.setdefault(norm, []).append(duration)
        self._norms = [(durations, freeze_statistics(norm)) for norm, durations in norms.items()]
        self.on_step_end(run)  # a resumed run may have unfrozen some
        for phase_optimizer in run.phase_optimizers:
            # First, or other hooks would measure gradients that are dropped.
            phase_optimizer.pre_clip_hooks.insert(0, lambda: self._drop_gradients(run))

    def on_step_end(self, run: Run) -> None:
        for item in [item for item in self._norms if all(duration.reached(run.state) for duration in item[0])]:
            self._norms.remove(item)
            item[1](run.task.training)

    def close(self) -> None:
        for _, unfreeze in self._norms:
            unfreeze(True)
        self._frozen, self._norms = [], []

    def _drop_gradients(self, run: Run) -> None:
        for duration, parameters in self._frozen:
            if not duration.reached(run.state):
                for parameter in parameters:
                    parameter.grad = None  # skipped by optimizers and norms
