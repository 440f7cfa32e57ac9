"""Messages between stages in lanes: the same weights as through host memory, with NCCL or with gloo in its place."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist
from trainkit.strategies.pipeline.plan.schedules import BACKWARD, FORWARD, Action
from trainkit.strategies.pipeline.run.communication import DeviceChannel, Lane, StageChannel, lane_backend
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.transports.host_copy import HostCopier

from tests.marks import on_gpu
from tests.strategies.pipeline.models import EncoderDecoder, Gpt, Mlp
from tests.strategies.pipeline.training import Training, largest_difference, make, step_batches
from trainkit.testing import run_ranks


class _LateCopier(HostCopier):
    """Copies that end when the test says so."""

    def __init__(self):
        self.device_is_done = threading.Event()

    def to_host(self, source, target, *, after):
        return _LateCopy(self.device_is_done, source, target)


class _LateCopy:
    def __init__(self, device_is_done, source, target):
        self._device_is_done, self._source, self._target = device_is_done, source, target

    def synchronize(self):
        if not self._device_is_done.wait(600):
            raise RuntimeError("the device is never done")
        self._target.copy_(self._source)


def _sent_before_the_device_is_done():
    rank = dist.get_rank()
    channel = StageChannel(dist.new_group([0, 1], backend="gloo"), rank=rank, device=torch.device("cpu"))
    if rank == 1:
        pending = [channel.expect((2, 3), torch.float32, source=0, tag=7) for _ in range(2)]
        return [each.open("an activation").tolist() for each in pending]
    channel._sender, channel._copier = ThreadPoolExecutor(1), _LateCopier()  # as on a CUDA device
    for index in range(2):
        sent = torch.full((3, 2), float(index + 1)).T
        channel.send(sent, to=1, tag=7, user=Action(FORWARD, 1, index))
    channel._copier.device_is_done.set()
    channel.finish()
    return None


def test_a_send_does_not_wait_for_the_device_and_sends_in_order_what_is_copied():
    _, received = run_ranks(_sent_before_the_device_is_done, 2, timeout=120)

    assert received == [[[1.0] * 3] * 2, [[2.0] * 3] * 2]


FORTH, BACK = Lane(0, 1, FORWARD, (0, 1)), Lane(1, 0, BACKWARD, (1, 0))


@pytest.mark.parametrize(
    ("configured", "devices", "expected"),
    [
        ("cpu:gloo,cuda:nccl", ["a", "b"], "nccl"),  # auto
        ("nccl", ["a", "b"], "nccl"),
        ("cpu:gloo,cuda:nccl", ["a", "b", "b"], None),
        ("cpu:gloo,cuda:gloo", ["a", "b"], None),
    ],
)
def test_stages_use_nccl_where_the_ranks_do_and_each_has_its_own_device(configured, devices, expected):
    assert lane_backend(configured, devices) == expected


class _OfDevice:
    """The properties of a CUDA device."""

    def __init__(self, device):
        self.uuid = device.index


def _lanes_of_default(num_devices):
    """Return the lane backend of a pipeline whose ranks seem to be on CUDA devices, joined as on these."""
    dist.get_backend_config = lambda group=None: "cpu:gloo,cuda:nccl"  # in the processes of this test alone
    torch.cuda.get_device_properties = _OfDevice
    strategy = PipelineStrategy(stages=2, device="cpu")
    Training(make(Mlp), strategy)
    strategy.device = torch.device("cuda", dist.get_rank() % num_devices)
    return strategy._lane_backend()


@pytest.mark.parametrize(("num_devices", "expected"), [(2, "nccl"), (1, None)])
def test_by_default_stages_on_different_cuda_devices_use_nccl(num_devices, expected):
    assert run_ranks(_lanes_of_default, 2, num_devices, timeout=120) == [expected] * 2


def _sent_both_ways(device_type, backend):
    """Send an activation, its gradient, and the sign of a missing one; return what arrives."""
    rank = dist.get_rank()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    lanes = {lane: dist.new_group([0, 1], backend=backend) for lane in (FORTH, BACK)}
    channel = DeviceChannel(dist.new_group([0, 1], backend="gloo"), rank=rank, device=device, lanes=lanes)
    if rank == 0:
        for index in range(2):
            sent = torch.full((3,), float(index + 1), device=device)
            channel.send(sent, to=1, tag=7, user=Action(FORWARD, 1, index), lane=FORTH)
        pending = [channel.expect_gradient((3,), torch.float32, source=1, tag=8, lane=BACK) for _ in range(2)]
        found = [each.open_gradient("a gradient") for each in pending]
        channel.release(to=1, begun=[Action(FORWARD, 1, 0), Action(FORWARD, 1, 1)])
    else:
        pending = [channel.expect((3,), torch.float32, source=0, tag=7, lane=FORTH) for _ in range(2)]
        found = [each.open("an activation") for each in pending]
        users = [Action(BACKWARD, 0, index) for index in range(2)]
        channel.send_gradient(None, of=found[0], to=0, tag=8, user=users[0], lane=BACK)
        channel.send_gradient(10 * found[1], of=found[1], to=0, tag=8, user=users[1], lane=BACK)
    channel.finish()
    assert all(each is None or each.device == device for each in found)
    return [None if each is None else each.tolist() for each in found]


def test_lanes_bring_activations_gradients_and_the_sign_of_a_missing_one():
    first, second = run_ranks(_sent_both_ways, 2, "cpu", "gloo", timeout=120)

    assert second == [[1.0] * 3, [2.0] * 3]
    assert first == [None, [20.0] * 3]


class _Frozen(Mlp):
    """Trains its last layers only: no gradient crosses the split point."""

    def __init__(self):
        super().__init__()
        self.net[:8].requires_grad_(False)


class _OnLanes(PipelineStrategy):
    """A pipeline whose stages use lanes of gloo, as they use NCCL's between CUDA devices."""

    def _lane_backend(self):
        return "gloo"


