"""Compiling a task's forward."""

import pytest
import torch
from torch import nn

from tests.tasks import Regression, assert_close, assert_same_bits, regression_data
from trainkit import Data, TaskModule
from trainkit.model.transforms import compile_forward


class NoForward(TaskModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch):
        return (self.layer(batch[0]) - batch[1]).square().mean()


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
    task = NoForward()
    names = list(task.state_dict())
    compile_forward(task)
    task.training_step([torch.ones(2, 4), torch.ones(2, 1)]).backward()
    assert backend.graphs > 0
    assert list(task.state_dict()) == names
