"""Against the real package, in a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks import Regression, StopAt, regression_data
from trainkit import Data
from trainkit.loggers.guarded import SafeLogger
from trainkit.loggers.mlflow import MlflowLogger


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # what the logger sets, undone at the end


def client_of(folder: Path) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=(folder / "mlruns").absolute().as_uri())


def run_of(folder: Path) -> Any:
    client = client_of(folder)
    (run,) = client.search_runs([client.get_experiment_by_name("trainkit").experiment_id])
    return run


def curve(folder: Path, name: str) -> list[tuple[int, float]]:
    points = client_of(folder).get_metric_history(run_of(folder).info.run_id, name)
    return [(point.step, point.value) for point in points]


@pytest.mark.slow
def test_curves_settings_texts_and_images_can_be_read_by_mlflow(tmp_path: Path) -> None:
    logger = SafeLogger(MlflowLogger())
    logger.open(tmp_path, step=0)
    logger.write_config("trainer: {seed: 7}\nlong: " + "a" * 7000)
    logger.write({"train/loss": 0.5, "train/learning_rate.0": 1.0}, step=1)
    logger.write({"train/loss": float("nan")}, step=2)
    logger.write({"m" * 300: 2.0, "m" * 301: 3.0}, step=2)
    logger.write_text("samples", "hello", step=2)
    logger.write_image("picture", torch.zeros(2, 3, 3, dtype=torch.uint8), step=2)
    lost = logger.failures
    logger.close()

    run = run_of(tmp_path)
    assert lost == 0
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.seed"] == "7"
    assert len(run.data.params["long"]) == 6000
    assert run.data.params["long"].endswith("... (7,000 characters)")
    assert [len(name) for name in run.data.metrics if name.startswith("mmm")] == [250, 250]
    assert curve(tmp_path, "train/learning_rate.0") == [(1, 1.0)]
    assert [step for step, _ in curve(tmp_path, "train/loss")] == [1, 2]
    names = {path.name for path in (tmp_path / "mlruns").rglob("artifacts/**/*") if path.is_file()}
    assert names == {"config.yaml", "step_00000002.txt", "step_00000002.png"}


def test_a_resumed_run_is_one_run_without_what_was_beyond_the_checkpoint(make_trainer: Any, tmp_path: Path) -> None:
    """The first part logs one step further than it has saved."""
    data = Data(train=regression_data(32), batch_size=4)
    settings = {
        "loggers": ["mlflow", "jsonl"],
        "log_every": "1step",
        "run_dir": tmp_path,
        "config": "trainer: {seed: 1}",
    }
    make_trainer(callbacks=[StopAt(3)], **settings).fit(Regression(), data)
    logger = MlflowLogger()
    logger.open(tmp_path, step=3)
    logger.write({"train/loss": 9.0}, step=4)
    logger.close()

    make_trainer(**{**settings, "config": "trainer: {seed: 2}"}).fit(Regression(), data, resume=tmp_path)

    points = curve(tmp_path, "train/loss")
    assert [step for step, _ in points] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert points[3][1] < 9.0
    assert run_of(tmp_path).data.params["trainer.seed"] == "1"


def test_a_server_that_cannot_be_reached_does_not_stop_training(make_trainer: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    logger = MlflowLogger(tracking_uri="http://127.0.0.1:9")

    result = make_trainer(loggers=[logger]).fit(Regression(), Data(train=regression_data(16), batch_size=4))

    assert result.steps == 4
