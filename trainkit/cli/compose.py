"""Composition of a run's config by Hydra, from groups, files and overrides, and its validation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from trainkit.cli.overrides import FULL, GROUPS, LISTS, SIZES, KeyOrigins, Overrides
from trainkit.cli.signatures import import_paths
from trainkit.cli.validate import (
    SECTIONS,
    ConfigError,
    Problem,
    check,
    closest,
    did_you_mean,
    list_choices,
    unknown_choice,
    unknown_key,
)
from trainkit.errors import UserError, nearest
from trainkit.registry import plugin_settings
from trainkit.storage import local_path

CONFIG = "config"
CONFIG_FILE = "config.yaml"
_SAVED = "settings_of_a_run"
_OWN_CONFIGS = "conf"  # the folder of a project's groups, in the working folder


@dataclass(frozen=True)
class SavedConfig:
    """The config of a run: it comes from its folder or a checkpoint, and may be anybody's."""

    path: Path
    """A `config.yaml`, or the checkpoint that holds the text."""
    text: str
    trusted: bool = False
    """True if the user trusts every class and function that it names."""

    def content(self) -> dict[str, Any]:
        """Return the config without keys that change how it is composed; raises UserError if it is not one."""
        from trainkit.run_dir.folder import check_config  # here, as it imports torch

        try:
            check_config(self.text, self.path)
            saved = OmegaConf.to_container(OmegaConf.load(StringIO(self.text))) if self.text.strip() else {}
        # Its message is already complete, and it is a ValueError.
        except UserError:
            raise
        except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
            raise UserError(f"{self.path} cannot be read: {error}") from None
        if not isinstance(saved, dict) or not saved:
            raise UserError(
                f"{self.path} is empty: the run was started from Python. Go on there: Trainer(...).fit(task, data, "
                "resume=PATH), or validate, test and predict with checkpoint=PATH."
            )
        unknown = [unknown_key(str(key), SECTIONS, all_keys=()) for key in saved if key not in SECTIONS]
        if unknown:
            raise ConfigError([replace(problem, origin=str(self.path)) for problem in unknown])
        if not self.trusted and "${" in repr(saved):
            raise UserError(
                f"{self.path} has an interpolation (${{...}}), which may read environment variables; trainkit saves "
                "none. Replace it by its value, or type --trust."
            )
        return {str(key): value for key, value in saved.items()}


@dataclass(frozen=True)
class Settings:
    """The composed config of a run."""

    tree: dict[str, Any]
    """Plain values; `recipe` is the name of the chosen recipe, or `None`."""
    config: Any
    """The config before its interpolations are resolved."""
    find_origins: Callable[[], KeyOrigins] = KeyOrigins
    """Returns the origin of each key; it reads all files again."""

    @property
    def name(self) -> str:
        """The name of the run's folder: the recipe, or the task's class."""
        return Path(str(self.tree.get("recipe") or self.tree["task"]["_target_"]).rpartition(".")[2]).name

    @property
    def unresolved(self) -> str:
        """The config as YAML, with its interpolations."""
        return OmegaConf.to_yaml(self.config)

    def as_yaml(self) -> str:
        """Return the YAML that is saved in the run folder; the run can be repeated from it."""
        return OmegaConf.to_yaml(OmegaConf.create(self.tree))


@contextmanager
def compose_config(
    config_dirs: Sequence[str | Path] = (), *, saved: SavedConfig | None = None
) -> Iterator[ConfigComposer]:
    """Enter with Hydra initialized with the package's groups, installed plugins and the folders in `config_dirs`.

    With `saved`, its values replace the package's defaults; unless it is trusted, it may name only classes of trainkit
    and what the user's own configs and overrides name too.
    """
    with _another_hydra(), initialize_config_module("trainkit.conf", version_base="1.3", job_name="trainkit"):
        loader = GlobalHydra.instance().config_loader()
        search_path = loader.get_search_path()
        for folder in config_dirs:
            # After the package's groups, whose files win, and before Hydra's schemas, which must stay last.
            path = f"file://{_existing_folder(folder)}"
            search_path.prepend("--config-dir", path, anchor=SearchPathQuery(provider="schema", path=None))
        # Hydra has read the search path already, and does not notice a change.
        loader.repository.initialize_sources(search_path)  # type: ignore[attr-defined] # of the one loader there is
        for group, name, settings in plugin_settings():
            ConfigStore.instance().store(group=group, name=name, node=settings, provider="plugin")
        yield ConfigComposer(loader, saved, config_dirs)


