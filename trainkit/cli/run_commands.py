"""Commands that run a config, fit, resume, validate, test and predict, and the objects they create."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, TextIO

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn

from trainkit.callback import Callback
from trainkit.checkpoint.store import CHECKPOINTS, load_from, resolve
from trainkit.cli.compose import (
    CONFIG_FILE,
    ConfigComposer,
    SavedConfig,
    Settings,
    compose_config,
    read_saved,
    resume_command,
    with_origins,
)
from trainkit.cli.main import Arguments
from trainkit.cli.signatures import install_hint, with_objects
from trainkit.cli.validate import ConfigError, Problem
from trainkit.console import printable
from trainkit.duration import Duration
from trainkit.errors import Stopped, UserError, raising_module
from trainkit.files import move, open_new, part_of, sync
from trainkit.logger import Logger
from trainkit.model.deferred_init import deferred_init
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.report.config_diff import ConfigChange, differences
from trainkit.rng import seed_everything
from trainkit.run_dir.folder import check_writable, choose_run_dir
from trainkit.run_dir.remote_run import fetch, find_remote_run
from trainkit.run_dir.resume_auto import find_run_to_resume
from trainkit.signals import EXIT_CODES
from trainkit.storage import is_url, local_path, working_folder
from trainkit.strategy import Strategy
from trainkit.task import TaskModule
from trainkit.trainer import Launch, Trainer

logger = logging.getLogger(__name__)
_EXAMPLE = "runs/digits/2026-01-31_12-00-00"
_TORCH_SOURCE = re.compile(r"^\[enforce fail at .*?\] .*?\. |\nException raised from [^\"]*")
"""What a message of torch says about its own source: the failed check, and the C++ frames."""


def fit(arguments: Arguments) -> int:
    """Train in a new folder; `config=PATH` repeats a run, `resume=auto` continues the newest unfinished one."""
    config = arguments.take("config")
    saved = None if config is None else read_saved(config, trusted=arguments.trust)
    resumed = arguments.take("resume")
    if resumed not in (None, "auto"):
        raise UserError(f"resume={resumed}: fit accepts only resume=auto. Type trainkit resume {resumed}")
    with compose_config(arguments.config_dirs, saved=saved) as composer:
        settings = composer.settings(arguments.overrides, needs_task=not arguments.cfg)
        if arguments.cfg:
            return show_config(settings, arguments)
        batch_is_typed = saved is None and any("batch_size" in text for text in arguments.overrides)
        reference = _reference_batch_size(composer, settings) if batch_is_typed else None
    run_dir = new_run_dir(settings) if resumed is None else _run_dir_to_continue(settings)
    return _train(settings, run_dir, arguments, resume=resumed, reference=reference)


def resume(arguments: Arguments) -> int:
    """Continue a run in its own folder, or a checkpoint outside of its run in a new one, with config and overrides."""
    typed = _path_argument(arguments)
    remote = find_remote_run(typed)[0] if is_url(typed) else None
    path = _existing(typed) if remote is None else remote.fetch(None)
    settings = settings_of_run(arguments, path)
    if arguments.cfg:
        return show_config(settings, arguments)
    chosen = settings.tree["run_dir"]
    if remote is not None:
        return _train(settings, chosen or remote.url, arguments, resume=typed)
    resolve(path)
    folder = choose_run_dir(settings.name) if _is_outside_of_its_run(path) else run_folder_of(path)
    return _train(settings, chosen or folder, arguments, resume=path)


def validate(arguments: Arguments) -> int:
    """Print the metrics of a trained task on all validation data."""
    return _evaluate(arguments, Trainer.validate, report=_print_metrics)


def test(arguments: Arguments) -> int:
    """Print the metrics of a trained task on all test data."""
    return _evaluate(arguments, Trainer.test, report=_print_metrics)


def predict(arguments: Arguments) -> int:
    """Write `predictions.pt` into the run's folder, or the file `out=`."""
    out = arguments.take("out")

    def path_in(folder: Path) -> Path:
        return folder / "predictions.pt" if out is None else local_path(out, what="out")

    def write(predictions: Any, folder: Path) -> None:
        _write_predictions(predictions, path_in(folder))

    return _evaluate(arguments, Trainer.predict, report=write, check=lambda folder: check_writable(path_in(folder)))


# ---- Training


