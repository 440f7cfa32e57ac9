"""Ranks of a pipeline on several hosts."""

import json
import logging
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.pipeline import strategy as strategy_module
from trainkit.strategies.pipeline.plan.traffic import StepMessages, broadcast_tree, rank_grid, traffic_of
from trainkit.strategies.pipeline.run import mesh as mesh_module
from trainkit.strategies.pipeline.run.mesh import PipelineMesh, backend_with_host
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.transports.hosts import HostLayout

from tests.strategies.pipeline.models import Mlp
from tests.strategies.pipeline.training import Training, largest_difference, make, step_batches
from trainkit import Data, Trainer, deferred_init
from trainkit.checkpoint.store import load_from
from trainkit.errors import UserError
from trainkit.optim.precision import Precision
from trainkit.task import TaskModule
from trainkit.testing import run_ranks

TWO_BY_TWO = HostLayout.of(["a", "a", "b", "b"])


def test_a_host_has_the_stages_of_a_replica_or_the_replicas_of_a_stage():
    assert rank_grid(TWO_BY_TWO, stages=2, replicas=2, placement="cluster") == [[0, 1], [2, 3]]
    assert rank_grid(TWO_BY_TWO, stages=2, replicas=2, placement="spread") == [[0, 2], [1, 3]]
    interleaved = HostLayout.of(["a", "b", "a", "b"])
    assert rank_grid(interleaved, stages=2, replicas=2, placement="cluster") == [[0, 2], [1, 3]]
    with pytest.raises(UserError, match=r"hosts are \(0, 3\), \(1, 2\), in which no stages can be placed"):
        rank_grid(HostLayout.of(["a", "b", "b", "a"]), stages=2, replicas=2, placement="cluster")


def _traffic(hosts, *, replicas, activations=0, gradients=(0, 0), shared=0, broadcast=((), ())):
    """Return what two stages send between hosts, by placement."""
    filled = [[*sizes, *[0] * (replicas - len(sizes))] for sizes in broadcast]
    messages = StepMessages({(0, 1): activations}, gradients, {(0, 1): shared}, filled)
    found = [traffic_of(hosts, placement, messages, stages=2, replicas=replicas) for placement in ("cluster", "spread")]
    return [(row.activations, row.gradients, row.weights) for row in found]


def test_between_hosts_either_activations_are_sent_or_gradients():
    cluster, spread = _traffic(TWO_BY_TWO, replicas=2, activations=10, gradients=[100, 200])

    assert cluster == (0, 600, 0)  # each host sends and receives 300
    assert spread == (20, 0, 0)


def test_replicas_on_one_host_do_not_join_their_sums_before_they_are_sent():
    four_of_eight = HostLayout.of(["a"] * 4 + ["b"] * 4)
    # Two of the four neighbours in each ring are on another host, and each rank sends 2 * 3/4 of the bytes.
    assert _traffic(four_of_eight, replicas=4, gradients=[100, 200])[0] == (0, 2 * 150 + 2 * 300, 0)
    # Three hosts with two ranks of each stage: three of six neighbours, 2 * 5/6 of the bytes.
    three = HostLayout.of(["a"] * 4 + ["b"] * 4 + ["c"] * 4)
    assert _traffic(three, replicas=6, gradients=[60, 0])[0] == (0, 3 * 100, 0)


def test_gradients_of_shared_parameters_are_sent_between_hosts_if_replicas_are_spread():
    assert _traffic(TWO_BY_TWO, replicas=2, shared=50) == [(0, 0, 0), (0, 2 * 2 * 50, 0)]


def test_weights_and_buffers_are_sent_along_the_tree_of_each_broadcast():
    assert broadcast_tree(6, 0) == [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5)]
    assert broadcast_tree(4, 3) == [(3, 0), (3, 1), (0, 2)]
    four_of_eight = HostLayout.of(["a"] * 4 + ["b"] * 4)
    # From replica 0 go 0 > 2 and 1 > 3 to the other host; from replica 1 also 2 > 0 back.
    cluster, spread = _traffic(four_of_eight, replicas=4, broadcast=[(10,), (0, 7)])
    assert cluster == (0, 0, 2 * 10 + 3 * 7)
    assert spread == (0, 0, 0)


