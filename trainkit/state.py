"""TrainState: steps, epochs, samples and seconds of training."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Counters over all ranks, the same on every rank."""

    step: int = 0
    """Optimizer steps of the whole task."""
    epoch: int = 0
    """Complete epochs."""
    position: int = 0
    """Items of the present epoch trained so far, over all ranks."""
    samples: int = 0
    """Samples trained so far, over all ranks and epochs."""
    epoch_length: int | None = None
    """Items of one epoch; `None` for iterable datasets."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest value of every logged metric, by its full name (`validation/loss`)."""
    skipped_steps: set[int] = field(default_factory=set)
    """Steps that a rollback has listed: they change nothing."""
    micro_batch_size: int | None = None
    """Maximum number of samples of a micro-batch, if `micro_batch_size=auto` has found it."""
    evaluation_due: bool = False
    """True if an evaluation was interrupted and must be repeated."""
    clock_is_synced: bool = False
    """True if a duration counts seconds, so that ranks synchronize their clocks."""
    _seconds_before: float = 0.0
    _started: float | None = None
    _synced: float | None = None

    @property
    def epochs(self) -> float:
        """Epochs with the fraction of the present one."""
        return self.epoch + (self.position / self.epoch_length if self.epoch_length else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds of training, including those before a resume; as last synchronized if clocks are."""
        return self.own_seconds if self._synced is None else self._synced

    @property
    def own_seconds(self) -> float:
        """Seconds of training by this rank's own clock."""
        return self._seconds_before + (0.0 if self._started is None else time.monotonic() - self._started)

    def start_clock(self) -> None:
        """Count seconds from now on."""
        self._started = time.monotonic()

    def resume_clock(self, seconds: float) -> None:
        """Continue the clock from `seconds`."""
        self._seconds_before = seconds
        self.start_clock()

    def sync_clock(self) -> None:
        """Make `seconds` the synchronized time; until the first `set_clock`, the time at the resume."""
        if not self.clock_is_synced:
            self.clock_is_synced = True
            self._synced = self._seconds_before

    def set_clock(self, seconds: float) -> None:
        """Set the synchronized time, the same on every rank, until the next call."""
        self._synced = seconds

    def advance(self, *, items: int, samples: int, ends_epoch: bool) -> None:
        """Count one optimizer step over `samples` samples."""
        self.step += 1
        self.samples += samples
        if ends_epoch:
            self.epoch += 1
            self.position = 0
        else:
            self.position += items

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "position": self.position,
            "samples": self.samples,
            "seconds": self.own_seconds,
            "metrics": {name: float(value) for name, value in self.metrics.items()},
            "evaluation_due": self.evaluation_due,
            "skipped_steps": sorted(self.skipped_steps),
            "micro_batch_size": self.micro_batch_size,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""
        self.step = saved["step"]
        self.epoch = saved["epoch"]
        self.position = saved["position"]
        self.samples = saved["samples"]
        self.metrics = dict(saved["metrics"])
        self.evaluation_due = saved["evaluation_due"]
        self.skipped_steps = set(saved.get("skipped_steps", []))
        self.micro_batch_size = saved.get("micro_batch_size")
        self._seconds_before = saved["seconds"]
