"""Invalid configs and overrides, and their messages."""

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml

from trainkit.cli.compose import compose_config
from trainkit.cli.main import main
from trainkit.cli.signatures import EXTRAS
from trainkit.cli.validate import ConfigError, missing_device
from trainkit.errors import UserError

QUIET = ["callbacks=[]", "logger=[]"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


def _settings(*overrides, config_dirs=()):
    with compose_config(config_dirs) as composer:
        return composer.settings(overrides)


def _message(*overrides, config_dirs=()):
    with pytest.raises(UserError) as caught:
        _settings(*overrides, config_dirs=config_dirs)
    return str(caught.value)


def _problems(*overrides):
    """Return the message of each problem by its origin."""
    with pytest.raises(ConfigError) as caught:
        _settings(*overrides)
    problems = {problem.origin: problem.message for problem in caught.value.problems}
    assert len(problems) == len(caught.value.problems), f"two problems of one origin: {caught.value}"
    return problems


# Keys of a wrong choice are not checked.
@pytest.mark.parametrize(
    "meant",
    [
        {
            "trainer.max_epoch=3": "trainer.max_duration",
            "++trainer.presicion=fp64": "trainer.precision",
            "traner.seed=1": "trainer",
            "trainer.batch_size=3": "data.batch_size",
            "trainer.strategy=single": "strategy",
            "task.widht=3": "task.width",
            "+task.learning_rate=3": "task.lr",
            "data.batchsize=3": "data.batch_size",
            "strategy.acumulate=2": "strategy.accumulate",
            "strategi.accumulate=2": "strategy",
            "callbacks.checkpoint.evry=1epoch": "callbacks.checkpoint.every",
            "callbacks.checkpoint.async=true": "callbacks.checkpoint.async_save",
            "async=true": "callbacks.checkpoint.async_save",
            "checkpoint.async=true": "callbacks.checkpoint",
            "callbacks.progres_bar.refresh_per_second=1": "callbacks.progress_bar",
            "logger.jsonl.file_name=a": "logger.jsonl.filename",
        },
        {
            "+trainer.max_epoch=3": "trainer.max_duration",
            "strategy=singel": "single",
            "callbacks=[default,erly_stopping]": "early_stopping",
            "logger=tensorbord": "tensorboard",
            "~callbacks.progres_bar": "~callbacks.progress_bar",
            "~trainer.sed": "~trainer.seed",
            "task._target_=trainkit.recipes.digits.DigitTask": "DigitsTask",
        },
        {"recipe=digit": "digits", "size=tinny": "tiny", "+callbacks=erly_stopping": "early_stopping"},
    ],
    ids=["keys", "choices", "recipe"],
)
def test_a_mistyped_name_is_reported_with_the_nearest_name_and_its_origin(meant):
    problems = _problems("recipe=digits", *meant)
    assert set(problems) == {f"the command line: {typed}" for typed in meant}, "one mistake is one problem"
    for typed, name in meant.items():
        message = problems[f"the command line: {typed}"]
        assert f"Did you mean '{name}'?" in message
        assert "+trainer" not in message


def test_all_problems_are_reported_at_once():
    message = _message("recipe=digits", "+trainer.max_epoch=3", "task.widht=3", "strategy=singel", "task.lr=fast")
    assert message.startswith("4 problems in the settings; nothing was started.")
    for part in ("trainer.max_duration", "task.width", "unknown strategy 'singel'", "task.lr: 'fast' is text"):
        assert part in message


DIGITS = "# @package _global_\ndefaults:\n  - digits\n"
FILE = "from conf/recipe/mine.yaml"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            f"{DIGITS}trainer:\n  max_epochs: 3\ntask:\n  widht: 4\n",
            ["trainer.max_epochs: unknown key. Did you mean 'trainer.max_duration'?", f"{FILE}:5", f"{FILE}:7"],
        ),
        (
            f"{DIGITS}  - override /strategy: singel\n",
            ["unknown strategy 'singel'. Did you mean 'single'?", "\n    from "],
        ),
        (f"{DIGITS}strategy: singel\n", ["unknown strategy 'singel'. Did you mean 'single'?", f"{FILE}:4"]),
        (
            f"{DIGITS}strategy: ddp\n",
            ["is a choice, not a value; write '- override /strategy: ddp' in the file's defaults", f"{FILE}:4"],
        ),
        ("task:\n  _target_: trainkit.recipes.digits.DigitsTask\n", ["# @package _global_"]),
        ("# @package _global_\ntrainer:\n  seed: [1\ntask: 3\n", ["mine.yaml:4", "invalid YAML"]),
    ],
    ids=["mistyped keys", "wrong choice", "wrong value", "a choice as a value", "without its first line", "not YAML"],
)
def test_a_mistake_in_a_file_is_reported_with_its_place(tmp_path, written, said):
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(written)
    message = _message("recipe=mine", config_dirs=["conf"])
    for part in said:
        assert part in message


