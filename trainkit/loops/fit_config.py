"""FitConfig: the settings of a run, checked once and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainkit.callback import Callback
from trainkit.duration import Duration
from trainkit.logger import Logger
from trainkit.model.compile import Compilation
from trainkit.model.transforms import ModelTransforms, check_patterns
from trainkit.optim.optimizer import GradientClipping
from trainkit.optim.optimizer_settings import ResumeOptimizer
from trainkit.optim.precision import Precision

NonfinitePolicy = Literal["raise", "skip", "stop", "rollback"]


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """The Trainer's arguments after parsing; what it hands to the ranks. Raises UserError for invalid values."""

    max_duration: Sequence[Duration]
    """Training stops at whichever comes first."""
    evaluate_every: Duration | None
    log_every: Duration | None
    """`None`: by the length of the run."""
    seed: int
    precision: Precision
    clip: GradientClipping
    transforms: ModelTransforms | None
    offload_activations: bool
    compile: Compilation | None
    deterministic: bool
    detect_anomaly: bool
    fused_optimizer: bool
    no_weight_decay: Sequence[str]
    on_nonfinite: NonfinitePolicy
    max_rollbacks: int
    skip_grad_norm_factor: float | None
    resume_optimizer: ResumeOptimizer
    num_sanity_batches: int
    limits: Mapping[str, int | None]
    """Global batches at most, by stage: `train`, `validation`, `test`, `predict`."""
    overfit_batches: int | None
    fast_dev_run: bool
    callbacks: list[Callback]
    loggers: list[Logger]
    yaml: str
    """All settings of the run as YAML, kept in its folder and its checkpoints."""
    remote: str | None = None
    """The URL that the run folder is copied to."""

    def __post_init__(self) -> None:
        check_patterns("no_weight_decay", self.no_weight_decay)

    def in_one_batch(self) -> FitConfig:
        """Return the settings of `fast_dev_run`: one batch of each stage, and no loggers."""
        # Without sanity batches and loggers: the one step is followed by an evaluation, and curves of it say nothing.
        step, limits = Duration(1, "step"), dict.fromkeys(self.limits, 1)
        return replace(self, max_duration=[step], evaluate_every=step, limits=limits, num_sanity_batches=0, loggers=[])
