"""Tasks, which know no trainer, rank or device, and the errors for missing methods."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.tasks import Regression, adamw, regression_data
from trainkit import Data, TaskModule, UserError

DATA = Data(train=regression_data(8), validation=regression_data(4), batch_size=4)


def test_a_step_runs_with_a_batch_and_nothing_else():
    task = Regression()
    batch = [torch.ones(3, 4), torch.ones(3, 1)]
    assert task.training_step(batch).shape == ()
    assert set(task.validation_step(batch)) == {"loss", "absolute"}
    assert task.test_step(batch) == task.validation_step(batch)
    assert torch.equal(task.predict_step(batch), task(batch[0]))


class WithOptimizer(TaskModule):
    configure_optimizers = adamw

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)


def test_predicting_calls_the_task_by_default():
    class Calls(TaskModule):
        def forward(self, batch):
            return batch + 1

    assert Calls().predict_step(torch.ones(1)) == 2


def test_a_task_without_training_step_is_rejected_with_the_remedy(make_trainer):
    with pytest.raises(UserError, match=r"WithOptimizer has no training_step; define training_step\(self, batch\)"):
        make_trainer().fit(WithOptimizer(), DATA)


def test_a_task_without_validation_step_is_rejected_with_the_remedy(make_trainer):
    class NoValidation(WithOptimizer):
        def training_step(self, batch):
            return self.layer(batch[0]).sum()

    with pytest.raises(UserError, match=r"NoValidation has no validation_step; define validation_step\(self, batch\)"):
        make_trainer(num_sanity_batches=1).fit(NoValidation(), DATA)


def test_a_task_without_an_optimizer_is_rejected_with_the_remedy(make_trainer):
    class NoOptimizer(TaskModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 1)

    with pytest.raises(UserError, match=r"define configure_optimizers\(self\): return torch\.optim\.AdamW\(self\.par"):
        make_trainer().fit(NoOptimizer(), DATA)


@pytest.mark.parametrize("call", ["log", "log_dict"])
def test_a_task_that_logs_as_in_lightning_is_told_to_return_the_value(make_trainer, call):
    class Logs(Regression):
        def training_step(self, batch):
            loss = super().training_step(batch)
            getattr(self, call)(*(("mse", loss) if call == "log" else ({"mse": loss},)), prog_bar=True)
            return loss

    message = r"Logs calls self\.log\('mse'\), but .* write return \{'loss': loss, .*LightningTask\(module\)"
    with pytest.raises(UserError, match=message):
        make_trainer().fit(Logs(), DATA)


def test_an_attribute_called_log_is_the_users_own(make_trainer):
    class Own(Regression):
        def __init__(self):
            super().__init__()
            self.log = []

        def training_step(self, batch):
            self.log.append(len(batch[0]))
            return super().training_step(batch)

    task = Own()
    make_trainer(max_duration="1step").fit(task, DATA)
    assert task.log == [4]


def test_a_task_is_copied_and_pickled_like_any_module():
    task = Regression()
    for copied in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert torch.equal(copied.network[0].weight, task.network[0].weight)


def test_training_changes_the_task_in_place_and_wraps_nothing(make_trainer):
    task = Regression()
    names, layer, parameters = list(task.state_dict()), task.network[0], set(map(id, task.parameters()))
    make_trainer().fit(task, DATA)
    assert list(task.state_dict()) == names
    assert task.network[0] is layer
    assert set(map(id, task.parameters())) == parameters
