"""`-m`: one run for each combination of values."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.program import Program
from trainkit.checkpoint.store import CheckpointStore
from trainkit.cli.main import main
from trainkit.cli.sweep import SweepObjective

TINY = [
    *("recipe=digits_mlp", "data.num_train=32", "data.batch_size=16", "task.width=8"),
    *("trainer.max_duration=2step", "trainer.report=false"),
]
QUIET = ["callbacks=[]", "logger=[]"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def _jobs(folder):
    return json.loads((folder / "sweep.json").read_text())["jobs"]


@pytest.mark.slow
def test_two_jobs_leave_two_run_folders_and_a_table(tmp_path, capsys):
    settings = ["trainer.report=true", "+callbacks=early_stopping", "~callbacks.progress_bar"]
    assert main(["fit", "-m", *TINY, "task.lr=0.1,0.2", *settings]) == 0
    (sweep,) = (tmp_path / "runs" / "digits_mlp").iterdir()
    assert sweep.name.endswith("_sweep")
    for job, lr in (("0", "0.1"), ("1", "0.2")):
        assert f"lr: {lr}" in (sweep / job / "config.yaml").read_text()
        assert "early_stopping:" in (sweep / job / "config.yaml").read_text()
        assert json.loads((sweep / job / "summary.json").read_text())["steps"] == 2
        assert "task.lr" in (sweep / job / "config_diff.json").read_text()
    shown = capsys.readouterr().out
    assert "sweep of 2 jobs in runs/digits_mlp/" in shown
    assert "1  task.lr=0.2  validation/loss=" in shown
    changed = [line.split() for line in shown.splitlines() if line.startswith("changed ")]
    assert ["task.lr=0.1" in typed for typed in changed] == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.slow
def test_a_job_alone_gives_the_weights_of_the_same_job_in_a_sweep(tmp_path):
    assert main(["fit", "-m", *TINY, *QUIET, "task.lr=0.1,0.2", "run_dir=sweep"]) == 0
    assert main(["fit", *TINY, *QUIET, "task.lr=0.2", "run_dir=alone"]) == 0
    swept, alone = (
        json.loads((tmp_path / name / "summary.json").read_text())["metrics"] for name in ("sweep/1", "alone")
    )
    assert swept == alone


def test_the_objective_is_the_best_value_that_a_run_has_kept(tmp_path):
    metrics = {"validation/accuracy": 0.5, "train/accuracy": 0.1}
    objective = SweepObjective("validation/accuracy", "max")
    assert objective.value(metrics, tmp_path) == 0.5
    assert objective.value({"train/accuracy": 0.1}, tmp_path) == 0.1
    assert not list(tmp_path.iterdir())
    store = CheckpointStore(tmp_path / "checkpoints")
    for step, value in enumerate((0.25, 0.75, 0.5)):
        store.save({}, name=f"step_{step}", step=step, epoch=0, metrics={"validation/accuracy": value})
    assert objective.value(metrics, tmp_path) == 0.75


def test_a_failed_job_is_recorded_and_the_sweep_goes_on(tmp_path, capsys):
    assert main(["fit", "-m", *TINY, *QUIET, "task.width=0,8", "run_dir=sweep"]) == 2
    said = capsys.readouterr()
    assert "error: task.width: must be at least 1" in said.err
    assert "0  task.width=0  failed: task.width: must be at least 1" in said.out
    jobs = _jobs(tmp_path / "sweep")
    assert [job["exit_code"] for job in jobs] == [2, 0]
    assert jobs[1]["metrics"] and jobs[1]["exit_reason"] == "reached max_duration=2step"
    assert jobs[0]["value"] is None and jobs[1]["value"] == jobs[1]["metrics"]["validation/loss"]
    assert Path(jobs[1]["run_dir"], "summary.json").exists()


INTERRUPTED_TASK = """
from trainkit.recipes.digits_mlp import DigitsMLP


class Interrupted(DigitsMLP):
    def __init__(self, **settings: object):
        raise KeyboardInterrupt
