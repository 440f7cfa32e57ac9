"""The folder that a run writes into."""

import json
import logging
import os
import re
import shutil
import stat
from contextlib import suppress
from typing import Any

import pytest
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.speed_monitor import SpeedMonitor
from trainkit.strategies.ddp import DDPStrategy

from tests.tasks import Regression, regression_data
from trainkit import Callback, Data, UserError
from trainkit.checkpoint.store import CheckpointStore
from trainkit.run_dir.folder import check_run_dir, choose_run_dir, make_run_dir, write_config

DATA = Data(train=regression_data(8), batch_size=4)


def test_a_new_folder_is_named_by_task_and_time(tmp_path):
    folder = choose_run_dir("Digits", parent=tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.name)
    assert folder.parent == tmp_path / "Digits"
    assert not folder.exists()


def test_two_runs_in_one_second_have_different_folders(tmp_path):
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

    monkeypatch.setattr("trainkit.run_dir.folder.TemporaryFile", refuse)
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
        raise AssertionError(f"{constant} is not JSON")

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


class Modes(Callback):
    """Notes the modes of all files in the run's folder while it trains."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_step_end(self, run: Any) -> None:
        logging.getLogger("trainkit.tests").warning("a warning for warnings.jsonl")
        for path in run.run_dir.rglob("*"):
            with suppress(FileNotFoundError):  # a save in the background renames its files
                self.found[path.name] = stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o002, 0o664, 0o775), (0o077, 0o600, 0o700)])
def test_files_have_the_mode_of_the_umask_and_locks_are_the_users_own(make_trainer, tmp_path, umask, file, folder):
    modes = Modes()
    callbacks = [Checkpoint(every="1step", async_save=True), SpeedMonitor(step_times=True), modes]
    run_dir = tmp_path / "run"
    before = os.umask(umask)
    try:
        make_trainer(callbacks=callbacks, loggers=["tensorboard", "jsonl", "csv"], run_dir=run_dir).fit(
            Regression(), Data(train=regression_data(16), batch_size=4)
        )
    finally:
        os.umask(before)
    assert modes.found.pop(".lock") == 0o600
    found = modes.found | {path.name: stat.S_IMODE(path.stat().st_mode) for path in run_dir.rglob("*")}
    is_folder = {path.name: path.is_dir() for path in run_dir.rglob("*")}
    assert {name: oct(mode) for name, mode in found.items() if name[0] != "."} == {
        name: oct(folder if is_folder.get(name) else file) for name in found if name[0] != "."
    }
    expected = {"config.yaml", "environment.json", "summary.json", "metrics.jsonl", "metrics.csv", "manifest.json"}
    assert expected | {"warnings.jsonl", "report.html", "step_00000004.pt"} <= set(found)


class RemoveFolder(Callback):
    """Removes or moves the run's folder after a step."""

    def __init__(self, step: int, *, moved: bool = False) -> None:
        self.step, self.moved = step, moved

    def on_step_complete(self, run: Any) -> None:
        if run.is_main and run.state.step == self.step:
            run.run_dir.rename(run.run_dir.with_name("elsewhere"))
            if not self.moved:
                shutil.rmtree(run.run_dir.with_name("elsewhere"))


@pytest.mark.parametrize(("step", "lost_before"), [(2, 3), (4, 4)], ids=["inside", "after the last save"])
@pytest.mark.parametrize(("moved", "asynchronous"), [(False, False), (True, False), (False, True)])
def test_a_removed_folder_is_noticed_and_the_run_can_be_resumed(  # noqa: PLR0917
    make_trainer, tmp_path, caplog, step, lost_before, moved, asynchronous
):
    run_dir = tmp_path / "run"
    settings: dict[str, Any] = {"loggers": ["tensorboard", "jsonl", "csv"], "run_dir": run_dir, "config": "seed: 0\n"}
    saving = Checkpoint(every="2step", async_save=asynchronous)
    data = Data(train=regression_data(16), batch_size=4)
    make_trainer(callbacks=[saving, RemoveFolder(step, moved=moved)], log_every="1step", **settings).fit(
        Regression(), data
    )
    [warning] = [record.getMessage() for record in caplog.records if "before step" in record.getMessage()]
    assert f"{run_dir} was removed or moved before step {lost_before}" in warning
    assert (run_dir / "config.yaml").read_text() == "seed: 0\n"
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 4
    assert "removed or moved" in (run_dir / "warnings.jsonl").read_text()
    assert json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])["step"] == lost_before
    assert len(list((run_dir / "tensorboard").iterdir())) == 1 and (run_dir / "metrics.csv").exists()
    assert {".lock", ".owner"}.isdisjoint(os.listdir(run_dir))
    result = make_trainer(max_duration="6step", **settings).fit(Regression(), data, resume=run_dir)
    assert result.steps == 6


class WriteLines(Callback):
    def on_step_end(self, run: Any) -> None:
        print(f"a line after step {run.state.step}")


def test_a_folder_removed_under_ranks_is_made_again(make_trainer, tmp_path):
    run_dir = tmp_path / "run"
    callbacks = [Checkpoint(every="2step"), RemoveFolder(2), WriteLines()]
    strategy = DDPStrategy(device="cpu", devices=2)
    make_trainer(strategy, callbacks=callbacks, log_every="1step", run_dir=run_dir, config="seed: 0\n").fit(
        Regression(), Data(train=regression_data(16), batch_size=4)
    )
    assert (run_dir / "config.yaml").read_text() == "seed: 0\n"
    assert "a line after step 4" in (run_dir / "rank_0.log").read_text()
    assert CheckpointStore(run_dir / "checkpoints").load_last().entry.step == 4


def test_a_folder_that_cannot_be_made_again_is_a_warning(make_trainer, tmp_path, caplog):
    class Replace(RemoveFolder):
        def on_step_complete(self, run: Any) -> None:
            super().on_step_complete(run)
            if run.state.step == self.step:
                run.run_dir.touch()

    trainer = make_trainer(callbacks=[Replace(2)], run_dir=tmp_path / "run", log_every="1step")
    with pytest.raises(UserError, match="summary could not be written"):
        trainer.fit(Regression(), Data(train=regression_data(16), batch_size=4))
    assert "run was removed or moved, and cannot be made again" in caplog.text
