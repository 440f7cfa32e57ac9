"""Commands that show something: `trainkit report`, `trainkit recipes` and `trainkit partition`."""

from __future__ import annotations

import ast
import os
from importlib.util import find_spec
from pathlib import Path

from trainkit.cli.main import Arguments, choices, print_table
from trainkit.errors import UserError, nearest
from trainkit.storage import is_url, local_path

_EXAMPLE = "trainkit report runs/digits/2026-01-31_12-00-00"
_SHOWN = 8
_NEEDS = "Needs the extra `"


def report(arguments: Arguments) -> int:
    """Write the report of a run or sweep, or the comparison of several runs, and print its path."""
    out = arguments.take("out")
    wrong = [text for text in arguments.overrides if "=" in text and not is_url(text) and not Path(text).exists()]
    if wrong:
        raise UserError(f"report takes folders and out=FILE, not {wrong[0].partition('=')[0]}. Type {_EXAMPLE}")
    folders = [_existing(text) for text in arguments.overrides]
    if not folders:
        raise UserError(f"report needs a run. Type {_EXAMPLE}")
    # Imported after the arguments are checked, as they import torch.
    from trainkit.checkpoint.serialization import DAMAGED_TEXT
    from trainkit.report.comparison import comparison_report
    from trainkit.report.record import read_run
    from trainkit.report.run_report import COMPARISON, REPORT, run_report, write_page
    from trainkit.report.sweep_report import SWEEP, sweep_report
    from trainkit.run_dir.folder import check_writable

    try:
        if len(folders) == 1 and (folders[0] / SWEEP).is_file():
            page, path = sweep_report(folders[0]), folders[0] / REPORT
        elif len(folders) == 1:
            run = _run_in(folders[0])
            page, path = run_report(read_run(run)), run / REPORT
        else:
            runs = [_run_in(folder) for folder in folders]
            for index, run in enumerate(runs):
                # Resolved, as links and `..` give one folder several paths.
                if run.resolve() in [other.resolve() for other in runs[:index]]:
                    raise UserError(f"{run} is given twice; a comparison needs different runs.")
            # Not inside of a run, to which it would seem to belong; nor far above runs that have little in common.
            common, beside = Path(os.path.commonpath([run.absolute().parent for run in runs])), runs[-1].parent
            path = (beside.parent if common == beside.absolute().parent else beside) / COMPARISON
            page = comparison_report([read_run(run) for run in runs])
    # Its message is already complete, and it is a ValueError.
    except UserError:
        raise
    except DAMAGED_TEXT as error:
        where = " or ".join(map(str, folders))
        raise UserError(f"a file in {where} is not what a run writes: {type(error).__name__}: {error}.") from error
    target = path if out is None else local_path(out, what="out")
    check_writable(target)
    print(write_page(page, target))
    return 0


def _existing(text: str) -> Path:
    if is_url(text):
        return _fetched(text)
    path = Path(text)
    if path.exists():
        return path
    parent = path.absolute().parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    beside = sorted(child.name for child in parent.iterdir() if child.is_dir() and not child.name.startswith("."))
    near = nearest(path.name, beside) or (f" There are: {_first(beside)}." if beside else "")
    raise UserError(f"{text}: {parent} does not contain {path.name}.{near}")


def _fetched(url: str) -> Path:
    """Return the local folder of a run in a store, without its checkpoints."""
    from trainkit.run_dir.remote_run import find_remote_run

    run, _ = find_remote_run(url)
    if run is None:
        raise UserError(f"{url} is not a run folder.")
    return run.fetch(None)


def _run_in(path: Path) -> Path:
    """Return the run folder of `path`: itself, or that of a checkpoint or file in it; raises UserError if none."""
    from trainkit.report.record import is_run

    is_folder = path.is_dir() and path.name != "checkpoints"
    for folder in [path] if is_folder else [path.parent, path.parent.parent]:
        if is_run(folder):
            return folder
    # runs/<recipe>/<date_time>: a folder of runs has them one or two levels below.
    for pattern in ("*", "*/*"):
        below = [folder for folder in path.glob(pattern) if folder.is_dir() and is_run(folder)]
        below.sort(key=lambda folder: folder.stat().st_mtime)
        if below and pattern == "*":
            names = _first([folder.name for folder in below[::-1]])
            raise UserError(f"{path} contains {len(below)} runs: {names}. Type trainkit report {below[-1]}")
        if below:
            raise UserError(f"{path} is not a run folder. Its latest run: trainkit report {below[-1]}")
    raise UserError(f"{path} is not a run folder.")


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# ---- Recipes


def recipes(arguments: Arguments) -> int:
    """Print each recipe of the package and of the given config folders."""
    folders = "".join(f" --config-dir {folder}" for folder in arguments.config_dirs)
    rows = []
    for name, file in sorted(choices(arguments, "recipe").items()):
        summary = _summary(file.read_text(encoding="utf-8"))
        rows.append((name, f"{summary}\ntrainkit fit{folders} recipe={name}\n"))
    print_table(rows)
    return 0


def _summary(text: str) -> str:
    """Return the first line of a recipe's docstring, and the extra that it needs; its module is not imported."""
    import yaml

    settings = yaml.safe_load(text) or {}
    target = str((settings.get("task") or {}).get("_target_", ""))
    try:
        # Not by importing the module, which may need packages that are not installed.
        spec = find_spec(target.rpartition(".")[0])
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        docstring = ast.get_docstring(ast.parse(source)) or ""
    except (ImportError, ValueError, SyntaxError, OSError):
        return f"({target} cannot be read)"
    lines = docstring.strip().splitlines()
    # By convention a recipe's docstring names its extra in one line of this form.
    needs = [f"{line} Type: pip install 'trainkit-torch[{line.split('`')[1]}]'" for line in lines if _NEEDS in line]
    return "\n".join([*lines[:1], *needs])


def partition(arguments: Arguments) -> int:
    """Print and draw the partition of a task; its step runs a few times on one batch in this process."""
    chosen = arguments.take("strategy")
    if chosen not in (None, "pipeline"):
        raise UserError(f"strategy={chosen} has no stages; only strategy=pipeline partitions a task. Omit strategy=.")
    from trainkit.cli.compose import compose_config
    from trainkit.cli.run_commands import assemble, show_config

    with compose_config(arguments.config_dirs) as composer:
        settings = composer.settings(["strategy=pipeline", *arguments.overrides], needs_task=not arguments.cfg)
    if arguments.cfg:
        return show_config(settings, arguments)
    from torch.utils.data import DataLoader

    from trainkit.data.data import Data
    from trainkit.strategy import SupportsPartitionPreview

    run = assemble(settings, run_dir=None, loggers=False)
    strategy = run.trainer.strategy
    if not isinstance(strategy, SupportsPartitionPreview):
        raise UserError(f"{type(strategy).__name__} has no stages; only strategy=pipeline partitions a task.")
    data = Data(train=run.data) if isinstance(run.data, DataLoader) else run.data
    preview = strategy.preview(run.task, data.stage_data("train"), precision=run.trainer.fit_config.precision)
    print(f"{settings.name} in {preview}")
    return 0
