"""Commands, options, help pages and exit codes of the command line.

Exit codes: 0 success, 1 an exception in the user's code or in trainkit (with a traceback), 2 a user error (a message),
129, 130 and 143 stopped by SIGHUP, SIGINT and SIGTERM.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, resources
from pathlib import Path
from textwrap import fill
from traceback import format_exception
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from trainkit import __version__
from trainkit.console import log_to_stderr, printable
from trainkit.errors import RankExit, RemoteRankError, UserError, nearest, user_traceback

if TYPE_CHECKING:
    from importlib.abc import Traversable  # importlib.resources.abc from Python 3.11 on

    from rich.text import Text


class Command(NamedTuple):
    """A command of `trainkit`."""

    function: str
    """`module:name` in this package of a function that takes Arguments and returns the exit code."""
    summary: str
    usage: str


COMMANDS = {
    "fit": Command("run_commands:fit", "train a task", "recipe=digits [key=value ...]"),
    "validate": Command("run_commands:validate", "evaluate a trained task on validation data", "checkpoint=PATH"),
    "test": Command("run_commands:test", "evaluate a trained task on test data", "checkpoint=PATH"),
    "predict": Command("run_commands:predict", "write the predictions of a trained task", "checkpoint=PATH"),
    "resume": Command("run_commands:resume", "continue a stopped run", "PATH [key=value ...]"),
    "export": Command("export:export", "export the weights, or a program", "checkpoint=PATH out=model.safetensors"),
    "parity": Command(
        "parity:parity",
        "check that strategies train to the same weights",
        "recipe=digits strategies=[single,dp,ddp] [json=true]",
    ),
    "partition": Command(
        "report:partition", "show the partition of a pipeline, without training", "recipe=digits strategy.stages=4"
    ),
    "explain": Command(
        "explain:explain",
        "show description, type and value of a key; without a key, the whole config",
        "[trainer.max_duration] [key=value ...]",
    ),
    "report": Command("report:report", "write the report of a run or sweep, or compare runs", "PATH [PATH ...]"),
    "recipes": Command("report:recipes", "list the recipes", ""),
    "new": Command("new_project:new", "create a project", "my_project"),
    "doctor": Command("doctor:doctor", "check this machine", "[run_dir=PATH] [devices=2]"),
    "completion": Command("completion:completion", "print the completion script of a shell", "bash"),
}
_SWEEP = "sweep:sweep"  # of `fit -m`
_RANKS = ("strategy=ddp", "strategy=torch_ddp", "strategy=fusion", "strategy=fsdp", "strategy=pipeline")
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
  --trust             with config=PATH: import the classes and functions that the config names
  --debug             print the traceback of a user error too
  -h, --help          print this page; with recipe=NAME or strategy=NAME also their keys
"""
_RUN_OPTIONS = """\
options:
  checkpoint=PATH     a run folder (its last checkpoint), a checkpoint file, or RUN_FOLDER/best; or the URL of one
  --config-dir DIR    add your own folder of groups, such as recipe/mine.yaml
  --trust             import the classes and functions that the run's config names
  --cfg job           print the config and exit
  --debug             print the traceback of a user error too
"""
_PATHS = ("checkpoint=", "config=")
_GROUPS = ("recipe", "size", "strategy", "callbacks", "logger")


