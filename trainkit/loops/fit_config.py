"""FitConfig: the settings of a run, checked once and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from trainkit.callback import Callback
from trainkit.duration import Duration
from trainkit.errors import UserError, nearest
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
    log_every: Duration
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
        # 2**63 - 1: ranks and steps add to the seed, and torch takes seeds below 2**64. A bool is an int to Python.
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}.")
        check_patterns("no_weight_decay", self.no_weight_decay)
        policies = get_args(NonfinitePolicy)
        if self.on_nonfinite not in policies:
            raise UserError(
                f"on_nonfinite={self.on_nonfinite!r} is unknown.{nearest(self.on_nonfinite, policies)} "
                "Choose raise, skip, stop or rollback."
            )
        if self.resume_optimizer not in get_args(ResumeOptimizer):
            raise UserError(
                f"resume_optimizer={self.resume_optimizer!r} is unknown."
                f"{nearest(self.resume_optimizer, get_args(ResumeOptimizer))} Choose configured or saved."
            )
        _check_count("max_rollbacks", self.max_rollbacks)
        factor = self.skip_grad_norm_factor
        # In this order, as a text cannot be compared; `not factor > 1` refuses NaN too.
        if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 1):
            example = "10 skips steps at ten times the average norm"
            raise UserError(f"skip_grad_norm_factor must be above 1, got {factor!r}; {example}.")
        _check_count("num_sanity_batches", self.num_sanity_batches, of=" of batches", least=0)
        limits = {f"limit_{stage}_batches": limit for stage, limit in self.limits.items()}
        for name, limit in (limits | {"overfit_batches": self.overfit_batches}).items():
            if limit is not None:
                _check_count(name, limit, of=" of batches")

    def in_one_batch(self) -> FitConfig:
        """Return the settings of `fast_dev_run`: one batch of each stage, and no loggers."""
        # Without sanity batches and loggers: the one step is followed by an evaluation, and curves of it say nothing.
        step, limits = Duration(1, "step"), dict.fromkeys(self.limits, 1)
        return replace(self, max_duration=[step], evaluate_every=step, limits=limits, num_sanity_batches=0, loggers=[])


def _check_count(name: str, value: int, *, of: str = "", least: int = 1) -> None:
    # By type first: `True` counts as 1, and to compare a text would raise an error that names no setting.
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} must be a whole number{of}, at least {least}, got {value!r}.")
