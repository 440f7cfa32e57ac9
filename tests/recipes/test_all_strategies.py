"""Every recipe trains to the same losses under every strategy that applies to it."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.recipes.tiny import TINY
from trainkit import registry
from trainkit.cli.compose import Settings, compose_config
from trainkit.cli.run_commands import assemble
from trainkit.testing import run_ranks

STRATEGIES = {
    "single": ("single", {"device": "cpu"}),
    "accumulate": ("single", {"device": "cpu", "accumulate": 2}),
    "dp": ("dp", {"devices": ["cpu", "cpu"]}),
    "ddp": ("ddp", {"device": "cpu"}),
    "torch_ddp": ("torch_ddp", {"device": "cpu"}),
    "fusion": ("fusion", {"device": "cpu"}),
    "fsdp": ("fsdp", {"device": "cpu", "min_unit_mb": 0.02}),
    "pipeline": ("pipeline", {"device": "cpu"}),
    "unsplit_pipeline": ("pipeline", {"device": "cpu", "accumulate": 1}),
}
RANK_OF = {"single": 0, "accumulate": 1, "dp": 1}  # the one that trains alone
DEFAULT = tuple(STRATEGIES)[:-1]
ONLY = {
    "contrastive": ("single", "unsplit_pipeline", "ddp", "torch_ddp", "fusion", "fsdp"),
    "gan": ("single", "accumulate", "dp", "ddp", "fsdp", "pipeline"),  # the others do not support phases
}
# Images are compared within a rank: strategies of two ranks agree with each other, but not with one device.
REFERENCE = {"contrastive": dict.fromkeys(("ddp", "torch_ddp", "fusion", "fsdp"), "torch_ddp")}
MEASURED = {"gan": {"train/discriminator/loss", "train/generator/loss", "validation/distance"}}


def losses_on_this_rank(
    folder: str, trees: dict[str, dict[str, Any]], nodes: dict[str, Any]
) -> dict[tuple[str, str], dict[str, float]]:
    """Train every recipe under every strategy of this rank, and return the losses after three steps."""
    os.chdir(folder)  # of both ranks, which make the tokens of some recipes there
    logging.disable(logging.INFO)
    rank, found = dist.get_rank(), {}
    for recipe, tree in trees.items():
        for strategy in ONLY.get(recipe, DEFAULT):
            if RANK_OF.get(strategy, rank) == rank:
                settings = Settings({**tree, "strategy": nodes[strategy]}, config={})
                run = assemble(settings, run_dir=Path(f"{recipe}_{strategy}_{rank}"))
                metrics = run.trainer.fit(run.task, run.data).metrics
                found[recipe, strategy] = {k: v for k, v in metrics.items() if k.endswith(("/loss", "/distance"))}
    return found


def composed(typed: list[str]) -> dict[str, Any]:
    settings = ["callbacks=[]", "logger=[]", "trainer.max_duration=3step", "trainer.evaluate_every=3step"]
    settings += ["trainer.log_every=1step", "trainer.limit_validation_batches=2", "trainer.num_sanity_batches=0"]
    settings += ["trainer.report=false"]
    with compose_config() as composer:
        return composer.settings([*typed, *settings]).tree


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_recipe_trains_to_the_same_losses_under_every_strategy(tmp_path):
    nodes = {name: {**registry._settings("strategy", of), **own} for name, (of, own) in STRATEGIES.items()}
    trees = {recipe: composed([f"recipe={recipe}", *typed]) for recipe, typed in TINY.items()}
    first, second = run_ranks(losses_on_this_rank, 2, str(tmp_path), trees, nodes, timeout=240)
    losses = {**second, **first}
    assert set(losses) == {(recipe, strategy) for recipe in TINY for strategy in ONLY.get(recipe, DEFAULT)}
    for (recipe, strategy), found in losses.items():
        assert set(found) == MEASURED.get(recipe, {"train/loss", "validation/loss"}), (recipe, strategy)
        same_as = REFERENCE.get(recipe, {}).get(strategy, "single")
        assert found == pytest.approx(losses[recipe, same_as], rel=2e-4), (recipe, strategy)
