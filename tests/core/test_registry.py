"""Finding strategies, callbacks and loggers by their short names."""

from importlib.metadata import EntryPoint

import pytest
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Recorder
from trainkit import Trainer, UserError, registry


def test_a_name_gives_a_new_object_with_default_settings():
    first, second = registry.make("strategy", "single"), registry.make("strategy", "single")
    assert type(first) is SingleStrategy
    assert first is not second
    assert first.accumulate is None


def test_an_unknown_name_is_rejected_with_the_nearest_and_all_names():
    with pytest.raises(UserError, match=r"unknown strategy 'sinlge'\. Did you mean 'single'\? There are: .*single"):
        Trainer(strategy="sinlge", callbacks=[], loggers=[])


@pytest.mark.parametrize(("setting", "group"), [("callbacks", "callbacks"), ("loggers", "logger")])
def test_an_unknown_callback_or_logger_is_refused(setting, group):
    with pytest.raises(UserError, match=f"unknown {group} 'nothing_like_this'"):
        Trainer(**{"callbacks": [], "loggers": [], setting: ["nothing_like_this"]})


def test_a_class_in_place_of_an_object_is_refused_with_what_to_write():
    with pytest.raises(UserError, match=r"Recorder is a class, not an object; write Recorder\(\)"):
        Trainer(callbacks=[Recorder], loggers=[])


def test_an_installed_packages_entry_point_is_a_name_like_any_other(monkeypatch):
    point = EntryPoint("mine", "trainkit.strategies.single:SingleStrategy", "trainkit.strategies")
    monkeypatch.setattr(registry, "_points", lambda group: [point] if group == "strategy" else [])
    assert type(registry.make("strategy", "mine")) is SingleStrategy
    assert {"mine", "single"} <= set(registry.names("strategy"))


def test_all_names_can_be_made():
    for name in registry.names("strategy"):
        assert registry.make("strategy", name).comm.world_size >= 1
