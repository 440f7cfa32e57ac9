"""The table of docs/step.md: "yes" trains to the weights of one device with one micro-batch, "refused" is refused."""

from pathlib import Path

import pytest
import torch
from torch import nn
from trainkit.strategies.single import SingleStrategy

from tests.seams import training
from tests.seams.test_backward_in_step import Twice
from tests.seams.test_carried_state import AttributeFromTheBeginning, BufferByRows, BufferOfAMean, lanes
from tests.seams.test_coupled_optimizers import WithNormalised, WithPerTensor
from tests.seams.test_pipelined_hooks import Tied
from tests.seams.test_sharded_parameters import Functional
from tests.seams.training import BOUND, WIDTH, Layers, difference, trained
from trainkit.errors import UserError

PAGE = Path(__file__).parents[2] / "docs/step.md"


class SparseGradients(Layers):
    def build(self):
        self.embedding = nn.Embedding(6, WIDTH, sparse=True)
        nn.init.ones_(self.embedding.weight)

    def forward(self, inputs):
        return super().forward(inputs + self.embedding((inputs[:, 0] * 100).long() % 6))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scripted(Layers):
    def build(self):
        self.scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))


class WithLBFGS(Layers):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


STARTED = [("a running mean", "ddp"), ("`functional_call`", "ddp"), ("sparse gradients", "pipeline")]
STARTED += [("TorchScript", "fsdp"), ("TorchScript", "pipeline")]
TRIALS = {
    "a buffer with a row": BufferByRows,
    "tensors in an attribute": AttributeFromTheBeginning,
    "a running mean": BufferOfAMean,
    "a `backward` of its own": Twice,
    "LBFGS": WithLBFGS,
    "one that uses all elements": WithPerTensor,
    "one that uses all gradients": WithNormalised,
    "shared (tied) weights": Tied,
    "sparse gradients": SparseGradients,
    "`functional_call`": Functional,
    "TorchScript": Scripted,
}


def cell(row, strategy):
    lines = [line.strip(" |\n").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    (column,) = (index for index, title in enumerate(lines[0]) if title.startswith(f"`{strategy}`"))
    (found,) = (line for line in lines if line[0].startswith(row))
    return found[column]


@pytest.mark.parametrize(("row", "strategy"), [*((row, one) for one in ("single", "dp") for row in TRIALS), *STARTED])
def test_a_cell_of_the_table_is_true(row, strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(training.MAKE_STRATEGY, "one", lambda: SingleStrategy(device="cpu"))
    words, make_task, data = cell(row, strategy), TRIALS[row], lanes() if TRIALS[row] is BufferByRows else None
    if words == "no: refused" or "one micro-batch" in words:  # the strategies of these tests have two
        with pytest.raises(UserError):
            trained(strategy, make_task(), data=data)
    else:
        assert words == "yes"
        assert difference(trained(strategy, make_task(), data=data), trained("one", make_task(), data=data)) < BOUND
