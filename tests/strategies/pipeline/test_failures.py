"""Messages of each rank when one of them fails or hangs."""

import functools
import os
import re
import signal
import time
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.strategies.pipeline.run.mesh import PipelineErrors
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.strategies.pipeline.models import Mlp
from tests.strategies.pipeline.training import Training, make, step_batches
from trainkit.distributed.failure_store import RankError
from trainkit.distributed.launcher import RankFailure
from trainkit.testing import rank_outcomes, run_ranks


class _Departs(Mlp):
    def training_step(self, batch):
        hidden = self.net[:8](batch[0])
        if batch[0].shape[0] == 2:
            hidden = hidden.sin()
        return nn.functional.cross_entropy(self.net[8:](hidden), batch[1])


class _Pause(nn.Module):
    """Hangs in the second step."""

    num_calls = 0

    def forward(self, inputs):
        self.num_calls += 1
        if dist.get_rank() == 1 and self.num_calls > 3:
            time.sleep(600)  # longer than the test
        return inputs


class _Hangs(Mlp):
    def __init__(self):
        super().__init__()
        self.net[9] = _Pause()


def _train(model, timeout):
    strategy = PipelineStrategy(
        stages=dist.get_world_size(), device="cpu", split_points=["net.8"], timeout_seconds=timeout
    )
    training = Training(make(model), strategy)
    torch.manual_seed(0)
    training.run(step_batches(model, sizes=[5, 3, 2], num_steps=2))


def test_a_trace_mismatch_is_named_on_every_rank():
    outcomes = rank_outcomes(_train, 2, _Departs, 300.0)

    for outcome in outcomes:
        assert "`sin`, but the traced step calls" in outcome.failure
        assert "micro-batch 2 in stage" in outcome.failure and "Move the branch" in outcome.failure


def _thaw_between_steps():
    """Train the first stage from the second step on: the tensor that it sends needs a gradient then."""
    task = make(Mlp)
    task.net[:8].requires_grad_(False)
    training = Training(task, PipelineStrategy(stages=2, device="cpu", split_points=["net.8"]))
    first, second = step_batches(Mlp, sizes=[5, 3, 2], num_steps=2)
    training.step(first)
    task.net[7].requires_grad_(True)
    training.step(second)


def test_a_sent_tensor_that_needs_a_gradient_but_needed_none_in_the_trace_is_an_error():
    sender, receiver = rank_outcomes(_thaw_between_steps, 2)

    made = r"forward of micro-batch 0 in stage 0: module 'net.\d+' .*made a tensor that needs a gradient, and made one"
    assert re.search(made, sender.failure)
    assert "train with strategy=ddp" in sender.failure
    assert "stage 0 of replica 0 stopped in step 1" in receiver.failure


def test_a_rank_that_does_not_answer_is_named_with_its_stage_and_micro_batch():
    outcomes = rank_outcomes(_train, 2, _Hangs, 10.0, patience=0.0)

    waiting = next(outcome for outcome in outcomes if outcome.rank == 0)
    assert "timed out waiting for the gradients of micro-batch 0 from stage 1" in waiting.failure
    assert re.search(r"rank 1: has not come; it is in step 1, .*test_failures.py:\d+", waiting.failure)


class _Breaks(torch.autograd.Function):
    """Fails in the backward of the second step's second micro-batch."""

    @staticmethod
    def forward(ctx, inputs, calls):
        ctx.call = calls
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.call == 5:
            raise ValueError("a wrong gradient")
        return gradient, None


class _Breaking(nn.Module):
    num_calls = 0

    def forward(self, inputs):
        self.num_calls += 1
        return _Breaks.apply(inputs, self.num_calls)


class _BreaksInBackward(Mlp):
    def __init__(self):
        super().__init__()
        self.net[9] = _Breaking()


def _fail_between_steps():
    strategy = PipelineStrategy(stages=2, device="cpu", split_points=["net.8"], timeout_seconds=10.0)
    training = Training(make(Mlp), strategy)
    first, second = step_batches(Mlp, sizes=[5, 3, 2], num_steps=2)
    try:
        training.step(first)
        if dist.get_rank() == 1:
            raise ValueError("a callback's mistake")
        training.step(second)
    finally:
        strategy.teardown()


def _reasons():
    reasons = []
    for train in (_fail_between_steps, functools.partial(_train, _BreaksInBackward, 300.0)):
        try:
            train()
        except Exception as error:
            reasons.append("".join(traceback.format_exception(error)))
    return reasons


def test_every_stage_names_the_stage_that_failed_and_the_place():
    (message, backward_message), (_, own) = run_ranks(_reasons, 2)

    assert "RankError: stage 1 of replica 0 stopped in step 0: ValueError: a callback's mistake" in message
    assert "gloo" not in message + backward_message
    place = "backward of micro-batch 1 in stage 1"
    assert f"stage 1 of replica 0 stopped in step 1, {place}: ValueError: a wrong gradient" in backward_message
    assert "ValueError: a wrong gradient" in own
    assert place in own


class _Store:
    """A failure store without other ranks."""

    def __init__(self, cause=None):
        self.cause, self.published = cause, []

    def root_cause(self):
        return self.cause

    def publish(self, message):
        self.published.append(message)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (None, "the connection to another rank is lost"),
        ("stage 1 stopped: ValueError: no", "stage 1 stopped: ValueError: no\nstage 0 stopped then: the connection"),
    ],
)
def test_the_cause_of_a_lost_connection_comes_first_and_without_the_words_of_gloo(cause, message):
    store = _Store(cause)
    errors = PipelineErrors(store, name="stage 0", step=lambda: 3)
    lost = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2222"

    with pytest.raises(RankError) as caught:
        errors.explain(RuntimeError(lost))

    assert str(caught.value).startswith(message)
    assert "gloo" not in str(caught.value) + str(store.published)


def _die_on_the_last_rank():
    if os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_with_its_stage():
    strategy = PipelineStrategy(stages=2, replicas=2, device="cpu")

    with pytest.raises(RankFailure, match=r"rank 3, stage 1 of replica 1 \(pid \d+\) was killed by SIGKILL"):
        strategy.launch(_die_on_the_last_rank)
