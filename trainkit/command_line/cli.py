"""The command line: which command is meant, and the exit code that its outcome gives.

Exit codes: 0 done, 1 an error in the user's code or ours (with a traceback), 2 something to be set right by the user
(one message), 130 and 143 stopped by SIGINT and SIGTERM.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import NoReturn

from trainkit.errors import FailedElsewhere, UserError, nearest


@dataclass(frozen=True)
class Command:
    """One word after `trainkit`."""

    function: str
    """`module:name` of a function that takes Arguments and returns the exit code; imported when it is called."""
    summary: str
    usage: str
    flags: tuple[str, ...] = ()
    """Options without a value that only this command has."""


COMMANDS = {
    "fit": Command("trainkit.command_line.commands:fit", "train a task", "recipe=digits [key=value ...]"),
    "validate": Command(
        "trainkit.command_line.commands:validate", "measure a trained task on validation data", "run=PATH"
    ),
    "test": Command("trainkit.command_line.commands:test", "measure a trained task on test data", "run=PATH"),
    "predict": Command("trainkit.command_line.commands:predict", "write a trained task's predictions", "run=PATH"),
    "resume": Command(
        "trainkit.command_line.commands:resume", "continue a run that was stopped", "PATH [key=value ...]"
    ),
    "export": Command(
        "trainkit.command_line.export:export",
        "write a checkpoint's weights for other programs",
        "run=PATH out=model.safetensors [checkpoint=best]",
    ),
    "parity": Command(
        "trainkit.command_line.parity:parity",
        "show that strategies train to the same weights",
        "recipe=digits strategies=[single,dp,ddp] [--json]",
        flags=("--json",),
    ),
    "partition": Command(
        "trainkit.strategies.pipeline.strategy:partition_command",
        "show how a pipeline would be cut, without training",
        "recipe=digits strategy.stages=4",
    ),
    "explain": Command(
        "trainkit.command_line.explain:explain",
        "say what a key means, takes, and is now",
        "trainer.max_duration [key=value ...]",
    ),
    "config": Command(
        "trainkit.command_line.config_tree:config",
        "print all settings, with where each comes from",
        "recipe=digits [key=value ...]",
    ),
    "schema": Command(
        "trainkit.command_line.schema:schema", "print what settings may hold, for editors", "> trainkit.schema.json"
    ),
    "report": Command(
        "trainkit.command_line.report:report", "write the report of a run or sweep, or compare runs", "PATH [PATH ...]"
    ),
    "recipes": Command("trainkit.command_line.recipe_table:recipes", "list what is ready to run", ""),
    "new": Command("trainkit.command_line.scaffold:new", "write a project to start from", "my_project"),
    "doctor": Command(
        "trainkit.command_line.doctor:doctor", "look whether this machine can train", "[run_dir=PATH] [devices=2]"
    ),
    "completion": Command(
        "trainkit.command_line.completion:completion", "print a script that completes in your shell", "bash"
    ),
}


@dataclass
class Arguments:
    """What was typed after the command."""

    command: str
    overrides: list[str] = field(default_factory=list)
    """Everything that is no option, in its order."""
    config_dirs: list[str] = field(default_factory=list)
    multirun: bool = False
    cfg: bool = False
    resolve: bool = False
    flags: frozenset[str] = frozenset()
    """Those of the command's own flags that were typed."""

    def take(self, key: str) -> str | None:
        """Return the value typed as `key=value`, as it is, and leave the other overrides."""
        values = [text.partition("=")[2] for text in self.overrides if text.startswith(f"{key}=")]
        self.overrides = [text for text in self.overrides if not text.startswith(f"{key}=")]
        return values[-1] if values else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        return _fail(str(error))
    except FailedElsewhere as error:
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
    """Write the whole traceback of the present exception to stderr, in colours on a terminal."""
    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True).print_exception(max_frames=0)
    else:
        import traceback

        traceback.print_exc()


def _fail(message: str, *, code: int = 2) -> int:
    sys.stdout.flush()
    print(f"error: {message}" if code == 2 else message, file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    from trainkit.command_line import command_help

    if not argv or argv[0] in ("-h", "--help", "help"):
        print(command_help.overview())
        return 0
    if argv[0] == "--version":
        from trainkit import __version__

        print(f"trainkit {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'.{nearest(name, COMMANDS)} There are: {', '.join(COMMANDS)}.")
    arguments, wants_help = _parse(name, rest)
    if wants_help:
        print(command_help.of_command(arguments))
        return 0
    make_working_folder_importable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("trainkit").setLevel(logging.INFO)
    return _function(COMMANDS[name])(arguments)


def _function(command: Command) -> Callable[[Arguments], int]:
    module, _, name = command.function.partition(":")
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
    """Let `task._target_=my_package.MyTask` find what lies here, as `python -m` does."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
