"""`trainkit parity`: train a recipe or task under several strategies and show whether they agree."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from trainkit.command_line.cli import Arguments
from trainkit.command_line.composition import composing
from trainkit.command_line.overrides import GROUPS
from trainkit.errors import UserError, nearest

T = TypeVar("T")
_KEYS = ("strategies", "steps", "devices", "device", "tolerance", "json")


def parity(arguments: Arguments) -> int:
    """Print the comparison, as a table or (`--json`, `json=true`) as JSON; 1 if a strategy disagrees with single."""
    as_json = "--json" in arguments.flags or _read(arguments, "json", _flag, False)
    strategies = _read(arguments, "strategies", _names, None)
    steps = _read(arguments, "steps", int, 20)
    devices = _read(arguments, "devices", int, 2)
    device = _read(arguments, "device", str, "cpu")
    tolerance = _read(arguments, "tolerance", float, None)
    with composing(arguments.config_dirs) as composer:
        _check_keys(arguments)
        settings = composer.settings(arguments.overrides)
    from trainkit.command_line.assembly import assemble
    from trainkit.parity import DEFAULT_STRATEGIES, compare_strategies

    assembly = assemble(settings, run_dir=None, loggers=False)
    report = compare_strategies(
        assembly.task,
        assembly.data,
        strategies or DEFAULT_STRATEGIES,
        steps=steps,
        devices=devices,
        device=device,
        tolerance=tolerance,
        trainer=settings.tree["trainer"],
    )
    print(report.as_json() if as_json else report.as_table())
    sys.stdout.flush()
    return 0 if report.is_equal else 1


def _check_keys(arguments: Arguments) -> None:
    """Raise UserError for what is nearly a key of this command: composing would name only those of a run."""
    for text in arguments.overrides:
        key = text.partition("=")[0]
        near = "" if key in GROUPS or "." in key else nearest(key, _KEYS)
        if near:
            raise UserError(f"{key}: unknown key.{near} parity has {', '.join(_KEYS)}, and the keys of a run.")


def _read(arguments: Arguments, key: str, convert: Callable[[str], T], default: Any) -> Any:
    typed = arguments.take(key)
    if typed is None:
        return default
    try:
        return convert(typed)
    except UserError:
        raise
    except ValueError:
        example = {"steps": 20, "devices": 2, "tolerance": 1e-5}.get(key, "true")
        raise UserError(f"{key}={typed}: write for example {key}={example}.") from None


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.strip("[]").split(",")]
    if not all(names):
        raise UserError(f"strategies={text}: write strategies=[single,dp,ddp].")
    return names


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"
