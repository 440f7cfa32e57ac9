"""The hooks of a run."""

import inspect

from trainkit import Callback
from trainkit.callback import HOOKS


def test_every_hook_method_is_listed():
    methods = {name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if name.startswith("on_")}
    assert methods == set(HOOKS)
    assert len(HOOKS) == len(methods)


def test_a_callback_that_overrides_nothing_can_be_closed_saved_and_restored():
    callback = Callback()
    assert callback.state_dict() == {}
    callback.load_state_dict({})
    callback.close()
    callback.close()
