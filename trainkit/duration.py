"""Duration and Interval: amounts of training such as `500step`, `2epoch`, `30min` or `1e6sample`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainkit.errors import UserError, nearest
from trainkit.state import TrainState

UNITS = ("step", "epoch", "sample", "second", "minute", "hour")
_SPELLINGS = {unit: unit for unit in UNITS} | {f"{unit}s": unit for unit in UNITS}
_SPELLINGS |= {"s": "second", "sec": "second", "min": "minute", "h": "hour"}
_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0}
_ROUNDING = 1e-12
"""Relative tolerance of comparisons: fractions of an epoch are not exact in binary."""
_TEXT = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]+)\s*")


@dataclass(frozen=True)
class Duration:
    """A positive amount of training in one unit: `step`, `epoch`, `sample`, `second`, `minute` or `hour`.

    Steps and samples are whole numbers; epochs may be fractions (`0.25epoch`). Steps and samples count over
    all ranks: a step is one optimizer update of the whole task.
    """

    value: float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UserError(f"unknown unit {self.unit!r} of a duration; write one of {', '.join(UNITS)}.")
        if not (math.isfinite(self.value) and self.value > 0):
            raise UserError(f"a duration must be positive and finite, got {self.value:g}{self.unit}.")
        if self.unit in ("step", "sample") and self.value != int(self.value):
            raise UserError(f"a number of {self.unit}s must be whole, got {self.value:g}{self.unit}.")

    @classmethod
    def parse(cls, text: str | Duration, *, where: str = "a duration") -> Duration:
        """Read `"500step"`, `"2epoch"`, `"1e6sample"`, `"30min"`; raises UserError naming `where`."""
        if isinstance(text, Duration):
            return text
        match = _TEXT.fullmatch(str(text))
        if match is None:
            raise UserError(
                f"{where} = {text!r} is not a duration; write a number and a unit, for example "
                "'500step', '2epoch', '30min' or '1e6sample'."
            )
        number, spelling = match.groups()
        if spelling.lower() not in _SPELLINGS:
            raise UserError(
                f"{where} = {text!r}: unknown unit {spelling!r}.{nearest(spelling, _SPELLINGS)} "
                f"Units: step, epoch, sample, s, min, h."
            )
        try:
            value = float(number)
        except ValueError:
            raise UserError(f"{where} = {text!r}: {number!r} is not a number.") from None
        return cls(value, _SPELLINGS[spelling.lower()])

    @classmethod
    def parse_all(cls, texts: str | Duration | Iterable[str | Duration], *, where: str) -> list[Duration]:
        """Read one duration or several, also separated by commas (`"10epoch,30min"`)."""
        if isinstance(texts, str):
            texts = texts.split(",")
        elif isinstance(texts, Duration):
            texts = [texts]
        elif not isinstance(texts, Iterable):
            raise UserError(f"{where} = {texts!r} is not a duration; write for example '500step' or '2epoch'.")
        durations = [cls.parse(text, where=where) for text in texts]
        if not durations:
            raise UserError(f"{where} is empty; write for example '500step' or '2epoch'.")
        return durations

    @property
    def is_time(self) -> bool:
        """True for seconds, minutes and hours, which are not the same on every rank."""
        return self.unit in _SECONDS

    def elapsed(self, state: TrainState) -> float:
        """Return the amount trained so far, in this duration's unit."""
        if self.unit == "step":
            return state.step
        if self.unit == "sample":
            return state.samples
        if self.unit == "epoch":
            return state.epochs
        return state.seconds / _SECONDS[self.unit]

    def reached(self, state: TrainState) -> bool:
        """Return True if training has lasted at least this long."""
        return self.elapsed(state) >= self.value * (1 - _ROUNDING)

    def __str__(self) -> str:
        return f"{self.value:g}{self.unit}"


class Interval:
    """Becomes due once every `duration`, and after the first step if `at_first`; never if `duration` is `None`."""

    def __init__(self, duration: Duration | None, *, at_first: bool = False) -> None:
        self.duration = duration
        self._at_first = at_first
        self.next = math.inf
        """The time, steps or samples at which it is due."""

    def start(self, state: TrainState) -> None:
        """Count from the present state, which may be that of a resumed run."""
        if self.duration is None:
            return
        if self.duration.is_time:
            # Ranks whose clocks differ would be due at different steps, and wait for each other in collectives.
            state.sync_clock()
        # Multiples from the start of training, not from now: a resumed run is due where one without a break would be.
        passed = math.floor(self.duration.elapsed(state) / self.duration.value * (1 + _ROUNDING))
        self.next = (passed + 1) * self.duration.value * (1 - _ROUNDING)
        if self._at_first and state.step == 0:
            self.next = 0.0

    def due(self, state: TrainState) -> bool:
        """Return True once for each multiple of the duration that is reached."""
        if self.next == math.inf or self.duration is None or self.duration.elapsed(state) < self.next:
            return False
        # From the present state, as a step may pass several multiples: they are due once together.
        self.start(state)
        return True


def log_interval(max_steps: int | None) -> Duration:
    """Return the usual interval between log points: 50 steps, and fewer in a run whose curve would have few points."""
    return Duration(50 if max_steps is None else max(1, min(50, max_steps // 50)), "step")


def total_steps(
    durations: Sequence[Duration], *, steps_of_epoch: int | None, items_of_epoch: int | None, batch_size: int | None
) -> int | None:
    """Return the optimizer steps until the first of the durations is reached; `None` if that is not known yet."""
    totals = []
    for duration in durations:
        if duration.unit == "step":
            totals.append(int(duration.value))
        elif steps_of_epoch is None or items_of_epoch is None:
            continue
        elif duration.unit == "epoch":
            whole_epochs, part = divmod(duration.value, 1.0)
            # Slightly fewer items, or an inexact fraction of exactly n steps would be rounded up to n + 1.
            items = part * items_of_epoch * (1 - _ROUNDING)
            totals.append(int(whole_epochs) * steps_of_epoch + math.ceil(items / (batch_size or 1)))
        elif duration.unit == "sample" and batch_size is not None:
            # Epoch by epoch, as the last step of each may have fewer samples.
            whole_epochs, rest = divmod(int(duration.value), items_of_epoch)
            totals.append(int(whole_epochs) * steps_of_epoch + math.ceil(rest / batch_size))
    return min(totals, default=None)
