"""The folder of a run: its config, summary and environment.

runs/<name>/<date_time>/
config.yaml  metrics.jsonl  tensorboard/  checkpoints/  rank_<k>.log  summary.json
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import UninitializedParameter

from trainkit import registry
from trainkit.devices import has_streams, name_of, toolkit_versions
from trainkit.errors import UserError
from trainkit.files import disk_error_text, reason, write_optional, write_text

if TYPE_CHECKING:
    from trainkit.run import Run

FILENAME = "environment.json"
# Limits of a config that is read: few bytes of YAML may stand for values that take hours or all memory to load.
_MAX_CONFIG_BYTES = 1 << 17
_MAX_CONFIG_VALUES = 5_000
_MAX_CONFIG_DIGITS = 4_000
_MAX_CONFIG_DEPTH = 50
# A repository on a slow network disk must not delay the start of the run.
_GIT_SECONDS = 2.0
_PACKAGES = ("numpy", "transformers", "lightning", "torchmetrics", "datasets")

logger = logging.getLogger(__name__)


def choose_run_dir(name: str, *, parent: Path = Path("runs")) -> Path:
    """Return a folder `runs/<name>/<date_time>` that does not exist yet."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    suffixes = ("" if attempt == 0 else f"_{attempt}" for attempt in count())
    return next(path for path in (parent / name / (stamp + suffix) for suffix in suffixes) if not path.exists())


def check_run_dir(folder: Path) -> None:
    """Raise UserError if the folder cannot be made or written to, or has links to outside; changes nothing."""
    check_links(folder)
    # Of the nearest folder that exists: the missing ones are made only when the run starts.
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"the run folder {folder} cannot be made: {existing} is a file. Set run_dir to another path.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"the run folder {folder} cannot be written to; set run_dir to a writable path.")


def check_links(folder: Path) -> None:
    """Raise UserError for a link in the folder that points out of it: a run would write or remove what is there."""
    root = os.path.realpath(folder)
    for parent, folders, files in os.walk(root):  # which follows no links
        for path in (os.path.join(parent, name) for name in [*folders, *files]):
            target = os.path.realpath(path) if os.path.islink(path) else root
            if os.path.commonpath([root, target]) != root:
                raise UserError(
                    f"the run folder {folder} has the link {os.path.relpath(path, root)}, which points out of it, to "
                    f"{target}: the run would write there. Remove the link, or choose a folder elsewhere: run_dir=PATH."
                )


def make_run_dir(folder: Path) -> None:
    """Make the folder if it does not exist; raises UserError as `check_run_dir` does."""
    check_links(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not tell: the file system may be full or mounted read-only.
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"the run folder {folder} cannot be written to ({error.strerror}); set run_dir to a writable path."
        ) from None


def check_writable(path: Path) -> None:
    """Raise UserError if the file cannot be written, found by making one beside it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"{path} cannot be written: {reason(error)}. Type out=FILE to write elsewhere.") from error


def write_config(folder: Path, config: str) -> None:
    """Write the run's settings to `config.yaml`; those of an earlier part of the run are kept if they differ."""
    path = folder / "config.yaml"
    try:
        # A resume with other settings: the config of the earlier steps stays beside the new one.
        if path.exists() and path.read_text() != config:
            path.rename(folder / f"config_until_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}.yaml")
        write_text(path, config)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {disk_error_text(error, folder)}") from error


def read_config(path: Path) -> str:
    """Return the text of a run's config; raises OSError, or an error of `check_config`."""
    with path.open("rb") as file:
        # One byte more than the limit shows that there is more, without reading all of it.
        text = file.read(_MAX_CONFIG_BYTES + 1).decode("utf-8", "replace")
    check_config(text, path)
    return text


