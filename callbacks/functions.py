"""Functions of the user's as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from trainkit.callback import HOOKS, Callback
from trainkit.errors import UserError, nearest

Function = Callable[..., object]


class LambdaCallback(Callback):
    """Calls a function at each of the moments that are given.

    `LambdaCallback({"on_step_end": lambda run: ...})`. In YAML a function is the dotted path to it.

    Args:
        functions: For each moment, what is called with the arguments of that moment.

    """

    def __init__(self, functions: Mapping[str, str | Function] | None = None) -> None:
        for moment, function in (functions or {}).items():
            if moment not in HOOKS:
                raise UserError(
                    f"functions.{moment} is no moment of a run.{nearest(moment, HOOKS)} There are: {', '.join(HOOKS)}."
                )
            setattr(self, moment, _found(function, moment) if isinstance(function, str) else function)


def _found(path: str, moment: str) -> Function:
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"functions.{moment}: there is no {path!r} ({error}); write my_package.my_function.") from None
    if not callable(found):
        raise UserError(f"functions.{moment}: {path} is a {type(found).__name__}, and a function is wanted.")
    function: Function = found
    return function
