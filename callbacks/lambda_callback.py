"""Functions as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from trainkit.callback import HOOKS, Callback
from trainkit.errors import UserError, nearest

Function = Callable[..., object]


class LambdaCallback(Callback):
    """Calls a function for each given hook.

    `LambdaCallback({"on_step_end": lambda run: ...})`. In YAML a function is given by its dotted path.

    Args:
        functions: For each hook, the function that is called with the arguments of the hook.

    """

    def __init__(self, functions: Mapping[str, str | Function] | None = None) -> None:
        for moment, function in (functions or {}).items():
            if moment not in HOOKS:
                raise UserError(
                    f"functions.{moment} is not a hook of a callback.{nearest(moment, HOOKS)} There are: "
                    f"{', '.join(HOOKS)}."
                )
            setattr(self, moment, _found(function, moment) if isinstance(function, str) else function)


def _found(path: str, moment: str) -> Function:
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"functions.{moment}: there is no {path!r} ({error}); write my_package.my_function.") from None
    if not callable(found):
        raise UserError(f"functions.{moment}: {path} is a {type(found).__name__}, not a function.")
    function: Function = found
    return function
