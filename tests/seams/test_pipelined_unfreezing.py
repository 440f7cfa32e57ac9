"""Parameters that begin to be trained during a run, in a pipeline with replicas."""

import pytest
import torch
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.seams.training import BOUND, MAKE_STRATEGY, Layers, batches, difference, trained
from trainkit import Callback
from trainkit.errors import UserError


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class PartlyFrozen(Layers):
    """A task whose first and last layers are frozen at first."""

    def finish(self):
        self.a.requires_grad_(False)
        self.c.requires_grad_(False)


class Unfreeze(Callback):
    """Unfreezes the layers after the third step."""

    def on_step_end(self, run):
        if run.state.step == 3:
            run.task.requires_grad_(True)


def plain_loop():
    task = PartlyFrozen()
    optimizer = task.configure_optimizers()
    for step, (inputs, targets) in enumerate(batches(), start=1):
        task.training_step((inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            task.requires_grad_(True)
    return task.state_dict()


def test_replicas_reduce_the_gradients_of_parameters_unfrozen_in_the_run(monkeypatch):
    monkeypatch.setitem(MAKE_STRATEGY, "grid", lambda: PipelineStrategy(device="cpu", stages=2, replicas=2))
    assert difference(trained("grid", PartlyFrozen(), Unfreeze()), plain_loop()) < BOUND


def test_a_stage_that_begins_to_need_gradients_of_an_earlier_one_is_refused(monkeypatch):
    def split():
        return PipelineStrategy(device="cpu", stages=2, split_points=["b"])

    monkeypatch.setitem(MAKE_STRATEGY, "split", split)
    with pytest.raises(UserError, match=r"`tanh`.* needs a gradient.*strategy=ddp"):
        trained("split", PartlyFrozen(), Unfreeze())


class OnlyTrained(PartlyFrozen):
    def configure_optimizers(self):
        return torch.optim.SGD(self.b.parameters(), lr=0.1)


class AddLast(Callback):
    """Adds the last layer to the optimizer after the third step."""

    def on_step_end(self, run):
        if run.state.step == 3:
            run.task.c.requires_grad_(True)
            run.phase_optimizers[0].optimizer.add_param_group({"params": list(run.task.c.parameters())})


def test_an_optimizer_that_grows_after_it_was_divided_is_refused(monkeypatch):
    settings = {"device": "cpu", "stages": 1, "replicas": 2, "shard_optimizer": True}
    monkeypatch.setitem(MAKE_STRATEGY, "divided", lambda: PipelineStrategy(**settings))
    with pytest.raises(UserError, match=r"into the optimizer during the run.*shard_optimizer=false"):
        trained("divided", OnlyTrained(), AddLast())
