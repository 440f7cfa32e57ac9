"""Moments of a run at which user code may be called."""

import inspect

from trainkit import Callback
from trainkit.callback import MOMENTS


def test_every_method_that_is_a_moment_is_listed_as_one():
    methods = {name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if name.startswith("on_")}
    assert methods == set(MOMENTS)
    assert len(MOMENTS) == len(methods)


def test_a_callback_that_overrides_nothing_can_be_closed_saved_and_restored():
    callback = Callback()
    assert callback.state_dict() == {}
    callback.load_state_dict({})
    callback.close()
    callback.close()
