"""MLflow: curves, settings, images and text in a folder, or on a tracking server."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse
from zlib import crc32

from trainkit.files import write_text
from trainkit.logger import HyperParameter, Logger, require_package, truncate
from trainkit.loggers.media import png

if TYPE_CHECKING:
    from torch import Tensor

ID_FILE = "mlflow_run_id"
"""The file in the run's folder with MLflow's id of the run."""
LONGEST_SETTING = 6_000
LONGEST_NAME = 250
"""Characters that MLflow accepts."""
_MOST_AT_ONCE = 100  # settings in one request


class MlflowLogger(Logger):
    """Writes to MLflow, of which `mlflow-skinny` is enough: `pip install 'trainkit-torch[mlflow]'`.

    A resumed run continues the same MLflow run. In a folder, points beyond the resumed step are removed; a server keeps
    them, and they are written again at the same steps.

    Args:
        experiment: The experiment, created if it does not exist.
        name: The run's name; `None`: that of its folder.
        tracking_uri: A server's address or a folder; `None`: the environment variable MLFLOW_TRACKING_URI, else the
            folder `mlruns` in the run's folder.

    """

    def __init__(
        self, *, experiment: str = "trainkit", name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        require_package("mlflow", extra="mlflow", where="the logger mlflow")
        self.experiment = experiment
        self.name = name
        self.tracking_uri = tracking_uri
        self._client: Any = None
        self._run_id = ""

    def open(self, folder: Path, *, step: int) -> None:
        self.close()
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").absolute().as_uri()
        local = _folder_of(uri)
        if local is not None:
            # Newer versions refuse folders unless this is set: they want a database, which mlflow-skinny lacks.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        existing = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if existing is None else existing.experiment_id
        id_file = folder / ID_FILE
        if step > 0 and id_file.exists():
            self._run_id = id_file.read_text().strip()
            if local is not None:
                _truncate(local / experiment / self._run_id / "metrics", step=step)
            client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = client.create_run(experiment, run_name=self.name or folder.name).info.run_id
            write_text(id_file, f"{self._run_id}\n")
        # Last, so that a failure above leaves the logger closed.
        self._client = client

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = [Metric(_name(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=named)

    def write_config(self, config: str) -> None:
        self._client.log_text(self._run_id, config, "config.yaml")

    def write_hyperparameters(self, values: Mapping[str, HyperParameter]) -> None:
        from mlflow.entities import Param

        # A resumed run keeps its first hyperparameters: MLflow refuses to change them.
        logged = self._client.get_run(self._run_id).data.params
        new = [Param(_name(name), truncate(str(value), LONGEST_SETTING)) for name, value in values.items()]
        new = [setting for setting in new if setting.key not in logged]
        for first in range(0, len(new), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, params=new[first : first + _MOST_AT_ONCE])

    def write_text(self, name: str, text: str, *, step: int) -> None:
        self._client.log_text(self._run_id, text, f"{_name(name)}/step_{step:08d}.txt")

    def write_image(self, name: str, image: Tensor, *, step: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"step_{step:08d}.png"
            path.write_bytes(png(image))
            self._client.log_artifact(self._run_id, str(path), _name(name))

    def close(self) -> None:
        # Cleared first: close may be called twice.
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._run_id)


def _name(name: str) -> str:
    """Return a name that MLflow accepts: letters, digits and a few signs, at most `LONGEST_NAME`; long ones differ."""
    accepted = "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
    return accepted if len(accepted) <= LONGEST_NAME else f"{accepted[: LONGEST_NAME - 9]}_{crc32(name.encode()):08x}"


def _folder_of(uri: str) -> Path | None:
    """Return the folder of an address that names no server."""
    parsed = urlparse(uri)
    if parsed.scheme == "file":
        return Path(unquote(parsed.path))
    return Path(uri) if parsed.scheme == "" else None


def _truncate(folder: Path, *, step: int) -> None:
    """Remove the points beyond `step` from files whose lines are `<time> <value> <step>`."""
    for path in folder.rglob("*"):
        if path.is_file():
            lines = path.read_text().splitlines(keepends=True)
            kept_lines = [line for line in lines if _step_of(line) <= step]
            if len(kept_lines) < len(lines):
                write_text(path, "".join(kept_lines))


def _step_of(line: str) -> float:
    """Return the step of a line; infinity for a line that was written only in part."""
    fields = line.split()
    return int(fields[2]) if line.endswith("\n") and len(fields) >= 3 and fields[2].isdigit() else float("inf")