class _Tied(TaskModule):
    """An embedding that is also the head, with statistics between."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def training_step(self, batch):
        (inputs,) = batch
        return nn.functional.cross_entropy(self.hidden(self.embedding(inputs)) @ self.embedding.weight.T, inputs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def _planned_traffic(**settings):
    strategy = PipelineStrategy(
        stages=2,
        replicas=2,
        device="cpu",
        accumulate=2,
        shared_parameters="replicated",
        split_points=["hidden.1"],
        **settings,
    )
    strategy.mesh.hosts, strategy.precision = TWO_BY_TWO, Precision()
    data = Data(train=torch.utils.data.TensorDataset(torch.arange(16)), batch_size=16)
    return [
        (row.activations, row.gradients, row.weights)
        for row in strategy._plan_alone(_Tied(), data.stage_data("train")).traffic
    ]


def test_a_plan_counts_weights_of_optimizer_shards_buffers_and_shared_gradients():
    embedding, linear, norm, buffers = 16 * 8 * 4, (8 * 8 + 8) * 4, 2 * 8 * 4, 2 * 8 * 4 + 8
    held = 2 * embedding + 2 * linear + norm  # the embedding by both stages
    activations = 2 * 2 * 2 * (4 * 8 * 4)  # two replicas, two micro-batches, both ways

    assert _planned_traffic() == [(0, 2 * held, buffers), (activations, 2 * 2 * embedding, 0)]
    sharded = _planned_traffic(shard_optimizer=True, broadcast_buffers=False)
    assert sharded == [(0, 2 * held, held), (activations, 2 * 2 * embedding, 0)]


def _of_two_hosts():
    mesh_module.host_name = lambda: f"host {dist.get_rank() // 2}"  # the ranks of this test alone


def _sent_in_host_memory(rendezvous):
    """Return what replicas receive in host memory where all ranks are joined for tensors on CUDA devices only."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    mesh = PipelineMesh(stages=1, replicas=2)
    mesh.join(timeout=timedelta(seconds=60))
    tensor = torch.full((3,), float(rank))
    dist.broadcast(tensor, 0, group=mesh.replica_group)
    return tensor.tolist()


def test_replicas_receive_parameters_in_host_memory_also_if_their_backend_has_none(tmp_path):
    assert run_ranks(_sent_in_host_memory, 2, tmp_path / "rendezvous", timeout=120) == [[0.0] * 3] * 2
    assert backend_with_host("cuda:nccl") == "cpu:gloo,cuda:nccl"
    assert backend_with_host("cpu:gloo,cuda:nccl") is None


def _weights(placement, replicas):
    _of_two_hosts()  # three for three replicas
    strategy = PipelineStrategy(stages=2, replicas=replicas, placement=placement, device="cpu")
    training = Training(make(Mlp), strategy)
    sizes = [4] * 2 * replicas
    mine = step_batches(Mlp, sizes=sizes, num_steps=3, replica=strategy.comm.rank, num_replicas=replicas)
    training.run(mine)
    weights, place = training.weights(), (strategy.mesh.replica, strategy.mesh.stage)
    strategy.teardown()
    return place, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (2, {"cluster": [(0, 0), (0, 1), (1, 0), (1, 1)], "spread": [(0, 0), (1, 0), (0, 1), (1, 1)]}),
        (3, {"spread": [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]}),  # two of a stage's replicas on one host
    ],
)
def test_either_placement_trains_to_the_weights_of_one_process(replicas, expected):
    single = Training(make(Mlp), SingleStrategy(device="cpu"))
    single.run(step_batches(Mlp, sizes=[4] * 2 * replicas, num_steps=3))

    for placement, places in expected.items():
        found = run_ranks(_weights, 2 * replicas, placement, replicas, timeout=400)
        assert [place for place, _ in found] == places
        assert largest_difference(found[0][1], single.weights()) < 1e-10


