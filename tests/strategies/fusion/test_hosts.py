"""Several simulated hosts: shared memory in each, gloo between servers, and the weights of one device."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.transports.communication_thread import CommunicationThread

from tests.equality import StepWeights, largest_difference, numbers
from tests.strategies.fusion.test_failure import FailingOnOne
from tests.strategies.fusion.training import Partly, Wide, pretend_hosts, train, trained
from tests.tasks import EachStep, Fitting, fit
from trainkit import Data, UserError
from trainkit.distributed.collectives import gather
from trainkit.testing import rank_outcomes, run_ranks

# ---- Training


class TwoRanksPerHost(FusionStrategy):
    """Treats every two ranks as a host."""

    def setup(self, precision):
        super().setup(precision)
        pretend_hosts(2)


def differences_on_this_rank(run_dir):
    """Return for every combination the largest difference from single, and the name of the transport."""
    found = {}
    alone = run_dir / f"single_{dist.get_rank()}"
    singles = {
        name: trained(SingleStrategy(device="cpu"), name, run_dir=alone, precision="fp64")
        for name in ("perceptron", "gpt")
    }
    threads = (False, True) if dist.get_world_size() == 4 else (False,)
    combinations = itertools.product(("rank", "host"), (False, True), threads, (None, "bf16"))
    for servers, shard, thread, reduce_dtype in combinations:
        strategy = TwoRanksPerHost(
            device="cpu",
            servers=servers,
            shard_optimizer=shard,
            communication_thread=thread,
            reduce_dtype=reduce_dtype,
            buffer_mb=0.0005,
            max_in_flight=2,
        )
        name = "gpt" if thread and reduce_dtype is None else "perceptron"
        recorder = EachStep(lambda run: run.strategy._transport.name)
        ours = trained(strategy, name, recorder, run_dir=run_dir / "fusion", precision="fp64")
        found[servers, shard, thread, reduce_dtype] = (largest_difference(ours, singles[name]), recorder.seen[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_ranks_of_several_hosts_train_to_the_weights_of_one_device(num_ranks, tmp_path):
    for found in run_ranks(differences_on_this_rank, num_ranks, tmp_path, timeout=150):
        for (servers, shard, thread, reduce_dtype), (difference, name) in found.items():
            case = f"{servers} {shard} {thread} {reduce_dtype}"
            # Integer token weights, such as the GPT's, are divided in fp32 in every precision.
            assert difference < {None: 1e-6 if thread else 1e-10, "bf16": 3e-2}[reduce_dtype], case
            assert reduce_dtype is None or difference > 1e-6, case
            # Three ranks make uneven hosts, of which only the first ranks can exchange the same shards.
            assert name == ("exchange" if servers == "rank" and num_ranks == 3 else "shared_memory"), case


def same_weights_on_all_ranks(run_dir, combinations):
    """Return for every combination True if all ranks have the same bits after each step."""
    found = {}
    for servers, shard, thread, reduce_dtype in combinations:
        strategy = TwoRanksPerHost(
            device="cpu",
            servers=servers,
            shard_optimizer=shard,
            communication_thread=thread,
            buffer_mb=0.0005,
            reduce_dtype=reduce_dtype,
        )
        recorder = EachStep(lambda run: run.strategy._transport.name)
        ours = trained(strategy, "perceptron", recorder, run_dir=run_dir / "fusion")
        assert recorder.seen[-1] == "shared_memory"
        of_ranks = gather(ours, dist.group.WORLD)
        same = all(largest_difference(ours, other) == 0.0 for other in of_ranks)
        found[servers, shard, thread, reduce_dtype] = same
    return found


COMBINATIONS = list(itertools.product(("rank", "host"), (False, True), (False, True), (None, "bf16", "fp16")))


@pytest.mark.parametrize(
    "combinations",
    [
        [("rank", False, True, None), ("rank", True, True, "bf16"), ("host", False, False, "fp16")],
        pytest.param(COMBINATIONS, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_all_ranks_of_several_hosts_have_the_same_weights_after_every_step(combinations, tmp_path):
    for found in run_ranks(same_weights_on_all_ranks, 4, tmp_path, combinations):
        assert found == dict.fromkeys(combinations, True)


def partly_used(run_dir):
    """Return the differences from single of a task with parameters that only some ranks use."""
    single = StepWeights()
    alone = SingleStrategy(device="cpu", accumulate=dist.get_world_size())
    data = Data(train=numbers(16), batch_size=4)
    train(alone, Partly(), data, single, run_dir=run_dir / f"single_{dist.get_rank()}", steps=8)
    found, used = [], []
    for servers in ("rank", "host"):
        seen = StepWeights()
        strategy = GradientRecorder(device="cpu", servers=servers, shard_optimizer=True, buffer_mb=0.0005)
        train(strategy, Partly(), data, seen, run_dir=run_dir / "fusion", steps=8)
        found.append(largest_difference(seen.steps, single.steps))
        used += strategy.used
    return found, used


class GradientRecorder(TwoRanksPerHost):
    """Records which parameters have a gradient when they are updated."""

    def setup(self, precision):
        super().setup(precision)
        self.used = []

    def optimizer_step(self, phase_optimizer):
        self.used.append([parameter.grad is not None for parameter in phase_optimizer.parameters])
        return super().optimizer_step(phase_optimizer)


@pytest.mark.slow
def test_flags_of_unused_parameters_reach_all_ranks_of_all_hosts(tmp_path):
    found = run_ranks(partly_used, 4, tmp_path)
    for differences, used in found:
        assert max(differences) < 1e-6
        assert used == found[0][1]  # on servers and on other ranks


def bytes_on_this_rank(run_dir):
    found = {}
    for servers, shard in itertools.product(("rank", "host"), (False, True)):
        recorder = EachStep(lambda run: run.strategy.bytes_a_step)
        strategy = TwoRanksPerHost(device="cpu", servers=servers, shard_optimizer=shard)
        train(strategy, Wide(), Data(train=numbers(12), batch_size=6), recorder, run_dir=run_dir, steps=2)
        found[servers, shard] = recorder.seen[-1]
    return found


@pytest.mark.slow
def test_servers_move_equal_numbers_of_bytes_and_other_ranks_move_none(tmp_path):
    of_ranks = run_ranks(bytes_on_this_rank, 4, tmp_path)
    for shard in (False, True):
        moved = [found["rank", shard] for found in of_ranks]
        assert max(moved) <= 1.02 * sum(moved) / 4
        moved = [found["host", shard] for found in of_ranks]
        assert moved[1] == moved[3] == 0 < moved[0]
        assert max(moved) <= 1.02 * sum(moved) / 2


# ---- Errors


def refused(run_dir):
    """Return the message for one server per host together with transport=exchange."""
    strategy = TwoRanksPerHost(device="cpu", servers="host", transport="exchange")
    with pytest.raises(UserError) as caught:
        train(strategy, Wide(), Data(train=numbers(12), batch_size=6), run_dir=run_dir)
    return str(caught.value)


def test_one_server_per_host_needs_shared_memory(tmp_path):
    for message in run_ranks(refused, 2, tmp_path):
        assert "servers=host" in message and "strategy.servers=rank" in message


def failing(kind, settings, run_dir):
    pretend_hosts(2)
    strategy, task = kind(device="cpu", timeout_seconds=600.0, **settings), FailingOnOne()
    task.rank = 3
    train(strategy, task, Data(train=numbers(24), batch_size=6), run_dir=run_dir, steps=6)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (DDPStrategy, {}),
        (FusionStrategy, {"communication_thread": False, "shard_optimizer": True}),
        (FusionStrategy, {"communication_thread": True, "shard_optimizer": True}),
    ],
)
def test_a_failure_on_one_host_ends_the_ranks_of_all(kind, settings, tmp_path):
    outcomes = rank_outcomes(failing, 4, kind, settings, tmp_path, patience=60)
    assert "ZeroDivisionError: rank 3 cannot go on" in outcomes[3].failure
    for outcome in outcomes[:3]:
        assert "rank 3" in outcome.failure and "cannot go on" in outcome.failure


def limits_of_groups():
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def groups_of_strategies(run_dir):
    """Return by strategy the time-outs of the groups that it makes, and those of what it leaves behind."""
    pretend_hosts(2)
    found = {}
    for name, kind, settings in (
        ("ddp", DDPStrategy, {}),
        ("fusion", TwoRanksPerHost, {}),
        ("fusion, exchange", FusionStrategy, {"transport": "exchange"}),
    ):
        recorder = EachStep(lambda run: limits_of_groups())
        strategy = kind(device="cpu", timeout_seconds=77, **settings)
        train(strategy, Wide(), Data(train=numbers(12), batch_size=4), recorder, run_dir=run_dir / name, steps=2)
        found[name] = recorder.seen[-1], limits_of_groups()
    return found


@pytest.mark.slow
def test_groups_of_a_strategy_have_its_time_out_and_end_with_it(tmp_path):
    for rank in run_ranks(groups_of_strategies, 4, tmp_path):
        assert {name: limits for name, (limits, _) in rank.items()} == {
            "ddp": [77, 77],  # inside the host, and between hosts
            "fusion": [77] * 3,  # and for flags
            "fusion, exchange": [77, 77],
        }
        assert not any(left for _, left in rank.values())


# ---- Settings that follow from the hosts


def settings_between_hosts(run_dir):
    """Return the number of buckets, and whether a thread moves them."""
    found = []
    for kind, one_host in itertools.product((DDPStrategy, FusionStrategy), (True, False)):
        pretend_hosts(2 if one_host else 1)
        buckets = EachStep(lambda run: len(run.strategy.gradients.reducer.plan.buckets))
        transports = EachStep(lambda run: run.strategy.gradients.reducer.transport)
        layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(10)))  # of one MiB each
        data, folder = Data(train=TensorDataset(torch.ones(4, 512)), batch_size=2), f"{run_dir}/{dist.get_rank()}"
        fit(kind(device="cpu"), Fitting(layers), data, buckets, transports, max_duration="2step", run_dir=folder)
        found.append((buckets.seen[-1], isinstance(transports.seen[-1], CommunicationThread)))
    return found


def test_between_hosts_buckets_are_small_and_a_thread_moves_those_of_fusion(tmp_path):
    for found in run_ranks(settings_between_hosts, 2, tmp_path):
        assert found == [(2, False), (10, False), (4, False), (10, True)]
