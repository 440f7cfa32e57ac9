"""The YAML file and the page of each strategy have the arguments of its constructor."""

import inspect
import re
from importlib import import_module, resources
from pathlib import Path

import pytest
import yaml
from trainkit.strategies.pipeline.plan.schedules import SCHEDULES, SEVERAL_STAGES, SYNONYMS

from trainkit import registry

DOCS = Path(__file__).parents[2] / "docs"
IN_PYTHON_ONLY = {"process_group"}
"""Arguments that no text names."""


def settings_of(name):
    """Return the constructor of a strategy, and what its YAML file sets."""
    settings = yaml.safe_load((resources.files("trainkit.conf") / "strategy" / f"{name}.yaml").read_text())
    module, _, attribute = settings.pop("_target_").rpartition(".")
    return getattr(import_module(module), attribute), settings


@pytest.mark.parametrize("name", registry.names("strategy"))
def test_the_keys_in_the_yaml_are_the_arguments_of_the_class_with_their_defaults(name):
    made, settings = settings_of(name)
    parameters = inspect.signature(made).parameters
    assert settings == {key: each.default for key, each in parameters.items() if key not in IN_PYTHON_ONLY}


@pytest.mark.parametrize("name", ["ddp", "fusion", "fsdp", "pipeline"])
def test_the_keys_on_the_page_of_a_strategy_are_arguments_of_it(name):
    made, _ = settings_of(name)
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| key \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    keys = [key for table in rows for row in table.splitlines() for key in re.findall(r"`(\w+)", row.split("|")[1])]
    assert len(keys) > 5
    assert [key for key in keys if key not in inspect.signature(made).parameters] == []


def test_every_schedule_is_named_where_one_is_chosen():
    for text in (
        (DOCS / "pipeline.md").read_text(encoding="utf-8"),
        (resources.files("trainkit.conf") / "strategy" / "pipeline.yaml").read_text(),
        settings_of("pipeline")[0].__doc__,
    ):
        assert [name for name in (*SCHEDULES, *SEVERAL_STAGES) if name not in text] == []
    assert [name for name in SYNONYMS if f"`{name}`" not in (DOCS / "pipeline.md").read_text(encoding="utf-8")] == []