def resume_hint(stopped: Stopped, run_dir: Path | str, tree: Mapping[str, Any]) -> str:
    """Return the message about a stopped run of the config `tree`: its checkpoint, and the command that resumes it."""
    by, callbacks = f"stopped by {stopped.signal_name}", tree["callbacks"] or {}
    nodes = callbacks.values() if isinstance(callbacks, Mapping) else callbacks
    # By the end of its name: `trainkit.callbacks.checkpoint.Checkpoint`, or a class of the user with the same name.
    saving = next((node for node in nodes if node and str(node.get("_target_")).endswith(".Checkpoint")), None)
    saves_at_end = saving is not None and saving.get("save_at_end", True)
    try:
        checkpoint = resolve(working_folder(run_dir))
    except UserError:
        if tree["trainer"].get("fast_dev_run"):
            return f"{by}; fast_dev_run=true saves nothing."
        if saving is None:
            return f"{by}; nothing is saved, as this run has no checkpoint callback. Add +callbacks=checkpoint"
        hint = "" if saves_at_end else ", and save_at_end=false saves nothing at a signal"
        return f"{by} before the first checkpoint was saved{hint}: there is nothing to resume."
    where = f"the state is saved in {checkpoint}" if saves_at_end else f"the last checkpoint is {checkpoint}"
    return f"{by}; {where}.\nTo continue: {resume_command(run_dir, tree)}"


def new_run_dir(settings: Settings) -> Path | str:
    """Return the chosen folder or URL, or a new folder; raises UserError if the chosen one contains a run."""
    run_dir: str | None = settings.tree["run_dir"]
    if run_dir is None:
        return choose_run_dir(settings.name)
    folder = working_folder(run_dir)
    if any((folder / name).exists() for name in (CONFIG_FILE, CHECKPOINTS, "multirun.yaml", "sweep.json")):
        if is_url(run_dir):
            raise UserError(f"{folder} already contains the run of {run_dir}. Add resume=auto, or choose another URL.")
        raise UserError(
            f"run_dir={folder} already contains a run. Type trainkit resume {folder}, or choose another folder."
        )
    return run_dir if is_url(run_dir) else folder


def recipe_diff(settings: Settings, config_dirs: Sequence[str] = ()) -> list[ConfigChange] | None:
    """Return the differences of the config to its recipe; `None` if no recipe can be composed."""
    recipe = settings.tree.get("recipe")
    if recipe is None:
        return None
    try:
        with compose_config(config_dirs) as composer:
            recipe_tree, with_strategy = composer.recipe_trees(recipe, settings.tree["strategy"]["_target_"])
    except UserError as error:  # a recipe whose folder is gone
        logger.debug("the recipe %s cannot be composed: %s", recipe, error)
        return None
    changes = differences(with_strategy, settings.tree)
    if recipe_tree != with_strategy:
        recipe_strategy, chosen_strategy = (
            tree["strategy"]["_target_"].rpartition(".")[2] for tree in (recipe_tree, settings.tree)
        )
        changes.insert(0, ConfigChange("strategy", recipe_strategy, chosen_strategy))
    return changes


def _reference_batch_size(composer: ConfigComposer, settings: Settings) -> ReferenceBatchSize | None:
    """Return the recipe's own global batch size; `None` if it has none."""
    recipe = settings.tree.get("recipe")
    if recipe is None:
        return None
    recipe_tree = composer.settings([f"recipe={recipe}"]).tree
    batch_size, rate = recipe_tree["data"].get("batch_size"), recipe_tree["task"].get("lr")
    if not isinstance(batch_size, int):
        return None
    return ReferenceBatchSize(batch_size, f"recipe {recipe}", float(rate) if isinstance(rate, (int, float)) else None)


def _train(
    settings: Settings,
    run_dir: Path | str,
    arguments: Arguments,
    *,
    resume: Path | str | None = None,
    reference: ReferenceBatchSize | None = None,
) -> int:
    run = assemble(settings, run_dir=run_dir)
    run.trainer.launch = Launch(
        prints_run_dir=True,
        reference_batch_size=reference,
        overrides=arguments.overrides,
        resume_command=partial(resume_command, tree=settings.tree),
        # A function: the recipe is composed again only if a report asks for the differences.
        config_diff=partial(recipe_diff, settings, arguments.config_dirs),
    )
    try:
        run.trainer.fit(run.task, run.data, resume=resume)
    except Stopped as stopped:
        _print_on_main(run, resume_hint(stopped, run_dir, settings.tree), to=sys.stderr)
        return stopped.exit_code
    except KeyboardInterrupt:
        return EXIT_CODES["SIGINT"]  # the trainer has logged what is saved
    return 0


