"""Pipelines whose two ranks share one CUDA device: messages, schedules, placement and sharded optimizers."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from trainkit.strategies.pipeline.plan.schedules import BACKWARD, FORWARD, Action
from trainkit.strategies.pipeline.run import mesh as mesh_module
from trainkit.strategies.pipeline.run.communication import StageChannel
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.marks import gpus
from tests.strategies.pipeline.models import EncoderDecoder, Gpt, Mlp
from tests.strategies.pipeline.training import Training, largest_difference, make, step_batches
from tests.tasks import Regression, regression_data
from trainkit import Callback, Data, Trainer
from trainkit.testing import run_ranks

pytestmark = gpus()
DEVICE = {"device": "cuda", "backend": "gloo"}
SIZES = [4] * 4


def _sent_both_ways(device):
    """Send activations and a gradient, one of them missing, between two ranks; return what arrives."""
    rank, device = dist.get_rank(), torch.device(device)
    channel = StageChannel(dist.new_group([0, 1], backend="gloo"), rank=rank, device=device)
    if rank == 0:
        for index in range(2):
            sent = torch.full((2, 3), float(index + 1), device=device).T  # in another memory format
            channel.send(sent, to=1, tag=7, user=Action(FORWARD, 1, index))
        pending = [channel.expect_gradient((3, 2), torch.float32, source=1, tag=8) for _ in range(2)]
        found = [each.open_gradient("a gradient") for each in pending]
    else:
        pending = [channel.expect((3, 2), torch.float32, source=0, tag=7) for _ in range(2)]
        found = [each.open("an activation") for each in pending]
        channel.send_gradient(10 * found[0], of=found[0], to=0, tag=8, user=Action(BACKWARD, 0, 0))
        channel.send_gradient(None, of=found[1], to=0, tag=8, user=Action(BACKWARD, 0, 1))
    channel.finish()
    assert all(each is None or each.device.type == device.type for each in found)
    return [None if each is None else each.flatten().tolist() for each in found]


def test_stages_that_share_a_device_bring_activations_gradients_and_the_sign_of_a_missing_one():
    first, second = run_ranks(_sent_both_ways, 2, "cuda", timeout=120)

    assert second == [[1.0] * 6, [2.0] * 6]
    assert first == [[10.0] * 6, None]


def _differences(cases):
    """Return for each case the largest difference of the weights from those of one process on the CPU."""
    return [_difference(model, dict(settings)) for model, settings in cases]


def _difference(model, settings):
    placed_by = settings.pop("hosts", None)
    if placed_by is not None:
        mesh_module.host_name = lambda: placed_by[dist.get_rank()]  # in the processes of this test alone
    task = make(model)
    single = copy.deepcopy(task)
    strategy = PipelineStrategy(**settings)
    training = Training(task, strategy)
    mine = step_batches(
        model, sizes=SIZES, num_steps=3, replica=strategy.comm.rank, num_replicas=strategy.mesh.replicas
    )
    training.run(strategy.step_batches(iter(mine), pin_memory=False))
    weights = {name: tensor.cpu() for name, tensor in training.weights().items()}
    strategy.teardown()
    reference = Training(single, SingleStrategy(device="cpu"))
    reference.run(step_batches(model, sizes=SIZES, num_steps=3))
    return largest_difference(weights, reference.weights()) if dist.get_rank() == 0 else None


SCHEDULES = [
    {"stages": 2, "schedule": "gpipe"},
    {"stages": 2, "schedule": "1f1b"},
    {"stages": 2, "schedule": "interleaved_1f1b"},
    {"stages": 2, "max_in_flight": 1},
    {"stages": 2, "max_in_flight": 4},
]
REPLICAS = [
    {"stages": 1, "replicas": 2},
    {"stages": 1, "replicas": 2, "shard_optimizer": True},
]
HOSTS = {"stages": 2, "replicas": 2, "hosts": "aabb"}
PLACEMENTS = [{**HOSTS, "placement": placement} for placement in ("cluster", "spread")]


def _assert_equal(num_ranks, cases):
    found = run_ranks(_differences, num_ranks, cases, timeout=400)[0]
    assert [case for case, difference in zip(cases, found, strict=True) if not difference < 1e-10] == []


@pytest.mark.parametrize("model", [Mlp, Gpt, EncoderDecoder])
def test_every_schedule_and_limit_of_micro_batches_trains_on_one_gpu_to_the_weights_of_one_process(model):
    _assert_equal(2, [(model, {**DEVICE, **settings}) for settings in SCHEDULES])


def test_replicas_on_one_gpu_with_whole_and_sharded_optimizers_have_the_weights_of_one_process():
    _assert_equal(2, [(Mlp, {**DEVICE, **settings}) for settings in REPLICAS])


def test_either_placement_trains_on_one_gpu_to_the_weights_of_one_process():
    _assert_equal(4, [(Mlp, {**DEVICE, **settings}) for settings in PLACEMENTS])


def _trained_without_waiting_for_the_device():
    """Train two steps; in the third, torch raises where a stage waits for the device between its actions."""
    strategy = PipelineStrategy(stages=2, **DEVICE, verify="off")
    training = Training(make(Mlp), strategy)
    batches = step_batches(Mlp, sizes=SIZES, num_steps=3)
    on_device = list(strategy.step_batches(iter(batches), pin_memory=False))
    training.run(on_device[:2])
    train = strategy.runtime.train

    def watched(*arguments, **settings):
        torch.cuda.set_sync_debug_mode("error")
        try:
            train(*arguments, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    strategy.runtime.train = watched
    training.run(on_device[2:])
    strategy.teardown()
    return True


def test_stages_that_send_through_host_memory_do_not_wait_for_the_device():
    assert run_ranks(_trained_without_waiting_for_the_device, 2, timeout=400) == [True, True]


class CountWaits(Callback):
    """Counts how often torch says that a step waits for the device, from the third step on."""

    def __init__(self):
        self.waits = []

    def on_step_end(self, run):
        waits = [str(warning.message) for warning in self.warned if "synchronizing" in str(warning.message)]
        # Of the pretended device alone, which waits in some operations and then names them.
        self.waits.append(len([text for text in waits if "aten::" not in text]))
        self.warned.clear()
        torch.cuda.set_sync_debug_mode("warn")

    def on_fit_start(self, run):
        self.caught = warnings.catch_warnings(record=True)
        self.warned = self.caught.__enter__()
        warnings.simplefilter("always")

    def close(self):
        torch.cuda.set_sync_debug_mode("default")


def _waits_of_each_step(folder):
    waits = CountWaits()
    strategy = PipelineStrategy(stages=2, accumulate=4, verify="off", **DEVICE)
    trainer = Trainer(
        strategy, max_duration="8step", callbacks=[waits], loggers=[], log_every="100step", run_dir=folder
    )
    trainer.fit(Regression(hidden=8), Data(train=regression_data(64), batch_size=8))
    return waits.waits[2:-1]


def test_a_step_of_a_pipeline_waits_for_the_device_once_to_send_its_outputs(tmp_path):
    first, last = run_ranks(_waits_of_each_step, 2, tmp_path / "run", timeout=400)
    assert (max(first), max(last)) == (0, 1)