@pytest.mark.parametrize(
    ("before", "is_told"),
    [([[0, 2], [1, 3]], True), ([[0, 1], [2, 3]], False), ([[0, 1, 2, 3]], False), ([[0, 1, 2], [3, 4, 5]], False)],
)
def test_another_place_of_the_ranks_is_reported_only_for_the_same_stages_and_replicas(before, is_told, caplog):
    strategy = PipelineStrategy(stages=2, replicas=2, device="cpu", placement="cluster")
    strategy.comm = SingleStrategy(device="cpu").comm
    with caplog.at_level(logging.WARNING):
        assert not strategy.place_ranks(Mlp(), _data(4).stage_data("train"), {"grid": before})
    assert ("in the run that is resumed" in caplog.text) == is_told


def _data(batch_size):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = Mlp.batch(4 * batch_size, generator)
    return Data(train=torch.utils.data.TensorDataset(inputs, targets), batch_size=batch_size)


def _fitted(folder, width, batch_size, *, deferred=False, steps=3, resume=None, **settings):
    """Train by a Trainer, in which ranks are placed before data is opened; return the grid and the weights."""
    _of_two_hosts()
    with deferred_init() if deferred else nullcontext():
        task = make(Mlp, width=width, dropout=0.2)
    strategy = PipelineStrategy(stages=2, replicas=2, device="cpu", **settings)
    trainer = Trainer(
        strategy, max_duration=f"{steps}step", run_dir=folder, seed=1, callbacks=[Checkpoint(every=f"{steps}step")]
    )
    trainer.fit(task, _data(batch_size), resume=resume)
    return strategy.mesh.grid, task.state_dict()


def _grids(folder, width, batch_size, deferred):
    return _fitted(folder, width, batch_size, deferred=deferred)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "batch_size", "deferred", "chosen"),
    [(4, 512, False, "cluster"), (64, 16, False, "spread"), (64, 16, True, "spread")],
)
def test_ranks_are_placed_where_they_send_fewer_bytes_between_hosts(tmp_path, width, batch_size, deferred, chosen):
    grids = run_ranks(_grids, 4, tmp_path / "run", width, batch_size, deferred, timeout=400)

    assert grids == [rank_grid(TWO_BY_TWO, stages=2, replicas=2, placement=chosen)] * 4
    plan = json.loads((tmp_path / "run" / "partition.json").read_text())
    best, other = plan["traffic"]
    assert best["placement"] == chosen
    sent, otherwise = (sum(row[kind] for kind in ("activations", "gradients", "weights")) for row in (best, other))
    assert sent <= otherwise
    assert f"placement={chosen} is used" in (tmp_path / "run" / "partition.txt").read_text()


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def _resumed(folder):
    """Return grids, weights and warnings of a whole run, one that resumes its half, and one placed otherwise."""
    messages = _Messages()
    logging.getLogger(strategy_module.__name__).addHandler(messages)
    runs = {"whole": _fitted(folder / "whole", 64, 16, steps=4)}
    _fitted(folder / "half", 64, 16, steps=2)
    PipelineStrategy._cheaper_placement = lambda *_: "cluster"  # as if other times were measured now
    runs["resumed"] = _fitted(folder / "resumed", 64, 16, steps=4, resume=folder / "half")
    assert not messages.found
    runs["otherwise"] = _fitted(folder / "otherwise", 64, 16, steps=4, resume=folder / "half", placement="cluster")
    return runs, messages.found


@pytest.mark.slow
def test_a_resumed_run_keeps_its_placement_and_is_bit_equal_and_another_placement_is_reported(tmp_path):
    of_ranks = run_ranks(_resumed, 4, tmp_path, timeout=400)

    runs, messages = of_ranks[0]
    spread, weights = runs["whole"]
    assert spread == [[0, 2], [1, 3]] and runs["resumed"][0] == spread
    assert all(torch.equal(weights[name], found) for name, found in runs["resumed"][1].items())
    assert runs["otherwise"][0] == [[0, 1], [2, 3]]
    (message,) = messages
    assert "placed as [[0, 1], [2, 3]], but were [[0, 2], [1, 3]] in the run that is resumed" in message
    assert "set strategy.placement=auto to repeat them" in message
    # So random generators do not go to ranks of other replicas.
    before, now = (load_from(tmp_path / name).payload["layout"] for name in ("half", "otherwise"))
    assert before.replace("[[0, 2], [1, 3]]", "[[0, 1], [2, 3]]") == now != before
