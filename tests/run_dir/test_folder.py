"""The folder that a run writes into."""

import json
import os
import re

import pytest

from tests.tasks import Regression, regression_data
from trainkit import Data, UserError
from trainkit.run_dir.folder import check_run_dir, choose_run_dir, make_run_dir, write_config

DATA = Data(train=regression_data(8), batch_size=4)


def test_a_new_folder_is_named_by_task_and_time(tmp_path):
    folder = choose_run_dir("Digits", parent=tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name)
    assert folder.parent == tmp_path / "Digits"
    assert not folder.exists()


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path):
    folders = set()
    for _ in range(3):
        folder = choose_run_dir("Digits", parent=tmp_path)
        folder.mkdir(parents=True)
        folders.add(folder)
    assert len(folders) == 3


def test_checking_a_folder_changes_nothing(tmp_path):
    check_run_dir(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_named(make_trainer, tmp_path):
    (tmp_path / "runs").write_text("a file")
    trainer = make_trainer(run_dir=tmp_path / "runs" / "mine")
    with pytest.raises(UserError, match=r"run folder .*mine cannot be made: .*runs is a file\. Set run_dir"):
        trainer.fit(Regression(), DATA)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_named(make_trainer, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    trainer = make_trainer(run_dir=tmp_path / "closed" / "mine")
    with pytest.raises(UserError, match=r"cannot be written to; set run_dir to a writable path"):
        trainer.fit(Regression(), DATA)


def test_a_file_system_that_refuses_is_named(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.touch", refuse)
    with pytest.raises(UserError, match=r"cannot be written to \(Read-only file system\); set run_dir"):
        make_run_dir(tmp_path / "mine")


def test_a_run_writes_its_config_and_a_summary(make_trainer):
    trainer = make_trainer(config="lr: 0.1\n", max_duration="3step")
    result = trainer.fit(Regression(), DATA)
    assert (result.run_dir / "config.yaml").read_text() == "lr: 0.1\n"
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["steps"] == result.steps == 3
    assert summary["samples"] == 12
    assert summary["exit_reason"] == "reached max_duration=3step"
    assert summary["metrics"]["train/loss"] == result.metrics["train/loss"]
    assert summary["seconds"] > 0
    assert summary["samples_per_second"] > 0
    assert "weights" not in summary


def test_a_run_that_fails_says_so_in_its_summary(make_trainer):
    class Broken(Regression):
        def training_step(self, batch):
            raise KeyError("boom")

    trainer = make_trainer()
    with pytest.raises(KeyError):
        trainer.fit(Broken(), DATA)
    summary = json.loads((trainer.run_dir / "summary.json").read_text())
    assert summary["exit_reason"] == "KeyError: 'boom'"


def test_a_summary_is_valid_json_also_after_a_loss_that_was_not_finite(make_trainer):
    class Bad(Regression):
        def training_step(self, batch):
            return super().training_step(batch) * float("nan")

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    trainer = make_trainer(on_nonfinite="stop", log_every="1step")
    trainer.fit(Bad(), DATA)
    json.loads((trainer.run_dir / "summary.json").read_text(), parse_constant=refuse)


def test_the_config_of_an_earlier_part_of_the_run_is_kept(tmp_path):
    write_config(tmp_path, "a: 1\n")
    write_config(tmp_path, "a: 1\n")
    assert len(list(tmp_path.iterdir())) == 1
    write_config(tmp_path, "a: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"
    (earlier,) = tmp_path.glob("config_until_*.yaml")
    assert earlier.read_text() == "a: 1\n"


def test_a_run_without_run_dir_makes_a_folder_below_runs(make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = make_trainer(run_dir=None).fit(Regression(), DATA)
    assert (tmp_path / result.run_dir).parent == tmp_path / "runs" / "Regression"
