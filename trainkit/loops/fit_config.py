"""FitConfig: the settings of a run, checked once and the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from signal import Signals
from typing import Literal, get_args

from trainkit.callback import Callback
from trainkit.data.data import Data
from trainkit.duration import Duration
from trainkit.errors import UserError, nearest
from trainkit.logger import Logger
from trainkit.model.transforms import ModelTransforms, check_patterns
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import GradientClipping
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
    transforms: ModelTransforms
    compile: bool
    deterministic: bool
    detect_anomaly: bool
    fused_optimizer: bool
    no_weight_decay: Sequence[str]
    on_nonfinite: NonfinitePolicy
    max_rollbacks: int
    skip_grad_norm_factor: float | None
    num_sanity_batches: int
    limits: Mapping[str, int | None]
    """Global batches at most, by stage: `train`, `validation`, `test`, `predict`."""
    overfit_batches: int | None
    fast_dev_run: bool
    preemption_signal: Signals | None
    callbacks: list[Callback]
    loggers: list[Logger]
    yaml: str
    """All settings of the run as YAML, kept in its folder and its checkpoints."""
    reference_batch_size: ReferenceBatchSize | None = None
    """The global batch that the learning rate was chosen for, if it is known."""

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed!r}.")
        check_patterns("no_weight_decay", self.no_weight_decay)
        policies = get_args(NonfinitePolicy)
        if self.on_nonfinite not in policies:
            raise UserError(
                f"on_nonfinite={self.on_nonfinite!r} is unknown.{nearest(self.on_nonfinite, policies)} "
                "Choose raise, skip, stop or rollback."
            )
        if isinstance(self.max_rollbacks, bool) or not isinstance(self.max_rollbacks, int) or self.max_rollbacks < 1:
            raise UserError(f"max_rollbacks must be a whole number, at least 1, got {self.max_rollbacks!r}.")
        factor = self.skip_grad_norm_factor
        if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 1):
            raise UserError(
                f"skip_grad_norm_factor must be above 1, got {factor!r}; 10 skips steps at ten times the average norm."
            )
        _check_limit("num_sanity_batches", self.num_sanity_batches, least=0)
        for stage, limit in self.limits.items():
            _check_limit(f"limit_{stage}_batches", limit)
        _check_limit("overfit_batches", self.overfit_batches)

    def in_one_batch(self) -> FitConfig:
        """Return the settings of `fast_dev_run`: one batch of each stage, and no loggers."""
        step = Duration(1, "step")
        return replace(self, max_duration=[step], evaluate_every=step, limits=dict.fromkeys(self.limits, 1), loggers=[])

    def validates(self, data: Data) -> bool:
        """Return True if training is interrupted by validations."""
        return data.has("validation") and self.evaluate_every is not None

    def data_seed(self, data: Data) -> int:
        """Return the seed of the order of samples."""
        return self.seed if data.seed is None else data.seed


def _check_limit(name: str, value: int | None, *, least: int = 1) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise UserError(f"{name} must be a whole number of batches, at least {least}, got {value!r}.")
