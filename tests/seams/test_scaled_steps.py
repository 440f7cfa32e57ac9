"""Steps that the scaler of fp16 skips are counted in the logs."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.seams.training import BATCH_SIZE, Layers, samples, trained
from trainkit import Data
from trainkit.loggers.jsonl import JsonlLogger


class Overflowing(Layers):
    """Has gradients in its second and third step that are finite only without the scale."""

    def finish(self):
        self.float()

    def training_step(self, batch):
        inputs, targets, indices = batch
        is_large = (indices >= BATCH_SIZE) & (indices < 3 * BATCH_SIZE)
        with torch.autocast("cpu", enabled=False):
            loss = nn.functional.mse_loss(self(inputs.float()), targets.float())
        return loss * torch.where(is_large.all(), 1e36, 1.0)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_steps_that_the_scaler_skips_are_logged_with_its_scale(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = TensorDataset(*samples().tensors, torch.arange(len(samples())))
    data = Data(train=dataset, batch_size=BATCH_SIZE, shuffle=False)
    settings = {"log_every": "1step", "run_dir": tmp_path / "run", "loggers": [JsonlLogger()]}
    trained(strategy, Overflowing(), data=data, precision="fp16-mixed", **settings)
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    logged = [record for record in records if "train/skipped_steps" in record]
    assert [record["train/skipped_steps"] for record in logged] == [0, 1, 2, 2, 2, 2]
    assert [record["train/loss_scale"] for record in logged] == [2.0**16, 2.0**15, *[2.0**14] * 4]
