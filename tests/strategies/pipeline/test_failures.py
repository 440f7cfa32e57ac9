"""What each rank says when one of them cannot go on, or does not answer."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.strategies.launcher import RankFailure
from trainkit.strategies.pipeline.strategy import Pipeline

from tests.strategies.pipeline.models import Mlp
from tests.strategies.pipeline.training import Training, make, windows
from trainkit.testing import rank_outcomes


class _Departs(Mlp):
    def training_step(self, batch):
        hidden = self.net[:8](batch[0])
        if batch[0].shape[0] == 2:
            hidden = hidden.sin()
        return nn.functional.cross_entropy(self.net[8:](hidden), batch[1])


class _Pause(nn.Module):
    def forward(self, inputs):
        if dist.get_rank() == 1:
            time.sleep(9)
        return inputs


class _Hangs(Mlp):
    def __init__(self):
        super().__init__()
        self.net[9] = _Pause()


def _train(model, timeout):
    strategy = Pipeline(stages=dist.get_world_size(), device="cpu", cuts=["net.8"], timeout=timeout)
    training = Training(make(model), strategy)
    torch.manual_seed(0)
    training.run(windows(model, sizes=[5, 3, 2], num_steps=1))


def test_a_departure_from_the_recording_is_named_on_every_rank():
    outcomes = rank_outcomes(_train, 2, _Departs, 60.0, timeout=60)

    for outcome in outcomes:
        assert "`sin` where the recorded step has" in outcome.failure
        assert "micro-batch 2 in stage" in outcome.failure and "Move the branch" in outcome.failure


def test_a_rank_that_does_not_answer_is_named_with_its_stage_and_micro_batch():
    outcomes = rank_outcomes(_train, 2, _Hangs, 4.0, timeout=60)

    waiting = next(outcome for outcome in outcomes if outcome.rank == 0)
    assert "waited in vain for stage 1's part of micro-batch 0, for the backward of stage 0" in waiting.failure
    assert waiting.seconds < 30


def _die_on_the_last_rank():
    if os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_its_stage():
    strategy = Pipeline(stages=2, replicas=2, device="cpu")

    with pytest.raises(RankFailure, match=r"rank 3, stage 1 of replica 1 \(pid \d+\) was killed by SIGKILL"):
        strategy.launch(_die_on_the_last_rank)
