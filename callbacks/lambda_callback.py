"""Functions as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from trainkit.callback import HOOKS, Callback
from trainkit.errors import UserError, nearest

Function = Callable[..., object]


class LambdaCallback(Callback):
    """Calls a function at each of the given hooks.

    `LambdaCallback(functions={"on_step_end": lambda run: ...})`. In YAML a function is given by its dotted path.

    Args:
        functions: For each hook, the function that is called with the arguments of the hook.

    """

    def __init__(self, *, functions: Mapping[str, str | Function] | None = None) -> None:
        if functions is not None and not isinstance(functions, Mapping):
            raise UserError(f"functions={functions!r} is not a mapping; write functions={{'on_step_end': function}}.")
        for hook, function in (functions or {}).items():
            if hook not in HOOKS:
                raise UserError(
                    f"functions.{hook} is not a hook of a callback.{nearest(hook, HOOKS)} There are: "
                    f"{', '.join(HOOKS)}."
                )
            if not isinstance(function, str) and not callable(function):
                raise UserError(f"functions.{hook}: {function!r} is not a function.")
            setattr(self, hook, _import(function, hook) if isinstance(function, str) else function)


def _import(path: str, hook: str) -> Function:
    module, _, name = path.rpartition(".")
    try:
        function: Function = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"functions.{hook}: {path!r} cannot be imported ({error}); write my_package.my_function."
        ) from None
    if not callable(function):
        raise UserError(f"functions.{hook}: {path} is a {type(function).__name__}, not a function.")
    return function
