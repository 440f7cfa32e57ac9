"""Where logged values go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.histogram import Histogram
    from trainkit.model_graph import ModelGraph

Setting = str | int | float | bool


class Logger(ABC):
    """Writes what a run logs; only rank 0 opens it, and nothing that it raises ends the run.

    Scalars are what every logger writes; the other methods do nothing where the destination has no place for them.
    """

    @abstractmethod
    def open(self, folder: Path, *, step: int) -> None:
        """Write into the run's `folder` from now on; what an earlier part of the run wrote beyond `step` is cut."""

    @abstractmethod
    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write `metrics` by their full names (`train/loss`) at optimizer step `step`."""

    def write_config(self, config: str) -> None:
        """Keep the run's settings, a YAML text, where the destination has a place for them."""

    def write_hyperparameters(self, values: Mapping[str, Setting]) -> None:
        """Keep the run's settings one by one, by their dotted names (`trainer.seed`), for tables of several runs."""

    def write_text(self, name: str, text: str, *, step: int) -> None:
        """Write a text, such as predictions in words."""

    def write_image(self, name: str, image: Tensor, *, step: int) -> None:
        """Write an image: uint8 on the host, (height, width, 3)."""

    def write_histogram(self, name: str, histogram: Histogram, *, step: int) -> None:
        """Write how values are distributed."""

    def write_graph(self, graph: ModelGraph) -> None:
        """Keep the operations of the task's training step."""

    def close(self) -> None:
        """Flush and release; may be called twice."""


def cut(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters, with a note of how much is left out."""
    if len(text) <= limit:
        return text
    note = f"... ({len(text):,} characters)"
    return text[: max(0, limit - len(note))] + note[:limit]
