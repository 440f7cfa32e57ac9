"""`trainkit parity`: train a task under several strategies and compare the results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainkit.cli.compose import ConfigComposer, compose_config
from trainkit.cli.main import Arguments
from trainkit.cli.overrides import GROUPS
from trainkit.cli.signatures import signature_of
from trainkit.console import printable
from trainkit.errors import Stopped, UserError, nearest

_KEYS = ("strategies", "steps", "devices", "device", "tolerance", "json")


def parity(arguments: Arguments) -> int:
    """Print the comparison, with `json=true` as JSON; return 1 if a strategy differs from `single`."""
    # Imported here, as they import torch.
    from trainkit.cli.run_commands import assemble
    from trainkit.optim.precision import Precision
    from trainkit.parity.compare import DEFAULT_STRATEGIES, compare_strategies

    as_json = _read(arguments, "json", _flag, False)
    strategies = _read(arguments, "strategies", _names, DEFAULT_STRATEGIES)
    options = {
        "steps": _read(arguments, "steps", int, 20),
        "devices": _read(arguments, "devices", int, 2),
        "device": _read(arguments, "device", str, "cpu"),
        "tolerance": _read(arguments, "tolerance", float, None),
    }
    _check_keys(arguments)
    of_strategies = _take_strategy_settings(arguments)
    with compose_config(arguments.config_dirs) as composer:
        settings = composer.settings(arguments.overrides)
        chosen = _with_settings(strategies, of_strategies, composer, arguments.overrides)
    # The precision is that of the comparison, unless it was typed or a recipe sets it.
    typed = any(_key(text) == "trainer.precision" for text in arguments.overrides)
    default = None if typed else Precision().name
    trainer = {key: value for key, value in settings.tree["trainer"].items() if (key, value) != ("precision", default)}
    run = assemble(settings, run_dir=None, loggers=False)
    try:
        report = compare_strategies(run.task, run.data, chosen, trainer=trainer, **options)
    except Stopped as stopped:
        print(f"stopped by {stopped.signal_name}; the comparison is incomplete", file=sys.stderr)
        raise
    print(report.as_json() if as_json else printable(report.as_table()))
    # Before the exit code: an output that cannot be written fails here, not while the interpreter ends.
    sys.stdout.flush()
    return 0 if report.is_equal else 1


def _check_keys(arguments: Arguments) -> None:
    """Raise UserError for a key similar to one of this command, which composition would not suggest."""
    for text in arguments.overrides:
        key = text.partition("=")[0]
        if _key(text) == "strategy":
            raise UserError(f"{text}: parity compares several strategies; type strategies=[single,ddp].")
        near = "" if key in GROUPS or "." in key else nearest(key, _KEYS)
        if near:
            raise UserError(f"{key}: unknown key.{near} parity accepts {', '.join(_KEYS)} and the keys of a run.")


def _key(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")


def _take_strategy_settings(arguments: Arguments) -> dict[str, str]:
    """Remove the overrides of `strategy` and return them by their keys below it."""
    below = {_key(text): text for text in arguments.overrides if _key(text).startswith("strategy.")}
    arguments.overrides = [text for text in arguments.overrides if text not in below.values()]
    return {key.removeprefix("strategy."): text for key, text in below.items()}


def _with_settings(
    names: Sequence[str], typed: Mapping[str, str], composer: ConfigComposer, overrides: Sequence[str]
) -> list[str | tuple[str, dict[str, Any]]]:
    """Return the strategies, each with the typed settings that it accepts; `single`, the reference, has none."""
    if not typed:
        return list(names)
    for key in ("devices", "device"):
        if key in typed:
            raise UserError(f"strategy.{key}: the same for all strategies; type {key}=VALUE.")
    chosen: list[str | tuple[str, dict[str, Any]]] = []
    # The reference has no ranks, buckets or stages to set.
    others = [name for name in names if name != "single"]
    accepted: set[str] = set()
    for name in others:
        target = composer.settings([*overrides, f"strategy={name}"]).tree["strategy"]["_target_"]
        takes = set(signature_of(target).parameters)
        accepted |= takes
        accepted_texts = {key: text for key, text in typed.items() if key.partition(".")[0] in takes}
        tree = composer.settings([*overrides, f"strategy={name}", *accepted_texts.values()]).tree["strategy"]
        chosen.append((name, {key: tree[key] for key in {key.partition(".")[0] for key in accepted_texts}}))
    for key in typed:
        if key.partition(".")[0] not in accepted:
            which = f"none of {', '.join(others)} has it" if others else "choose a strategy other than single"
            raise UserError(f"strategy.{key}: unknown key; {which}.{nearest(key, accepted)}")
    return chosen


def _read(arguments: Arguments, key: str, convert: Callable[[str], Any], default: Any) -> Any:
    typed = arguments.take(key)
    if typed is None:
        return default
    try:
        return convert(typed)
    # Its message is already complete, and it is a ValueError.
    except UserError:
        raise
    except ValueError:
        example = {"steps": 20, "devices": 2, "tolerance": 1e-5}.get(key, "true")
        raise UserError(f"{key}={typed} is invalid; type for example {key}={example}.") from None


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.strip("[]").split(",")]
    if not all(names):
        raise UserError(f"strategies={text} is invalid; type strategies=[single,dp,ddp].")
    return names


def _flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"