def _run_dir_to_continue(settings: Settings) -> Path | str:
    """Return the chosen folder or URL, or the folder of the newest unfinished run of the recipe, or a new one."""
    if settings.tree["run_dir"] is not None:
        return str(settings.tree["run_dir"])
    durations = Duration.parse_all(settings.tree["trainer"].get("max_duration", "1epoch"), where="max_duration")
    return find_run_to_resume(None, name=settings.name, max_duration=durations).run_dir or choose_run_dir(settings.name)


# ---- Trained runs


def checkpoint_path(arguments: Arguments) -> Path:
    """Return the path of the run or checkpoint in `arguments`, which may be RUN_FOLDER/best or another name in a run.

    One in a store is fetched. Raises UserError if there is none.
    """
    return _existing(_path_argument(arguments))


def _existing(typed: str) -> Path:
    if is_url(typed):
        return fetch(typed)
    path = Path(typed)
    if path.exists():
        return path
    in_a_run = (run_folder_of(path) / CHECKPOINTS).is_dir()
    return resolve(path.parent, path.name) if in_a_run else resolve(path)


def _path_argument(arguments: Arguments) -> str:
    typed = arguments.take("checkpoint")
    # A path alone may stand first, as in `trainkit test PATH`.
    if typed is None and arguments.overrides and "=" not in arguments.overrides[0]:
        typed = arguments.overrides.pop(0)
    if not typed:
        example = _EXAMPLE if arguments.command == "resume" else f"checkpoint={_EXAMPLE}"
        raise UserError(f"{arguments.command} needs a run or a checkpoint. Type trainkit {arguments.command} {example}")
    return typed


