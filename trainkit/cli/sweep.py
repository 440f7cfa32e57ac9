"""Sweeps: one run for each combination of values, with Hydra's sweepers and launchers.

runs/<recipe>/<date_time>_sweep/
multirun.yaml  sweep.json  report.html  0/  1/  ...      a run folder for each job, with its outcome in job.json

`sweep.json` contains the objective (a metric and its mode) and for each job its number, overrides, run folder, exit
code, exit reason, error, metrics, seconds, and the value of the objective.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from trainkit.checkpoint.store import CHECKPOINTS, CheckpointStore
from trainkit.cli.compose import ConfigComposer, Settings, compose_config, drop_unselected, resume_command, settings_of
from trainkit.cli.main import Arguments, make_working_folder_importable, print_table, print_traceback, with_notes
from trainkit.cli.overrides import Overrides
from trainkit.cli.run_commands import assemble, new_run_dir, recipe_diff, resume_hint
from trainkit.cli.signatures import install_hint, is_installed
from trainkit.cli.validate import ConfigError, Problem
from trainkit.console import printable
from trainkit.errors import CheckpointError, Stopped, UserError, nearest
from trainkit.files import write_text
from trainkit.report.run_report import REPORT, write_page
from trainkit.report.sweep_report import SWEEP, sweep_report
from trainkit.signals import EXIT_CODES
from trainkit.storage import local_path
from trainkit.trainer import Launch

# Each job is composed, which takes time: a sweep of thousands would seem to hang.
_MOST_CHECKED = 200
# Each job has its number as folder. trainkit logs itself, and writes the config of each run.
_HYDRA_OVERRIDES = (
    "hydra.sweep.subdir=${hydra.job.num}",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
# Launchers and sweepers, with the packages of those that are not Hydra's own.
_PLUGINS = {
    "basic": "",
    "joblib": "hydra_joblib_launcher",
    "optuna": "hydra_optuna_sweeper",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
}
_LOCAL_LAUNCHERS = ("basic", "joblib", "submitit_local")
_JOB = "job.json"


@dataclass
class JobOutcome:
    """The outcome of one job of a sweep."""

    number: int
    overrides: list[str]
    run_dir: str
    exit_code: int = 0
    exit_reason: str = ""
    error: str | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    """The latest values; `None` for values that are not finite."""
    seconds: float | None = None
    value: float | None = None
    """The value of the objective, of the run's best checkpoint; `None` if the job did not measure it."""

    def __float__(self) -> float:
        """Return the objective; sweepers that optimize it call this."""
        if self.value is None:
            raise ValueError(self.error or "the job did not measure the objective")
        return self.value


@dataclass(frozen=True)
class SweepObjective:
    """The metric that a sweep optimizes, and its mode (`min` or `max`)."""

    metric: str
    mode: str = "min"

    def value(self, metrics: Mapping[str, float | None], run_dir: Path) -> float | None:
        """Return the metric of the best checkpoint that a run has kept, which is the one to use; `None` for none.

        Without checkpoints it is the latest value, and without a validation that of training.
        """
        value = metrics.get(self.metric, metrics.get(f"train/{self.metric.partition('/')[2]}"))
        with suppress(CheckpointError):  # no checkpoint has the metric
            best = CheckpointStore(run_dir / CHECKPOINTS).best(self.metric, "max" if self.mode == "max" else "min")
            value = value if best is None else best.metrics[self.metric]
        return value if value is not None and math.isfinite(value) else None

    def best(self, values: Sequence[float | None]) -> int | None:
        """Return the index of the best value."""
        sign = 1 if self.mode == "min" else -1
        # Of equal values the first job counts, as a tuple with its index is compared.
        signed_values = [(sign * value, index) for index, value in enumerate(values) if value is not None]
        return min(signed_values)[1] if signed_values else None


def find_objective(tree: Mapping[str, Any]) -> SweepObjective:
    """Return the first metric that a callback monitors; `validation/loss` if there is none."""
    callbacks = tree.get("callbacks") or {}
    nodes = [node for node in callbacks.values() if isinstance(node, Mapping) and isinstance(node.get("monitor"), str)]
    if nodes:
        return SweepObjective(nodes[0]["monitor"], str(nodes[0].get("mode", "min")))
    return SweepObjective("validation/loss")


