"""Differences between a run's config and its recipe."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hydra.core.singleton import Singleton

from trainkit.command_line.composition import composing
from trainkit.report.config_diff import ConfigChange, differences

logger = logging.getLogger(__name__)


def changes_from_recipe(config: Mapping[str, Any]) -> list[ConfigChange] | None:
    """Return what differs from the recipe with the same strategy; `None` where no recipe can be composed."""
    recipe = config.get("recipe")
    if not isinstance(recipe, str):
        return None
    try:
        recipe_config, defaults = _defaults(recipe, config)
    except Exception as error:  # a user's recipe may raise anything, and a report can do without
        logger.debug("the recipe %s cannot be composed: %s", recipe, error)
        return None
    changes = differences(defaults, config)
    if recipe_config != defaults:
        before, after = (_strategy_target(tree).rpartition(".")[2] for tree in (recipe_config, config))
        changes.insert(0, ConfigChange("strategy", before, after))
    return changes


def _defaults(recipe: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config of the recipe, and the same with the strategy of the run."""
    state = Singleton.get_state()  # the Hydra of a sweep may be running
    try:
        with composing() as composer:
            recipe_config = composer.settings([f"recipe={recipe}"]).tree
            wanted = _strategy_target(config)
            if wanted in ("", _strategy_target(recipe_config)):
                return recipe_config, recipe_config
            # Each composition takes a tenth of a second; most often the name is part of the class's path.
            for name in sorted(composer.options("strategy"), key=lambda name: name not in wanted.split(".")):
                tree = composer.settings([f"recipe={recipe}", f"strategy={name}"]).tree
                if _strategy_target(tree) == wanted:
                    return recipe_config, tree
            return recipe_config, recipe_config
    finally:
        Singleton.set_state(state)


def _strategy_target(tree: Mapping[str, Any]) -> str:
    strategy = tree.get("strategy")
    return str(strategy.get("_target_", "")) if isinstance(strategy, Mapping) else ""
