"""The YAML file and the page of each strategy have the arguments of its constructor."""

import inspect
import math
import re
from importlib import import_module, resources
from pathlib import Path

import pytest
import yaml
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.plan.schedules import SCHEDULES, SEVERAL_STAGES, SYNONYMS

from trainkit import UserError, registry

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


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        (DDPStrategy, {"devices": 0}, "at least 1"),
        (DDPStrategy, {"find_unused_parameters": "atuo"}, "Did you mean 'auto'"),
        (DDPStrategy, {"transport": "nccl"}, "transport='nccl' is unknown"),
        (
            DDPStrategy,
            {"reduce_dtype": "bf61"},
            "reduce_dtype='bf61' is unknown. Did you mean 'bf16'. Choose bf16, fp16 or None",
        ),
        (DDPStrategy, {"bucket_cap_mb": 0}, "bucket_cap_mb must be a number of MiB above 0"),
        (
            DDPStrategy,
            {"bucket_cap_mb": math.inf},
            "must be a number of MiB above 0, and finite, got inf",
        ),
        (DDPStrategy, {"timeout_seconds": 0}, "timeout_seconds must be a number of seconds above 0"),
        (
            FusionStrategy,
            {"reduce_dtype": "bf61"},
            "reduce_dtype='bf61' is unknown. Did you mean 'bf16'. Choose bf16, fp16 or None",
        ),
        (DDPStrategy, {"broadcast_buffers": "no"}, "broadcast_buffers must be True or False, got 'no'"),
        (FusionStrategy, {"transport": "exchang"}, "Did you mean 'exchange'"),
        (FusionStrategy, {"buffer_mb": 0}, "buffer_mb must be a number of MiB above 0"),
        (FusionStrategy, {"max_in_flight": 0}, "max_in_flight must be a whole number"),
        (FusionStrategy, {"servers": "hots"}, "Did you mean 'host'"),
        (FusionStrategy, {"communication_thread": "yes"}, "communication_thread must be auto, True or False"),
        (FusionStrategy, {"optimizer_in_backward": "yes"}, "optimizer_in_backward must be auto, True or False"),
        (FSDPStrategy, {"min_unit_mb": -1}, "min_unit_mb must be a number of MiB, at least 0"),
        (FSDPStrategy, {"reshard_after_forward": "yes"}, "must be True, False or a whole number of ranks"),
        (FSDPStrategy, {"offload": "gpu"}, "offload='gpu' is unknown.* Choose cpu or None"),
        (FSDPStrategy, {"reduce_dtype": "bf61"}, "reduce_dtype='bf61' is unknown. Did you mean 'bf16'"),
        (FSDPStrategy, {"prefetch": 0}, "prefetch must be a whole number of units, at least 1, got 0"),
        (FSDPStrategy, {"replicate": 0}, "replicate must be a whole number of groups, at least 1"),
        (FSDPStrategy, {"devices": 0}, "at least 1"),
    ],
)
def test_a_wrong_setting_is_refused_at_once_by_name(strategy, settings, message):
    with pytest.raises(UserError, match=message):
        strategy(**settings)