def sweep(arguments: Arguments) -> int:
    """Run all jobs, failed or not; print a table and return the first exit code that is not 0."""
    if arguments.take("resume") is not None:
        raise UserError("resume=auto resumes one run, and -m starts several; remove one of them.")
    if arguments.cfg:
        raise UserError("--cfg job prints the config of one run; remove -m and choose one value for each key.")
    plugins = _plugins(arguments.overrides)
    with compose_config(arguments.config_dirs) as composer:
        overrides = Overrides(arguments.overrides, options=composer.options, sweep=True)
        # With another launcher the jobs run on other machines, whose devices are not known here.
        first = _check_jobs(composer, overrides, local=plugins.get("hydra/launcher", "basic") in _LOCAL_LAUNCHERS)
        objective = find_objective(first.tree)
        folder = local_path(new_run_dir(first), what="run_dir of a sweep")
        if first.tree["run_dir"] is None:
            folder = folder.with_name(f"{folder.name}_sweep")
        deletions = [key for key, _ in overrides.deletions]
        # In quotes: Hydra's grammar gives a meaning to signs that a path may have.
        lines = [*composer.rendered(overrides, deletions=deletions), f"hydra.sweep.dir='{folder}'", *_HYDRA_OVERRIDES]
        keys = [text.lstrip("+").partition("=")[0] for text in arguments.overrides]
        if plugins.get("hydra/sweeper") == "optuna" and "hydra.sweeper.direction" not in keys:
            lines.append(f"hydra.sweeper.direction={'maximize' if objective.mode == 'max' else 'minimize'}")
        try:
            _run_jobs(composer, lines)
        # After Ctrl-C or a failure too: the jobs that have ended are reported.
        finally:
            outcomes = _outcomes(folder)
            if outcomes:
                _report(outcomes, folder, objective)
    return next((outcome.exit_code for outcome in outcomes if outcome.exit_code), 0)


def _plugins(texts: Sequence[str]) -> dict[str, str]:
    """Return the launcher and sweeper in the overrides; raises UserError if one is not installed."""
    typed: dict[str, str] = {}
    for text in texts:
        group, _, name = text.partition("=")
        if group not in ("hydra/launcher", "hydra/sweeper"):
            continue
        if name not in _PLUGINS:
            raise UserError(f"{text} is unknown.{nearest(name, _PLUGINS)}")
        package = _PLUGINS[name]
        if package and not is_installed(package):
            raise UserError(f"{text} needs a package that is not installed. {install_hint(package)}")
        typed[group] = name
    return typed


def _check_jobs(composer: ConfigComposer, overrides: Overrides, *, local: bool) -> Settings:
    """Return the first job's config; raises ConfigError with the problems of all jobs."""
    problems: list[Problem] = list(overrides.problems)
    checked: list[Settings] = []
    for texts in overrides.jobs()[:_MOST_CHECKED]:
        try:
            checked.append(composer.settings(texts, check_devices=local))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return checked[0]


def _run_jobs(composer: ConfigComposer, lines: list[str]) -> None:
    hydra = GlobalHydra.instance().hydra
    assert hydra is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # plugins warn about versions of their dependencies
            hydra.multirun(composer.config_name, _run_job, lines, with_log_configuration=False)
    except HydraException as error:
        raise UserError(str(error)) from None
    except (ValueError, RuntimeError) as error:
        # Optuna raises if all jobs failed, or the last one of a grid; the table reports them.
        if not any(words in str(error) for words in ("No trials are completed", "`Study.stop`")):
            raise


