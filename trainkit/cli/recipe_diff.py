"""RecipeDiff: the callback that writes how a run's config differs from its recipe, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.callback import Callback
from trainkit.report.config_changes import Change, write_changes

if TYPE_CHECKING:
    from trainkit.run import Run


class RecipeDiff(Callback):
    """Writes `config_changes.json` into the run folder. In a file of its own: every rank imports it, without Hydra."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes

    def on_fit_start(self, run: Run) -> None:
        if run.is_main and run.run_dir is not None:
            write_changes(run.run_dir, self._changes)
