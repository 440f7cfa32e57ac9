"""Commands, options, help pages and exit codes of the command line.

Exit codes: 0 success, 1 an exception in the user's code or in trainkit (with a traceback), 2 a user error (a message),
130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module, resources
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NoReturn

from trainkit.errors import RemoteRankError, UserError, nearest

if TYPE_CHECKING:
    from importlib.abc import Traversable  # importlib.resources.abc from Python 3.11 on

    from rich.table import Table


@dataclass(frozen=True)
class Command:
    """A command of `trainkit`."""

    function: str
    """`module:name` of a function that takes Arguments and returns the exit code; imported when it is called."""
    summary: str
    usage: str
    flags: tuple[str, ...] = ()
    """Options without a value of this command alone."""


COMMANDS = {
    "fit": Command("trainkit.cli.run_commands:fit", "train a task", "recipe=digits [key=value ...]"),
    "validate": Command(
        "trainkit.cli.run_commands:validate", "evaluate a trained task on validation data", "checkpoint=PATH"
    ),
    "test": Command("trainkit.cli.run_commands:test", "evaluate a trained task on test data", "checkpoint=PATH"),
    "predict": Command(
        "trainkit.cli.run_commands:predict", "write the predictions of a trained task", "checkpoint=PATH"
    ),
    "resume": Command("trainkit.cli.run_commands:resume", "continue a stopped run", "PATH [key=value ...]"),
    "export": Command(
        "trainkit.cli.export:export",
        "export a checkpoint as safetensors or a torch.export program",
        "checkpoint=PATH out=model.safetensors",
    ),
    "parity": Command(
        "trainkit.cli.parity:parity",
        "check that strategies train to the same weights",
        "recipe=digits strategies=[single,dp,ddp] [--json]",
        flags=("--json",),
    ),
    "partition": Command(
        "trainkit.cli.report:partition",
        "show the partition of a pipeline, without training",
        "recipe=digits strategy.stages=4",
    ),
    "explain": Command(
        "trainkit.cli.explain:explain",
        "show description, type and value of a key; without a key, the whole config",
        "[trainer.max_duration] [key=value ...]",
    ),
    "config-schema": Command(
        "trainkit.cli.schema:config_schema", "print the JSON Schema of a config for editors", "> trainkit.schema.json"
    ),
    "report": Command(
        "trainkit.cli.report:report", "write the report of a run or sweep, or compare runs", "PATH [PATH ...]"
    ),
    "recipes": Command("trainkit.cli.report:recipes", "list the recipes", ""),
    "new": Command("trainkit.cli.new_project:new", "create a project", "my_project"),
    "doctor": Command("trainkit.cli.doctor:doctor", "check this machine", "[run_dir=PATH] [devices=2]"),
    "completion": Command("trainkit.cli.completion:completion", "print the completion script of a shell", "bash"),
}
_SWEEP = "trainkit.cli.sweep:sweep"  # of `fit -m`
_RENAMED = {"config": "explain", "schema": "config-schema"}
_EXAMPLES = """\
examples:
  trainkit recipes
  trainkit fit recipe=digits
  trainkit fit recipe=digits trainer.max_duration=5epoch strategy.accumulate=4 task.lr=1e-3
  trainkit fit -m recipe=digits task.lr=1e-3,3e-3
  trainkit fit --config-dir conf recipe=mine
  trainkit test checkpoint=runs/digits/2026-01-31_12-00-00
"""
_FIT_OPTIONS = """\
options:
  -m, --multirun      train once for each value: task.lr=1e-3,3e-3 (a Hydra sweep)
  --config-dir DIR    add your own folder of groups, such as recipe/mine.yaml
  --cfg job           print the config and exit; with --resolve, interpolations are resolved
  resume=auto         resume the run in run_dir, or the newest unfinished run of the recipe, or start a new one
  config=PATH         repeat the run with this folder or config.yaml
  -h, --help          print this page; with recipe=NAME or strategy=NAME also their keys
"""
_RUN_OPTIONS = """\
options:
  checkpoint=PATH     a run folder (its last checkpoint), a checkpoint file, or RUN_FOLDER/best
  --config-dir DIR    add your own folder of groups, such as recipe/mine.yaml
  --cfg job           print the config and exit
"""
_GROUPS = ("recipe", "size", "strategy", "callbacks", "logger")


@dataclass
class Arguments:
    """The arguments of a command."""

    command: str
    overrides: list[str] = field(default_factory=list)
    """All arguments that are not options, in order."""
    config_dirs: list[str] = field(default_factory=list)
    multirun: bool = False
    cfg: bool = False
    resolve: bool = False
    flags: frozenset[str] = frozenset()
    """The command's own flags among the arguments."""

    def take(self, key: str) -> str | None:
        """Remove `key=value` from the overrides and return the value as text; `None` if there is none."""
        values = [text.partition("=")[2] for text in self.overrides if text.startswith(f"{key}=")]
        self.overrides = [text for text in self.overrides if not text.startswith(f"{key}=")]
        return values[-1] if values else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        return _fail(str(error))
    except RemoteRankError as error:
        return _fail(str(error), code=1)
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)
    except BrokenPipeError:  # `trainkit recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        print_traceback()
        return 1