def test_a_missing_config_folder_is_reported_with_the_nearest(tmp_path):
    (tmp_path / "conf").mkdir()
    assert "Did you mean 'conf'?" in _message("recipe=mine", config_dirs=["cnof"])


@pytest.mark.parametrize(
    "said",
    [
        {
            "task.width=wide": "'wide' is text, but must be a whole number",
            "data.batch_size=1e3": "Write 1000.",
            "trainer.max_rollbacks=true": "true is true or false, but must be a whole number",
            "trainer.num_sanity_batches=nan": "nan is a number, but must be a whole number",
            "trainer.seed=-inf": "-inf is a number, but must be a whole number",
            "task.lr=null": "null is null, but must be a number",
            "trainer.compile=1": "1 is a whole number, but must be true or false or a mapping",
            "trainer.on_nonfinite=skipp": "Did you mean 'skip'?",
            "trainer.max_duration=5": "5 is not a duration",
            "trainer.log_every=5stp": "Did you mean 'step'?",
            "trainer.max_grad_norm=[1]": "[1] is a list, but must be a number or null",
            "trainer.freeze=[net,3]": "element 1: 3 is a whole number, but must be text",
            "run_dir=3": "3 is a whole number, but must be text or null",
            "strategy=null": "no strategy is chosen; type strategy=single",
            "logger.jsonl.filename=3": "For text, write '\"3\"'.",
        },
        {
            "trainer.max_duration=[1epoch,3min,4parsec]": "unknown unit 'parsec'",
            "run_dir=": "is empty; type run_dir=PATH",
            "strategy=[single]": "takes one choice, not a list",
        },
        {"trainer=fast": "not a mapping", "run_dir=' '": "is empty; type run_dir=PATH"},
    ],
    ids=["values", "others", "section"],
)
def test_a_value_of_the_wrong_type_is_reported_with_the_right_type(said):
    problems = _problems("recipe=digits", *said)
    for typed, part in said.items():
        assert part in problems[f"the command line: {typed}"]


def test_a_recipe_that_is_null_is_reported_with_what_to_type():
    assert "is missing. Type recipe=" in _message("recipe=digits", "recipe=null")


def test_numbers_texts_and_lists_of_the_right_type_are_accepted():
    tree = _settings(
        "recipe=digits", "task.lr=1", "trainer.max_grad_norm=3", "trainer.max_duration=[3epoch,5min]", "run_dir=a/b"
    ).tree
    assert tree["trainer"]["max_duration"] == ["3epoch", "5min"]


def test_an_argument_that_is_not_an_override_is_reported_with_the_syntax():
    message = _message(
        "recipe=digits", "trainer.seed", "run_dir=a=b", "trainer.log_every=1,2", "task.lr=${vars.lr}", "task.width=???"
    )
    assert "'trainer.seed' is not an override; write key=value" in message
    assert "'run_dir=a=b' cannot be read" in message
    assert "trainer.log_every: has several values; add -m to run once for each" in message
    assert "task.lr: Interpolation key 'vars.lr' not found" in message
    assert "task.width: has no value; type" in message


