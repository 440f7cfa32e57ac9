"""Checkpoints of the trained parameters alone."""

from typing import Any

import pytest
import torch
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.ema import EMA
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Regression, assert_same_bits, on_cpu, regression_data, weights
from trainkit import Data, Phase, Trainer
from trainkit.checkpoint.store import load_from
from trainkit.errors import CheckpointError, UserError
from trainkit.testing import run_ranks

STRATEGIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("ddp", "torch_ddp", "fsdp", "pipeline")},
    "fusion": {"shard_optimizer": True},
}
FROZEN = ["network.0.weight", "network.0.bias"]


def data() -> Data:
    samples = regression_data(32, dtype=torch.float64)
    return Data(train=samples, validation=samples, batch_size=8)


def trainer(strategy: Any, folder: Any, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {"precision": "fp64", "loggers": [], "report": False, "num_sanity_batches": 0}
    defaults |= {"freeze": ["network.0"], "callbacks": [Checkpoint(trainable_only=True)], "run_dir": folder}
    return Trainer(strategy, **{**defaults, **settings})


class Phases(Regression):
    def configure_phases(self) -> list[Phase]:
        return [Phase("training", self.configure_optimizers())]


def single() -> SingleStrategy:
    return SingleStrategy(device="cpu")


def test_only_what_trains_is_saved_and_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    whole, stopped, resumed = (Regression(hidden=8) for _ in range(3))
    trainer(single(), tmp_path / "whole", max_duration="2epoch").fit(whole, data())
    trainer(single(), tmp_path / "run").fit(stopped, data())
    payload = load_from(tmp_path / "run").payload
    assert list(payload["task"]) == ["network.3.weight", "network.3.bias"]
    assert list(payload["frozen_weights"]["dtypes"]) == sorted(FROZEN)
    trainer(single(), None, max_duration="2epoch").fit(resumed, data(), resume=tmp_path / "run")
    assert_same_bits(resumed, whole)


def test_other_frozen_weights_are_refused_in_a_resumed_run_and_in_an_evaluation(tmp_path):
    task, run = Regression(hidden=8), tmp_path / "run"
    trainer(single(), run).fit(task, data())
    expected = trainer(single(), None).validate(task, data())
    assert trainer(single(), None).validate(Regression(hidden=8), data(), checkpoint=run) == expected
    for call in (Trainer.validate, Trainer.fit):
        settings = {"checkpoint": run} if call is Trainer.validate else {"resume": run}
        with pytest.raises(CheckpointError, match="2 frozen ones have other values than those it was trained on"):
            call(trainer(single(), None, max_duration="2epoch"), Regression(hidden=8, init_seed=1), data(), **settings)
    with pytest.raises(CheckpointError, match=r"2 unexpected: network.3.weight, network.3.bias"):
        trainer(single(), None, freeze=[]).validate(Regression(), data(), checkpoint=run)


def resumed_by_the_next(folder: str, expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return for each strategy the distance of the weights to `expected` in a run that the one before it stopped."""
    found = {}
    names = list(STRATEGIES)
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        trainer(on_cpu(name, **STRATEGIES[name]), f"{folder}/{name}").fit(Regression(hidden=8), data())
        assert len(load_from(f"{folder}/{name}").payload["task"]) == 2, name
        task = Regression(hidden=8)
        again = trainer(on_cpu(following, **STRATEGIES[following]), None, max_duration="2epoch")
        again.fit(task, data(), resume=f"{folder}/{name}")
        found[name] = max((own - expected[key]).abs().max().item() for key, own in weights(task).items())
    return found


@pytest.mark.slow
def test_every_strategy_resumes_what_another_saved(tmp_path):
    whole = Regression(hidden=8)
    trainer(single(), tmp_path / "whole", max_duration="2epoch").fit(whole, data())
    for found in run_ranks(resumed_by_the_next, 2, str(tmp_path), weights(whole), timeout=240):
        assert found.keys() == STRATEGIES.keys()
        assert all(distance < 1e-9 for distance in found.values()), found


def test_it_is_refused_where_checkpoints_must_hold_more(tmp_path):
    with pytest.raises(UserError, match=r"trainable_only=true works with whole checkpoints only"):
        Checkpoint(trainable_only=True, sharded=True)
    callbacks = [Checkpoint(trainable_only=True), EMA()]
    with pytest.raises(UserError, match="trainable_only=true does not work with EMA"):
        trainer(single(), tmp_path / "run", callbacks=callbacks).fit(Regression(hidden=8), data())
    with pytest.raises(UserError, match="trainable_only=true does not work with phases, of which each freezes"):
        trainer(single(), tmp_path / "run").fit(Phases(hidden=8), data())
