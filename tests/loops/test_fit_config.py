"""FitConfig: what the Trainer hands to the ranks."""

import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from trainkit import Duration, Trainer


def test_settings_cannot_change_after_they_were_checked(make_trainer):
    with pytest.raises(FrozenInstanceError):
        make_trainer().fit_config.seed = 3


def test_a_process_gets_the_settings_without_the_trainer(make_trainer):
    config = make_trainer(
        max_duration=["2epoch", "5min"], max_grad_norm=0.5, callbacks=["learning_rate_monitor"]
    ).fit_config
    copy = pickle.loads(pickle.dumps(config))
    assert copy.max_duration == [Duration(2, "epoch"), Duration(5, "minute")]
    assert copy.clip == config.clip
    assert [type(callback) for callback in copy.callbacks] == [type(callback) for callback in config.callbacks]
    assert not any(isinstance(getattr(config, field.name), Trainer) for field in fields(config))


def test_fast_dev_run_takes_one_batch_of_every_stage_and_no_loggers(make_trainer):
    config = make_trainer(fast_dev_run=True, max_duration="9epoch", loggers=["jsonl"]).fit_config
    assert config.max_duration == [Duration(1, "step")]
    assert set(config.limits.values()) == {1}
    assert config.loggers == []
