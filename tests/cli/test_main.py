"""The command line as a whole: exit codes, messages and help."""

import gc
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.program import Program
from trainkit import Trainer
from trainkit.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]
TINY = [
    *("recipe=digits_mlp", "data.num_train=64", "data.batch_size=16", "task.width=8"),
    *("trainer.log_every=2step", "trainer.report=false"),
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def _errors(capsys, *argv):
    """Return the messages on stderr of a command that must end with exit code 2."""
    assert main(list(argv)) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err


def _python(*command, check=True):
    """Run Python and return the finished process."""
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=check, timeout=600)


@pytest.mark.parametrize("argv", [["--help"], ["fit", "--help"], ["recipes"]], ids=" ".join)
def test_help_answers_without_importing_torch_or_hydra(argv):
    imports = _python("-X", "importtime", "-m", "trainkit", *argv).stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in imports}
    assert "trainkit.cli.main" in imported
    assert not {name.partition(".")[0] for name in imported} & {"torch", "hydra", "omegaconf", "numpy"}


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)


def test_help_of_fit_lists_groups_and_keys_and_those_of_what_is_chosen(capsys):
    assert main(["fit", "--help", "recipe=char_lm", "+callbacks=early_stopping"]) == 0
    shown = capsys.readouterr().out
    for expected in ("strategy ", "single", "max_duration: 1epoch", "context: 128", "patience: 3", "~callbacks."):
        assert expected in shown


def test_recipes_are_listed_with_what_to_type(capsys):
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for name in ("digits", "digits_mlp", "char_lm"):
        assert f"trainkit fit recipe={name}\n" in shown
    assert "cannot be read" not in shown


def test_recipes_are_listed_with_the_extra_that_each_needs(capsys):
    assert main(["recipes"]) == 0
    blocks = capsys.readouterr().out.strip().split("\n\n")
    needed = {block.split()[0]: re.findall(r"Needs the extra `(\w+)`", block) for block in blocks}
    assert needed == {
        "char_lm": [],
        "contrastive": ["recipes"],
        "digits": ["recipes"],
        "digits_mlp": ["recipes"],
        "finetune": ["huggingface"],
        "gan": ["recipes"],
        "gpt": ["huggingface"],
        "image_classification": ["images"],
        "tabular": ["recipes"],
    }
    commands = [f"pip install 'trainkit-torch[{name}]'" for names in needed.values() for name in names]
    assert re.findall(r"Type: (pip install \S+)", "".join(blocks)) == commands


def test_a_mistyped_command_or_option_is_named_with_the_nearest(capsys):
    assert "Did you mean 'fit'?" in _errors(capsys, "fti")
    assert "Did you mean '--config-dir'?" in _errors(capsys, "fit", "--config-dri", "x")


SLOW = (
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "tensorboard",
    "sklearn",
    "pandas",
)


@pytest.mark.slow
def test_an_error_in_the_config_imports_nothing_that_is_slow_beside_torch_and_hydra():
    script = f"""
import sys, torch, hydra
before = {{name for name in {SLOW} if name in sys.modules}}
from trainkit.cli.main import main
wrong = ["trainer.max_epoch=3", "strategy.acumulate=2", "task.lrr=1"]
for strategy in ("single", "dp", "pipeline"):
    assert main(["fit", "recipe=digits", f"strategy={{strategy}}", *wrong]) == 2
    print(*[name for name in {SLOW} if name in sys.modules and name not in before])
"""
    ran = _python("-c", script)
    for name in ("trainer.max_duration", "strategy.accumulate", "task.lr"):
        assert ran.stderr.count(name) >= 3, name
    assert ran.stdout.split() == []


