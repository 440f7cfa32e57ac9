"""Every recipe trains to the same losses under every strategy that applies to it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.tiny import TINY

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 240
# Images are compared within a rank: strategies of two ranks agree with each other, but not with one device.
REFERENCE = {"contrastive": dict.fromkeys(("ddp", "torch_ddp", "fusion"), "torch_ddp")}
MEASURED = {"gan": {"train/discriminator/loss", "train/generator/loss", "validation/distance"}}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_recipe_trains_to_the_same_losses_under_every_strategy(tmp_path):
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = subprocess.Popen(
        [*program, "-m", "tests.recipes.train_all_strategies", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        printed, complaints = ranks.communicate(timeout=LIMIT_SECONDS)
    finally:
        ranks.terminate()  # torchrun ends its ranks
        ranks.wait(120)
    assert ranks.returncode == 0, complaints[-3000:]
    losses = json.loads(printed.partition("LOSSES ")[2])
    assert set(losses) == set(TINY)
    for recipe, by_strategy in losses.items():
        for strategy, found in by_strategy.items():
            assert set(found) == MEASURED.get(recipe, {"train/loss", "validation/loss"}), (recipe, strategy)
            same_as = REFERENCE.get(recipe, {}).get(strategy, "single")
            assert found == pytest.approx(by_strategy[same_as], rel=2e-4), (recipe, strategy)
