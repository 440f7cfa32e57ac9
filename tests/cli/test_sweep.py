"""`-m`: one run for each combination of values."""

import json
import sys

import pytest

from trainkit.command_line.cli import main

TINY = ["recipe=digits_mlp", "data.num_train=32", "data.batch_size=16", "task.width=8", "trainer.max_duration=2step"]
QUIET = ["callbacks=[]", "logger=[]"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_two_jobs_leave_two_run_folders_and_a_table(tmp_path, capsys):
    assert main(["fit", "-m", *TINY, "task.lr=0.1,0.2", "+callbacks=early_stopping", "~callbacks.progress_bar"]) == 0
    (sweep,) = (tmp_path / "runs" / "digits_mlp").iterdir()
    assert sweep.name.endswith("_sweep")
    for job, lr in (("0", "0.1"), ("1", "0.2")):
        assert f"lr: {lr}" in (sweep / job / "config.yaml").read_text()
        assert "early_stopping:" in (sweep / job / "config.yaml").read_text()
        assert json.loads((sweep / job / "summary.json").read_text())["steps"] == 2
    shown = capsys.readouterr().out
    assert "sweep of 2 jobs in runs/digits_mlp/" in shown
    assert "1  task.lr=0.2  validation/loss=" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_job_alone_gives_the_weights_of_the_same_job_in_a_sweep(tmp_path):
    assert main(["fit", "-m", *TINY, *QUIET, "task.lr=0.1,0.2", "run_dir=sweep"]) == 0
    assert main(["fit", *TINY, *QUIET, "task.lr=0.2", "run_dir=alone"]) == 0
    swept, alone = (
        json.loads((tmp_path / name / "summary.json").read_text())["metrics"] for name in ("sweep/1", "alone")
    )
    assert swept == alone


def test_a_failed_job_is_recorded_and_the_sweep_goes_on(tmp_path, capsys):
    assert main(["fit", "-m", *TINY, *QUIET, "task.width=0,8", "run_dir=sweep"]) == 2
    said = capsys.readouterr()
    assert "error: task.width: must be at least 1" in said.err
    assert "0  task.width=0  failed: task.width: must be at least 1" in said.out
    jobs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert [job["exit_code"] for job in jobs] == [2, 0]
    assert jobs[1]["metrics"]


def test_a_wrong_setting_in_any_job_is_told_before_the_first_starts(tmp_path, capsys):
    assert main(["fit", "-m", *TINY, *QUIET, "task.width=8,wide", "task.lrr=1,2", "strategy=single,singel"]) == 2
    said = capsys.readouterr().err
    for part in ("'wide' is text", "Did you mean 'task.lr'?", "Did you mean 'single'?"):
        assert part in said
    assert said.count("task.lrr: unknown key") == 1
    assert list(tmp_path.iterdir()) == []
