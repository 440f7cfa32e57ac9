from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module, resources
from typing import Any

import numpy as np
import pytest
import yaml

from trainkit import UserError, registry

CHOICES = [(group, name) for group in ("callbacks", "logger") for name in registry.names(group)]


def settings_of(group: str, name: str) -> tuple[Any, dict[str, Any]]:
    content = yaml.safe_load((resources.files("trainkit.conf") / group / f"{name}.yaml").read_text())
    assert list(content) == [name]
    settings = dict(content[name])
    module, _, attribute = settings.pop("_target_").rpartition(".")
    return getattr(import_module(module), attribute), settings


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_the_keys_in_the_yaml_are_the_arguments_of_the_class_with_their_defaults(group: str, name: str) -> None:
    made, settings = settings_of(group, name)

    parameters = inspect.signature(made).parameters

    assert settings == {name: parameter.default for name, parameter in parameters.items()}


@pytest.mark.parametrize(("group", "name"), CHOICES)
def test_callbacks_and_loggers_are_made_by_name(group: str, name: str) -> None:
    assert isinstance(registry.make(group, name), settings_of(group, name)[0])


@pytest.mark.parametrize("name", registry.names("callbacks"))
def test_every_setting_of_a_callback_is_refused_as_an_unexpected_object_by_its_name(name: str) -> None:
    made, settings = settings_of("callbacks", name)
    for setting in settings:
        with pytest.raises(UserError, match=rf"\b{setting}\b"):
            made(**{setting: object()})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "early_stopping",
            {"patience": "3"},
            r"early_stopping\.patience must be a whole number of evaluations, at least 1, got '3'\.",
        ),
        ("early_stopping", {"threshold": "0"}, r"early_stopping\.threshold must be None or a number, got '0'\."),
        ("ema", {"every": True}, r"ema\.every must be a whole number of steps, at least 1, got True\."),
        ("ema", {"decay": [0.9]}, r"ema\.decay must be a number above 0 and below 1, got \[0\.9\]; 0\.999 remembers"),
        (
            "checkpoint",
            {"save_last_k": 1.5},
            r"checkpoint\.save_last_k must be None or a whole number, at least 1, got 1\.5\.",
        ),
        ("checkpoint", {"async_save": "false"}, r"checkpoint\.async_save must be True or False, got 'false'\."),
        ("histograms", {"pattern": None}, r"histograms\.pattern must be text, got None\."),
    ],
)
def test_a_setting_of_a_wrong_type_is_refused_with_the_type_that_is_expected(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        registry.make("callbacks", name, settings)


def test_numbers_of_numpy_and_whole_numbers_for_any_number_are_accepted() -> None:
    registry.make(
        "callbacks", "early_stopping", {"patience": np.int64(3), "min_delta": np.float32(0.1), "threshold": 1}
    )


@pytest.mark.slow
def test_making_the_defaults_imports_neither_rich_nor_tensorboard() -> None:
    program = (
        "import sys; from trainkit import Trainer; Trainer();"
        "print([name for name in ('rich', 'tensorboard', 'google.protobuf', 'hydra') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)

    assert finished.stdout.strip() == "[]"