@contextmanager
def _another_hydra() -> Iterator[None]:
    """Set aside the Hydra that is initialized, which may be that of a sweep, for one that the block initializes."""
    outer_hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = outer_hydra


def resume_command(run_dir: str | Path, tree: Mapping[str, Any]) -> str:
    """Return the command that resumes a run of the config `tree`, with `--trust` if it names code that needs it."""
    needs_trust = _foreign_code(tree, _own_code([_OWN_CONFIGS]))
    return f"trainkit resume {run_dir}{' --trust' if needs_trust else ''}"


def _own_code(folders: Iterable[str | Path], typed: Iterable[tuple[str, Any]] = ()) -> set[str]:
    """Return the import paths that plugins, the configs in `folders` and the `typed` values of keys name."""
    paths = {path for key, value in typed for _, path in import_paths(value, key)}
    paths |= {path for _, _, settings in plugin_settings() for _, path in import_paths(settings)}
    for file in (file for folder in folders for file in Path(folder).rglob("*.yaml")):
        # A file that cannot be read names no code. If it is chosen, the composition reports it.
        with suppress(OSError, ValueError, yaml.YAMLError):
            paths |= {path for _, path in import_paths(yaml.safe_load(file.read_text(encoding="utf-8")))}
    # Functions of Hydra import what their arguments name.
    return {path for path in paths if not path.startswith("hydra.")}


def _foreign_code(tree: Mapping[str, Any], trusted_paths: Collection[str]) -> dict[str, str]:
    """Return the import paths in a config, by key, that are neither trainkit's nor among `trusted_paths`."""
    return {
        key: path
        for key, path in import_paths(tree)
        if path not in trusted_paths and not (key.endswith("._target_") and path.startswith("trainkit."))
    }


def read_saved(path: str | Path, *, trusted: bool = False) -> SavedConfig:
    """Return the config of a run folder, or in a `config.yaml`; raises UserError if it cannot be read."""
    from trainkit.run_dir.folder import read_config  # here, as it imports torch

    path = local_path(path, what="config")
    file = path / CONFIG_FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{path} is not a run folder: it has no {CONFIG_FILE}.")
    try:
        return SavedConfig(file, read_config(file), trusted)
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None


