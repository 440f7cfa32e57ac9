from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module, resources
from typing import Any

import pytest
import yaml

from trainkit import registry

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


def test_making_the_defaults_imports_neither_rich_nor_tensorboard() -> None:
    program = (
        "import sys; from trainkit import Trainer; Trainer();"
        "print([name for name in ('rich', 'tensorboard', 'google.protobuf', 'hydra') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)

    assert finished.stdout.strip() == "[]"
