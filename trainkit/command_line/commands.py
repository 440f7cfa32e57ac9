"""The commands that put a run together: fit, validate, test, predict and resume."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from trainkit.command_line.cli import Arguments
from trainkit.command_line.composition import Composer, Settings, composing
from trainkit.errors import Stopped, UserError

if TYPE_CHECKING:
    from trainkit.command_line.assembly import Assembly
    from trainkit.linear_scaling import UsualBatch

_CHECKPOINTS = "checkpoints"
_SETTINGS = "config.yaml"


def fit(arguments: Arguments) -> int:
    """Train, in a new folder; `config=PATH` repeats the settings of a run, `resume=auto` goes on with one."""
    saved = arguments.take("config")
    resumed = arguments.take("resume")
    profiled = arguments.take("profile")
    if profiled is not None:
        arguments.overrides.append(f"trainer.profile={profiled}")
    if resumed not in (None, "auto"):
        raise UserError(f"resume={resumed}: fit goes on by itself with resume=auto. Type trainkit resume {resumed}")
    if arguments.multirun:
        if resumed is not None:
            raise UserError("resume=auto goes on with one run, and -m starts several; leave one of them out.")
        from trainkit.command_line.sweep import sweep

        return sweep(arguments)
    with composing(arguments.config_dirs, saved=None if saved is None else settings_file(Path(saved))) as composer:
        settings = composer.settings(arguments.overrides, needs_task=not arguments.cfg)
        usual = _usual_batch(composer, arguments, settings) if saved is None else None
    if arguments.cfg:
        return _show(settings, arguments)
    run_dir = _new_run_dir(settings) if resumed is None else _run_dir_to_continue(settings)
    return _train(settings, run_dir, resume=resumed, usual=usual)


def resume(arguments: Arguments) -> int:
    """Continue a run in its own folder, with its settings and the overrides."""
    path = _path(arguments, "trainkit resume runs/digits/2026-01-31_12-00-00")
    settings = settings_of_run(arguments, path)
    if arguments.cfg:
        return _show(settings, arguments)
    _check_checkpoint(path)
    chosen = settings.tree["run_dir"]
    return _train(settings, Path(chosen) if chosen else run_folder_of(path), resume=path)


def validate(arguments: Arguments) -> int:
    """Print the metrics of a trained task on all validation data."""
    return _evaluate(arguments, lambda trainer: trainer.validate, report=_print_metrics)


def test(arguments: Arguments) -> int:
    """Print the metrics of a trained task on all test data."""
    return _evaluate(arguments, lambda trainer: trainer.test, report=_print_metrics)


def predict(arguments: Arguments) -> int:
    """Write `predictions.pt` into the run's folder."""
    return _evaluate(arguments, lambda trainer: trainer.predict, report=_keep_predictions)


# ---- Training


def farewell(stopped: Stopped, run_dir: Path) -> str:
    """Return where the state of a stopped run is, and what to type to continue it."""
    from trainkit.checkpoints.store import resolve

    try:
        checkpoint = resolve(run_dir)
    except UserError:
        return f"stopped by {stopped.signal_name}; nothing is saved without +callbacks=checkpoint."
    return f"stopped by {stopped.signal_name}; the state is saved in {checkpoint}. Continue: trainkit resume {run_dir}"


def check_is_new(folder: Path) -> None:
    """Raise UserError if a folder holds a run already."""
    if (
        (folder / _SETTINGS).exists()
        or (folder / _CHECKPOINTS).exists()
        or (folder / "multirun.yaml").exists()
        or (folder / "sweep.json").exists()
    ):
        raise UserError(
            f"run_dir={folder} holds a run already. Continue it: trainkit resume {folder}. Or choose another folder."
        )


def _usual_batch(composer: Composer, arguments: Arguments, settings: Settings) -> UsualBatch | None:
    """Return the global batch that the recipe was written for, if another one may have been typed."""
    recipe = settings.tree.get("recipe")
    if recipe is None or not any("batch_size" in text for text in arguments.overrides):
        return None
    from trainkit.linear_scaling import UsualBatch

    own = composer.settings([f"recipe={recipe}"]).tree
    batch_size, rate = own["data"].get("batch_size"), own["task"].get("lr")
    if not isinstance(batch_size, int):
        return None
    return UsualBatch(batch_size, f"recipe {recipe}", float(rate) if isinstance(rate, (int, float)) else None)


def _train(
    settings: Settings, run_dir: Path, *, resume: Path | str | None = None, usual: UsualBatch | None = None
) -> int:
    from trainkit.command_line.assembly import assemble

    assembly = assemble(settings, run_dir=run_dir)
    assembly.trainer.usual_batch = usual
    try:
        result = assembly.trainer.fit(assembly.task, assembly.data, resume=resume)
    except Stopped as stopped:
        _say(assembly, farewell(stopped, run_dir), to=sys.stderr)
        return stopped.exit_code
    if result.run_dir is not None:
        _say(assembly, f"the run is in {result.run_dir}{', with its report.html' if assembly.trainer.report else ''}")
    return 0


