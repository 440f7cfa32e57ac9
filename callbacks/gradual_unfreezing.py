"""Training the last layers first, and more of them as training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from trainkit.callback import Callback
from trainkit.duration import Duration
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.loops.run import Run


class GradualUnfreezing(Callback):
    """Keeps parameters as they are until their time has come.

        encoder.layers.0.*    --------------------================     unfreeze_at: {"encoder.layers.0.*": 4epoch,
        encoder.*             ----------==========================          "encoder.*": 2epoch}
        head                  ====================================

    Patterns are matched against parameters' names; of several that fit, the latest time counts. Gradients are computed
    all the time, since strategies have agreed on who sends what, and are dropped before they are clipped, so that
    neither the optimizer nor the norm sees them. What is frozen for the whole run belongs in `trainer.freeze`, which
    saves the computation too.

    Args:
        unfreeze_at: For each pattern of parameter names (`encoder.*`), the duration for which they stay frozen.

    """

    def __init__(self, *, unfreeze_at: Mapping[str, str | Duration] | None = None) -> None:
        self.unfreeze_at = {
            pattern: Duration.parse(text, where=f"unfreeze_at.{pattern}")
            for pattern, text in (unfreeze_at or {}).items()
        }
        timed = [
            pattern for pattern, duration in self.unfreeze_at.items() if duration.unit in ("second", "minute", "hour")
        ]
        if timed:
            raise UserError(f"unfreeze_at.{timed[0]} is counted in steps, epochs or samples: clocks differ on ranks.")
        self._frozen: list[tuple[Duration, list[nn.Parameter]]] = []

    def on_fit_start(self, run: Run) -> None:
        if getattr(run.strategy, "shard_optimizer", False) or getattr(run.strategy, "optimizer_in_backward", False):
            raise UserError(
                "gradual_unfreezing drops whole gradients before the optimizer's step, which this strategy makes in "
                "parts; set strategy.shard_optimizer=false and strategy.optimizer_in_backward=false."
            )
        named = dict(run.task.named_parameters())
        self._frozen = []
        for pattern, duration in sorted(self.unfreeze_at.items(), key=lambda item: item[1].value):
            matching = [name for name in named if fnmatchcase(name, pattern)]
            if not matching:
                raise UserError(f"unfreeze_at.{pattern} fits no parameter; there are {', '.join(list(named)[:20])}.")
            self._frozen.append((duration, [named[name] for name in matching]))
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.pre_clip_hooks.insert(0, lambda: self._drop(run))

    def close(self) -> None:
        self._frozen = []

    def _drop(self, run: Run) -> None:
        for duration, parameters in self._frozen:
            if not duration.reached(run.state):
                for parameter in parameters:
                    parameter.grad = None  # optimizers and norms leave alone what has no gradient