def run_folder_of(path: Path) -> Path:
    """Return the run folder of `path`: itself, or that of its checkpoints folder or of a file in it."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name == CHECKPOINTS else folder


def _is_outside_of_its_run(path: Path) -> bool:
    return path.is_file() and not (run_folder_of(path) / CONFIG_FILE).is_file()


def settings_of_run(arguments: Arguments, path: Path) -> Settings:
    """Return the config of a run with the overrides."""
    if _is_outside_of_its_run(path):  # it contains the config
        saved = SavedConfig(path, str(load_from(path).payload.get("config") or ""), arguments.trust)
    else:
        saved = read_saved(run_folder_of(path), trusted=arguments.trust)
    with compose_config(arguments.config_dirs, saved=saved) as composer:
        return composer.settings(arguments.overrides)


def _evaluate(
    arguments: Arguments,
    method: Callable[..., Any],
    *,
    report: Callable[[Any, Path], None],
    check: Callable[[Path], None] = lambda folder: None,
) -> int:
    path = checkpoint_path(arguments)
    settings = settings_of_run(arguments, path)
    if arguments.cfg:
        return show_config(settings, arguments)
    resolve(path)  # raises if there is none; the trainer gets the folder, to skip damaged checkpoints
    check(run_folder_of(path))
    run = assemble(settings, run_dir=None, loggers=False)
    for callback in run.trainer.fit_config.callbacks:
        if hasattr(callback, "prints_evaluation"):  # a progress bar, which the core does not import
            callback.prints_evaluation = False
    try:
        outcome = method(run.trainer, run.task, run.data, checkpoint=path)
    except Stopped as stopped:
        _print_on_main(run, f"stopped by {stopped.signal_name}", to=sys.stderr)
        return stopped.exit_code
    if run.trainer.strategy.comm.is_main:
        report(outcome, run_folder_of(path))
    return 0


# ---- Output


def show_config(settings: Settings, arguments: Arguments) -> int:
    """Print the config for `--cfg job`, with `--resolve` without interpolations; return exit code 0."""
    print(settings.as_yaml() if arguments.resolve else settings.unresolved, end="")
    return 0


def _print_on_main(run: RunComponents, line: str, *, to: TextIO | None = None) -> None:
    """Print a line on the main rank only: under torchrun every rank runs the command."""
    if run.trainer.strategy.comm.is_main:
        print(printable(line), file=to)


def _print_metrics(metrics: dict[str, float], folder: Path) -> None:
    shown = {printable(name): value for name, value in metrics.items()}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        print(f"{name:<{width}}  {value:.6g}")


def _write_predictions(predictions: Any, path: Path) -> None:
    with whole_file(path) as part:
        torch.save(predictions, part)
    described = f"{len(predictions)} predictions" if hasattr(predictions, "__len__") else "predictions"
    if hasattr(predictions, "shape"):
        described = f"predictions of shape {tuple(predictions.shape)}"
    print(f"{described} in {path}")


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """Yield a temporary path that is synced and renamed to `out` at the end; raises UserError if that fails."""
    part = part_of(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_new(part))  # not through a link, as in a folder of others
        yield part
        # Opened again, as the caller has closed it. Without sync a crash could
        # leave an empty file under the final name.
        with open(part, "rb") as file:
            sync(file.fileno())
        move(part, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}.") from error
    finally:
        # After the rename there is no file; after an error nothing here may hide it.
        with suppress(OSError):
            part.unlink(missing_ok=True)


# ---- Objects of a run


@dataclass(frozen=True)
class RunComponents:
    """The objects that a config describes."""

    trainer: Trainer
    task: Any
    data: Any


def assemble(settings: Settings, *, run_dir: Path | str | None, loggers: bool = True) -> RunComponents:
    """Create the objects of a config, the task's weights from `trainer.seed`.

    Without `loggers` only callbacks write files. Raises ConfigError with the errors of all constructors.
    """
    tree = settings.tree
    components = _Components()
    # The task comes first: its weights must depend on the seed alone.
    seed_everything(tree["trainer"].get("seed", 0) % 2**63)  # the Trainer refuses larger seeds
    # Without memory until the strategy knows which part of the task this rank needs.
    with deferred_init() if tree["trainer"].get("deferred_init") else nullcontext():
        task = components.create("task", tree["task"], TaskModule)
    data = components.create("data", tree["data"], object)
    strategy = components.create("strategy", tree["strategy"], Strategy)
    callbacks = components.create_all("callbacks", tree.get("callbacks"), Callback)
    created = components.create_all("logger", tree.get("logger"), Logger) if loggers else []
    objects: dict[str, Any] = {"callbacks": callbacks, "loggers": created, "run_dir": run_dir}
    # A stand-in for a strategy that was refused: the Trainer's arguments are checked too.
    objects |= {"strategy": strategy or Strategy(device="cpu"), "config": settings.as_yaml()}
    trainer = components.call("trainer", lambda arguments: Trainer(**objects, **arguments), tree["trainer"])
    if isinstance(task, nn.Module):
        components.problems += _too_many_stages(task, tree["strategy"])
    if components.problems:
        raise ConfigError(with_origins(components.problems, settings.find_origins())) from components.cause
    gc.freeze()  # what exists now, mostly modules, is never searched for garbage
    gc.enable()  # `main` has disabled it
    return RunComponents(trainer, task, data)


class _InvalidArgument(UserError):
    """An argument's value that a constructor refused with an exception other than UserError, the cause."""