def print_traceback() -> None:
    """Print the traceback of the current exception to stderr, in colours on a terminal."""
    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True).print_exception(max_frames=0)
    else:
        import traceback

        traceback.print_exc()


def print_table(table: Table) -> None:
    """Print a table to stdout; its width is not limited if that is not a terminal."""
    from rich.console import Console

    if Console().is_terminal:
        Console().print(table)
        return
    console = Console(width=10_000)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _fail(message: str, *, code: int = 2) -> int:
    sys.stdout.flush()
    print(f"error: {message}" if code == 2 else message, file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] == "--version":
        from trainkit import __version__

        print(f"trainkit {__version__}")
        return 0
    name, *rest = argv
    if name in _RENAMED:
        raise UserError(f"the command '{name}' is renamed to '{_RENAMED[name]}'.")
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'.{nearest(name, COMMANDS)} There are: {', '.join(COMMANDS)}.")
    arguments, wants_help = _parse(name, rest)
    if wants_help:
        print(command_page(arguments))
        return 0
    make_working_folder_importable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("trainkit").setLevel(logging.INFO)
    is_sweep = name == "fit" and arguments.multirun
    return _imported(_SWEEP if is_sweep else COMMANDS[name].function)(arguments)


def _imported(path: str) -> Callable[[Arguments], int]:
    module, _, name = path.partition(":")
    function: Callable[[Arguments], int] = getattr(import_module(module), name)
    return function


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. Type {self.prog} --help")


def _parse(name: str, rest: list[str]) -> tuple[Arguments, bool]:
    parser = _Parser(prog=f"trainkit {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    flags = COMMANDS[name].flags
    for flag in flags:
        parser.add_argument(flag, action="append_const", dest="flags", const=flag, default=[])
    read, others = parser.parse_known_intermixed_args(rest)
    if others:
        near = nearest(others[0], ("--help", "--multirun", "--cfg", "--resolve", "--config-dir", *flags))
        raise UserError(f"unknown option {others[0]}.{near} Type {parser.prog} --help")
    arguments = Arguments(
        command=name,
        overrides=read.overrides,
        config_dirs=read.config_dir,
        multirun=read.multirun,
        cfg=read.cfg is not None,
        resolve=read.resolve,
        flags=frozenset(read.flags if flags else ()),
    )
    return arguments, read.help


def make_working_folder_importable() -> None:
    """Put the working folder on `sys.path`, as `python -m` does, for `task._target_=my_package.MyTask`."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


# ---- Help, from the YAML files of the groups: torch and Hydra are not imported


def overview() -> str:
    """Return the text of `trainkit --help`."""
    commands = [f"  {name:<15}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: trainkit COMMAND [key=value ...]",
            "",
            "commands:",
            *commands,
            "",
            _EXAMPLES,
            "Type trainkit COMMAND --help for its options.",
        ]
    )


def command_page(arguments: Arguments) -> str:
    """Return the text of `trainkit COMMAND --help`."""
    command = COMMANDS[arguments.command]
    lines = [f"usage: trainkit {arguments.command} {command.usage}".rstrip(), "", f"{command.summary}.", ""]
    if arguments.command == "fit":
        lines += [_FIT_OPTIONS, *_groups(arguments), *_keys(arguments)]
    elif arguments.command in ("validate", "test", "predict", "resume"):
        lines += [_RUN_OPTIONS, "The config is that of the run; change it with key=value, as for fit."]
    return "\n".join(lines).rstrip()


def choices(arguments: Arguments, group: str) -> dict[str, Traversable]:
    """Return the file of each choice of a group, of the package and of the given config folders."""
    folders: list[Traversable] = [Path(folder) for folder in reversed(arguments.config_dirs)]
    choices: dict[str, Traversable] = {}
    for folder in [*folders, resources.files("trainkit.conf")]:
        below = folder / group
        if below.is_dir():
            choices |= {f.name[: -len(".yaml")]: f for f in below.iterdir() if f.name.endswith(".yaml")}
    return choices


def _groups(arguments: Arguments) -> list[str]:
    lines = ["groups (choose with GROUP=NAME):"]
    for group in _GROUPS:
        names = ", ".join(sorted(choices(arguments, group)))
        lines.append(fill(names, 100, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14))
    return [
        *lines,
        "  callbacks=[a,b] and logger=[a,b] replace the defaults; +callbacks=NAME adds, ~callbacks.NAME removes",
        "",
    ]


def _keys(arguments: Arguments) -> list[str]:
    lines = [
        "keys (set with KEY=VALUE) and their defaults:",
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
