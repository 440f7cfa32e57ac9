"""Where logged values go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path


class Logger(ABC):
    """Writes scalars; only rank 0 opens it."""

    @abstractmethod
    def open(self, folder: Path, *, step: int) -> None:
        """Write into the run's `folder` from now on; what an earlier part of the run wrote beyond `step` is cut."""

    @abstractmethod
    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write `metrics` by their full names (`train/loss`) at optimizer step `step`."""

    def write_config(self, config: str) -> None:
        """Keep the run's settings, a YAML text, where the destination has a place for them."""

    def close(self) -> None:
        """Flush and release; may be called twice."""
