"""What the trainer imports and calls draws from no global generator: a step has the draws of a plain loop."""

import importlib
import random
import sys

import numpy as np
import pytest
import torch

from tests.program import Program
from tests.seams.training import BATCH_SIZE, Layers, samples
from trainkit import Data, Logger, Trainer, registry
from trainkit.callback import Callback
from trainkit.trainer import DEFAULT_CALLBACKS

SETTINGS = {
    "model_summary": {"costs": True},
    "checkpoint": {"every": "2step"},
    "early_stopping": {"monitor": "validation/loss"},
    "ema": None,  # these change the training
    "gradual_unfreezing": None,
    "lambda_callback": None,
    "learning_rate_finder": None,
    "swa": None,
}
QUIET = [name for name in registry.names("callbacks") if SETTINGS.get(name, {}) is not None and name != "default"]


@pytest.fixture(autouse=True)
def _rich_is_imported_before_a_run_of_this_process():
    importlib.import_module("rich.style")


class Draws(Layers):
    """Draws in each step from python's, numpy's and torch's generators, and keeps the numbers in a buffer."""

    def finish(self):
        self.register_buffer("drawn", torch.zeros(3, dtype=torch.float64))

    def training_step(self, batch):
        numbers = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
        self.drawn.mul_(0.9).add_(numbers)
        return super().training_step(batch) * random.random()


def fit(steps, folder, *, callbacks=None, loggers=None, resume=None):
    task = Draws()
    trainer = Trainer(
        max_duration=f"{steps}step", callbacks=callbacks, loggers=loggers, log_every="1step", run_dir=folder
    )
    trainer.fit(task, Data(train=samples(), validation=samples(), batch_size=BATCH_SIZE), resume=resume)
    return task.state_dict()


def assert_equal(state, expected):
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def resume_in_a_new_process(folder, expected):
    assert "rich" not in sys.modules
    assert_equal(fit(6, None, resume=folder), expected)


def test_a_run_that_is_resumed_in_a_new_process_draws_like_one_that_was_not_interrupted(tmp_path):
    expected = fit(6, tmp_path / "one")
    fit(3, tmp_path / "two")
    with Program(resume_in_a_new_process, tmp_path / "two", expected) as program:
        assert program.wait() == 0


def fit_with_each_callback(folder, expected):
    assert "rich" not in sys.modules
    for name in QUIET:
        callback = registry.make("callbacks", name, SETTINGS.get(name, {}))
        print(name)  # the last one that is shown is that of a failure
        assert_equal(fit(4, folder / name, callbacks=[callback]), expected)


def test_no_callback_of_the_trainer_draws(tmp_path):
    assert {*DEFAULT_CALLBACKS} < {*QUIET}
    expected = fit(4, None, callbacks=[], loggers=[])
    with Program(fit_with_each_callback, tmp_path, expected) as program:
        assert program.wait() == 0


class NamesRuns(Logger):
    def open(self, folder, *, step):
        random.random()

    def write(self, metrics, *, step):
        random.random(), np.random.rand(), torch.rand(())


def test_what_a_logger_draws_does_not_change_training(tmp_path):
    expected = fit(4, None, callbacks=[], loggers=[])
    assert_equal(fit(4, tmp_path / "run", callbacks=[], loggers=[NamesRuns()]), expected)


class DrawsToo(Callback):
    def on_step_end(self, run):
        random.random()


def test_what_a_callback_of_the_user_draws_counts(tmp_path):
    states = [fit(4, None, callbacks=callbacks, loggers=[]) for callbacks in ([], [DrawsToo()])]
    assert not torch.equal(states[0]["drawn"], states[1]["drawn"])
