"""`trainkit config`: the settings of a run as they are in the end, with where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainkit.command_line.cli import Arguments
from trainkit.command_line.commands import settings_file
from trainkit.command_line.composition import Settings, composing
from trainkit.command_line.origins import Origins

_MOST_ALIGNED = 56  # columns


def config(arguments: Arguments) -> int:
    """Print the settings as YAML, with the origin of each value as a comment; with `config=PATH` those of a run."""
    saved = arguments.take("config")
    file = None if saved is None else settings_file(Path(saved))
    with composing(arguments.config_dirs, saved=file) as composer:
        settings = composer.settings(arguments.overrides, needs_task=False)
        print("\n".join(annotated(settings)))
    return 0


def annotated(settings: Settings) -> Iterator[str]:
    """Yield lines of YAML, each value with its origin."""
    origins = settings.find_origins()
    written = yaml.safe_load(settings.unresolved) or {}
    rows = list(_rows(settings.tree, written, "", 0, origins))
    width = min(_MOST_ALIGNED, max((len(text) for text, origin in rows if origin), default=0))
    for text, origin in rows:
        yield f"{text:<{width}}  # {origin}" if origin else text


def _rows(node: dict[str, Any], written: Any, path: str, depth: int, origins: Origins) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        place = f"{path}.{key}" if path else key
        source = written.get(key) if isinstance(written, dict) else None
        if isinstance(value, dict) and value:
            yield f"{'  ' * depth}{key}:", ""
            yield from _rows(value, source, place, depth + 1, origins)
        else:
            origin = origins.of(place)
            if isinstance(source, str) and "${" in source:
                origin = f"{source} in {origin}"
            yield f"{'  ' * depth}{key}: {_inline(value)}", origin


def _inline(value: Any) -> str:
    """Return a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
