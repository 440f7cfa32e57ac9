"""`trainkit explain`: descriptions, values and origins of keys."""

import sys

import pytest
import yaml

from trainkit import registry
from trainkit.cli.compose import compose_config
from trainkit.cli.explain import key_reference, known_keys
from trainkit.cli.main import main
from trainkit.cli.signatures import read_docstring


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def _explained(capsys, *argv):
    assert main(["explain", *argv]) == 0
    return capsys.readouterr().out


def _refused(capsys, *argv):
    assert main(["explain", *argv]) == 2
    return capsys.readouterr().err


def test_a_key_is_explained_by_meaning_type_default_and_origin(capsys):
    shown = _explained(capsys, "trainer.max_duration", "recipe=digits")
    assert "How long to train." in shown
    assert "a duration such as 500step" in shown
    assert "default  1epoch" in shown
    assert "value    20epoch, from " in shown and "conf/recipe/digits.yaml:" in shown
    typed = _explained(capsys, "trainer.max_duration", "recipe=digits", "trainer.max_duration=3step")
    assert "value    3step, from the command line: trainer.max_duration=3step" in typed


def test_a_key_of_another_choice_is_explained_with_the_override_to_type(capsys):
    assert "available with strategy=pipeline" in _explained(capsys, "strategy.stages")
    assert "available with +callbacks=early_stopping" in _explained(capsys, "patience")


@pytest.mark.parametrize("path", ["callbacks.early_stopping", "early_stopping"])
def test_an_object_of_another_choice_is_explained_with_the_override_to_type(path, capsys):
    lines = _explained(capsys, path).splitlines()
    assert lines[0] == "callbacks.early_stopping"
    assert "  available with +callbacks=early_stopping" in lines
    assert any(line.split()[0] == "callbacks.early_stopping.patience" for line in lines)


def test_a_misspelt_choice_is_reported_with_the_nearest(capsys):
    assert "Did you mean 'early_stopping'?" in _refused(capsys, "earli_stopping")


def test_the_end_of_a_key_is_enough_where_there_is_one(capsys):
    assert _explained(capsys, "max_grad_norm").startswith("trainer.max_grad_norm\n")
    assert "several keys end in 'monitor'. Did you mean" in _refused(capsys, "monitor", "+callbacks=early_stopping")


def test_a_section_lists_its_choices_and_keys(capsys):
    shown = _explained(capsys, "strategy", "strategy=ddp")
    for part in ("choices (strategy=NAME)", "pipeline ", "strategy.bucket_cap_mb ", "DDPStrategy"):
        assert part in shown


def test_an_unknown_key_is_reported_with_the_nearest(capsys):
    assert "Did you mean 'trainer.max_duration'?" in _refused(capsys, "trainer.max_duratoin")
    assert "Did you mean 'width'?" in _refused(capsys, "widht")


def test_a_class_without_docstrings_is_explained_by_the_comment_in_its_file(tmp_path, capsys):
    (tmp_path / "plain.py").write_text(
        "import trainkit\nclass Task(trainkit.TaskModule):\n    def __init__(self, rate: float = 0.5): ...\n"
    )
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\ntask:\n  _target_: plain.Task\n  rate: 0.25 # how fast it goes\n"
    )
    shown = _explained(capsys, "task.rate", "--config-dir", "conf", "recipe=mine")
    assert "  how fast it goes\n" in shown
    assert "default  0.5" in shown and "value    0.25, from conf/recipe/mine.yaml:4" in shown


@pytest.mark.slow
def test_the_config_is_yaml_with_the_origin_of_every_value(capsys):
    argv = ["recipe=char_lm", "task.lr=0.5", "+callbacks=early_stopping"]
    assert main(["explain", *argv]) == 0
    shown = capsys.readouterr().out
    with compose_config() as composer:
        tree = composer.settings(argv).tree
    assert yaml.safe_load(shown) == tree
    lines = {line.split(":")[0].strip(): line for line in shown.splitlines()}
    assert "# the command line: task.lr=0.5" in lines["lr"]
    assert "conf/callbacks/early_stopping.yaml:" in lines["patience"]
    assert "# ${data.context} in " in next(line for line in shown.splitlines() if "context: 128" in line)
    assert all("#" in line for line in shown.splitlines() if not line.endswith(":"))


@pytest.mark.slow
def test_every_key_of_the_package_is_described_by_a_docstring():
    """`explain` and the page of keys in the guide have no other source."""
    choices = [f"{group}={name}" for group in ("recipe", "strategy") for name in registry.names(group)]
    choices += [f"{group}=[{','.join(registry.names(group))}]" for group in ("callbacks", "logger")]
    with compose_config() as composer:
        for choice in choices:
            tree = composer.settings([choice], needs_task=False, check_devices=False).tree
            silent = [key for key, known in known_keys(tree).items() if not known.doc and "hook" not in key]
            assert silent == [], choice


def test_the_page_of_keys_has_every_key_with_its_default():
    page = key_reference()
    for row in (
        "| `trainer.max_grad_norm` | a number or null | `null` | Clip gradients to this global norm. |",
        "| `strategy.stages` | a whole number | `2` |",
        "| `callbacks.early_stopping.patience` | a whole number | `3` |",
    ):
        assert row in page
    assert all(f"`strategy={name}`" in page for name in registry.names("strategy"))


def test_arguments_of_a_docstring_may_run_over_lines_and_have_types():
    summary, arguments = read_docstring(
        "Does it.\n\nMore.\n\nArgs:\n    one (int): First\n        and more: of it.\n    two: Second.\n\n"
        "Returns:\n    x: y\n"
    )
    assert summary == "Does it."
    assert arguments == {"one": "First and more: of it.", "two": "Second."}