def test_missing_arguments_are_named(tmp_path):
    (tmp_path / "tasks_for_this_test.py").write_text(
        "from trainkit import TaskModule\n"
        "class MyTask(TaskModule):\n"
        "    def __init__(self, width: int, *, depth: int, lr: float = 0.1): ...\n"
    )
    message = _message("recipe=digits", "task={_target_: tasks_for_this_test.MyTask, lr: 1}", "~task.weight_decay")
    assert "task.depth: is missing; MyTask needs it. Type task.depth=VALUE" in message


def test_arguments_by_position_that_a_class_does_not_take_are_reported():
    message = _message("recipe=digits", "+task._args_=[1]", "+data._args_=1")
    assert "task._args_: DigitsTask does not take these by position; type task.NAME=VALUE" in message
    assert "data._args_: DigitsData does not take these by position; type data.NAME=VALUE" in message


def test_nested_objects_are_checked_too():
    message = _message(
        "recipe=digits",
        "data={_target_: trainkit.data.data.Data, train: {_target_: torch.utils.data.DataLoader, btach_size: 3}}",
        *(f"~data.{name}" for name in ("num_train",)),
    )
    assert "data.train.btach_size: unknown key. Did you mean 'data.train.batch_size'?" in message
    assert "data.train.dataset: is missing" in message


def test_a_target_that_cannot_be_imported_is_reported(tmp_path):
    (tmp_path / "needs_sklearnn.py").write_text("import sklearnn\nclass T: ...\n")
    targets = ["task._target_=nowhere.Task", "data._target_=needs_sklearnn.T", "callbacks.checkpoint._target_=Task"]
    message = _message("recipe=digits", *targets)
    assert "there is no module 'nowhere'" in message
    assert "package 'sklearnn', which is not installed" in message
    assert "'Task' is not a dotted path" in message


def test_a_missing_optional_package_is_reported_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(EXTRAS, "is_not_installed", "wandb")
    (tmp_path / "logging_task.py").write_text("import is_not_installed\nclass T: ...\n")
    assert "pip install 'trainkit-torch[wandb]'" in _message("recipe=digits", "task._target_=logging_task.T")


def test_a_key_of_a_callback_that_is_not_enabled_is_reported_with_how_to_enable_it():
    message = _message("recipe=digits", "callbacks.early_stopping.patience=3")
    assert "callbacks.early_stopping: is not enabled; type +callbacks=early_stopping" in message


def test_callbacks_and_loggers_are_added_removed_and_replaced():
    defaults = list(_settings("recipe=digits").tree["callbacks"])
    added = _settings("recipe=digits", "+callbacks=early_stopping", "callbacks.early_stopping.patience=7").tree
    assert list(added["callbacks"]) == [*defaults, "early_stopping"]
    assert added["callbacks"]["early_stopping"]["patience"] == 7
    taken = _settings("recipe=digits", "~callbacks.progress_bar", "~logger.tensorboard").tree
    assert list(taken["callbacks"]) == [name for name in defaults if name != "progress_bar"]
    assert list(taken["logger"]) == ["jsonl"]
    # The recipe has keys of the checkpoint callback, which is not selected any more.
    replaced = _settings("recipe=digits", "callbacks=[speed_monitor]", "+callbacks=progress_bar", "logger=[]").tree
    assert list(replaced["callbacks"]) == ["speed_monitor", "progress_bar"]
    assert not replaced.get("logger")
    assert not _settings("recipe=digits", "callbacks=null").tree.get("callbacks")


def test_own_values_may_be_below_vars():
    assert _settings("recipe=digits", "vars.rate=0.5", "task.lr=${vars.rate}").tree["task"]["lr"] == 0.5


