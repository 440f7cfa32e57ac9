"""Linear scaling is shown if the global batch differs from the one that the learning rate was chosen for."""

import re

import pytest
import torch

from tests.tasks import Regression, regression_data
from trainkit import Data, Trainer
from trainkit.cli.main import main
from trainkit.optim.lr_schedule import LRSchedule, ReferenceBatchSize, linear_scaling


def test_the_rate_grows_as_the_global_batch_does():
    shown = linear_scaling(256, [0.002, 0.002], ReferenceBatchSize(64, "recipe digits"))
    assert shown == "0.002 as set; linear scaling from recipe digits's global batch of 64 to 256 makes 0.008"


def test_a_changed_rate_is_shown_beside_that_of_the_recipe():
    shown = linear_scaling(32, [0.1], ReferenceBatchSize(64, "recipe digits", learning_rate=0.002))
    assert shown.startswith("0.1 as set;") and shown.endswith("makes 0.001")


def test_the_reference_batch_size_or_none_gives_no_comparison():
    assert linear_scaling(64, [0.1], ReferenceBatchSize(64, "recipe digits")) is None
    assert linear_scaling(64, [0.1], None) is None


SHORT = ["recipe=digits_mlp", "trainer.max_duration=1step", "trainer.evaluate_every=null", "data.num_train=64"]


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ([], None),
        (["strategy=dp"], None),  # other devices, but the same global batch
        (
            ["data.batch_size=32"],
            "0.002 as set; .* recipe digits_mlp's global batch of 64 to 32 makes 0.001",
        ),
        (["data.batch_size=32", "task.lr=1e-3"], "0.001 as set; .*makes 0.001"),
    ],
)
def test_the_plan_of_a_recipe_with_another_batch_shows_it(typed, shown, tmp_path, capsys):
    assert main(["fit", *SHORT, *typed, f"run_dir={tmp_path / 'run'}", "callbacks=model_summary", "logger=[]"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^batches +global batch \d+ = ", printed, re.MULTILINE)
    lines = [line for line in printed.splitlines() if line.startswith("lr scaling")]
    assert len(lines) == (shown is not None)
    assert shown is None or re.search(shown, lines[0])


def test_a_resumed_run_with_another_batch_shows_it(tmp_path, capsys):
    def train(batch_size, steps, folder="run", **more):
        data = [regression_data(32)[:8]] * 4 if batch_size is None else regression_data(32)
        trainer = Trainer(
            "single",
            max_duration=f"{steps}step",
            callbacks=["checkpoint", "model_summary"],
            loggers=[],
            run_dir=tmp_path / folder,
        )
        task = Regression(lambda task: torch.optim.SGD(task.parameters(), lr=0.01))
        trainer.fit(task, Data(train=data, batch_size=batch_size), **more)
        return capsys.readouterr().out

    assert "lr scaling" not in train(4, 2)
    assert "lr scaling" not in train(4, 3, resume=tmp_path / "run")
    resumed = train(8, 4, resume=tmp_path / "run")
    assert (
        "lr scaling   0.01 as set; linear scaling from the resumed run's global batch of 4 to 8 makes 0.02" in resumed
    )
    train(None, 2, "pre-batched")
    assert "lr scaling" not in train(4, 3, "pre-batched", resume=tmp_path / "pre-batched")


def test_a_manual_schedule_steps_only_when_the_task_does(tmp_path):
    class Steps(Regression):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return optimizer, LRSchedule(self.scheduler, every="manual")

    task = Steps()
    trainer = Trainer("single", max_duration="2epoch", callbacks=[], loggers=[], run_dir=tmp_path, report=False)
    trainer.fit(task, Data(train=regression_data(8), validation=regression_data(4), batch_size=4))
    assert task.scheduler.get_last_lr() == [1.0]
