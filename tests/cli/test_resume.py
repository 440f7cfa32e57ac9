"""Stopping and continuing a run from the command line."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.program import Program, wait_until
from trainkit.checkpoint.store import load_from
from trainkit.cli.main import main
from trainkit.cli.run_commands import resume_hint
from trainkit.errors import Stopped

TINY = [
    *("recipe=digits_mlp", "data.num_train=96", "data.batch_size=16", "task.width=8"),
    *("logger=[jsonl]", "trainer.report=false"),
]
CHECKPOINTS = ["callbacks=[checkpoint]", "callbacks.checkpoint.every=2step"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def _weights(run):
    return load_from(run).payload["task"]


@pytest.mark.slow
def test_a_run_continued_in_mid_epoch_has_the_weights_of_one_never_stopped():
    assert main(["fit", *TINY, *CHECKPOINTS, "run_dir=whole", "trainer.max_duration=10step"]) == 0
    assert main(["fit", *TINY, *CHECKPOINTS, "run_dir=parts", "trainer.max_duration=8step"]) == 0
    assert main(["resume", "parts", "trainer.max_duration=10step"]) == 0
    whole, parts = _weights("whole"), _weights("parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert len(Path("parts/metrics.jsonl").read_text().splitlines()) >= 1


@pytest.mark.slow
def test_a_run_continues_with_other_settings_and_another_choice_of_callbacks():
    assert main(["fit", *TINY, *CHECKPOINTS, "run_dir=run", "trainer.max_duration=2step"]) == 0
    argv = ["resume", "checkpoint=run", "trainer.max_duration=4step", "strategy=single", "strategy.accumulate=2"]
    assert main([*argv, "+callbacks=speed_monitor", "logger=csv"]) == 0
    settings = Path("run/config.yaml").read_text()
    for part in ("accumulate: 2", "Checkpoint", "SpeedMonitor", "CsvLogger", "recipe: digits_mlp", "width: 8"):
        assert part in settings
    assert "JsonlLogger" not in settings
    assert load_from("run").entry.step == 4


def test_a_checkpoint_outside_of_its_run_is_continued_in_a_new_folder():
    assert main(["fit", *TINY, *CHECKPOINTS, "run_dir=run", "trainer.max_duration=2step"]) == 0
    load_from("run").entry.path.rename("moved.pt")
    before = sorted(Path().iterdir())
    assert main(["resume", "moved.pt", "trainer.max_duration=4step"]) == 0
    assert {path.name for path in set(Path().iterdir()) - set(before)} == {"runs"}
    [run] = Path("runs/digits_mlp").iterdir()
    assert load_from(run).entry.step == 4


def test_settings_of_a_run_cannot_be_mistyped_either(capsys):
    assert main(["fit", *TINY, *CHECKPOINTS, "run_dir=run", "trainer.max_duration=2step"]) == 0
    capsys.readouterr()
    assert main(["resume", "run", "trainer.max_duratoin=4step", "strategy=singel"]) == 2
    said = capsys.readouterr().err
    assert "Did you mean 'trainer.max_duration'?" in said
    assert "Did you mean 'single'?" in said


def test_a_stop_before_the_first_checkpoint_says_why_nothing_is_saved():
    def hint(callbacks, run_dir="unsaved", **trainer):
        return resume_hint(Stopped("SIGTERM", 143), Path(run_dir), {"callbacks": callbacks, "trainer": trainer})

    saving = {"mine": {"_target_": "trainkit.callbacks.checkpoint.Checkpoint"}}
    at_epochs = {"mine": {**saving["mine"], "save_at_end": False}}
    early = "stopped by SIGTERM before the first checkpoint was saved"
    absent = "stopped by SIGTERM; nothing is saved, as this run has no checkpoint callback. Add +callbacks=checkpoint"
    assert hint(saving) == f"{early}: there is nothing to resume."
    assert hint(at_epochs) == (f"{early}, and save_at_end=false saves nothing at a signal: there is nothing to resume.")
    assert [hint({}), hint([]), hint({"other": {"_target_": "mine.Other"}})] == [absent] * 3
    assert hint(saving, fast_dev_run=True) == "stopped by SIGTERM; fast_dev_run=true saves nothing."

    assert main(["fit", *TINY, *CHECKPOINTS, "run_dir=run", "trainer.max_duration=2step"]) == 0
    assert "; the state is saved in run/checkpoints/step_00000002.pt.\nTo continue: " in hint(saving, "run")
    assert "; the last checkpoint is run/checkpoints/step_00000002.pt.\nTo continue: " in hint(at_epochs, "run")


def test_the_command_to_continue_trusts_code_that_only_the_command_line_named():
    assert main(["fit", *TINY, *CHECKPOINTS, "run_dir=run", "trainer.max_duration=2step"]) == 0

    def hint(**callbacks):
        return resume_hint(Stopped("SIGTERM", 143), Path("run"), {"callbacks": callbacks, "trainer": {}})

    assert hint(mine={"_target_": "trainkit.callbacks.checkpoint.Checkpoint"}).endswith("trainkit resume run")
    assert hint(mine={"_target_": "mine.Own"}).endswith("trainkit resume run --trust")
    Path("conf/callbacks").mkdir(parents=True)
    Path("conf/callbacks/own.yaml").write_text("own:\n  _target_: mine.Own\n")
    assert hint(mine={"_target_": "mine.Own"}).endswith("trainkit resume run")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_run_resumably_and_says_how(number, code, tmp_path):
    argv = ["fit", *TINY, *CHECKPOINTS, "run_dir=run", "trainer.max_duration=1e6step", "trainer.evaluate_every=null"]
    with Path("said.txt").open("w+") as file:
        with Program(_command, argv, streams=(0, file.fileno(), file.fileno())) as program:
            wait_until(lambda: list(Path("run").glob("checkpoints/*.pt")), runs=lambda: program.exit_code is None)
            os.kill(program.pid, number)
            ended = program.wait()
        said = Path("said.txt").read_text()
    assert ended == code, said
    assert "Traceback" not in said
    assert f"stopped by {number.name}; the state is saved in run/checkpoints/step_" in said
    assert "To continue: trainkit resume run" in said
    step = load_from("run").entry.step
    assert main(["resume", "run", f"trainer.max_duration={step + 1}step"]) == 0
    assert load_from("run").entry.step == step + 1


def _command(argv):
    sys.exit(main(argv))


INTERRUPTED_TASK = """\
import os
import signal

