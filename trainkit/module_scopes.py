"""Which module is being called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def module_scopes(root: nn.Module) -> Iterator[list[str]]:
    """Yield a list that holds, while modules run, the names of those being called, the innermost last."""
    scopes: list[str] = []
    handles: list[Any] = []
    for name, module in root.named_modules():
        handles += [
            module.register_forward_pre_hook(_entering(scopes, name)),
            module.register_forward_hook(lambda *_: _leave(scopes), always_call=True),
        ]
    try:
        yield scopes
    finally:
        for handle in handles:
            handle.remove()


def _entering(scopes: list[str], name: str) -> Callable[..., None]:
    return lambda *_: scopes.append(name)


def _leave(scopes: list[str]) -> None:
    scopes.pop()
