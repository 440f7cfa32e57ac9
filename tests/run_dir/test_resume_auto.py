"""The run that `resume=auto` continues."""

import json
import logging
import os
import shutil

import pytest
from trainkit.callbacks.checkpoint import Checkpoint

from tests.tasks import Recorder, Regression, assert_same_bits, regression_data
from trainkit import Callback, Data
from trainkit.checkpoint.store import CheckpointStore, load_from
from trainkit.cli.main import main
from trainkit.errors import Stopped, UserError

DATA = Data(train=regression_data(20), batch_size=4)
TINY = ["recipe=digits_mlp", "data.num_train=96", "data.batch_size=16", "task.width=8", "logger=[jsonl]"]
CHECKPOINTS = ["callbacks=[checkpoint]", "callbacks.checkpoint.every=1step", "callbacks.checkpoint.save_last_k=null"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Fail(Callback):
    """Ends a run at a step by an exception, or by a signal."""

    def __init__(self, step, number=None):
        self.step, self.number = step, number

    def on_step_end(self, run):
        if run.state.step == self.step:
            if self.number is None:
                raise RuntimeError("broken")
            os.kill(os.getpid(), self.number)


def checkpoint():
    return Checkpoint(every="1step", save_last_k=None)


def first_step(recorder):
    return recorder.moments[0][1]


@pytest.fixture
def fit(make_trainer):
    """Train with `resume="auto"` and return the result and the step that training began at."""

    def run(*callbacks, run_dir=None, max_duration="5step", task=None):
        recorder = Recorder()
        callbacks = [recorder, checkpoint(), *callbacks]
        trainer = make_trainer(callbacks=callbacks, run_dir=run_dir, max_duration=max_duration)
        return trainer.fit(task or Regression(), DATA, resume="auto"), first_step(recorder)

    return run


def runs():
    folder = os.path.join("runs", "Regression")
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def test_a_new_run_starts_and_logs_it_if_there_is_none_to_resume(fit, caplog):
    with caplog.at_level(logging.INFO, logger="trainkit"):
        assert fit()[1] == 0
    assert "resume=auto: starting a new run, as no run in runs/Regression can be resumed." in caplog.messages


@pytest.mark.parametrize("number", [None, 2, 15], ids=["exception", "SIGINT", "SIGTERM"])
def test_a_run_that_was_ended_early_resumes_to_the_weights_of_an_uninterrupted_one(fit, make_trainer, caplog, number):
    whole, resumed = Regression(hidden=8, dropout=0.5), Regression(hidden=8, dropout=0.5)
    make_trainer(max_duration="5step").fit(whole, DATA)
    with pytest.raises((RuntimeError, Stopped)):
        fit(Fail(3, number), task=Regression(hidden=8, dropout=0.5))
    with caplog.at_level(logging.INFO, logger="trainkit"):
        result, first = fit(task=resumed)
    assert first == 3
    assert [path for path in runs()] == [result.run_dir.name]
    assert f"resume=auto: continuing runs/Regression/{result.run_dir.name} from step 3." in caplog.messages
    assert_same_bits(resumed, whole)


def test_a_run_that_was_killed_has_no_summary_and_is_resumed(fit):
    fit(max_duration="3step")
    os.remove(os.path.join("runs", "Regression", runs()[0], "summary.json"))
    assert fit()[1] == 3
    assert len(runs()) == 1


def test_a_summary_is_that_of_the_latest_part_of_a_run(fit):
    class NoSummary(Callback):
        def on_fit_start(self, run):
            assert not (run.run_dir / "summary.json").exists()

    result, _ = fit(max_duration="3step")
    assert json.loads((result.run_dir / "summary.json").read_text())["status"] == "finished"
    with pytest.raises(RuntimeError, match="broken"):
        fit(NoSummary(), Fail(4))
    assert json.loads((result.run_dir / "summary.json").read_text())["status"] == "failed"


def test_a_finished_run_is_not_resumed_unless_it_is_to_last_longer(fit):
    assert fit()[1] == 0
    assert fit()[1] == 0
    assert len(runs()) == 2
    assert fit(max_duration="7step")[1] == 5
    assert len(runs()) == 2


def test_the_newest_run_that_can_be_continued_is_chosen(fit):
    for step in (2, 3):
        with pytest.raises(RuntimeError, match="broken"):
            fit(Fail(step), run_dir=f"runs/Regression/2026-01-0{step}_00-00-00")
    os.makedirs("runs/Regression/2026-01-09_00-00-00")  # killed before its first checkpoint
    shutil.copytree("runs/Regression/2026-01-03_00-00-00", "runs/Regression/2026-01-03_00-00-00_2")
    shutil.copytree("runs/Regression/2026-01-02_00-00-00", "runs/Regression/2026-01-03_00-00-00_10")
    for file in CheckpointStore("runs/Regression/2026-01-03_00-00-00_10/checkpoints").entries():
        os.truncate(file.path, 100)
    result, first = fit()
    assert (result.run_dir.name, first) == ("2026-01-03_00-00-00_2", 3)


def test_the_given_folder_is_resumed_also_if_there_are_newer_runs(fit):
    with pytest.raises(RuntimeError, match="broken"):
        fit(Fail(3))
    assert fit(run_dir="mine")[1] == 0
    assert fit(run_dir="mine")[1] == 5  # finished: there is nothing left to do
    with pytest.raises(RuntimeError, match="broken"):
        fit(Fail(6), run_dir="mine", max_duration="8step")
    assert fit(run_dir="mine", max_duration="8step")[1] == 6


def test_a_damaged_checkpoint_is_passed_over(fit):
    with pytest.raises(RuntimeError, match="broken"):
        fit(Fail(3), run_dir="mine")
    entries = CheckpointStore("mine/checkpoints").entries()
    os.truncate(entries[-1].path, entries[-1].size - 1)
    assert fit(run_dir="mine")[1] == 2


def test_a_folder_in_which_every_checkpoint_is_damaged_starts_a_new_run(fit):
    fit(run_dir="mine")
    for entry in CheckpointStore("mine/checkpoints").entries():
        os.truncate(entry.path, 10)
    assert fit(run_dir="mine")[1] == 0
    assert load_from("mine").entry.step == 5


@pytest.mark.slow
def test_the_command_line_resumes_a_run_and_names_it(capfd):
    argv = ["fit", *TINY, *CHECKPOINTS, "resume=auto"]
    assert main([*argv, "trainer.max_duration=2step"]) == 0
    assert main([*argv, "trainer.max_duration=4step"]) == 0
    (folder,) = os.listdir("runs/digits_mlp")
    assert load_from(f"runs/digits_mlp/{folder}").entry.step == 4
    assert main([*argv, "trainer.max_duration=4step", "run_dir=mine"]) == 0
    assert main([*argv, "trainer.max_duration=6step", "run_dir=mine"]) == 0
    assert load_from("mine").entry.step == 6


@pytest.mark.parametrize("words", [["resume=runs/x"], ["resume=auto", "-m", "seed=1,2"]])
def test_the_command_line_refuses_a_run_that_cannot_be_resumed(words, capsys):
    assert main(["fit", *TINY, *words]) == 2
    assert "resume" in capsys.readouterr().err


def test_a_wrong_word_is_taken_for_a_path(make_trainer):
    with pytest.raises(UserError, match="There is no run or checkpoint at atuo"):
        make_trainer().fit(Regression(), DATA, resume="atuo")
