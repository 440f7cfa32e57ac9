"""Commands that show something: `trainkit report`, `trainkit recipes` and `trainkit partition`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from trainkit.cli.main import Arguments, choices, print_table
from trainkit.errors import UserError, nearest

_EXAMPLE = "trainkit report runs/digits/2026-01-31_12-00-00"
_SHOWN = 8


def report(arguments: Arguments) -> int:
    """Write the report of a run or sweep, or the comparison of several runs, and print its path."""
    out = arguments.take("out")
    wrong = [text for text in arguments.overrides if "=" in text and not Path(text).exists()]
    if wrong:
        raise UserError(f"report takes folders and out=FILE, not {wrong[0].partition('=')[0]}. Type {_EXAMPLE}")
    folders = [_existing(text) for text in arguments.overrides]
    if not folders:
        raise UserError(f"report needs a run. Type {_EXAMPLE}")
    print(_written(folders, None if out is None else Path(out)))
    return 0


def _written(folders: list[Path], out: Path | None) -> Path:
    from trainkit.report.comparison import comparison_report
    from trainkit.report.record import read_run
    from trainkit.report.run_report import COMPARISON, REPORT, run_report, write_page
    from trainkit.report.sweep_report import SWEEP, sweep_report

    if len(folders) == 1 and (folders[0] / SWEEP).is_file():
        return write_page(sweep_report(folders[0]), out or folders[0] / REPORT)
    runs = [_run_in(folder) for folder in folders]
    if len(runs) == 1:
        return write_page(run_report(read_run(runs[0])), out or runs[0] / REPORT)
    same = [str(run) for index, run in enumerate(runs) if run.resolve() in [other.resolve() for other in runs[:index]]]
    if same:
        raise UserError(f"{same[0]} is given twice; a comparison needs different runs.")
    return write_page(comparison_report([read_run(run) for run in runs]), out or runs[-1] / COMPARISON)


def _existing(text: str) -> Path:
    path = Path(text)
    if path.exists():
        return path
    parent = path.absolute().parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    beside = sorted(child.name for child in parent.iterdir() if child.is_dir() and not child.name.startswith("."))
    near = nearest(path.name, beside) or (f" There are: {_first(beside)}." if beside else "")
    raise UserError(f"{text}: {parent} does not contain {path.name}.{near}")


def _run_in(path: Path) -> Path:
    """Return the run folder of `path`: itself, or that of a checkpoint or file in it; raises UserError if none."""
    from trainkit.report.record import is_run

    for folder in (path, path.parent, path.parent.parent):
        if folder.is_dir() and is_run(folder):
            return folder
        if folder.is_dir() and folder is not path and path.is_dir() and path.name != "checkpoints":
            break
    below = _runs(path.glob("*")) if path.is_dir() else []
    if below:
        raise UserError(
            f"{path} contains {len(below)} runs: {_first([child.name for child in below[::-1]])}. "
            f"Type trainkit report {below[-1]}"
        )
    deeper = _runs(path.glob("*/*")) if path.is_dir() else []
    hint = f" Its latest run: trainkit report {deeper[-1]}" if deeper else ""
    raise UserError(f"{path} is not a run folder.{hint}")


def _runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among `paths`, the latest last."""
    from trainkit.report.record import is_run

    return sorted((path for path in paths if path.is_dir() and is_run(path)), key=lambda path: path.stat().st_mtime)


def _first(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# ---- Recipes


def recipes(arguments: Arguments) -> int:
    """Print each recipe of the package and of the given config folders."""
    folders = "".join(f" --config-dir {folder}" for folder in arguments.config_dirs)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, path in sorted(choices(arguments, "recipe").items()):
        summary = _summary(path.read_text(encoding="utf-8"))
        table.add_row(Text(name), Text(f"{summary}\ntrainkit fit{folders} recipe={name}\n"))
    print_table(table)
    return 0


def _summary(text: str) -> str:
    """Return the first line of the docstring of a recipe's module, without importing it."""
    import yaml

    settings = yaml.safe_load(text) or {}
    target = str((settings.get("task") or {}).get("_target_", ""))
    try:
        spec = find_spec(target.rpartition(".")[0])
        source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
        docstring = ast.get_docstring(ast.parse(source)) or ""
    except (ImportError, ValueError, SyntaxError, OSError):
        return f"({target} cannot be read)"
    return docstring.strip().partition("\n")[0]


def partition(arguments: Arguments) -> int:
    """Print and draw the partition of a task; its step runs a few times on one batch in this process."""
    chosen = arguments.take("strategy")
    if chosen not in (None, "pipeline"):
        raise UserError(f"strategy={chosen} has no stages; only strategy=pipeline partitions a task. Omit strategy=.")
    from trainkit.cli.compose import compose_config

    with compose_config(arguments.config_dirs) as composer:
        settings = composer.settings(["strategy=pipeline", *arguments.overrides], needs_task=not arguments.cfg)
    if arguments.cfg:
        print(settings.as_yaml() if arguments.resolve else settings.unresolved, end="")
        return 0
    from torch.utils.data import DataLoader

    from trainkit.cli.run_commands import assemble
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