"""


def test_an_interrupt_before_training_is_told_and_ends_the_sweep(tmp_path, capsys):
    (tmp_path / "interrupted_task.py").write_text(INTERRUPTED_TASK)
    task = "task={_target_: interrupted_task.Interrupted}"
    with pytest.raises(SystemExit) as caught:
        main(["fit", "-m", *(text for text in TINY if "width" not in text), *QUIET, task, "trainer.seed=1,2"])
    assert caught.value.code == 130
    assert "interrupted" in capsys.readouterr().err.splitlines()


def test_a_wrong_value_in_any_job_is_reported_before_the_first_starts(tmp_path, capsys):
    assert main(["fit", "-m", *TINY, *QUIET, "task.width=8,wide", "task.lrr=1,2", "strategy=single,singel"]) == 2
    said = capsys.readouterr().err
    for part in ("'wide' is text", "Did you mean 'task.lr'?", "Did you mean 'single'?"):
        assert part in said
    assert said.count("task.lrr: unknown key") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_optuna_searches_in_the_direction_of_the_monitored_metric(tmp_path, capsys):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    searched = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra/sweeper/sampler=grid",
        "hydra.sweeper.n_jobs=1",
    ]
    argv = [*TINY, "callbacks=[checkpoint]", "logger=[]", *searched, "task.width=choice(4,8)"]
    argv.remove("task.width=8")
    assert main(["fit", "-m", *argv, "run_dir=sweep"]) == 0
    kept = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert kept["objective"] == {"metric": "validation/accuracy", "mode": "max"}
    values = [job["value"] for job in kept["jobs"]]
    assert len(values) == 2
    best = max(values)
    assert f"best_value: {best}" in (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    assert capsys.readouterr().out.count("<- best") == 1


def test_a_missing_launcher_or_sweeper_is_reported_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "hydra_plugins.hydra_joblib_launcher", None)
    assert main(["fit", "-m", *TINY, "task.lr=1,2", "hydra/launcher=joblib"]) == 2
    assert "pip install 'trainkit-torch[sweeps]'" in capsys.readouterr().err
    assert main(["fit", "-m", *TINY, "task.lr=1,2", "hydra/launcher=jobllib"]) == 2
    assert "Did you mean 'joblib'?" in capsys.readouterr().err


ALONE = """\
import os
from pathlib import Path

from trainkit.recipes.digits_mlp import DigitsMLP


class Alone(DigitsMLP):
    def __init__(self, **settings):
        super().__init__(**settings)
        if "RANK" not in os.environ:  # where jobs are put together, not on a rank
            ranks = [rank for server in children_of(os.getpid()) for rank in children_of(server)]
            with Path("ranks.txt").open("a") as file:
                file.write(repr(ranks) + "\\n")


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
"""


SEARCHED = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweeper.n_jobs=1", "hydra.sweeper.n_trials=2"]
ON_RANKS = {
    "alone": [*TINY, "task._target_=alone.Alone", "task.lr=0.1,0.2"],
    "optuna": [*TINY[:3], *TINY[4:], *SEARCHED, "task.width=choice(0,8)"],
}


@pytest.fixture(scope="module")
def sweeps_on_ranks(tmp_path_factory):
    """The folders of two sweeps whose jobs train on ranks, one after the other in one program."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ON_RANKS}
    (folders["alone"] / "alone.py").write_text(ALONE)
    if find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
        del folders["optuna"]
    with Program(_sweep_in, folders) as program:
        assert program.wait() == 0
    return folders


def _sweep_in(folders):
    for name, folder in folders.items():
        os.chdir(folder)
        argv = [*ON_RANKS[name], *QUIET, "strategy=ddp", "strategy.devices=2", "run_dir=sweep"]
        with Path("out.txt").open("w") as out, redirect_stdout(out):
            code = main(["fit", "-m", *argv])
        Path("code.txt").write_text(str(code))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_job_of_ranks_starts_when_those_of_the_job_before_are_gone(sweeps_on_ranks):
    folder = sweeps_on_ranks["alone"]
    assert (folder / "code.txt").read_text() == "0"
    assert (folder / "ranks.txt").read_text() == "[]\n[]\n"
    assert [job["exit_code"] for job in _jobs(folder / "sweep")] == [0, 0]


@pytest.mark.slow
def test_joblib_runs_jobs_of_ranks_side_by_side_and_one_may_fail(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    argv = [*TINY, *QUIET, "task.width=8,0", "strategy=ddp", "strategy.devices=2", "run_dir=sweep"]
    # In an interpreter of its own: joblib starts its workers from the main module.
    command = [sys.executable, "-m", "trainkit", "fit", "-m", *argv, "hydra/launcher=joblib"]
    ran = subprocess.run(
        [*command, "hydra.launcher.n_jobs=2"], capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 2, ran.stderr
    jobs = _jobs(tmp_path / "sweep")
    assert [job["exit_code"] for job in jobs] == [0, 2]
    assert "task.width: must be at least 1" in jobs[1]["error"]
    assert "sweep of 2 jobs in sweep" in ran.stdout
    assert Path("sweep/report.html").exists()


@pytest.mark.slow
def test_optuna_goes_on_after_a_failed_job_of_ranks(sweeps_on_ranks):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    folder = sweeps_on_ranks["optuna"]
    printed = (folder / "out.txt").read_text()
    assert (folder / "code.txt").read_text() == "2", printed
    failed, trained = sorted(_jobs(folder / "sweep"), key=lambda job: job["value"] is not None)
    assert (failed["exit_code"], trained["exit_code"]) == (2, 0)
    assert "task.width: must be at least 1" in failed["error"]
    assert trained["value"] == trained["metrics"]["validation/loss"]
    assert json.loads((folder / trained["run_dir"] / "summary.json").read_text())["steps"] == 2
    assert "<- best" in printed and "failed: task.width" in printed
