"""Several runs, one for each combination of values, by Hydra's sweepers and launchers.

runs/<recipe>/<date_time>_sweep/
multirun.yaml  sweep.json  0/  1/  ...      a run's folder for each job
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trainkit.command_line.cli import Arguments, make_working_folder_importable, print_traceback
from trainkit.command_line.commands import check_is_new, farewell
from trainkit.command_line.composition import Composer, Settings, composing, forget_absent, settings_of
from trainkit.command_line.overrides import LISTS, Overrides
from trainkit.command_line.problem import Problem, SettingsError
from trainkit.errors import Stopped, UserError

_MOST_CHECKED = 200
_OF_HYDRA = (
    "hydra.sweep.subdir=${hydra.job.num}",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


@dataclass
class JobOutcome:
    """What one job of a sweep came to."""

    overrides: list[str]
    run_dir: str
    exit_code: int = 0
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def sweep(arguments: Arguments) -> int:
    """Run every job, whatever becomes of the others; print a table and return the first exit code that is not 0."""
    if arguments.cfg:
        raise UserError("--cfg job shows the settings of one run; leave -m out and choose one value for each key.")
    with composing(arguments.config_dirs) as composer:
        overrides = Overrides(arguments.overrides, options=composer.options, sweep=True)
        first = _check_jobs(composer, overrides)
        folder = _sweep_folder(first)
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        deletions = [key for key, _ in overrides.deletions]
        lines = [*composer.rendered(overrides, deletions=deletions), f"hydra.sweep.dir='{folder}'", *_OF_HYDRA]
        try:
            batches = hydra.multirun(composer.config_name, _run_job, lines, with_log_configuration=False)
        except HydraException as error:
            raise UserError(str(error)) from None
    outcomes = _outcomes(batches)
    _report(outcomes, folder)
    return next((outcome.exit_code for outcome in outcomes if outcome.exit_code), 0)


def _check_jobs(composer: Composer, overrides: Overrides) -> Settings:
    """Return the first job's settings; raises SettingsError with what is wrong in any of them, before one starts."""
    problems: list[Problem] = list(overrides.problems)
    checked: list[Settings] = []
    for texts in overrides.jobs()[:_MOST_CHECKED]:
        try:
            checked.append(composer.settings(texts))
        except SettingsError as error:
            problems += error.problems
    if problems:
        raise SettingsError(problems)
    return checked[0]


def _sweep_folder(settings: Settings) -> Path:
    from trainkit.run_folder import choose_run_dir

    chosen = settings.tree.get("run_dir")
    if chosen is None:
        folder = choose_run_dir(settings.name)
        return folder.with_name(f"{folder.name}_sweep")
    check_is_new(Path(chosen))
    return Path(chosen)


def _run_job(config: DictConfig) -> JobOutcome:
    """Train one job; called by Hydra's launcher, perhaps in another process."""
    from trainkit.command_line.assembly import assemble

    make_working_folder_importable()
    hydra = HydraConfig.get()
    typed = [_as_typed(str(text)) for text in hydra.overrides.task]
    run_dir = Path(hydra.runtime.output_dir)
    run_dir = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    outcome = JobOutcome(typed, str(run_dir))
    print(f"\njob {hydra.job.num}: {' '.join(typed)}", flush=True)
    try:
        settings = settings_of(OmegaConf.merge(config, {"run_dir": None}), hydra.runtime.choices.get("recipe"))
        for group in LISTS:
            forget_absent(settings.tree, group)
        assembly = assemble(settings, run_dir=run_dir)
        outcome.metrics = assembly.trainer.fit(assembly.task, assembly.data).metrics
    except Stopped as stopped:
        print(farewell(stopped, run_dir), file=sys.stderr)
        raise SystemExit(stopped.exit_code) from None  # it ends the sweep, not only this job
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        outcome.exit_code, outcome.error = 2, str(error)
    except Exception as error:
        print_traceback()
        outcome.exit_code, outcome.error = 1, f"{type(error).__name__}: {error}"
    return outcome


def _as_typed(text: str) -> str:
    return text.removesuffix("=null") if text.startswith("~") else text.lstrip("+")


def _outcomes(batches: Sequence[Sequence[JobReturn]]) -> list[JobOutcome]:
    return [job.return_value for batch in batches for job in batch]


def _report(outcomes: Sequence[JobOutcome], folder: Path) -> None:
    """Print a line for each job and keep `sweep.json`."""
    (folder / "sweep.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes))
    print(f"\nsweep of {len(outcomes)} jobs in {folder}")
    for number, outcome in enumerate(outcomes):
        typed = " ".join(text for text in outcome.overrides if len(outcomes) == 1 or text not in common)
        print(f"  {number}  {typed}  {_result(outcome)}")


def _result(outcome: JobOutcome) -> str:
    if outcome.error is not None:
        return f"failed: {outcome.error.splitlines()[0]}"
    shown: dict[str, Any] = {key: value for key, value in outcome.metrics.items() if key.startswith("validation/")}
    return "  ".join(f"{key}={value:.6g}" for key, value in (shown or outcome.metrics).items())
