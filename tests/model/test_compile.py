"""Compiling a task's forward or its blocks, and the report of it."""

import shutil
from typing import Any

import pytest
import torch
from torch import nn
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.dp import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.marks import EVERY_CASE, in_make_zoo
from tests.tasks import Fitting, Regression, assert_close, assert_same_bits, regression_data
from trainkit import Data, TaskModule, Trainer
from trainkit.errors import UserError
from trainkit.model.compile import Compilation
from trainkit.testing import run_ranks


class Backend:
    """Stands in for a compiler: counts the graphs it is given and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture
def backend(monkeypatch):
    backend, compiled = Backend(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, *args, **settings: compiled(model, backend=backend))
    yield backend
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of is its own
def test_a_compiled_task_has_the_same_names_and_trains_to_the_same_weights(make_trainer, backend):
    task, expected = Regression(hidden=8), Regression(hidden=8)
    data = Data(train=regression_data(16), validation=regression_data(8, seed=1), batch_size=4)
    make_trainer(compile=True, max_duration="2epoch").fit(task, data)
    make_trainer(max_duration="2epoch").fit(expected, data)
    assert backend.graphs > 0
    assert list(task.state_dict()) == list(expected.state_dict())
    assert_close(task, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_a_compiled_task_fits_the_plain_one(make_trainer, backend):
    from tests.tasks import StopAt

    data = Data(train=regression_data(16), batch_size=4)
    compiled, plain = Regression(hidden=8), Regression(hidden=8)
    trainer = make_trainer(compile=True, callbacks=[StopAt(4)])
    trainer.fit(compiled, data)
    make_trainer().fit(plain, data, resume=trainer.run_dir)  # which has no step left to do
    assert_same_bits(plain, compiled)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_task_without_a_forward_has_its_modules_compiled(make_trainer, backend):
    task = Fitting(nn.Linear(4, 1))
    names = list(task.state_dict())
    Compilation().apply(task)
    task.training_step([torch.ones(2, 4), torch.ones(2, 1)]).backward()
    assert backend.graphs > 0
    assert list(task.state_dict()) == names


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, inputs):
        return inputs + self.layer(inputs).tanh()


class Tower(TaskModule):
    """Blocks between two layers; the same weights every time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, inputs):
        hidden = self.inlet(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def training_step(self, batch):
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Breaking(Tower):
    def forward(self, inputs):
        torch._dynamo.graph_break()
        return super().forward(inputs)


STRATEGIES = {
    "ddp": lambda: DDPStrategy(device="cpu"),
    "torch_ddp": lambda: TorchDDPStrategy(device="cpu"),
    "fsdp": lambda: FSDPStrategy(device="cpu", units=["Block"]),
    "fusion": lambda: FusionStrategy(device="cpu"),
    "pipeline": lambda: PipelineStrategy(device="cpu", accumulate=2),
}


ONE_WAY = {"torch_ddp": False, "fusion": True}
"""Strategies that train the whole task compiled, or its blocks, and both in `make zoo`."""


def fitted(strategy: Any, compile: Any, folder: str) -> torch.Tensor:
    """Return the weights after training."""
    task, data = Tower(), Data(train=regression_data(32, dtype=torch.float64), batch_size=8)
    settings = {"max_duration": "3step", "precision": "fp64", "callbacks": [], "loggers": [], "report": False}
    Trainer(strategy, compile=compile, run_dir=folder, **settings).fit(task, data)
    return torch.cat([tensor.reshape(-1) for tensor in task.state_dict().values()])


def compiled_and_eager(folder: str) -> dict[str, tuple[float, int]]:
    """Return for each strategy the distance of the weights to those without compiling, and the number of graphs."""
    found = {}
    for name, make in STRATEGIES.items():
        counts, settings = torch._dynamo.utils.counters["stats"], {"backend": "aot_eager"}
        expected = fitted(make(), False, f"{folder}/{name}_eager")
        for part in ({}, {"blocks": ["Block"]}):
            if name == "pipeline" and not part:
                continue  # refused
            if name in ONE_WAY and bool(part) != ONE_WAY[name] and not EVERY_CASE:
                continue
            torch.compiler.reset()
            before = counts["unique_graphs"]
            weights = fitted(make(), settings | part, f"{folder}/{name}_{len(part)}")
            found[f"{name} {part}"] = (weights - expected).abs().max().item(), counts["unique_graphs"] - before
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_tasks_and_blocks_train_to_the_weights_of_eager_ones_under_every_strategy(tmp_path):
    for found in run_ranks(compiled_and_eager, 2, str(tmp_path), timeout=300):
        assert len(found) == (9 if EVERY_CASE else 7)
        for case, (distance, graphs) in found.items():
            assert distance < 1e-9, case
            assert graphs > 0, case


@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of is its own
def test_blocks_are_compiled_by_name_or_class_and_nothing_else(make_trainer):
    data = Data(train=regression_data(8), batch_size=4)
    for blocks in (["blocks.*"], ["Block"], [Block]):
        task = Tower()
        make_trainer(compile={"backend": "eager", "blocks": blocks}).fit(task, data)
        compiled = [name for name, module in task.named_modules() if module._compiled_call_impl is not None]
        assert compiled == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.slow
@in_make_zoo
@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of is its own
def test_inductor_with_options_trains_to_the_weights_of_an_eager_task(make_trainer):
    data = Data(train=regression_data(8), batch_size=4)
    compiled, eager = Tower(), Tower()
    make_trainer(compile={"options": {"epilogue_fusion": False}, "blocks": ["Block"]}).fit(compiled, data)
    make_trainer().fit(eager, data)
    assert_close(compiled, eager)


@pytest.mark.filterwarnings("ignore")
def test_modules_of_a_class_are_compiled_once_for_each_of_their_shapes(make_trainer):
    trainer = make_trainer(compile={"backend": "eager", "blocks": ["Linear"]}, max_duration="2epoch")
    trainer.fit(Tower(), Data(train=regression_data(8), batch_size=4))  # 4 to 8, three of 8 to 8, 8 to 1
    assert (trainer.run_dir / "compile.txt").read_text() == "compiled graphs: 3, graph breaks: 0, recompiles: 0\n"


@pytest.mark.filterwarnings("ignore")
def test_the_run_folder_lists_graph_breaks_and_recompiles_with_their_lines(make_trainer):
    torch.compiler.reset()
    trainer = make_trainer(compile={"backend": "eager"})
    trainer.fit(Breaking(), Data(train=regression_data(10), batch_size=4))  # a last batch of 2: a recompile
    report = (trainer.run_dir / "compile.txt").read_text()
    line = Breaking.forward.__code__.co_firstlineno + 1
    assert "graph breaks: 1, recompiles: 1\n" in report.splitlines()[0] + "\n"
    assert f"1 x {__file__}:{line}: Call to `torch._dynamo.graph_break()`" in report
    assert "size mismatch at index 0. expected 4, actual 2" in report


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "max-autotun"}, "compile.mode: 'max-autotun' is unknown. Did you mean 'max-autotune'?"),
        ({"backend": "aot_eagr"}, "compile.backend: 'aot_eagr' is unknown. Did you mean 'aot_eager'?"),
        ({"options": {"max_autotunes": True}}, "'max_autotunes' is unknown. Did you mean 'max_autotune'?"),
        ({"options": {"max_autotune": "x"}}, "type of attr max_autotune, got str should be bool"),
        ({"options": True}, "compile.options=True is not a mapping"),
        ({"bloks": ["Block"]}, "compile.bloks is unknown. Did you mean 'blocks'?"),
        ({"fullgraph": "yes"}, "compile.fullgraph must be True or False, got 'yes'"),
        ({"mode": "default", "options": {"max_autotune": True}}, "Either mode or options"),
        ({"backend": "eager", "mode": "default"}, "compile.mode is a setting of backend=inductor, not of eager"),
        ({"blocks": "Block"}, "write blocks=['Block']"),
        ({"blocks": ["Blok"]}, "'Blok' matches no module. Did you mean 'Block'?"),
        ({"blocks": ["blocks"]}, "blocks is a ModuleList, which has no forward; name the modules in it"),
    ],
)
def test_settings_that_do_not_exist_are_refused_before_training(make_trainer, settings, message):
    with pytest.raises(UserError) as raised:
        make_trainer(compile=settings).fit(Tower(), Data(train=regression_data(8), batch_size=4))
    assert message in str(raised.value)


def test_dp_refuses_to_compile(make_trainer):
    with pytest.raises(UserError, match=r"compile does not work with DataParallelStrategy.*strategy=ddp"):
        trainer = make_trainer(DataParallelStrategy(devices=2), compile=True)
        trainer.fit(Tower(), Data(train=regression_data(8), batch_size=4))