def test_keys_are_completed_without_importing_torch():
    script = (
        "import sys; from trainkit.cli.main import main; main(['completion', 'query']); print(*sorted(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "COMP_LINE": "trainkit fit recipe=digits trainer.max_"},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert "trainer.max_duration=" in ran.stdout
    assert "torch" not in ran.stdout.split()


def test_the_config_is_printed_and_nothing_is_run(capsys, tmp_path):
    assert main(["fit", "recipe=char_lm", "task.lr=1e-4", "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 0.0001" in shown
    assert "context: ${data.context}" in shown
    assert main(["fit", "recipe=char_lm", "--cfg", "job", "--resolve"]) == 0
    assert "context: 128" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_run_writes_its_config_summary_and_checkpoints_into_its_folder(capsys, tmp_path):
    assert main(["fit", *TINY, "trainer.max_duration=1epoch"]) == 0
    (run,) = (tmp_path / "runs" / "digits_mlp").iterdir()
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "summary.json", "metrics.jsonl", "tensorboard", "checkpoints"} <= names
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    shown = capsys.readouterr().out
    assert f"run folder: {run.relative_to(tmp_path)}" in shown
    typed = "data.num_train=64 data.batch_size=16 task.width=8 trainer.log_every=2step"
    assert f"changed      {typed} trainer.report=false trainer.max_duration=1epoch\n" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # nothing of Hydra's


def test_a_new_run_never_writes_into_the_folder_of_another(capsys):
    assert main(["fit", *TINY, "trainer.max_duration=1step", "run_dir=mine", "callbacks=[]", "logger=[]"]) == 0
    said = _errors(capsys, "fit", *TINY, "run_dir=mine")
    assert "trainkit resume mine" in said


def test_the_saved_config_repeats_the_run(capsys, tmp_path):
    quiet = ["callbacks=[]", "logger=[jsonl]"]
    assert main(["fit", *TINY, *quiet, "run_dir=first", "trainer.max_duration=3step", "task.lr=0.05"]) == 0
    torch.manual_seed(1234)  # earlier random numbers must not matter
    assert main(["fit", "config=first/config.yaml", "run_dir=second"]) == 0
    first, second = (
        json.loads((tmp_path / name / "summary.json").read_text())["metrics"] for name in ("first", "second")
    )
    assert first == second


@pytest.mark.slow
def test_deferred_init_builds_the_same_task_without_memory(tmp_path):
    quiet = ["callbacks=[checkpoint]", "logger=[]", "trainer.max_duration=3step"]
    found = []
    for folder, deferred in {"whole": "false", "deferred": "true"}.items():
        settings = ["strategy=fsdp", "strategy.devices=2", f"trainer.deferred_init={deferred}"]
        assert main(["fit", *TINY, *quiet, *settings, f"run_dir={folder}"]) == 0
        found.append(json.loads((tmp_path / folder / "summary.json").read_text())["metrics"])
    assert found[0] == found[1]
    assert main(["resume", "deferred", "trainer.max_duration=5step"]) == 0


def test_what_deferred_init_cannot_record_names_the_key(capsys, monkeypatch, tmp_path):
    Path("pickled.py").write_text(
        "import pickle\nfrom trainkit.recipes.digits_mlp import DigitsMLP\n\n\n"
        "class Pickled(DigitsMLP):\n"
        "    def __init__(self, *, width: int = 8, **others: float) -> None:\n"
        "        super().__init__(width=width, **others)\n"
        "        self.saved = pickle.dumps(self.network[1].weight)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    typed = ["fit", "recipe=digits_mlp", "task._target_=pickled.Pickled", "trainer.deferred_init=true"]
    assert "set trainer.deferred_init=false" in _errors(capsys, *typed)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_an_exception_in_user_code_ends_with_its_own_lines_the_step_and_the_report(strategy, capfd, tmp_path):
    module = f"broken_{strategy}"  # a module is imported once
    Path(f"{module}.py").write_text(
        "from trainkit.recipes.digits_mlp import DigitsMLP\n"
        "class Broken(DigitsMLP):\n"
        "    def training_step(self, batch):\n"
        "        return batch.nothing_here\n"
    )
    argv = ["fit", *TINY[:-1], f"task._target_={module}.Broken", "trainer.max_duration=1step", "run_dir=run"]
    argv += ["callbacks=[]", "logger=[]", f"strategy={strategy}"]
    argv += [] if strategy == "single" else ["strategy.devices=2"]
    assert main(argv) == 1
    said = capfd.readouterr().err
    lines = said.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{tmp_path / module}.py", line 4, in training_step'
    assert lines[2].strip() == "return batch.nothing_here"
    assert "trainkit/" not in said and said.count("AttributeError: ") == 1
    assert re.fullmatch(r"rank [01], before the first step, Broken.training_step", lines[-3])
    assert lines[-2:] == ["report: run/report.html", "(--debug shows all calls)"]

    argv[argv.index("run_dir=run")] = "run_dir=other"
    assert main([*argv, "--debug"]) == 1
    said = capfd.readouterr().err
    assert "trainkit/loops/fit_loop.py" in said and "return batch.nothing_here" in said


def test_an_error_of_a_constructor_is_one_message_and_exit_code_2(capsys):
    wrong = ["trainer.precision=fp31", "task.width=0", "trainer.max_grad_norm=-1"]
    said = _errors(capsys, "fit", *TINY, *wrong)
    assert all(name in said for name in ("precision", "task.width", "max_grad_norm"))
    assert "larger than the training data" in _errors(capsys, "fit", *TINY, "data.batch_size=1000")
    assert not Path("runs").exists()


def test_an_unwritable_run_folder_is_refused(capsys, tmp_path):
    Path("file").write_text("")
    assert "is a file" in _errors(capsys, "fit", *TINY, "run_dir=file/run")


def test_a_wrong_path_to_a_run_is_reported_with_the_nearest_name(capsys):
    assert main(["fit", *TINY, "trainer.max_duration=1step", "run_dir=runs/mine", "logger=[]"]) == 0
    for argv in (["resume", "runs/mien"], ["validate", "checkpoint=runs/mien"], ["predict", "runs/mien"]):
        assert "Did you mean 'mine'?" in _errors(capsys, *argv)
    assert "needs a run" in _errors(capsys, "test")
    assert "not a run folder" in _errors(capsys, "resume", "runs")


def test_a_trained_run_is_validated_tested_and_predicted_with(capsys, tmp_path):
    assert main(["fit", *TINY, "trainer.max_duration=2epoch", "run_dir=run"]) == 0
    trained = json.loads(Path("run/summary.json").read_text())["metrics"]["validation/loss"]
    capsys.readouterr()
    assert main(["validate", "checkpoint=run"]) == 0
    (loss,) = (line.split() for line in capsys.readouterr().out.splitlines() if "validation/loss" in line)
    assert loss == ["validation/loss", f"{trained:.6g}"]
    assert main(["test", "run/checkpoints/best", "callbacks=[]"]) == 0
    assert "test/accuracy" in capsys.readouterr().out
    assert main(["predict", "checkpoint=run", "callbacks=[]"]) == 0
    assert "predictions of shape (360,) in run/predictions.pt" in capsys.readouterr().out
    assert torch.load("run/predictions.pt").shape == (360,)
    # A checkpoint outside of its run folder contains the run's config.
    moved = max(Path("run/checkpoints").glob("*.pt"))
    moved.rename("moved.pt")
    assert main(["validate", "checkpoint=moved.pt", "callbacks=[]"]) == 0
    assert f"{trained:.6g}" in capsys.readouterr().out
    assert "task.width: must be at least 1" in _errors(capsys, "test", "checkpoint=moved.pt", "task.width=0")
    Path("moved.pt").rename(moved)
    assert "Did you mean 'best'?" in _errors(capsys, "test", "checkpoint=run/bets")
    assert "Did you mean 'task.width'?" in _errors(capsys, "validate", "checkpoint=run", "task.widht=4")


def test_a_run_that_python_started_cannot_be_resumed_by_the_command_line(capsys, make_trainer):
    from trainkit.recipes.digits import DigitsData
    from trainkit.recipes.digits_mlp import DigitsMLP

    make_trainer(max_duration="1step", run_dir="run", callbacks=["checkpoint"]).fit(DigitsMLP(), DigitsData())
    assert "is empty: the run was started from Python" in _errors(capsys, "resume", "run")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trainkit re", ["resume", "recipes", "report"]),
        ("trainkit fit recipe=digits_", ["recipe=digits_mlp"]),
        ("trainkit fit recipe=digits task.w", ["task.weight_decay=", "task.width="]),
        ("trainkit fit -m trainer.max_du", ["trainer.max_duration="]),
        ("trainkit ex", ["explain", "export"]),
        ("trainkit explain trainer.max_du", ["trainer.max_duration"]),
        ("trainkit explain recipe=digits task.wi", ["task.width"]),
        ("trainkit explain strategy=torch", ["strategy=torch_ddp"]),
        ("trainkit completion ba", []),
    ],
)
def test_the_shell_completes_commands_choices_and_keys(line, expected, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert main(["completion", "query"]) == 0
    assert sorted(capsys.readouterr().out.split()) == sorted(expected)


def test_completion_prints_a_script_for_each_shell(capsys):
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "trainkit completion query" in capsys.readouterr().out
    assert "Did you mean 'bash'?" in _errors(capsys, "completion", "bsh")


def test_python_dash_m_works_at_the_root_of_the_repository():
    ran = subprocess.run(
        [sys.executable, "-m", "trainkit", "recipes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert "trainkit fit recipe=digits" in ran.stdout


HOSTILE_TASK = """\
import logging
import torch
from trainkit.recipes.digits_mlp import DigitsMLP

TITLE, CLIPBOARD = "\\x1b]0;title\\x07", "\\x1b]52;c;aGk=\\x07"


class Hostile(DigitsMLP):
    def training_step(self, batch):
        return {**super().training_step(batch), f"m{TITLE}": torch.tensor(1.0)}

    def validation_step(self, batch):
        logging.getLogger("trainkit").warning("logged%s", TITLE)
        return {**super().training_step(batch), f"v{CLIPBOARD}": torch.tensor(1.0)}

    def predict_step(self, batch):
        raise RuntimeError(f"raised{CLIPBOARD}")


class Refused(DigitsMLP):
    def __init__(self, **settings):
        raise ValueError(f"refused{TITLE}")
"""


def _output_in_terminal(*argv):
    """Return the output of a command in a pseudo-terminal, and its exit code."""
    near, far = pty.openpty()
    with Program(_command, argv, streams=(far, far, far), environment={**os.environ, "TERM": "xterm"}) as program:
        os.close(far)
        output = b""
        try:
            while read := os.read(near, 65536):
                output += read
        except OSError:  # the program has closed its end
            pass
        os.close(near)
        return re.sub(r"\x1b\[[0-9;]*m", "", output.decode()), program.wait()  # without colours


def _command(argv):
    sys.exit(main(argv))


@pytest.mark.slow
def test_escapes_in_names_and_messages_are_shown_and_never_reach_the_terminal_raw(capsys):
    Path("hostile.py").write_text(HOSTILE_TASK)
    fit = ["fit", *TINY, "task._target_=hostile.Hostile", "run_dir=run", "trainer.max_duration=4step"]
    outputs = [_output_in_terminal(*fit), _output_in_terminal("predict", "run", "--trust")]
    assert [code for _, code in outputs] == [0, 1]
    shown, raised = (output for output, _ in outputs)
    assert main(["validate", "run", "--trust"]) == 0
    assert main(["predict", "run", "--trust"]) == 1
    assert main(["fit", "recipe=digits_mlp", "task={_target_: hostile.Refused}", "--debug"]) == 2
    plain = "".join(capsys.readouterr())
    for text in (shown, raised, plain):
        assert "\x1b]" not in text and "\x07" not in text
    for text, parts in {
        shown: ("m\\x1b]0;title\\x07", "v\\x1b]52;c;aGk=\\x07", "logged\\x1b]0;title\\x07"),
        raised: ("raised\\x1b]52;c;aGk=\\x07",),
        plain: ("v\\x1b]52;c;aGk=\\x07", "raised\\x1b]52;c;aGk=\\x07", "refused\\x1b]0;title\\x07"),
    }.items():
        assert [part for part in parts if part not in text] == []


def test_garbage_is_collected_again_before_a_run_begins(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Trainer, "fit", lambda *_, **__: seen.append(gc.isenabled()))
    assert main(["fit", "recipe=digits", "size=tiny", f"run_dir={tmp_path / 'run'}"]) == 0
    assert main(["fit", "recipe=unknown"]) == 2
    assert seen == [True]
    assert gc.isenabled()
