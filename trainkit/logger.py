"""Logger: the interface of destinations for metrics, texts, images and hyperparameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import UserError
from trainkit.storage import is_url

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.model.graph import ModelGraph

HyperParameter = str | int | float | bool
"""A leaf of a run's config."""


@dataclass(frozen=True)
class Histogram:
    """Counts of finite elements between edges."""

    edges: tuple[float, ...]
    """Ascending; one more than `counts`."""
    counts: tuple[int, ...]
    total: float
    total_of_squares: float
    num_nonfinite: int = 0

    @property
    def num_elements(self) -> int:
        """Finite elements."""
        return sum(self.counts)


class Logger(ABC):
    """Writes the metrics of a run; its errors do not end the run.

    Only rank 0 calls it, and writes only between `open` and `close`. Override what the destination supports.
    """

    @abstractmethod
    def open(self, folder: Path, *, step: int) -> None:
        """Write into the run's `folder` from now on; remove records of an earlier part of the run beyond `step`."""

    @abstractmethod
    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write `metrics` by their full names (`train/loss`) at optimizer step `step`."""

    def write_config(self, config: str) -> None:
        """Write the run's config, a YAML text that is not empty."""

    def write_hyperparameters(self, values: Mapping[str, HyperParameter]) -> None:
        """Write the hyperparameters by their dotted names (`trainer.seed`), for tables of several runs."""

    def write_text(self, name: str, text: str, *, step: int) -> None:
        """Write a text, such as predictions in words."""

    def write_image(self, name: str, image: Tensor, *, step: int) -> None:
        """Write an image: uint8 on the host, (height, width, 3)."""

    def write_histogram(self, name: str, histogram: Histogram, *, step: int) -> None:
        """Write a histogram of values."""

    def write_graph(self, graph: ModelGraph) -> None:
        """Write the operations of the task's training step."""

    def close(self) -> None:
        """Flush and release; may be called twice."""


def truncate(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters, with a note of its full length."""
    if len(text) <= limit:
        return text
    note = f"... ({len(text):,} characters)"
    return text[: max(0, limit - len(note))] + note[:limit]


def hyperparameters(config: str) -> dict[str, HyperParameter]:
    """Return the leaves of a YAML text by their dotted names (`trainer.seed`), without those that are `null`."""
    import yaml

    return dict(_flat(yaml.safe_load(config), ""))


def require_package(package: str, *, extra: str, where: str) -> None:
    """Raise UserError with what to type if a package is not installed. Nothing is imported."""
    if find_spec(package) is None:
        install = f"pip install 'trainkit-torch[{extra}]'"
        raise UserError(f"{where} needs the package '{package}', which is not installed: {install}.")


def check_inside_run_dir(path: str, *, where: str) -> None:
    """Raise UserError if a logger's file or folder could lie outside of the run's folder."""
    if is_url(path):
        raise UserError(f"{where}={path!r} is a URL, and must be a name in the run's folder.")
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise UserError(f"{where}={path!r} must lie in the run's folder; write a name such as {Path(path).name!r}.")


def _flat(value: Any, name: str) -> Iterator[tuple[str, HyperParameter]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _flat(child, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (str, int, float, bool)):
        yield name, value
    elif value is not None:
        yield name, str(value)
