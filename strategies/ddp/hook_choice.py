"""The communication hook that a strategy's settings name: one of ours, or any function, by its import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch.distributed as dist

from trainkit.errors import UserError, nearest

from .communication_hooks import HOOKS, AveragePeriod, PowerSGD
from .hook_run import CommunicationHook

_STATES: dict[str, type[PowerSGD | AveragePeriod]] = {"power_sgd": PowerSGD, "local_sgd": AveragePeriod}
_INTERNAL = frozenset({"group", "factors", "errors", "steps", "step"})  # fields that are no settings


@dataclass(frozen=True, slots=True)
class HookChoice:
    """A hook, and how its state is made once the process group is there."""

    hook: CommunicationHook
    make_state: Callable[..., Any] | None
    """Called with the process group and the options; without it the state is the group."""
    options: Mapping[str, Any]

    def state(self, group: dist.ProcessGroup) -> Any:
        """Return a new state of the hook for the ranks of `group`."""
        return group if self.make_state is None else self.make_state(group, **self.options)


def choose_hook(
    hook: str | CommunicationHook, *, state: str | Callable[..., Any] | None, options: Mapping[str, Any] | None
) -> HookChoice | None:
    """Return what the settings `hook`, `hook_state` and `hook_options` name together, or None for no hook.

    Raises UserError for what does not exist, cannot be called or does not go together.
    """
    options = dict(options or {})
    if isinstance(hook, str) and "." not in hook:
        return _own_hook(hook, state=state, options=options)
    function = _imported("hook", hook)
    make_state = None if state is None else _imported("hook_state", state)
    if make_state is None and options:
        raise UserError(
            f"hook_options={options} belong to power_sgd, local_sgd, or to what strategy.hook_state makes; set "
            "hook_state to the import path of a class that is called with the process group and these options."
        )
    if make_state is not None:
        _check_names(options, _arguments_of(make_state))
    return HookChoice(function, make_state, options)


def _own_hook(name: str, *, state: str | Callable[..., Any] | None, options: Mapping[str, Any]) -> HookChoice | None:
    if name not in HOOKS:
        raise UserError(
            f"hook={name!r} is unknown.{nearest(name, HOOKS)} Choose {', '.join(HOOKS)}, or the import path of a "
            "function such as torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook."
        )
    if state is not None:
        raise UserError(f"hook_state belongs to a hook of your own; hook={name} has its own. Leave hook_state out.")
    kind = _STATES.get(name)
    valid = [] if kind is None else [field.name for field in fields(kind) if field.name not in _INTERNAL]
    _check_names(options, valid)
    for option, value in options.items():
        least = 0 if option == "start_step" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"hook_options.{option} must be a whole number, at least {least}, got {value!r}.")
    hook = HOOKS[name]
    return None if hook is None else HookChoice(hook, kind, options)


def _check_names(options: Mapping[str, Any], valid: list[str] | None) -> None:
    for option in options:
        if valid is not None and option not in valid:
            known = f"There are: {', '.join(valid)}." if valid else "This hook has none."
            raise UserError(f"hook_options has no {option!r}.{nearest(option, valid)} {known}")


def _arguments_of(make_state: Callable[..., Any]) -> list[str] | None:
    """Return the names that may be given after the process group; None where any may."""
    try:
        parameters = list(inspect.signature(make_state).parameters.values())
    except ValueError:  # written in C
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters[1:]]


def _imported(setting: str, value: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(value, str):
        found: Any = value
    else:
        module, _, name = value.rpartition(".")
        try:
            home = import_module(module)
        except ImportError as error:
            raise UserError(f"{setting}={value} cannot be imported: {error}.") from None
        found = getattr(home, name, None)
        if found is None:
            raise UserError(f"{setting}={value}: {module} has no {name!r}.{nearest(name, vars(home))}")
    if not callable(found):
        raise UserError(f"{setting} must be a function or its import path, got {value!r}.")
    function: Callable[..., Any] = found
    return function
