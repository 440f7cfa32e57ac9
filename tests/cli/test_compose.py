"""Configs of runs and checkpoints: what they may name, and what happens to those that are hostile."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainkit.cli.compose import SavedConfig, compose_config
from trainkit.cli.main import main
from trainkit.errors import UserError
from trainkit.report.record import read_run

TINY = ["recipe=digits_mlp", "data.num_train=96", "data.batch_size=16", "task.width=8", "trainer.max_duration=1step"]
EVIL = """\
from pathlib import Path

Path({ran!r}).touch()
from trainkit.recipes.digits_mlp import DigitsMLP


class Task(DigitsMLP):
    pass


class NoTask:
    def __init__(self, **settings):
        Path({ran!r}).with_name("called").touch()


def function(*arguments, **settings):
    return None
"""
COMMANDS = [
    ["validate", "checkpoint=run"],
    ["test", "checkpoint=run"],
    ["predict", "checkpoint=run"],
    ["resume", "run", "trainer.max_duration=2step"],
    ["export", "checkpoint=run", "out=model.pt2"],
    ["fit", "config=run"],
    ["fit", "--cfg", "job", "config=run"],
    ["explain", "config=run"],
]
DDP = {"_target_": "trainkit.strategies.ddp.strategy.DDPStrategy", "devices": 1, "comm_hook": "power_sgd"}
TOUCH = {"_target_": "pathlib.Path.touch", "self": {"_target_": "pathlib.Path", "_args_": ["ran"]}}
LAMBDA = "trainkit.callbacks.lambda_callback.LambdaCallback"
FUNCTIONS = {"on_exception": "evil.function"}
HOSTILE = [
    ("evil.Task", {"task": {"_target_": "evil.Task"}}),
    ("pathlib.Path.touch", {"task": {"lr": TOUCH}}),
    ("pathlib.Path.touch", {"callbacks": {"checkpoint": {"every": [{"deep": [TOUCH]}]}}}),
    ("pathlib.Path.touch", {"vars": {"value": TOUCH}}),
    ("torch.hub.load", {"callbacks": {"x": {"_target_": "torch.hub.load", "repo_or_dir": "hub", "source": "local"}}}),
    ("torch.load", {"data": {"train": {"_target_": "torch.load", "f": "pickle.pt", "weights_only": False}}}),
    ("evil.function", {"task": {"lr": {"_target_": "evil.function", "_partial_": True}}}),
    ("hydra.utils.get_method", {"task": {"lr": {"_target_": "hydra.utils.get_method", "path": "evil.function"}}}),
    ("evil.function", {"callbacks": {"x": {"_target_": LAMBDA, "functions": FUNCTIONS}}}),
    ("evil.function", {"callbacks": {"x": {"_target_": LAMBDA, "_args_": [FUNCTIONS]}}}),
    ("evil.function", {"callbacks": {"x": {"_target_": LAMBDA, "_recursive_": False, "functions": FUNCTIONS}}}),
    ("evil.function", {"callbacks": {"checkpoint": {"every": [{"_target_": LAMBDA, "_args_": [FUNCTIONS]}]}}}),
    ("evil.Task", {"callbacks": {"x": {"_target_": LAMBDA, "functions": {"a": {"_target_": "evil.Task"}}}}}),
    ("./program", {"trainer": {"compile": {"options": {"cpp.cxx": [None, "./program"]}}}}),
    ("evil.function", {"strategy": {**DDP, "comm_hook": "evil.function"}}),
    ("evil.function", {"strategy": {**DDP, "comm_hook_state": "evil.function"}}),
    ("subprocess.run", {"logger": {"x": {"_target_": "trainkit.run_dir.folder.subprocess.run", "args": ["touch"]}}}),
    ("trainkit.cli.main.main", {"task": {"lr": {"_target_": "trainkit.cli.main.main", "argv": ["new", "ran"]}}}),
    ("trainkit.testing._Call", {"task": {"lr": {"_target_": "trainkit.testing._Call", "module": "evil"}}}),
    ("trainkit.testing._Call", {"task": {"lr": {"_target_": "trainkit.testing._Call", "_partial_": True}}}),
    ("trainkit.loggers.csv.CsvLogger", {"task": {"lr": {"_target_": "trainkit.loggers.csv.CsvLogger"}}}),
    ("trainkit.loggers.csv.CsvLogger", {"callbacks": {"x": {"_target_": "trainkit.loggers.csv.CsvLogger"}}}),
    ("hydra", {"hydra": {"searchpath": ["pkg://evil"]}}),
    ("defaults", {"defaults": ["_self_", {"recipe": "digits"}]}),
    ("${...}", {"vars": {"home": "${oc.env:HOME}"}}),
    ("${...}", {"vars": {"home": "\\${oc.env:HOME}"}}),
]
BOMBS = {
    "aliases": "vars:\n  a0: &a0 [x, x]\n" + "".join(f"  a{k + 1}: &a{k + 1} [*a{k}, *a{k}]\n" for k in range(40)),
    "itself": "vars: &a [*a]\n",
    "replaced": "vars: {a: &a [x], b: &a [*a, *a, *a, {c: *a}]}\n",
    "interpolations": "vars:\n  a0: x\n" + "".join(f"  a{k + 1}: ${{vars.a{k}}}${{vars.a{k}}}\n" for k in range(40)),
    "depth": f"vars: {'[' * 50_000}{']' * 50_000}\n",
    "mappings": f"vars: {'{a: ' * 50_000}1{'}' * 50_000}\n",
    "values": f"vars: [{'1,' * 60_000}]\n",
    "size": f"vars: '{'x' * 3_000_000}'\n",
    "digits": f"vars: {'9' * 10_000}\n",
    "sexagesimal": f"vars: 1{':59' * 30_000}\n",
    "bytes": "vars: !!binary x\n",
    "python": "vars: !!python/object/apply:os.system [touch ran]\n",
    "list": "- task\n",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    before = Path.cwd()
    os.chdir(folder)
    try:
        callbacks = ["callbacks=[checkpoint]", "logger=[jsonl]", "trainer.report=false"]
        assert main(["fit", *TINY, *callbacks, "run_dir=run"]) == 0
    finally:
        os.chdir(before)
    return folder / "run"


@pytest.fixture
def folder(tmp_path, monkeypatch, trained):
    """A working folder with a copy of a run, and with a module that leaves the file `ran` when it is imported."""
    import shutil

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    shutil.copytree(trained, "run")
    Path("evil.py").write_text(EVIL.format(ran=str(tmp_path / "ran")))
    Path("program").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    Path("program").chmod(0o700)
    Path("hub").mkdir()
    Path("hub/hubconf.py").write_text("import evil\n")
    yield tmp_path
    sys.modules.pop("evil", None)


def _merged(tree, changes):
    for key, value in changes.items():
        is_section = isinstance(value, dict) and "_target_" not in value and isinstance(tree.get(key), dict)
        tree[key] = _merged(tree[key], value) if is_section else value
    return tree


def _change(changes, run="run"):
    config = Path(run, "config.yaml")
    tree = yaml.safe_load(config.read_text())
    task = changes.get("task", {})
    if "_target_" in task:
        changes = {"task": {**tree["task"], **task}}
    config.write_text(yaml.safe_dump(_merged(tree, changes)))


def _lone(config, path="lone/x.pt"):
    """Write a checkpoint outside of a run folder, with another config inside."""
    [saved] = Path("run/checkpoints").glob("step_*.pt")
    payload = torch.load(saved, weights_only=True)
    Path(path).parent.mkdir()
    torch.save({**payload, "config": config}, path)
    return path


def _refused(capsys, *argv):
    capsys.readouterr()
    assert main([*argv]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert not Path("ran").exists() and not Path("called").exists()
    assert "evil" not in sys.modules
    return said


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_no_command_imports_what_a_folder_names(folder, capsys, argv):
    _change({"task": {"_target_": "evil.Task"}})
    said = _refused(capsys, *argv)
    assert "task._target_: evil.Task" in said
    assert "--trust" in said and "task._target_=evil.Task" in said


@pytest.mark.parametrize(("named", "changes"), HOSTILE)
def test_a_folder_runs_nothing_that_it_names(folder, capsys, named, changes):
    _change(changes)
    assert named in _refused(capsys, "validate", "checkpoint=run")
    assert main(["report", "run"]) == 0
    assert not Path("ran").exists()


@pytest.mark.parametrize(("named", "changes"), HOSTILE[::4])
def test_a_checkpoint_runs_nothing_that_its_config_names(folder, capsys, named, changes):
    _change(changes)
    path = _lone(Path("run/config.yaml").read_text())
    said = _refused(capsys, "validate", f"checkpoint={path}")
    assert named in said and "lone/x.pt" in said


def test_a_trusted_folder_and_a_trusted_checkpoint_run_what_they_name(folder):
    _change({"task": {"_target_": "evil.Task"}})
    path = _lone(Path("run/config.yaml").read_text())
    assert main(["validate", "checkpoint=run", "--trust"]) == 0
    assert main(["validate", f"checkpoint={path}", "--trust"]) == 0
    assert main(["resume", "run", "--trust", "trainer.max_duration=2step"]) == 0
    assert Path("ran").exists()


def test_a_name_that_is_typed_is_trusted(folder, capsys):
    _change({"task": {"_target_": "evil.Task"}})
    _change({"strategy": {**DDP, "comm_hook": "evil.function"}})
    assert "strategy.comm_hook" in _refused(capsys, "validate", "checkpoint=run", "task._target_=evil.Task")
    typed = ["task={_target_: evil.Task, width: 8}", "strategy=single"]
    assert main(["validate", "checkpoint=run", *typed]) == 0


@pytest.mark.parametrize("place", ["conf/recipe", "mine/recipe"])
def test_a_name_in_a_config_of_the_user_is_trusted(folder, place):
    _change({"task": {"_target_": "evil.Task"}})
    Path(place).mkdir(parents=True)
    Path(place, "mine.yaml").write_text("# @package _global_\ntask:\n  _target_: evil.Task\n")
    typed = [] if place.startswith("conf") else ["--config-dir", "mine"]
    assert main(["validate", "checkpoint=run", *typed]) == 0


def test_a_function_of_hydra_in_a_config_of_the_user_is_not_trusted_with_other_arguments(folder, capsys):
    Path("conf/recipe").mkdir(parents=True)
    Path("conf/recipe/mine.yaml").write_text("hook:\n  _target_: hydra.utils.get_method\n  path: math.sqrt\n")
    _change({"strategy": {**DDP, "comm_hook": {"_target_": "hydra.utils.get_method", "path": "evil.function"}}})
    assert "strategy.comm_hook._target_: hydra.utils.get_method" in _refused(capsys, "validate", "checkpoint=run")


def test_the_configs_and_modules_inside_of_a_run_folder_are_not_the_users(folder, capsys, monkeypatch):
    _change({"task": {"_target_": "evil.Task"}})
    Path("run/conf/recipe").mkdir(parents=True)
    Path("run/conf/recipe/mine.yaml").write_text("# @package _global_\ntask:\n  _target_: evil.Task\n")
    monkeypatch.chdir("run")
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert "evil.Task" in _refused(capsys, "validate", "checkpoint=.")
    assert main(["report", "."]) == 0
    assert os.getcwd() not in sys.path


def test_a_class_is_refused_before_it_is_called_unless_it_belongs_where_it_stands(folder, capsys):
    for key, kind in {"task": "TaskModule", "data": "Data", "callbacks.x": "Callback", "logger.x": "Logger"}.items():
        capsys.readouterr()
        assert main(["fit", *TINY, f"++{key}={{_target_: evil.NoTask}}", "run_dir=new"]) == 2
        said = capsys.readouterr().err
        assert f"{key}._target_: evil.NoTask is not a subclass of {kind}" in said
    Path("holder.py").write_text(
        "from trainkit.recipes.digits_mlp import DigitsMLP\nfrom torch import nn\n\n\n"
        "class Task(DigitsMLP):\n"
        "    def __init__(self, layers: 'list[nn.Module] | None' = None, width: int = 8):\n"
        "        super().__init__(width=width)\n"
    )
    task = "task={_target_: holder.Task, layers: [{_target_: evil.NoTask}]}"
    assert main(["fit", *TINY, "~task", f"+{task}", "run_dir=new"]) == 2
    assert "task.layers.0._target_: evil.NoTask is not a subclass of list or Module." in capsys.readouterr().err
    task = "task={_target_: holder.Task, width: {_target_: evil.NoTask}}"
    assert main(["fit", *TINY, "~task", f"+{task}", "run_dir=new"]) == 2
    assert "task.width._target_: evil.NoTask is not a subclass of int." in capsys.readouterr().err
    assert not Path("called").exists()


@pytest.mark.parametrize("name", BOMBS)
def test_a_config_that_would_use_up_memory_or_is_not_a_config_is_one_message(folder, capsys, name):
    config = Path("run/config.yaml").read_text().replace("vars: {}\n", "") + BOMBS[name]
    path = _lone(config)
    assert "lone/x.pt" in _refused(capsys, "validate", f"checkpoint={path}")
    Path("run/config.yaml").write_text(config)
    assert "run/config.yaml" in _refused(capsys, "validate", "checkpoint=run")
    expands = name not in ("interpolations", "list", "replaced")
    assert main(["report", "run"]) == (2 if expands else 0)
    assert not Path("ran").exists()


_NAMES = [
    "task",
    "data",
    "vars",
    "hydra",
    "_target_",
    "&a ",
    "*a",
    "!!binary ",
    "!!int ",
    "<<",
    "${vars.a}",
    "0x_",
    "1:60",
]


def test_a_few_aliases_are_read():
    text = "task: &task {_target_: a.B, sizes: &sizes [1, 2]}\ndata: {_target_: a.C, sizes: *sizes}\nvars: *task\n"
    assert SavedConfig(Path("x.pt"), text).content()["vars"]["sizes"] == [1, 2]


_PARTS = st.sampled_from([*_NAMES, *":-[]{},?|>'\"%@`# \n\t", ": ", "- ", "\n  "])
_TEXTS = st.lists(_PARTS | st.text(max_size=3), max_size=40)


@settings(max_examples=300, deadline=None)
@given(_TEXTS)
def test_any_text_is_a_config_or_one_message(parts):
    with suppress(UserError):
        assert isinstance(SavedConfig(Path("x.pt"), "".join(parts)).content(), dict)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_TEXTS)
def test_any_text_is_shown_or_one_message_in_a_report(tmp_path, parts):
    (tmp_path / "config.yaml").write_text("".join(parts), encoding="utf-8", errors="replace")
    with suppress(UserError):
        assert isinstance(read_run(tmp_path).config, dict)


def test_composing_leaves_the_hydra_that_is_initialized_as_that_of_a_sweep_is():
    with compose_config():
        running = GlobalHydra.instance().hydra
        with compose_config():
            assert GlobalHydra.instance().hydra is not running
        assert GlobalHydra.instance().hydra is running
    assert not GlobalHydra.instance().is_initialized()


def test_a_recipe_cannot_lead_out_of_the_folder_of_runs(folder):
    _change({"recipe": f"x.{folder}/elsewhere"})
    assert main(["fit", "config=run", "trainer.report=false"]) == 0
    assert list(Path("runs/elsewhere").iterdir()) and not Path("elsewhere").exists()


def test_json_that_is_nested_too_deeply_is_not_read(folder, capsys):
    deep = "[" * 100_000
    for name in ("summary.json", "environment.json", "failure.json", "config_diff.json", "timeline.json"):
        Path("run", name).write_text(deep)
    with Path("run/metrics.jsonl").open("a") as file:
        file.write(f"{deep}\n")
    assert main(["report", "run"]) == 0
    Path("run/sweep.json").write_text(deep)
    assert "sweep.json cannot be read" in _refused(capsys, "report", "run")


def test_a_refused_setting_of_a_checkpoint_outside_of_its_run_is_one_message(folder, capsys):
    path = _lone(Path("run/config.yaml").read_text())
    said = _refused(capsys, "validate", f"checkpoint={path}", "task.width=0", "data.batch_size=-1")
    assert "data.batch_size" in said or "task.width" in said
    assert "Did you mean 'task.width'?" in _refused(capsys, "validate", f"checkpoint={path}", "task.widht=8")


@pytest.mark.parametrize("config", [None, 3, "", "text"])
def test_a_checkpoint_without_a_config_is_one_message(folder, capsys, config):
    assert "lone/x.pt" in _refused(capsys, "validate", f"checkpoint={_lone(config)}")


@pytest.mark.parametrize("path", ["../ran", "/tmp/ran"])
def test_a_log_cannot_lie_outside_of_the_run_folder(folder, capsys, path):
    keys = ["logger.csv.filename", "logger.jsonl.filename", "logger.tensorboard.folder"]
    argv = ["fit", *TINY, "logger=[csv,jsonl,tensorboard]", *(f"{key}={path}" for key in keys), "run_dir=new"]
    said = _refused(capsys, *argv)
    assert [key for key in keys if f"{key}: " not in said] == []