def _run_dir_to_continue(settings: Settings) -> Path:
    """Return the folder that was chosen, or that of the newest unfinished run of the recipe, or a new one."""
    from trainkit.continuation import run_to_continue
    from trainkit.duration import Duration
    from trainkit.run_folder import choose_run_dir

    chosen = settings.tree.get("run_dir")
    if chosen is not None:
        return Path(chosen)
    durations = Duration.parse_all(settings.tree["trainer"].get("max_duration", "1epoch"), where="max_duration")
    return run_to_continue(None, name=settings.name, max_duration=durations).run_dir or choose_run_dir(settings.name)


def _new_run_dir(settings: Settings) -> Path:
    from trainkit.run_folder import choose_run_dir

    chosen = settings.tree.get("run_dir")
    if chosen is None:
        return choose_run_dir(settings.name)
    check_is_new(Path(chosen))
    return Path(chosen)


# ---- Runs that are there already


def run_folder_of(path: Path) -> Path:
    """Return the run folder that `path`, a run folder, its checkpoints folder or a file in that, belongs to."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name == _CHECKPOINTS else folder


def _evaluate(
    arguments: Arguments,
    method: Callable[[Any], Callable[..., Any]],
    *,
    report: Callable[[Any, Path], None],
) -> int:
    path = _path(arguments, f"trainkit {arguments.command} run=runs/digits/2026-01-31_12-00-00")
    which = arguments.take("checkpoint")
    settings = settings_of_run(arguments, path)
    if arguments.cfg:
        return _show(settings, arguments)
    checkpoint = _check_checkpoint(path, which)
    from trainkit.command_line.assembly import assemble

    assembly = assemble(settings, run_dir=None, loggers=False)
    try:
        outcome = method(assembly.trainer)(assembly.task, assembly.data, checkpoint=checkpoint)
    except Stopped as stopped:
        _say(assembly, f"stopped by {stopped.signal_name}", to=sys.stderr)
        return stopped.exit_code
    if assembly.trainer.strategy.comm.is_main:
        report(outcome, run_folder_of(path))
    return 0


def _path(arguments: Arguments, example: str) -> Path:
    """Return the run or checkpoint that was typed, as `run=PATH` or alone."""
    typed = arguments.take("run")
    if typed is None and arguments.overrides and "=" not in arguments.overrides[0]:
        typed = arguments.overrides.pop(0)
    if not typed:
        raise UserError(f"{arguments.command} needs a run. Type {example}")
    path = Path(typed)
    if not path.exists():
        _check_checkpoint(path)
    return path


def _check_checkpoint(path: Path, which: str | None = None) -> Path:
    """Return the checkpoint to load; raises UserError where there is none. The last one is found again when loaded."""
    from trainkit.checkpoints.store import resolve

    chosen = resolve(path, which or "last")
    return path if which in (None, "last") else chosen


def settings_of_run(arguments: Arguments, path: Path) -> Settings:
    """Return the settings that a run was started with, changed by what was typed now."""
    file = run_folder_of(path) / _SETTINGS
    if path.is_file() and not file.is_file():
        return _settings_in_checkpoint(arguments, path)
    with composing(arguments.config_dirs, saved=settings_file(run_folder_of(path))) as composer:
        return composer.settings(arguments.overrides)


def _settings_in_checkpoint(arguments: Arguments, path: Path) -> Settings:
    """Return the settings that a checkpoint keeps itself, for one that was moved away from its run."""
    from trainkit.checkpoints.store import load_from

    with TemporaryDirectory() as folder:
        file = Path(folder) / _SETTINGS
        file.write_text(load_from(path).payload["config"], encoding="utf-8")
        with composing(arguments.config_dirs, saved=file) as composer:
            return composer.settings(arguments.overrides)


def settings_file(path: Path) -> Path:
    """Return the file that holds a run's settings: `path` itself, or `config.yaml` in it."""
    file = path / _SETTINGS if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} is no run's folder: there is no {_SETTINGS} in it.")
    return file


# ---- What is printed


def _show(settings: Settings, arguments: Arguments) -> int:
    print(settings.as_yaml() if arguments.resolve else settings.unresolved, end="")
    return 0


def _say(assembly: Assembly, line: str, *, to: TextIO | None = None) -> None:
    """Print a line on one rank only: under torchrun each rank has come here by itself."""
    if assembly.trainer.strategy.comm.is_main:
        print(line, file=to)


def _keep_predictions(predictions: Any, folder: Path) -> None:
    import torch

    path = folder / "predictions.pt"
    part = path.with_suffix(".pt.part")
    torch.save(predictions, part)
    part.replace(path)
    print(f"{_described(predictions)} in {path}")


def _print_metrics(metrics: dict[str, float], folder: Path) -> None:
    width = max((len(name) for name in metrics), default=0)
    for name, value in metrics.items():
        print(f"{name:<{width}}  {value:.6g}")


def _described(predictions: Any) -> str:
    shape = getattr(predictions, "shape", None)
    if shape is not None:
        return f"predictions of shape {tuple(shape)}"
    return f"{len(predictions)} predictions" if hasattr(predictions, "__len__") else "predictions"
