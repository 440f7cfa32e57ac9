"""What `--help` prints; made from the files of the config groups, so that nothing slow is imported."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.command_line.cli import COMMANDS, Arguments

if TYPE_CHECKING:
    from importlib.abc import Traversable  # it moves in later versions of Python

_EXAMPLES = """\
examples:
  trainkit recipes
  trainkit fit recipe=digits
  trainkit fit recipe=digits trainer.max_duration=5epoch strategy.accumulate=4 task.lr=1e-3
  trainkit fit -m recipe=digits task.lr=1e-3,3e-3
  trainkit fit --config-dir conf recipe=mine
  trainkit test run=runs/digits/2026-01-31_12-00-00
"""
_FIT_OPTIONS = """\
options:
  -m, --multirun      run once for each value: task.lr=1e-3,3e-3 (Hydra's sweeps)
  --config-dir DIR    a folder of your own with groups such as recipe/mine.yaml
  --cfg job           print the settings and do nothing; --resolve: with interpolations resolved
  resume=auto         go on with the run in run_dir, or the newest unfinished one of the recipe; else start anew
  profile=true        short for trainer.profile=true: a trace and a table of operations of steps 10 to 15
  -h, --help          this page; together with recipe=NAME or strategy=NAME also their keys
"""
_RUN_OPTIONS = """\
options:
  checkpoint=best     of a run folder: last (the default), best, or a checkpoint's name
  --config-dir DIR    a folder of your own with groups such as recipe/mine.yaml
  --cfg job           print the settings and do nothing
"""
_GROUPS = ("recipe", "size", "strategy", "callbacks", "logger")


def overview() -> str:
    """Return the page of `trainkit --help`."""
    commands = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trainkit COMMAND [key=value ...]",
            "",
            "commands:",
            *commands,
            "",
            _EXAMPLES,
            "trainkit COMMAND --help tells more.",
        ]
    )


def of_command(arguments: Arguments) -> str:
    """Return the page of `trainkit COMMAND --help`."""
    command = COMMANDS[arguments.command]
    lines = [f"usage: trainkit {arguments.command} {command.usage}".rstrip(), "", f"{command.summary}.", ""]
    if arguments.command == "fit":
        lines += [_FIT_OPTIONS, *_groups(arguments), *_keys(arguments)]
    elif arguments.command in ("validate", "test", "predict", "resume"):
        lines += [_RUN_OPTIONS, "Settings are those of the run; key=value changes them, as for fit."]
    return "\n".join(lines).rstrip()


def choices(arguments: Arguments, group: str) -> dict[str, Traversable]:
    """Return the file of each choice in a group, of the package and of the given config folders."""
    folders: list[Traversable] = [Path(folder) for folder in reversed(arguments.config_dirs)]
    choices: dict[str, Traversable] = {}
    for folder in [*folders, resources.files("trainkit.conf")]:
        below = folder / group
        if below.is_dir():
            choices |= {f.name[: -len(".yaml")]: f for f in below.iterdir() if f.name.endswith(".yaml")}
    return choices


def _groups(arguments: Arguments) -> list[str]:
    lines = ["groups (choose with group=name):"]
    for group in _GROUPS:
        lines.append(f"  {group:<12}{', '.join(sorted(choices(arguments, group)))}")
    return [
        *lines,
        "  callbacks=[a,b] and logger=[a,b] replace what is on; +callbacks=name adds; ~callbacks.name takes away",
        "",
    ]


def _keys(arguments: Arguments) -> list[str]:
    lines = [
        "keys (set with key.key=value), with their defaults:",
        *_indented(resources.files("trainkit.conf") / "config.yaml"),
    ]
    for text in arguments.overrides:
        group, _, names = text.lstrip("+").partition("=")
        for name in names.strip("[]").split(","):
            path = choices(arguments, group).get(name) if group in _GROUPS else None
            if path is not None:
                lines += ["", f"{group}={name}:", *_indented(path)]
    return lines


def _indented(path: Traversable) -> list[str]:
    """Return the lines of a YAML file, without its defaults list."""
    lines: list[str] = []
    inside = False
    for line in path.read_text(encoding="utf-8").rstrip().splitlines():
        inside = line == "defaults:" or (inside and line.startswith((" ", "-")))
        if not inside and not line.startswith("#") and (line or lines):
            lines.append(f"  {line}".rstrip())
    return lines
