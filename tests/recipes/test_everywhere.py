"""Every recipe trains to the same losses under every strategy that applies to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.tiny import TINY
from trainkit import registry

ROOT = Path(__file__).parents[2]
MEASURED = {"gan": {"train/discriminator/loss", "train/generator/loss", "validation/distance"}}


def test_every_recipe_has_a_tiny_size():
    assert set(TINY) >= set(registry.names("recipe"))


@pytest.mark.slow
def test_every_recipe_trains_to_the_same_losses_under_every_strategy(tmp_path):
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*program, "-m", "tests.recipes.train_everywhere", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = json.loads(ran.stdout.partition("LOSSES ")[2])
    assert set(losses) == set(TINY)
    for recipe, by_strategy in losses.items():
        for strategy, found in by_strategy.items():
            assert set(found) == MEASURED.get(recipe, {"train/loss", "validation/loss"}), (recipe, strategy)
            assert found == pytest.approx(by_strategy["single"], rel=2e-4), (recipe, strategy)