def check_config(text: str, path: Path) -> None:
    """Raise UserError if YAML from `path` could take much time or memory to load, and YAMLError if it is invalid."""
    import yaml  # here, as a run from Python has no config

    reason = f"more than {_MAX_CONFIG_BYTES:,} bytes" if len(text) > _MAX_CONFIG_BYTES else ""
    count, opened, sizes = 0, list[tuple[str | None, int]](), dict[str | None, int]()
    # Events, which are not expanded yet: each alias counts as all the values that it stands for.
    for event in () if reason else yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, start = opened.pop()
            sizes[anchor] = count - start
        elif isinstance(event, yaml.AliasEvent):  # to a value that contains it, too
            count += sizes.get(event.anchor, _MAX_CONFIG_VALUES)
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            count += 1
        if tag := getattr(event, "tag", None):
            reason = f"a tag ({tag})"
        elif isinstance(event, yaml.ScalarEvent) and _is_long_number(event.value):
            reason = f"a number of more than {_MAX_CONFIG_DIGITS:,} digits"
        elif len(opened) > _MAX_CONFIG_DEPTH:
            reason = f"more than {_MAX_CONFIG_DEPTH} levels"
        elif count > _MAX_CONFIG_VALUES:
            reason = f"more than {_MAX_CONFIG_VALUES:,} values, with aliases expanded"
        if reason:
            break
    if reason:
        raise UserError(f"{path} cannot be read as a config: it has {reason}.")


def _is_long_number(text: str) -> bool:
    # Python converts a long number in quadratic time, or refuses it.
    return len(text) > _MAX_CONFIG_DIGITS and text[0] in "+-0123456789"


def clear_summary(folder: Path) -> None:
    """Remove the summary of an earlier part of the run: if this part is killed, it has none."""
    (folder / "summary.json").unlink(missing_ok=True)


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary.json`: the result of the run and the reason why it ended."""
    # Weights and states are for the caller of `fit` only, and no JSON.
    values = {key: _as_json(value) for key, value in summary.items() if key not in ("weights", "callback_states")}
    write_text(folder / "summary.json", json.dumps(values, indent=2, allow_nan=False) + "\n")


def write_environment(run: Run) -> None:
    """Write `environment.json`: versions, device, system, git commit and layout; never raises."""
    if run.run_dir is None:
        return
    try:
        write_optional(run.run_dir / FILENAME, json.dumps(_environment(run), indent=2) + "\n")
    except ValueError as error:
        logger.warning("the environment could not be written to %s: %s", run.run_dir, error)


def _environment(run: Run) -> dict[str, Any]:
    """Return the values that the report's header shows."""
    task, strategy, device = run.task, run.strategy, run.strategy.device
    # A lazy parameter has no number of elements yet.
    parameters = [parameter for parameter in task.parameters() if not isinstance(parameter, UninitializedParameter)]
    return {
        "started": time.time(),
        "command": _command(sys.argv),
        "task": f"{type(task).__module__}.{type(task).__qualname__}",
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "strategy": registry.name_of("strategy", strategy),
        "processes": strategy.comm.num_processes,
        "plan": None if run.plan is None else str(run.plan),
        "max_steps": run.max_steps,
        "precision": run.precision.name,
        "device": f"{device} ({name_of(device)})" if has_streams(device) else str(device),
        "seed": run.seed,
        "resumed_from": run.resumed_from,
        "versions": _versions(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git": _git_state(Path.cwd()),
    }


def _command(argv: Sequence[str]) -> str:
    """Return the command line with the program's name for its path; empty if no file was started."""
    if not argv or not argv[0] or argv[0].startswith("-"):
        return ""
    program = Path(argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return " ".join([name, shlex.join(argv[1:])]).strip()


def _versions() -> dict[str, str]:
    """Return the versions of packages that are imported already."""
    from trainkit import __version__

    versions = {"trainkit": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    versions |= toolkit_versions()
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    return versions


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit that is checked out, and if tracked files differ from it; `None` outside of git."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return None  # without starting a process
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    commit = done.stdout.strip()
    return {"commit": commit.removesuffix("-dirty"), "dirty": commit.endswith("-dirty")}


def _as_json(value: Any) -> Any:
    """Return the value in a form that JSON has: paths as strings, numbers that are not finite as null."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_json(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
