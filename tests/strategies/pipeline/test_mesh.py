"""Ranks of a pipeline on several hosts."""

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from trainkit.strategies.host_layout import HostLayout
from trainkit.strategies.pipeline import mesh as mesh_module
from trainkit.strategies.pipeline.mesh import PipelineMesh, backend_with_host, rank_grid, traffic_of
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.strategies.pipeline.models import Mlp
from tests.strategies.pipeline.training import Training, largest_difference, make, step_batches
from trainkit import Data, Trainer
from trainkit.errors import UserError
from trainkit.testing import run_ranks

TWO_BY_TWO = HostLayout.of(["a", "a", "b", "b"])


def test_a_host_has_the_stages_of_a_replica_or_the_replicas_of_a_stage():
    assert rank_grid(TWO_BY_TWO, stages=2, replicas=2, placement="cluster") == [[0, 1], [2, 3]]
    assert rank_grid(TWO_BY_TWO, stages=2, replicas=2, placement="spread") == [[0, 2], [1, 3]]
    interleaved = HostLayout.of(["a", "b", "a", "b"])
    assert rank_grid(interleaved, stages=2, replicas=2, placement="cluster") == [[0, 2], [1, 3]]
    with pytest.raises(UserError, match=r"hosts are \(0, 3\), \(1, 2\), in which no stages can be placed"):
        rank_grid(HostLayout.of(["a", "b", "b", "a"]), stages=2, replicas=2, placement="cluster")


def test_between_hosts_either_activations_are_sent_or_gradients():
    mesh = PipelineMesh(stages=2, replicas=2)
    mesh.hosts = TWO_BY_TWO
    sent = {"between_stages": {(0, 1): 10}, "gradients": [100, 200]}

    cluster, spread = (traffic_of(mesh, placement, **sent) for placement in ("cluster", "spread"))

    assert (cluster.activations, cluster.gradients) == (0, 600)  # each host sends and receives 300
    assert (spread.activations, spread.gradients) == (20, 0)


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


def _weights(placement):
    _of_two_hosts()
    strategy = PipelineStrategy(stages=2, replicas=2, placement=placement, device="cpu")
    training = Training(make(Mlp), strategy)
    mine = step_batches(Mlp, sizes=[4] * 4, num_steps=3, replica=strategy.comm.rank, num_replicas=2)
    training.run(mine)
    weights, place = training.weights(), (strategy.mesh.replica, strategy.mesh.stage)
    strategy.teardown()
    return place, weights


@pytest.mark.slow
def test_either_placement_trains_to_the_weights_of_one_process():
    single = Training(make(Mlp), SingleStrategy(device="cpu"))
    single.run(step_batches(Mlp, sizes=[4] * 4, num_steps=3))
    expected = {"cluster": [(0, 0), (0, 1), (1, 0), (1, 1)], "spread": [(0, 0), (1, 0), (0, 1), (1, 1)]}

    for placement, places in expected.items():
        found = run_ranks(_weights, 4, placement, timeout=400)
        assert [place for place, _ in found] == places
        assert largest_difference(found[0][1], single.weights()) < 1e-10


def _data(batch_size):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = Mlp.batch(3 * batch_size, generator)
    return Data(train=torch.utils.data.TensorDataset(inputs, targets), batch_size=batch_size)


def _fitted(folder, width, batch_size):
    """Train by a Trainer, in which ranks are placed before data is opened."""
    _of_two_hosts()
    task = make(Mlp, width=width, dropout=0.2).float()
    strategy = PipelineStrategy(stages=2, replicas=2, device="cpu")
    Trainer(strategy=strategy, max_duration="3step", run_dir=folder, seed=1).fit(task, _data(batch_size))
    return strategy.mesh.grid


@pytest.mark.slow
@pytest.mark.parametrize(("width", "batch_size", "chosen"), [(4, 512, "cluster"), (64, 16, "spread")])
def test_ranks_are_placed_where_they_send_fewer_bytes_between_hosts(tmp_path, width, batch_size, chosen):
    grids = run_ranks(_fitted, 4, tmp_path / "run", width, batch_size, timeout=400)

    assert grids == [rank_grid(TWO_BY_TWO, stages=2, replicas=2, placement=chosen)] * 4
    plan = json.loads((tmp_path / "run" / "partition.json").read_text())
    best, other = plan["traffic"]
    assert best["placement"] == chosen
    assert best["activations"] + best["gradients"] <= other["activations"] + other["gradients"]
    assert f"placement={chosen} is used" in (tmp_path / "run" / "partition.txt").read_text()