from trainkit.recipes.digits_mlp import DigitsMLP


class Interrupted(DigitsMLP):
    def training_step(self, batch):
        Interrupted.step = getattr(Interrupted, "step", 0) + 1
        for _ in range(2 if Interrupted.step == {at} else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch)
"""


@pytest.mark.parametrize("argv", [[], ["-m"]], ids=["run", "sweep"])
@pytest.mark.parametrize(
    ("at", "hint"),
    [
        (1, "interrupted; nothing was saved. To start again, type the same command."),
        (4, "step_00000002.pt are not saved. To continue: trainkit resume run"),
    ],
)
def test_a_second_interrupt_ends_the_run_with_one_line_about_what_is_saved(at, hint, argv, capsys, caplog):
    module = f"interrupted_{at}_{len(argv)}"
    Path(f"{module}.py").write_text(INTERRUPTED_TASK.format(at=at))
    typed = [*TINY, *CHECKPOINTS, f"task._target_={module}.Interrupted", "run_dir=run"]
    try:
        code = main(["fit", *argv, *typed])
    except SystemExit as end:  # of a sweep
        code = end.code
    assert code == 130
    (line,) = [text for text in caplog.messages if "interrupted" in text]
    assert hint in line
    assert capsys.readouterr().err == ""
    command = line.partition("To continue: trainkit ")[2]
    assert not command or main([*command.split(), "trainer.max_duration=6step"]) == 0
