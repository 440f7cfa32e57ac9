"""Weights & Biases: curves, histograms, images and text beside the run's config, online or offline."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainkit.files import write_text
from trainkit.logger import Histogram, HyperParameter, Logger, require_package, truncate
from trainkit.settings import check_arguments

if TYPE_CHECKING:
    from torch import Tensor

ID_FILE = "wandb_run_id"
"""The file in the run's folder with the server's id of the run."""
LONGEST_SETTING = 2_000
"""Characters of one hyperparameter."""


class WandbLogger(Logger):
    """Writes to Weights & Biases, which must be installed: `pip install 'trainkit-torch[wandb]'`.

    The x axis is the metric `step`. A resumed run continues the same W&B run, where points beyond the resumed step
    cannot be removed; they are written again at the same steps. With `mode=offline` everything stays in the run's
    folder until `wandb sync`.

    Args:
        project: The project at W&B.
        name: The run's name; `None`: that of its folder.
        entity: The team or user; `None`: your default one.
        group: The group of the run.
        tags: The tags of the run.
        mode: `online`, `offline` or `disabled`.

    """

    def __init__(
        self,
        *,
        project: str = "trainkit",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: Literal["online", "offline", "disabled"] = "online",
    ) -> None:
        require_package("wandb", extra="wandb", where="the logger wandb")
        check_arguments(WandbLogger.__init__, locals(), of="wandb")
        self._settings = dict[str, Any](project=project, entity=entity, group=group, tags=tags, mode=mode)
        self._name = name
        self._run: Any = None

    def open(self, folder: Path, *, step: int) -> None:
        import wandb

        self.close()
        id_file = folder / ID_FILE
        identifier = id_file.read_text().strip() if step > 0 and id_file.exists() else secrets.token_hex(4)
        self._wandb = wandb
        self._run = wandb.init(
            **self._settings,
            name=self._name or folder.name,
            dir=str(folder),
            id=identifier,
            # A new id begins a run, a known one continues it.
            resume="allow",
            # Its console would replace stdout and stderr, and with them the progress bar's terminal.
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")
        write_text(id_file, f"{identifier}\n")

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._log(metrics, step=step)

    def write_hyperparameters(self, values: Mapping[str, HyperParameter]) -> None:
        texts = {name: truncate(value, LONGEST_SETTING) for name, value in values.items() if isinstance(value, str)}
        self._run.config.update({**values, **texts}, allow_val_change=True)

    def write_text(self, name: str, text: str, *, step: int) -> None:
        self._log({name: self._wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)}, step=step)

    def write_image(self, name: str, image: Tensor, *, step: int) -> None:
        self._log({name: self._wandb.Image(image.numpy())}, step=step)

    def write_histogram(self, name: str, histogram: Histogram, *, step: int) -> None:
        import numpy as np

        counted = (np.array(histogram.counts), np.array(histogram.edges))
        self._log({name: self._wandb.Histogram(np_histogram=counted)}, step=step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(quiet=True)

    def _log(self, values: Mapping[str, Any], *, step: int) -> None:
        # Not as W&B's step counter, which refuses to go back when a run resumes from an earlier step.
        self._run.log({"step": step, **values})
