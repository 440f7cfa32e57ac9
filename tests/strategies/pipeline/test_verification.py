"""Verified steps: a pipeline that computes other values than one process ends with the first call that differs."""

import pytest
import torch
import torch.distributed as dist
from trainkit.strategies.pipeline.run import verification
from trainkit.strategies.pipeline.run.communication import PendingReceive
from trainkit.strategies.pipeline.run.runtime import PipelineRuntime
from trainkit.strategies.pipeline.run.verification import Checksum, StepRecord, Verification
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.strategies.pipeline.models import Gpt, ManyInputs, Mlp, ResNet
from tests.strategies.pipeline.training import Training, largest_difference, make, step_batches
from tests.strategies.pipeline.zoo.state import CountedPhases, StateInAnObject, TeacherMovedLast
from trainkit.errors import UserError
from trainkit.testing import rank_outcomes, run_ranks

SIZES = [3, 3, 2]


def _trained(model, *, num_steps=3, replicas=1, sizes=SIZES, **settings):
    strategy = PipelineStrategy(stages=dist.get_world_size() // replicas, replicas=replicas, device="cpu", **settings)
    training = Training(make(model), strategy)
    torch.manual_seed(0)
    steps = step_batches(model, sizes=sizes, num_steps=num_steps, replica=strategy.comm.rank, num_replicas=replicas)
    weights = training.run(steps).weights()
    strategy.teardown()
    return weights


def _same(model, **settings):
    """Return true if training with every step verified has the weights of training with none."""
    torch.manual_seed(0)
    verified = _trained(model, verify=3, **settings)
    plain = _trained(model, verify="off", **settings)
    return largest_difference(verified, plain) < 1e-12  # not 0, as cuts depend on measured times


def _verified_and_not():
    return {
        "shared parameters": _same(Gpt, split_points=["blocks.2"], shared_parameters="replicated"),
        "random numbers": _same(ManyInputs),
        "statistics": _same(ResNet),
        "phases": _same(CountedPhases, sizes=(4, 4, 4, 4)),
        "a teacher": _same(TeacherMovedLast, sizes=(4, 4, 4, 4), schedule="gpipe"),
        "attributes": _same(StateInAnObject, sizes=(4, 4, 4, 4)),
        "several stages a rank": _same(Mlp, schedule="interleaved_1f1b"),
    }


@pytest.mark.slow
def test_verified_steps_train_as_those_that_are_not():
    found = run_ranks(_verified_and_not, num_ranks=2)[0]  # the others have a part of the weights
    assert found == dict.fromkeys(found, True)


def _replicated():
    return {model.__name__: _same(model, replicas=2) for model in (Mlp, ResNet)}


@pytest.mark.slow
def test_verified_steps_of_replicas_train_as_those_that_are_not():
    found = run_ranks(_replicated, num_ranks=4)[0]  # the others have a part of the weights
    assert found == dict.fromkeys(found, True)


def _with_other_activations():
    if dist.get_rank() == 1:
        received = PendingReceive.open

        def changed(self, what):
            tensor = received(self, what)
            return tensor + 0.01 if tensor.is_floating_point() else tensor

        PendingReceive.open = changed
    _trained(Mlp, split_points=["net.8"])


def _with_other_gradients():
    if dist.get_rank() == 0:
        received = PendingReceive.open_gradient
        PendingReceive.open_gradient = lambda self, what: received(self, what) * 1.01
    _trained(Mlp, split_points=["net.8"])


def _with_other_state():
    train = PipelineRuntime.train

    def changed(self, executor, step, *args, **kwargs):
        train(self, executor, step, *args, **kwargs)
        if dist.get_rank() == 1:
            buffers = [buffer for module in executor.interceptor.modules.values() for buffer in module.buffers()]
            next(buffer for buffer in buffers if buffer.is_floating_point() and buffer.is_contiguous()).add_(0.01)

    PipelineRuntime.train = changed
    _trained(ResNet)


def _messages(work):
    return [outcome.failure for outcome in rank_outcomes(work, num_ranks=2)]


def test_other_activations_end_the_run_with_the_first_call_that_differs():
    for message in _messages(_with_other_activations):
        assert "step 1 is not that of one process: module 'net.8'" in message
        assert "made other values for micro-batch 0 on rank 1, stage 1 of replica 0" in message
        assert "strategy=ddp" in message


def test_other_gradients_end_the_run_with_the_last_parameter_that_differs():
    for message in _messages(_with_other_gradients):
        assert "'net.7" in message or "'net.6" in message
        assert "has another gradient on rank 0, stage 0 of replica 0" in message


def test_other_state_ends_the_run_with_its_name():
    for message in _messages(_with_other_state):
        assert "the step left another '" in message
        assert "running_" in message


def _num_verified():
    calls = []
    finish = Verification.finish
    Verification.finish = lambda self, *args, **kwargs: (calls.append(self._step), finish(self, *args, **kwargs))
    found = {}
    for name, share in (("fits", 0.125), ("does not fit", 0.0)):
        calls.clear()
        verification.MEMORY_SHARE = share
        _trained(Mlp, num_steps=3)
        found[name] = list(calls)
    for verify in ("off", 0, 2):
        calls.clear()
        _trained(Mlp, num_steps=3, verify=verify)
        found[verify] = list(calls)
    return found


@pytest.mark.slow
def test_the_first_step_is_verified_if_the_task_fits_in_memory():
    for found in run_ranks(_num_verified, num_ranks=2):
        assert found == {"fits": [1], "does not fit": [], "off": [], 0: [], 2: [1, 2]}


def test_a_checksum_tells_a_changed_element_a_swap_and_a_sign_from_rounding():
    def checksum(tensor):
        return StepRecord()._checksum([tensor])

    torch.manual_seed(0)
    tensor = torch.randn(100, dtype=torch.float64)
    expected = checksum(tensor)
    for change in (lambda t: t[7].add_(1e-5), lambda t: t[[3, 4]].sum(), lambda t: t.neg_(), lambda t: t.zero_()):
        other = tensor.clone()
        change(other)
        if not torch.equal(other, tensor):
            assert checksum(other).differs(expected, 1e-8)
    assert checksum(tensor[torch.arange(100).roll(1)]).differs(expected, 1e-8)
    assert not checksum(tensor * (1 + 1e-12)).differs(expected, 1e-8)
    assert not Checksum(float("nan")).differs(Checksum(float("nan")), 1e-8)
    assert Checksum(0.0).differs(Checksum(float("nan")), 1e-8)
    assert Checksum(float("nan")).differs(Checksum(0.0, 1.0), 1e-8)


@pytest.mark.parametrize("verify", ["of", -1, 1.5])
def test_other_values_of_verify_are_refused(verify):
    with pytest.raises(UserError, match=r"verify must be .*a whole number of steps, at least 0"):
        PipelineStrategy(verify=verify)
