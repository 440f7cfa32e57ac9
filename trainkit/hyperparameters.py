"""The settings of a run one by one, for tables in which runs are compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainkit.logger import Setting


def hyperparameters(config: str) -> dict[str, Setting]:
    """Return the settings of a YAML text by their dotted names (`trainer.seed`); `null` is left out."""
    if not config.strip():
        return {}
    import yaml

    return dict(_flat(yaml.safe_load(config), ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Setting]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (str, int, float, bool)):
        yield name, value
    elif value is not None:
        yield name, str(value)