class _Components:
    """Creates the objects of a run and collects the errors of their constructors."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.cause: BaseException | None = None
        """The first exception of a constructor that is not a UserError."""

    def create_all(self, group: str, nodes: Mapping[str, Any] | None, kind: type) -> list[Any]:
        """Return the objects of a group, without those that are `null`."""
        chosen = {name: node for name, node in (nodes or {}).items() if node is not None}
        created = [self.create(f"{group}.{name}", node, kind) for name, node in chosen.items()]
        return [component for component in created if component is not None]

    def create(self, path: str, node: Mapping[str, Any], kind: type) -> Any:
        """Return the object of `node`; `None` if its constructor raises, or if it is not a `kind`."""
        arguments = {key: value for key, value in node.items() if key != "_target_"}
        return self.call(path, partial(_instantiate, path, node["_target_"], kind), arguments)

    def call(self, path: str, make: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any]) -> Any:
        """Return the result of `make`; an invalid argument is dropped and the others are tried, to find all errors."""
        # Each pass drops one refused argument, and ends with an object or an error that names none.
        refused: set[str] = set()
        while True:
            left = {name: value for name, value in arguments.items() if name not in refused}
            try:
                made = make(left)
                return None if refused else made
            except UserError as error:
                # Without quoted text: a word in a value is not the name of an argument.
                words = re.findall(r"\w+", re.sub(r"'[^']*'", "", str(error)))
                named = [word for word in words if word in arguments]
                # A dropped argument has its default now: an error that names it is not the user's.
                if refused and (not named or refused & set(named)):
                    return None
                message = str(error)
                if isinstance(error, _InvalidArgument):
                    message += _place(error.__cause__)
                    self.cause = self.cause or error.__cause__
                self.problems.append(_problem(path, named, message))
                if not named:
                    return None
                refused.add(named[0])
            except Exception:
                if not refused:
                    raise
                return None  # caused by the dropped argument


def _instantiate(path: str, target: str, kind: type, arguments: Mapping[str, Any]) -> Any:
    """Return the object; raises UserError if it is not a `kind`."""
    try:
        # Plain lists and dictionaries: users' constructors do not expect those of OmegaConf.
        made = instantiate(with_objects({"_target_": target, **arguments}), _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or UserError(f"{path}: {error}")
        # The constructor imports an optional package.
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            needs = f"{target} needs the package '{cause.name}', which is not installed"
            raise UserError(f"{path}: {needs}. {install_hint(cause.name)}") from None
        if isinstance(cause, TypeError) and "unexpected keyword argument" in str(cause):
            raise UserError(f"{path}: {cause}") from None
        if _is_about_a_value(cause):
            raise _InvalidArgument(_TORCH_SOURCE.sub("", str(cause)) or type(cause).__name__) from cause
        raise cause from None  # the constructor's own error, with the user's code in its traceback
    if not isinstance(made, kind):
        returns = f"{target} returns a {type(made).__name__}"
        raise UserError(f"{path}._target_: {returns}; it must be a trainkit.{kind.__name__}.")
    return made


def _is_about_a_value(error: BaseException) -> bool:
    """Return True for a ValueError, and for an error that torch raises because of its arguments."""
    of_torch = (TypeError, RuntimeError) if _calls_torch(raising_module(error)) else ()
    return isinstance(error, (ValueError, OverflowError, MemoryError, *of_torch)) and not isinstance(error, UserError)


def _calls_torch(module: str) -> bool:
    """Return True for a module of torch, and for the one that records what a task asks torch for."""
    return module.partition(".")[0] == "torch" or module == deferred_init.__module__


def _place(cause: BaseException | None) -> str:
    """Return the type of a constructor's exception and the last line of the user's code in its traceback."""
    frames = walk_tb(cause.__traceback__ if cause else None)
    modules = {frame: str(frame.f_globals.get("__name__")) for frame, _ in frames}
    # The last frame outside Hydra and torch is the line that the user can change.
    users = [frame for frame in modules if not modules[frame].startswith("hydra.") and not _calls_torch(modules[frame])]
    lines = [f", {frame.f_code.co_filename}:{frame.f_lineno}" for frame in users]
    return f" ({type(cause).__name__}{''.join(lines[-1:])}; --debug shows the traceback)"


def _problem(path: str, named: list[str], message: str) -> Problem:
    if message.startswith((f"{path}:", f"{path}._target_:")):
        key, _, rest = message.partition(": ")
        return Problem(key, rest)
    if not named:
        return Problem(path, message)
    key = f"{path}.{named[0]}"
    for start in (key, named[0], f"{path.rpartition('.')[2]}.{named[0]}"):
        if message.startswith(f"{start} "):
            return Problem(key, message.removeprefix(f"{start} "))
    return Problem(key, message)


def _too_many_stages(task: nn.Module, strategy: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of a pipeline with more stages than the task has modules to begin one."""
    stages = strategy.get("stages")
    if not isinstance(stages, int):
        return []
    if strategy.get("schedule") == "interleaved_1f1b":
        # Each rank runs several stages then, so that there are more of them.
        stages *= strategy.get("stages_per_rank", 1)
    # A stage begins at a module without children, or at a parameter that a module with children holds itself.
    leaves = sum(not any(module.children()) for module in task.modules())
    direct_parameters = sum(
        len(list(module.parameters(recurse=False))) for module in task.modules() if any(module.children())
    )
    if stages <= leaves + direct_parameters:
        return []
    has = f"{type(task).__name__} has only {leaves + direct_parameters} modules"
    return [
        Problem(
            "strategy.stages", f"{stages} stages, but {has}; set strategy.stages={leaves + direct_parameters} or less."
        )
    ]
