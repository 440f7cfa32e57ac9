"""The random generators of Python and numpy, which a module may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def state() -> tuple[Any, ...]:
    """Return what `restore` needs, and what is another after a draw."""
    if "numpy" not in sys.modules:
        return (random.getstate(),)
    kind, keys, *rest = sys.modules["numpy"].random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def restore(saved: tuple[Any, ...]) -> None:
    """Let the generators go on from a state."""
    random.setstate(saved[0])
    for kind, keys, *rest in saved[1:]:
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def seed(number: int) -> None:
    """Seed the generators."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Draw from generators with this seed in the block, and go on as if nothing had been drawn."""
    before = state()
    seed(number)
    try:
        yield
    finally:
        restore(before)
