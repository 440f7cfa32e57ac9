"""Sparse buffers (the adjacency of a graph) and sparse batches train as dense ones in a plain loop."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from trainkit.callbacks.checkpoint import Checkpoint

from tests.seams.training import BOUND, EVERY, MAKE_STRATEGY, WIDTH, Layers, batches, difference, samples, trained
from trainkit import Data, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
SPARSE = {"coo": torch.Tensor.to_sparse, "csr": torch.Tensor.to_sparse_csr}


def adjacency():
    return (torch.rand(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) > 0.5).double()


class Graph(Layers):
    layout = "coo"

    def finish(self):
        self.register_buffer("adjacency", SPARSE[self.layout](adjacency()))

    def forward(self, inputs):
        return super().forward(torch.sparse.mm(self.adjacency, inputs.T).T)


class CompressedGraph(Graph):
    layout = "csr"


class SparseInputs(Layers):
    def forward(self, inputs):
        hidden = torch.sparse.mm(inputs, self.a.weight.T) + self.a.bias
        return self.c(torch.tanh(self.b(torch.tanh(hidden))))


class SparseBatches(Dataset):
    """Global batches whose inputs are sparse."""

    def __init__(self, layout):
        self.batches = [(SPARSE[layout](inputs.relu()), targets) for inputs, targets in batches()]

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def plain_loop(change):
    task = Layers()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)
    for inputs, targets in batches():
        nn.functional.mse_loss(task(change(inputs)), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return task.state_dict()


def without_graph(weights):
    return {name: tensor for name, tensor in weights.items() if name != "adjacency"}


@pytest.mark.parametrize("strategy", EVERY)
def test_a_sparse_buffer_stays_on_every_rank(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reference = plain_loop(lambda inputs: inputs @ adjacency().T)
    for task in (Graph(), CompressedGraph()):
        assert difference(without_graph(trained(strategy, task)), reference) < BOUND
        assert torch.equal(task.adjacency.to_dense(), adjacency())


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_sparse_buffer_is_saved_and_restored(strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reference = plain_loop(lambda inputs: inputs @ adjacency().T)
    for make in (Graph, CompressedGraph):
        folder, task = str(tmp_path / make.__name__), make()
        trained(strategy, make(), Checkpoint(every="3step"), run_dir=folder, max_duration="3step")
        again = Trainer(MAKE_STRATEGY[strategy](), max_duration="1epoch", callbacks=[], loggers=[], run_dir=folder)
        again.fit(task, Data(train=samples(), batch_size=8, shuffle=False), resume=folder)
        assert difference(without_graph(task.state_dict()), reference) < BOUND


@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "pipeline"])
def test_sparse_batches_are_split_by_rows(strategy, layout, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = Data(train=SparseBatches(layout), batch_size=None, shuffle=False)
    assert difference(trained(strategy, SparseInputs(), data=data), plain_loop(torch.relu)) < BOUND