def _run_job(config: DictConfig) -> JobOutcome:
    """Train one job and write its outcome; Hydra's launcher calls this, some in another process.

    The ranks of its strategy have ended when it returns.
    """
    # A launcher may call this in a process that does not have the working folder on its path.
    make_working_folder_importable()
    if multiprocessing.get_start_method(allow_none=True) == "loky":  # joblib's: ranks of a strategy would hang with it
        multiprocessing.set_start_method("spawn", force=True)
    hydra = HydraConfig.get()
    texts = [str(text) for text in hydra.overrides.task]
    typed = [text.removesuffix("=null") if text.startswith("~") else text.lstrip("+") for text in texts]
    run_dir = Path(hydra.runtime.output_dir)
    run_dir = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    outcome = JobOutcome(int(hydra.job.num), typed, str(run_dir))
    print(f"\njob {hydra.job.num}: {' '.join(typed)}", flush=True)
    try:
        _train(config, run_dir, outcome)
    except Stopped as stopped:
        print(resume_hint(stopped, run_dir, config), file=sys.stderr)
        outcome.exit_code, outcome.exit_reason = stopped.exit_code, stopped.signal_name
        outcome.error = f"stopped by {stopped.signal_name}"
        raise SystemExit(stopped.exit_code) from None  # ends the sweep, not only this job
    except KeyboardInterrupt:
        outcome.exit_code, outcome.exit_reason, outcome.error = EXIT_CODES["SIGINT"], "SIGINT", "interrupted"
        raise SystemExit(outcome.exit_code) from None
    except UserError as error:
        print(printable(f"error: {with_notes(error)}"), file=sys.stderr)
        outcome.exit_code, outcome.exit_reason, outcome.error = 2, "failed", str(error)
    except Exception as error:
        print_traceback(error, is_whole="--debug" in sys.argv)
        outcome.exit_code, outcome.exit_reason, outcome.error = 1, "failed", f"{type(error).__name__}: {error}"
    # On every path: the table is made from these files.
    finally:
        run_dir.mkdir(parents=True, exist_ok=True)
        _write(run_dir / _JOB, asdict(outcome))
    return outcome


def _train(config: DictConfig, run_dir: Path, outcome: JobOutcome) -> None:
    choices = HydraConfig.get().runtime.choices
    settings = settings_of(OmegaConf.merge(config, {"run_dir": None}), choices.get("recipe"))
    drop_unselected(settings.tree)
    try:
        run = assemble(settings, run_dir=run_dir)
    except KeyboardInterrupt:  # from here on the trainer says it
        print("interrupted", file=sys.stderr)
        raise
    run.trainer.launch = Launch(
        prints_run_dir=False,
        overrides=[text.removeprefix("++") for text in HydraConfig.get().overrides.task],
        resume_command=partial(resume_command, tree=settings.tree),
        config_diff=partial(recipe_diff, settings),
    )
    # SLURM may queue a job again, with the same folder.
    result = run.trainer.fit(run.task, run.data, resume="auto")
    outcome.exit_reason, outcome.seconds = result.exit_reason, result.seconds
    # JSON has no numbers that are not finite.
    outcome.metrics = {name: value if math.isfinite(value) else None for name, value in result.metrics.items()}
    outcome.value = find_objective(settings.tree).value(result.metrics, run_dir)


def _outcomes(folder: Path) -> list[JobOutcome]:
    """Return the outcomes in the jobs' folders: not every sweeper returns them."""
    read = [JobOutcome(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob(f"*/{_JOB}")]
    return sorted(read, key=lambda outcome: outcome.number)


def _report(outcomes: Sequence[JobOutcome], folder: Path, objective: SweepObjective) -> None:
    """Write `sweep.json` and `report.html`, and print a line for each job."""
    _write(folder / SWEEP, {"objective": asdict(objective), "jobs": [asdict(outcome) for outcome in outcomes]})
    common = set.intersection(*(set(outcome.overrides) for outcome in outcomes))
    best = objective.best([outcome.value for outcome in outcomes])
    rows = []
    for index, outcome in enumerate(outcomes):
        typed = " ".join(text for text in outcome.overrides if len(outcomes) == 1 or text not in common)
        mark = "<- best" if index == best and len(outcomes) > 1 else ""
        rows.append((str(outcome.number), typed, _result(outcome, objective.metric), mark))
    print(f"\nsweep of {len(outcomes)} jobs in {folder}")
    print_table(rows)
    print(f"report: {write_page(sweep_report(folder), folder / REPORT)}")


def _write(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _result(outcome: JobOutcome, metric: str) -> str:
    """Return the error or the metrics of a job, `metric` of its best checkpoint."""
    if outcome.error is not None:
        return f"failed: {outcome.error.splitlines()[0]}"
    shown = {key: value for key, value in outcome.metrics.items() if key.startswith("validation/")}
    shown = shown or dict(outcome.metrics)
    if metric in shown:
        shown[metric] = outcome.value
    values = {key: "not finite" if value is None else f"{value:.6g}" for key, value in shown.items()}
    if shown.get(metric) != outcome.metrics.get(metric):
        values[metric] += " (kept)"
    return "  ".join(f"{key}={value}" for key, value in values.items())