def test_an_argument_that_a_constructor_with_kwargs_rejects_is_a_message(tmp_path, capsys):
    (tmp_path / "open_task.py").write_text(
        "from trainkit.recipes.digits_mlp import DigitsMLP\n"
        "class Open(DigitsMLP):\n"
        "    def __init__(self, **settings):\n"
        "        super().__init__(**settings)\n"
    )
    argv = ["fit", "recipe=digits_mlp", "task._target_=open_task.Open", "task.widht=3", *QUIET]
    assert main(argv) == 2
    assert "unexpected keyword argument 'widht'" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_an_object_of_the_wrong_class_is_reported_with_the_right_class(capsys):
    argv = ["fit", "recipe=digits_mlp", *QUIET, "callbacks.mine={_target_: os.getcwd}"]
    assert main(argv) == 2
    assert (
        "callbacks.mine._target_: os.getcwd returns a str; it must be a trainkit.Callback." in capsys.readouterr().err
    )


def test_generated_constructors_are_checked(tmp_path):
    (tmp_path / "made_when_run.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Settings:\n"
        "    width: int\n"
        "    depth: 'int | None' = None\n"
        "class Duration: ...\n"
        "def with_own_duration(length: Duration): ...\n"
        "class Below(Settings): ...\n"
    )
    message = _message("recipe=digits", "~task", "+task={_target_: made_when_run.Below, wdith: 3, depth: deep}")
    for part in ("task.wdith: unknown key. Did you mean 'task.width'?", "task.width: is missing", "'deep' is text"):
        assert part in message
    tree = _settings("recipe=digits", "~task", "+task={_target_: made_when_run.with_own_duration, length: 3}").tree
    assert tree["task"]["length"] == 3


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            [
                *("strategy.accumulate=2", "strategy.micro_batch_size=4", "strategy.device=cuda"),
                *("trainer.max_grad_norm=1", "trainer.max_grad_value=1"),
                *("+callbacks=early_stopping", "trainer.evaluate_every=null"),
            ],
            [
                "strategy.micro_batch_size: excludes strategy.accumulate=2",
                "built without CUDA; set strategy.device=cpu",
                "trainer.max_grad_value: excludes trainer.max_grad_norm",
                "null means that callbacks.early_stopping.monitor=validation/loss is never measured",
            ],
        ),
        (
            ["strategy.accumulate=3"],
            ["cannot be split into accumulate=3 equal micro-batches on 1 rank(s); set accumulate="],
        ),
        (
            ["strategy=ddp", "strategy.devices=4", "strategy.accumulate=32", "strategy.backend=nccl"],
            ["accumulate=32 equal micro-batches on 4", "strategy.backend: 'nccl' needs CUDA devices"],
        ),
        (
            ["strategy=pipeline", "strategy.replicas=4", "strategy.accumulate=32", "strategy.split_points=[a,b]"],
            ["on 4 rank(s); set accumulate=16", "2 split points make 3 stages, not 2"],
        ),
        (["strategy=dp", "strategy.devices=[cuda:0,cuda:1]"], ["strategy.devices: device 'cuda:0' does not exist"]),
    ],
)
def test_values_that_exclude_each_other_are_reported(typed, said, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = _message("recipe=digits", *typed)
    assert [part for part in said if part not in message] == []
    assert message.count("from the command line: ") >= len(said)


def test_a_missing_device_is_reported_with_the_last_that_exists(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert missing_device("cuda:1") is None
    assert "has 2 CUDA device(s); set strategy.device=cuda:1" in str(missing_device("cuda:2"))


def test_a_parameter_whose_type_only_a_type_checker_imports_accepts_anything(tmp_path):
    (tmp_path / "typed_late.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from nowhere import Width\n"
        "def made(width: Width | None, depth: int = 1): ...\n"
    )
    assert _settings("recipe=digits", "~task", "+task={_target_: typed_late.made, width: wide}").tree["task"]
    message = _message("recipe=digits", "~task", "+task={_target_: typed_late.made, width: 1, depth: deep}")
    assert "task.depth: 'deep' is text, but must be a whole number" in message


def test_a_config_can_be_composed_for_devices_of_another_machine():
    with compose_config() as composer:
        assert composer.settings(["recipe=digits", "strategy.device=cuda"], check_devices=False).tree


def test_a_pipeline_under_torchrun_needs_a_process_for_each_stage(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "6")
    message = _message("recipe=digits", "strategy=pipeline", "strategy.stages=3")
    assert "3 stages x 1 replicas need 3 processes, but there are 6; set strategy.replicas=2" in message


def test_all_errors_of_constructors_are_reported_at_once_with_their_origins(capsys):
    wrong = ["task.width=0", "trainer.precision=fp31", "trainer.max_grad_norm=-1", "data.num_train=0"]
    assert main(["fit", "recipe=digits", *wrong, "strategy=pipeline", "strategy.stages=40", *QUIET]) == 2
    said = capsys.readouterr().err
    assert "4 problems in the settings; nothing was started." in said  # without a task the stages are not checked
    for part in ("task.width: must be at least 1 channel", "Did you mean 'fp32'?", "data.num_train: must be at least"):
        assert part in said
    for typed in wrong:
        assert f"from the command line: {typed}" in said
    assert not Path("runs").exists()


@pytest.mark.slow
def test_an_exception_of_a_constructor_about_a_value_is_a_message_and_with_debug_a_traceback(tmp_path, capsys):
    (tmp_path / "refusing.py").write_text(
        "from trainkit.recipes.digits_mlp import DigitsMLP\n"
        "class Refusing(DigitsMLP):\n"
        "    def __init__(self, width: int = 8, name: str = '', count: int = 0):\n"
        "        if width < 9 and width % 2:\n"
        "            raise ValueError(f'width must be even, got {width}')\n"
        "        if name:\n"
        "            raise ValueError(f'{name} is unknown')\n"
        "        super().__init__(width=width)\n"
        "        [0][count]\n"
    )
    argv = ["fit", "recipe=digits_mlp", "~task", "+task={_target_: refusing.Refusing}", *QUIET]
    for typed, said in {
        "task.width=3": "task.width: must be even, got 3 (ValueError, FILE:5; --debug shows the traceback)",
        "task.width=99999999999999": "task: DefaultCPUAllocator: can't allocate memory",
        "task.width=9999999999999999999999999": "task: ",
        "task.name=x": "task: x is unknown (ValueError, FILE:7; --debug shows the traceback)",
    }.items():
        assert main([*argv, typed]) == 2
        printed = capsys.readouterr().err
        assert said in re.sub(r"/\S*/refusing\.py", "FILE", printed) and "Traceback" not in printed
        assert main([*argv, typed, "--debug"]) == 2
        assert "Traceback" in capsys.readouterr().err
    assert main([*argv, "task.count=1"]) == 1, "any other exception is an error in the code"
    assert "IndexError" in capsys.readouterr().err


@pytest.mark.parametrize("deferred", ["false", "true"])
@pytest.mark.parametrize(
    ("width", "said"),
    [
        (
            "99999999999999",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 25599999999999744 bytes.",
        ),
        ("9" * 24, """empty(): argument 'size' failed to unpack the object at pos 1 with error "Overflow when"""),
    ],
    ids=["memory", "overflow"],
)
def test_an_error_of_torch_names_the_typed_keys_and_none_of_its_own_source(width, said, deferred, capsys):
    typed = [f"task.width={width}", "task.lr=0.5"]
    argv = ["recipe=digits_mlp", "size=tiny", *typed, f"trainer.deferred_init={deferred}", *QUIET]
    assert main(["fit", *argv]) == 2
    message, origin = capsys.readouterr().err.strip().split("\n")
    assert message.startswith(f"error: task: {said}")
    assert re.search(r"Error, \S*digits_mlp\.py:\d+; --debug shows the traceback\)$", message)
    assert origin == f"    from the command line: {' '.join(typed)}"


@pytest.mark.parametrize(
    ("typed", "strategy"),
    [
        ("task.lr=-1", ["strategy=single"]),
        ("task.lr=nan", ["strategy=single"]),
        ("task.lr=-1", ["strategy=ddp", "strategy.devices=2", "strategy.device=cpu"]),
    ],
)
def test_a_learning_rate_that_the_optimizer_refuses_is_a_message(typed, strategy, capsys):
    assert main(["fit", "recipe=digits_mlp", "size=tiny", typed, *strategy, *QUIET]) == 2
    printed = capsys.readouterr().err
    assert (
        f"DigitsMLP.configure_optimizers: Invalid learning rate: {typed[8:]}. Set a valid value of task.lr." in printed
    )
    assert "Traceback" not in printed


def test_a_seed_that_is_too_large_is_a_message(capsys):
    assert main(["fit", "recipe=digits_mlp", f"trainer.seed={10**23}", *QUIET]) == 2
    assert "trainer.seed: must be a whole number, at least 0 and at most 2**63 - 1" in capsys.readouterr().err


def test_an_error_of_a_constructor_about_its_own_default_is_not_reported(tmp_path, capsys):
    (tmp_path / "picky.py").write_text(
        "from trainkit import UserError\n"
        "from trainkit.recipes.digits_mlp import DigitsMLP\n"
        "class Picky(DigitsMLP):\n"
        "    def __init__(self, low: int = 5, high: int = 9):\n"
        "        super().__init__()\n"
        "        if low >= high:\n"
        "            raise UserError(f'low={low} must be below high={high}.')\n"
    )
    assert main(["fit", "recipe=digits_mlp", "task={_target_: picky.Picky, low: 4, high: 3}", *QUIET]) == 2
    assert main(["fit", "~task", "+task={_target_: picky.Picky, low: 4, high: 3}", "recipe=digits_mlp", *QUIET]) == 2
    said = capsys.readouterr().err
    assert "task.low: low=4 must be below high=3." in said
    assert "high=3." in said and "high=9" not in said and "low=5" not in said


def test_more_stages_than_a_task_has_modules_are_refused_before_a_process_starts(capsys, monkeypatch):
    import subprocess

    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["fit", "recipe=digits_mlp", "strategy=pipeline", "strategy.stages=40", *QUIET]) == 2
    assert "strategy.stages: 40 stages, but DigitsMLP has only 6 modules" in capsys.readouterr().err


def test_a_parameter_may_be_a_duration_or_a_fraction(tmp_path):
    (tmp_path / "shares.py").write_text(
        "from trainkit import Duration, TaskModule\n"
        "class Task(TaskModule):\n"
        "    def __init__(self, start: float | str | Duration, end: float | str | Duration): ...\n"
    )
    alone = ("~task", "recipe=digits")
    task = _settings(*alone, "+task={_target_: shares.Task, start: 0.75, end: 3epoch}").tree["task"]
    assert (task["start"], task["end"]) == (0.75, "3epoch")
    message = _message(*alone, "+task={_target_: shares.Task, start: 3parsec, end: null}")
    assert "task.start: " in message and "unknown unit 'parsec'" in message
    assert "task.end: null is null" in message


def test_an_override_without_a_key_or_with_spaces_is_reported_as_it_was_typed():
    typed = ["task.width = 64", "=5", "=", "+=5", "~", "~=5", "", " "]
    with pytest.raises(ConfigError) as caught:
        _settings("recipe=digits", *typed)
    said = [problem.message for problem in caught.value.problems]
    assert said == [f"'{text}' is not an override; write key=value, without spaces." for text in typed]


ELEMENTS_TASK = """\
from pathlib import Path
from typing import Any, Literal, Tuple

from torch import nn
from trainkit import TaskModule
from typing_extensions import Unpack


class Elements(TaskModule):
    def __init__(
        self,
        sizes: list[int] = [],
        rates: dict[str, float] = {},
        betas: tuple[float, float] = (0.9, 0.99),
        nested: dict[str, list[int]] = {},
        either: int | list[int] | None = None,
        modes: list[Literal["a", "b"]] = [],
        anything: list[Any] = [],
        layers: list[nn.Module] = [],
        files: tuple[Path, ...] = (),
        plain: list = [],
        pair: tuple[int, str] = (1, "a"),
        pair_or_more: tuple[int, str] | list[int] = [],
        perhaps: tuple[int, str] | None = None,
        by_number: dict[int, float] | None = None,
        any_tuple: Tuple = (),
        unpacked: "tuple[int, *tuple[str, ...]]" = (1,),
        named: "tuple[int, Unpack[tuple[str, ...]]]" = (1,),
    ):
        super().__init__()
"""


@pytest.mark.parametrize(
    "said",
    [
        {
            "task.sizes=[1,x]": "task.sizes: element 1: 'x' is text, but must be a whole number.",
            "task.rates={a: b}": "task.rates: element a: 'b' is text, but must be a number.",
            "task.betas=[0.9,x]": "task.betas: element 1: 'x' is text",
            "task.nested={a: [1, x]}": "task.nested: element a: element 1: 'x' is text, but must be a whole number.",
            "task.either=[x]": "task.either: element 0: 'x' is text, but must be a whole number.",
            "task.modes=[a,c]": "task.modes: element 1: 'c' is not 'a' or 'b'.",
        },
        {
            "task.rates={a: [1]}": "task.rates: element a: [1] is a list, but must be a number.",
            "task.pair=[1,2]": "task.pair: element 1: 2 is a whole number, but must be text.",
            "task.perhaps=[a,b]": "task.perhaps: element 0: 'a' is text, but must be a whole number.",
            "task.by_number={a: 1}": "task.by_number: key a: 'a' is text, but must be a whole number.",
        },
        {
            "task.pair=[1]": "task.pair: [1] must have 2 elements: a whole number, text.",
            "task.betas=[0.9,0.99,0.999]": "[0.9, 0.99, 0.999] must have 2 elements: a number, a number.",
            "task.rates={1: 2}": "key 1: 1 is a whole number, but must be text. For text, quote it in a YAML file",
        },
    ],
    ids=["each", "nested", "number"],
)
def test_an_element_of_a_wrong_type_is_reported_with_its_place(said, tmp_path):
    (tmp_path / "elements_task.py").write_text(ELEMENTS_TASK)
    message = _message("recipe=digits", "task={_target_: elements_task.Elements}", *said)
    assert [part for part in said.values() if part not in message] == []


def test_elements_of_the_right_type_and_those_that_cannot_be_checked_are_accepted(tmp_path):
    (tmp_path / "elements_task.py").write_text(ELEMENTS_TASK)
    typed = {
        "sizes": [1, 2],
        "rates": {"a": 1, "b": 0.5},
        "nested": {"a": [1]},
        "either": 3,
        "modes": ["a", "b"],
        "anything": ["x", 1],
        "layers": [{"_target_": "torch.nn.ReLU"}],
        "files": ["a", "b", "c"],
        "plain": ["x", 1, None],
        "pair": [1, "x"],
        "pair_or_more": [1, 2, 3],
        "perhaps": [1, "x"],
        "by_number": {1: 2},
        "any_tuple": [1, "x"],
        "unpacked": [1, "x", "y"],
        "named": [1, "x", "y"],
    }
    file = tmp_path / "conf/recipe/elements.yaml"
    file.parent.mkdir(parents=True)
    data = {"_target_": "trainkit.recipes.digits.DigitsData"}
    content = {"task": {"_target_": "elements_task.Elements", **typed}, "data": data}
    file.write_text(f"# @package _global_\n{yaml.safe_dump(content)}")
    tree = _settings("recipe=elements", "task.sizes=[1,${trainer.seed}]", config_dirs=["conf"]).tree
    assert tree["task"]["sizes"] == [1, 0]
