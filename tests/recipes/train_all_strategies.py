"""A program for two ranks of torchrun: trains every recipe under every strategy, and prints the losses as JSON."""

import json
import logging
import os
import sys
from pathlib import Path

import torch

from tests.recipes.tiny import TINY
from trainkit.cli.compose import compose_config
from trainkit.cli.run_commands import assemble

STRATEGIES = {
    "single": ["strategy=single", "strategy.device=cpu"],
    "accumulate": ["strategy=single", "strategy.device=cpu", "strategy.accumulate=2"],
    "dp": ["strategy=dp", "strategy.devices=[cpu,cpu]"],
    "ddp": ["strategy=ddp", "strategy.device=cpu"],
    "torch_ddp": ["strategy=torch_ddp", "strategy.device=cpu"],
    "fusion": ["strategy=fusion", "strategy.device=cpu"],
    "pipeline": ["strategy=pipeline", "strategy.device=cpu"],
    "unsplit_pipeline": ["strategy=pipeline", "strategy.device=cpu", "strategy.accumulate=1"],
}
DEFAULT = tuple(STRATEGIES)[:-1]
ONLY = {
    "contrastive": ("single", "unsplit_pipeline", "ddp", "torch_ddp", "fusion"),
    "gan": ("single", "accumulate", "dp", "ddp", "pipeline"),  # the others do not support phases
}


def train(recipe: str, strategy: str) -> dict[str, float]:
    """Return the losses after three steps."""
    texts = [f"recipe={recipe}", *TINY[recipe], *STRATEGIES[strategy], "callbacks=[]", "logger=[]"]
    texts += ["trainer.max_duration=3step", "trainer.evaluate_every=3step", "trainer.log_every=1step"]
    texts += ["trainer.limit_validation_batches=2", "trainer.num_sanity_batches=0"]
    with compose_config() as composer:
        settings = composer.settings(texts)
    assembly = assemble(settings, run_dir=Path(f"{recipe}_{strategy}_{os.environ['RANK']}"))
    metrics = assembly.trainer.fit(assembly.task, assembly.data).metrics
    return {name: value for name, value in metrics.items() if name.endswith(("/loss", "/distance"))}


def main() -> None:
    """Print what rank 0 came to."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    rank = int(os.environ["RANK"])
    os.chdir(sys.argv[1])  # of all ranks, which make the tokens of some recipes there
    losses = {recipe: {name: train(recipe, name) for name in ONLY.get(recipe, DEFAULT)} for recipe in TINY}
    if rank == 0:
        print("LOSSES", json.dumps(losses))


if __name__ == "__main__":
    main()
