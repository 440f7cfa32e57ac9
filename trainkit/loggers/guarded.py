"""SafeLogger: a logger that cannot end a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.logger import Histogram, HyperParameter, Logger, hyperparameters, truncate
from trainkit.model.graph import ModelGraph
from trainkit.rng import SavedGenerators

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

LONGEST_TEXT = 100_000
"""Characters; longer texts are shortened before any logger sees them."""
MOST_FAILURES = 10
"""Failures in a row after which a logger is switched off."""
SLOW_SECONDS = 5.0
"""Seconds of one write above which a warning is given, once."""


class SafeLogger(Logger):
    """Passes everything between `open` and `close` on to another logger, and keeps its failures from the run.

    The first failure is one warning that names the logger. Every later write tries again; after ten failures in a row,
    or if it cannot be opened, the logger is switched off. The number of dropped writes is reported when the run ends.
    What a logger draws (the name of a run) does not change the draws of training.
    """

    def __init__(self, inner: Logger) -> None:
        self.inner = inner
        self.failures = 0
        """Writes that were dropped."""
        self._name = type(inner).__name__
        self._is_open = False
        self._generators = SavedGenerators()

    def open(self, folder: Path, *, step: int) -> None:
        self._is_open, self._is_off, self._warned_slow = True, False, False
        self.failures = self._in_a_row = 0
        try:
            # Loggers and their libraries draw random numbers, for names and retries.
            with self._generators:
                self.inner.open(folder, step=step)
        except Exception as error:
            self._is_off = True
            logger.warning("%s cannot be opened (%s); training goes on without it.", self._name, _reason(error))

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._attempt(lambda: self.inner.write(metrics, step=step))

    def write_config(self, config: str) -> None:
        """Keep the config as a text and its values one by one."""
        self._attempt(lambda: self.inner.write_config(truncate(config, LONGEST_TEXT)))
        self._attempt(lambda: self.inner.write_hyperparameters(hyperparameters(config)))

    def write_hyperparameters(self, values: Mapping[str, HyperParameter]) -> None:
        self._attempt(lambda: self.inner.write_hyperparameters(values))

    def write_text(self, name: str, text: str, *, step: int) -> None:
        self._attempt(lambda: self.inner.write_text(name, truncate(text, LONGEST_TEXT), step=step))

    def write_image(self, name: str, image: Tensor, *, step: int) -> None:
        self._attempt(lambda: self.inner.write_image(name, image, step=step))

    def write_histogram(self, name: str, histogram: Histogram, *, step: int) -> None:
        self._attempt(lambda: self.inner.write_histogram(name, histogram, step=step))

    def write_graph(self, graph: ModelGraph) -> None:
        self._attempt(lambda: self.inner.write_graph(graph))

    def close(self) -> None:
        if self.failures:
            logger.warning("%s dropped %d records.", self._name, self.failures)
            self.failures = 0
        self._is_off = False  # also one that is switched off has something to release
        self._attempt(self.inner.close)
        self.failures, self._is_open = 0, False

    def _attempt(self, call: Callable[[], None]) -> None:
        """Make the call if the logger is open, and count its failure; KeyboardInterrupt and SystemExit pass through."""
        if not self._is_open:
            return
        if self._is_off:
            self.failures += 1
            return
        # Measured around the whole call, since training waits for it.
        began = time.monotonic()
        try:
            with self._generators:
                call()
        # Any error of a logger: it matters less than the run.
        except Exception as error:
            self._count_failure(error)
            return
        self._in_a_row = 0
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS and not self._warned_slow:
            self._warned_slow = True
            message = "%s took %.0f s to write, and training waited; log less often (trainer.log_every) or remove it."
            logger.warning(message, self._name, seconds)

    def _count_failure(self, error: Exception) -> None:
        self.failures += 1
        self._in_a_row += 1
        if self.failures == 1:
            logger.warning("%s failed (%s); training goes on, and it is tried again.", self._name, _reason(error))
        if self._in_a_row == MOST_FAILURES:
            self._is_off = True
            logger.warning("%s is switched off for the rest of this run.", self._name)


def _reason(error: Exception) -> str:
    return truncate(f"{type(error).__name__}: {error}", 500)