def _weights(strategy_class, cases, settings):
    found = []
    for model, own in cases:
        strategy = strategy_class(**settings, **own)
        training = Training(make(model), strategy)
        replicas = strategy.mesh.replicas
        mine = step_batches(model, sizes=[4] * 4, num_steps=3, replica=strategy.comm.rank, num_replicas=replicas)
        training.run(strategy.step_batches(iter(mine), pin_memory=False))
        found.append(training.weights())
        strategy.teardown()
    return found


INTERLEAVED = {"stages": 2, "schedule": "interleaved_1f1b"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (2, [(Mlp, {"stages": 2, "schedule": "gpipe"}), (_Frozen, {"stages": 2}), (EncoderDecoder, INTERLEAVED)]),
        pytest.param(4, [(EncoderDecoder, {"stages": 4}), (Gpt, {"stages": 2, "replicas": 2})], marks=pytest.mark.slow),
    ],
)
def test_stages_that_send_in_lanes_train_to_the_weights_of_one_process(num_ranks, cases):
    found = run_ranks(_weights, num_ranks, _OnLanes, cases, {"device": "cpu"}, timeout=400)[0]

    for (model, _), weights in zip(cases, found, strict=True):
        single = Training(make(model), SingleStrategy(device="cpu"))
        single.run(step_batches(model, sizes=[4] * 4, num_steps=3))
        assert largest_difference(weights, single.weights()) < 1e-10


@partial(on_gpu, devices=2)
def test_nccl_brings_what_gloo_brings_between_two_devices():
    assert run_ranks(_sent_both_ways, 2, "cuda", "nccl", timeout=400) == [
        [None, [20.0] * 3],
        [[1.0] * 3, [2.0] * 3],
    ]


def _weights_and_channel(backend, settings, rendezvous):
    """Train on ranks that are joined by `backend`; return the weights and if tensors go from device to device."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    strategy = PipelineStrategy(device="cuda", **settings)
    training = Training(make(Mlp), strategy)
    replicas = strategy.mesh.replicas
    batches = step_batches(Mlp, sizes=[4] * 4, num_steps=3, replica=strategy.comm.rank, num_replicas=replicas)
    training.run(strategy.step_batches(iter(batches), pin_memory=False))
    uses_lanes = isinstance(strategy.runtime._channel, DeviceChannel)
    weights = {name: each.cpu() for name, each in training.weights().items()}
    strategy.teardown()
    return weights, uses_lanes


@partial(on_gpu, devices=2)
@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("cpu:gloo,cuda:nccl", {"stages": 2}),  # as `auto` joins them
        ("nccl", {"stages": 2, "backend": "nccl"}),
        ("nccl", {"stages": 1, "replicas": 2, "backend": "nccl"}),
        ("gloo", {"stages": 2, "backend": "gloo"}),
    ],
)
def test_stages_on_two_devices_train_to_the_weights_of_one_process(tmp_path, backend, settings):
    weights, uses_lanes = run_ranks(_weights_and_channel, 2, backend, settings, tmp_path / "rendezvous", timeout=400)[0]

    assert uses_lanes == ("nccl" in backend)
    single = Training(make(Mlp), SingleStrategy(device="cpu"))
    single.run(step_batches(Mlp, sizes=[4] * 4, num_steps=3))
    assert largest_difference(weights, single.weights()) < 1e-6
