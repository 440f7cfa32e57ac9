"""Calls of chosen modules, led through a session that decides whether and how they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

Call = Callable[..., Any]


class Session(Protocol):
    """What decides about the calls of intercepted modules while it is open."""

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the module `name`; `call` is the module as it is without interception."""


class Interception:
    """Gives the chosen modules, while installed, a class that asks the open session on each call.

    Hooks, parameters, names and `isinstance` stay as they are; without an open session the modules behave as
    ever. The class is swapped because a hook cannot prevent a call, and `__call__` is looked up on the class.
    """

    def __init__(self, modules: Mapping[str, nn.Module]):
        self._modules = dict(modules)
        self._names = {id(module): name for name, module in modules.items()}
        self._classes: dict[type, type] = {}
        self._session: Session | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Give the modules their intercepting classes, and take them away again."""
        originals = [(module, type(module)) for module in self._modules.values()]
        try:
            for module, original in originals:
                object.__setattr__(module, "__class__", self._intercepting(original))
            yield
        finally:
            for module, original in originals:
                object.__setattr__(module, "__class__", original)

    @contextmanager
    def session(self, session: Session | None) -> Iterator[None]:
        """Lead calls through `session`; `None` lets them through."""
        outer, self._session = self._session, session
        try:
            yield
        finally:
            self._session = outer

    def _intercepting(self, original: type) -> type:
        if original not in self._classes:
            names = self._names
            original_call = original.__call__

            def intercepted_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                session = self._session
                name = names.get(id(module))  # none for a slice of a Sequential, which inherits the class
                if session is None or name is None:
                    return original_call(module, *args, **kwargs)
                return session.module_call(name, original_call.__get__(module), args, kwargs)

            namespace = {
                "__call__": intercepted_call,
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                "__doc__": original.__doc__,
            }
            self._classes[original] = type(original)(original.__name__, (original,), namespace)
        return self._classes[original]