class ConfigComposer:
    """Composes and validates configs from overrides."""

    def __init__(self, loader: ConfigLoader, saved: SavedConfig | None, config_dirs: Sequence[str | Path]) -> None:
        self.loader = loader
        self._config_dirs = config_dirs
        self.config_name = CONFIG if saved is None else _SAVED
        self._saved = saved

    def options(self, group: str) -> list[str]:
        """Return the choices of a group."""
        # The loader's own method copies all configs that were read, for each call.
        options: list[str] = self.loader.repository.get_group_options(group, ObjectType.CONFIG)  # type: ignore[attr-defined]
        return options

    def content(self, group: str, name: str) -> dict[str, Any]:
        """Return the content of a choice's file or plugin."""
        result = self.loader.repository.load_config(f"{group}/{name}")  # type: ignore[attr-defined] # of the one loader
        content = {} if result is None else OmegaConf.to_container(result.config)
        return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}

    def recipe_trees(self, recipe: str, strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the config of a recipe alone, and with the strategy whose `_target_` is `strategy`."""
        recipe_tree = self.settings([f"recipe={recipe}"], check_devices=False).tree
        if recipe_tree["strategy"]["_target_"] == strategy:
            return recipe_tree, recipe_tree
        names = [name for name in self.options("strategy") if self.content("strategy", name)["_target_"] == strategy]
        texts = [f"recipe={recipe}", *(f"strategy={name}" for name in names[:1])]
        return recipe_tree, self.settings(texts, check_devices=False).tree if names else recipe_tree

    def settings(self, texts: Sequence[str], *, needs_task: bool = True, check_devices: bool | None = None) -> Settings:
        """Return the config with the overrides `texts`; raises ConfigError with all its problems.

        With `check_devices` (default: `needs_task`) a device that this machine does not have is a problem.
        """
        overrides = Overrides(texts, options=self.options)
        problems = list(overrides.problems)
        rendered = self.rendered(overrides)
        config = self._composed(rendered, problems)
        if config is not None and overrides.deletions:
            # Hydra itself suggests no similar key and fails to delete a key that is null.
            present = _present(config, overrides.deletions, problems)
            config = self._composed(self.rendered(overrides, deletions=present), problems)
        if config is None:
            raise ConfigError(with_origins(problems, self._origins(overrides, [])))
        recipe = config.hydra.runtime.choices.get("recipe")
        if not any(problem.key == "recipe" for problem in problems):
            problems += self._without_size(recipe, config.hydra.runtime.choices.get("size") or FULL)
        # Hydra's node is not part of a run; a struct lets no key be removed until it is opened.
        with open_dict(config):
            del config["hydra"]
        settings = settings_of(config, recipe, problems)
        drop_unselected(settings.tree, overrides.replaced_groups, but=[key for key, _ in overrides.typed])
        check_devices = needs_task if check_devices is None else check_devices
        trusted = self._trusted(settings.tree, overrides)  # before anything is imported
        # Keys of a wrong choice would be reported as unknown.
        wrong = {problem.key for problem in problems if problem.key in GROUPS}
        needs_task = needs_task and "recipe" not in wrong
        needs = {"needs_task": needs_task, "check_devices": check_devices}
        all_problems = check(settings.tree, options=self.options, trusted=trusted, **needs)
        problems += [problem for problem in all_problems if problem.key.partition(".")[0] not in wrong]
        if problems:
            raise ConfigError(with_origins(problems, self._origins(overrides, rendered)))
        return replace(settings, find_origins=partial(self._origins, overrides, rendered))

    def _trusted(self, tree: Mapping[str, Any], overrides: Overrides) -> set[str] | None:
        """Return the import paths that the user's own configs, plugins and overrides name; `None`: all are trusted.

        Raises UserError if a run's config names others outside of trainkit. Nothing has been imported yet: modules run
        code when they are imported.
        """
        if self._saved is None or self._saved.trusted:
            return None
        source = self._saved.path
        # Inside a run the working folder's configs come with the run, and are not more trusted than it.
        is_in_run = source.name == CONFIG_FILE and Path.cwd().is_relative_to(source.parent.resolve())
        folders = [*self._config_dirs, *([] if is_in_run else [_OWN_CONFIGS])]
        trusted_paths = _own_code(folders, overrides.values)
        foreign = _foreign_code(tree, trusted_paths)
        if not foreign:
            return trusted_paths
        named = "\n".join(f"  {key}: {path}" for key, path in foreign.items())
        # Hydra has no override for the element of a list: these keys cannot be typed.
        in_list = [key for key in foreign if any(part.isdigit() for part in key.split("."))]
        typed = " ".join(f"{key}={path}" for key, path in foreign.items() if key not in in_list)
        raise UserError(
            f"{source} names code that is neither trainkit's nor named by your configs "
            f"({', '.join(map(str, folders)) or 'there are none'}); nothing was imported:\n{named}\n"
            "Importing it runs it. If you trust it, type --trust."
            + (f" Or type the names that you know: {typed}" if typed else "")
        )

    def rendered(self, overrides: Overrides, *, deletions: Collection[str] = ()) -> list[str]:
        """Return the overrides in the form that Hydra accepts for unknown keys too: the validation reports those."""
        chosen: dict[str, list[str]] = {group: [] for group in overrides.additions}
        if self._saved is not None:  # its config contains the choices
            _store_saved(self._saved, without=overrides.replaced_groups)
        elif chosen:
            composed = self.loader.compute_defaults_list(CONFIG, overrides.rendered({}), RunMode.MULTIRUN)
            for default in composed.defaults:
                group, _, name = str(default.config_path).partition("/")
                if group in chosen and not str(default.parent).startswith(f"{group}/"):
                    chosen[group].append(name)
        return overrides.rendered(chosen, deletions=deletions)

    def _composed(self, rendered: list[str], problems: list[Problem]) -> DictConfig | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Hydra's, about files that lack _self_
                return compose(self.config_name, overrides=rendered, return_hydra_config=True)
        except MissingConfigException as error:
            problems.append(_missing_config(error))
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            fixed = [text for key in ("recipe", "size") for text in rendered if text.startswith((f"{key}=", f"~{key}"))]
            if self._saved is not None and fixed:
                remedy = f"change single keys, or start another run with trainkit fit {fixed[0]}"
                problems.append(Problem("", f"'{fixed[0]}' cannot change the config of a run; {remedy}"))
            else:
                problems.append(Problem("", _without_advice(error)))
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            where = "" if mark is None else f"{mark.name}:{mark.line + 1}: "
            problems.append(Problem("", f"{where}invalid YAML: {error.problem}"))
        return None

    def _without_size(self, recipe: str | None, size: str) -> list[Problem]:
        """Return the problem of a size that the recipe does not have; Hydra would silently use its full size."""
        sizes = self.options(SIZES)
        if size == FULL or f"{recipe}_{size}" in sizes:
            return []
        recipes = [name.removesuffix(f"_{size}") for name in sizes if name.endswith(f"_{size}")]
        hint = f"; for your own recipe, write {SIZES}/{recipe}_{size}.yaml beside its folder" if recipe else ""
        message = f"recipe={recipe} has no such size" if recipe else f"size={size} needs a recipe"
        return [Problem("size", f"{message}. Recipes that have it: {', '.join(recipes)}{hint}.")]

    def _origins(self, overrides: Overrides, rendered: list[str]) -> KeyOrigins:
        origins = KeyOrigins()
        if self._saved is not None:
            origins.add_yaml(self._saved.text, self._saved.path)
        elif rendered:
            origins.add_composed(self.loader, self.config_name, rendered)
        for key, text in overrides.typed:
            origins.add_typed(key, text, is_choice=key in overrides.choices)
        return origins


def with_origins(problems: Sequence[Problem], origins: KeyOrigins) -> list[Problem]:
    """Return the problems, each with the origin of its key."""
    return [
        problem if problem.origin is not None else Problem(problem.key, problem.message, origins.of(problem.key))
        for problem in problems
    ]


def drop_unselected(tree: Mapping[str, Any], groups: Iterable[str] = LISTS, *, but: Collection[str] = ()) -> None:
    """Drop a recipe's values of callbacks or loggers that are not selected; keys in `but` are kept."""
    for group in set(LISTS) & set(groups):
        for name, node in list((tree.get(group) or {}).items()):
            typed = any(key.startswith(f"{group}.{name}") for key in but)
            if not typed and isinstance(node, Mapping) and "_target_" not in node:
                del tree[group][name]


def _existing_folder(folder: str | Path) -> Path:
    path = Path(folder).absolute()
    if not path.is_dir():
        beside = [child.name for child in path.parent.iterdir() if child.is_dir()] if path.parent.is_dir() else []
        raise UserError(f"--config-dir {folder}: there is no such folder.{nearest(path.name, beside)}")
    return path


def _store_saved(saved: SavedConfig, *, without: Sequence[str]) -> None:
    """Register a run's config as Hydra's base config, without its `run_dir` and the groups in `without`."""
    # Hydra refuses to choose from a group that is not in the defaults list.
    groups = [{group: None} for group in ("strategy", *LISTS)]
    content = {key: value for key, value in saved.content().items() if key not in without}
    node = OmegaConf.create({"defaults": ["_self_", *groups], **content, "run_dir": None})
    ConfigStore.instance().store(name=_SAVED, node=node)


def _present(config: DictConfig, keys: Sequence[tuple[str, str]], problems: list[Problem]) -> list[str]:
    """Return the keys typed with a `~` that have a value; unknown ones are added to `problems`."""
    present = []
    for key, text in keys:
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        names = [str(child) for child in node] if isinstance(node, DictConfig) else []
        if name not in names:
            near = [f"~{parent}.{other}" if parent else f"~{other}" for other in closest(name, names)]
            hint = did_you_mean(near) if near else list_choices(names)
            problems.append(Problem(key, f"nothing to remove. {hint}", f"the command line: {text}"))
        elif isinstance(node, DictConfig) and node.get(name) is not None:
            present.append(key)
    return present


def settings_of(config: Any, recipe: str | None, problems: list[Problem] | None = None) -> Settings:
    """Return the config with all interpolations resolved; those that fail are added to `problems`."""
    try:
        tree = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        if problems is None:
            raise UserError(str(error.msg)) from None
        problems.append(Problem(str(error.full_key or ""), str(error.msg).splitlines()[0]))
        tree = OmegaConf.to_container(config)
    assert isinstance(tree, dict)
    named = {"recipe": recipe, **{str(key): value for key, value in tree.items()}}
    return Settings(named, config)


def _missing_config(error: MissingConfigException) -> Problem:
    """Return the problem of a file that is missing for a defaults list."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    # The exception has the name of the asking file only in its message.
    asking = str(error).partition("In '")[2].partition("'")[0]
    options = list(error.options or ())
    message = unknown_choice(group, name, options) if group else f"there is no file '{name}.yaml'."
    return Problem(group, message, f"the defaults list of {asking}.yaml" if asking else None)


def _without_advice(error: Exception) -> str:
    """Return Hydra's message without its advice to append unknown keys."""
    lines = [line for line in str(error).splitlines() if line.strip() and "append to your" not in line]
    if error.__cause__ is not None:
        lines.append(str(error.__cause__).splitlines()[0])
    return "\n".join(lines)