@dataclass
class Arguments:
    """The arguments of a command."""

    command: str
    overrides: list[str] = field(default_factory=list)
    """All arguments that are not options, in order."""
    config_dirs: list[str] = field(default_factory=list)
    multirun: bool = False
    cfg: str | None = None
    resolve: bool = False
    trust: bool = False
    help: bool = False
    debug: bool = False

    def take(self, key: str) -> str | None:
        """Remove `key=value` from the overrides and return the value as text; `None` if there is none."""
        values = [text.partition("=")[2] for text in self.overrides if text.startswith(f"{key}=")]
        self.overrides = [text for text in self.overrides if not text.startswith(f"{key}=")]
        return values[-1] if values else None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` and return its exit code."""
    collects = gc.isenabled()
    is_debugged = "--debug" in (sys.argv if argv is None else argv)
    gc.disable()  # imports leave nothing to collect, and take a fifth less time; `assemble` enables it again
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        if is_debugged:
            print_traceback(error, is_whole=True)
        return _fail(with_notes(error))
    # The rank that failed has printed its traceback; one of this process would only hide it.
    except (RemoteRankError, RankExit) as error:
        return _fail(with_notes(error), code=1)
    except KeyboardInterrupt:
        return _fail("interrupted", code=130)
    except BrokenPipeError:  # `trainkit recipes | head`
        # Python flushes stdout at exit, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        print_traceback(error, is_whole=is_debugged)
        return 1
    finally:
        if collects:
            gc.enable()


def print_traceback(error: BaseException, *, is_whole: bool = False) -> None:
    """Print the traceback of an error to stderr, from the first call of the user's code on unless it `is_whole`."""
    # Of an error of another rank, the traceback of that rank.
    render: Callable[[], list[str]] | None = getattr(error, "_render_traceback_", None)
    shown = "" if is_whole else user_traceback(error) if render is None else "".join(render())
    if shown:
        shown = f"{shown.rstrip()}\n(--debug shows all calls)\n"
    _print_error(shown or "".join(format_exception(error)))


def print_table(rows: Iterable[Sequence[str | Text]]) -> None:
    """Print rows in columns to stdout; the width is not limited if that is not a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(printable(cell), overflow="fold") if isinstance(cell, str) else cell for cell in row))
    if Console().is_terminal:
        Console().print(table)
        return
    # Wide, as rich breaks lines at 80 columns if stdout is not a terminal.
    console = Console(width=10_000)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _fail(message: str, *, code: int = 2) -> int:
    _print_error(f"error: {message}\n" if code == 2 else f"{message}\n")
    return code


def _print_error(text: str) -> None:
    """Write an error to stderr, with its first word in red on a terminal."""
    # Or the error could appear above what was printed before it.
    sys.stdout.flush()
    text = printable(text)
    if sys.stderr.isatty() and text.startswith("error: "):
        from rich.console import Console
        from rich.text import Text

        # Not wrapped: a command that is broken by newlines cannot be copied.
        red = Text.assemble(("error:", "bold red"), text.removeprefix("error:"), end="")
        Console(stderr=True, highlight=False).print(red, soft_wrap=True, end="")
    else:
        print(text, end="", file=sys.stderr)


def with_notes(error: BaseException) -> str:
    """Return the message of an error with its notes below it."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if argv[0] == "--version":
        print(f"trainkit {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise UserError(f"unknown command '{name}'.{nearest(name, COMMANDS)} There are: {', '.join(COMMANDS)}.")
    arguments = _parse(name, rest)
    if arguments.help:
        print(command_page(arguments))
        return 0
    typed_paths = [
        text.rpartition("=")[2] for text in arguments.overrides if text.startswith(_PATHS) or "=" not in text
    ]
    if not any(text and Path.cwd().is_relative_to(os.path.realpath(text)) for text in typed_paths):
        make_working_folder_importable()  # unless that is the run folder: its files are data, not modules
    log_to_stderr()
    logging.getLogger("trainkit").setLevel(logging.INFO)
    is_sweep = name == "fit" and arguments.multirun  # whose launcher may start ranks in other processes
    if name in ("fit", "resume") and not is_sweep and any(text in _RANKS for text in arguments.overrides):
        from trainkit.distributed.fork_server import start_fork_server

        start_fork_server()  # now, so that it imports torch while this process does
    path = _SWEEP if is_sweep else COMMANDS[name].function
    module, _, attribute = path.partition(":")
    with _ended_by_interrupt():
        function: Callable[[Arguments], int] = getattr(import_module(f"trainkit.cli.{module}"), attribute)
    return function(arguments)


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C end this process at once, as SIGTERM does: imports may catch a KeyboardInterrupt."""
    # Python changes signal handlers on the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. Type {self.prog} --help")


def _parse(name: str, rest: list[str]) -> Arguments:
    # Without abbreviations: a mistyped option must not become another one. The help page depends on the overrides.
    parser = _Parser(prog=f"trainkit {name}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[], dest="config_dirs")
    # Intermixed, as options may stand between overrides.
    read, others = parser.parse_known_intermixed_args(rest)
    if others:
        options = ("--help", "--multirun", "--cfg", "--resolve", "--trust", "--debug", "--config-dir")
        near = nearest(others[0], options)
        raise UserError(f"unknown option {others[0]}.{near} Type {parser.prog} --help")
    return Arguments(name, **vars(read))


def make_working_folder_importable() -> None:
    """Put the working folder on `sys.path`, as `python -m` does, for `task._target_=my_package.MyTask`."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


# ---- Help, from the YAML files of the groups: torch and Hydra are not imported


def overview() -> str:
    """Return the text of `trainkit --help`."""
    commands = "\n".join(f"  {name:<15}{command.summary}" for name, command in COMMANDS.items())
    usage = f"usage: trainkit COMMAND [key=value ...]\n\ncommands:\n{commands}\n\n{_EXAMPLES}\n"
    return f"{usage}Type trainkit COMMAND --help for its options."


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
    # The later of two folders of the same choice wins, and the package wins over all, as in the composition.
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
    hint = "  callbacks=[a,b] and logger=[a,b] replace the defaults; +callbacks=NAME adds, ~callbacks.NAME removes"
    return [*lines, hint, ""]


def _keys(arguments: Arguments) -> list[str]:
    defaults = resources.files("trainkit.conf") / "config.yaml"
    lines = ["keys (set with KEY=VALUE) and their defaults:", *_indented(defaults)]
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
