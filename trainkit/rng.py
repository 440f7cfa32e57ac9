"""Random generators of python, numpy and torch: seed, capture and restore."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch on every device."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(*, devices: bool = True) -> dict[str, Any]:
    """Return the state of python's, numpy's and torch's generators, as tensors and plain values.

    `devices` includes the generators of GPUs; a worker process has none.
    """
    import numpy as np

    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    version, internal, gauss = random.getstate()
    return {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": numpy_state["state"]["pos"],
            "has_gauss": numpy_state["has_gauss"],
            "cached": numpy_state["gauss"],
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if devices and torch.cuda.is_available() else [],
    }


def set_rng_state(saved: dict[str, Any]) -> None:
    """Restore a state that `rng_state` returned. GPUs are restored only if their number is the same."""
    import numpy as np

    python, arrays = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    keys = arrays["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, arrays["position"], arrays["has_gauss"], arrays["cached"]))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore every generator at the end of the block."""
    saved = rng_state()
    try:
        yield
    finally:
        set_rng_state(saved)


def python_rng_state() -> tuple[Any, ...]:
    """Return the state of python's generator and, where it is imported, numpy's; it differs after a draw."""
    if "numpy" not in sys.modules:
        return (random.getstate(),)
    kind, keys, *rest = sys.modules["numpy"].random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def set_python_rng_state(saved: tuple[Any, ...]) -> None:
    """Restore what `python_rng_state` returned."""
    random.setstate(saved[0])
    for kind, keys, *rest in saved[1:]:
        numpy = sys.modules["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def seed_python(seed: int) -> None:
    """Seed python's generator and, where it is imported, numpy's."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextmanager
def seeded_python(seed: int) -> Iterator[None]:
    """Seed python's and numpy's generators in the block, and restore them at its end."""
    before = python_rng_state()
    seed_python(seed)
    try:
        yield
    finally:
        set_python_rng_state(before)


class SavedGenerators:
    """The states of the global generators of the CPU, to restore those that a block draws from.

    As a context manager it costs 4 us, of which `preserve_rng` takes 100: a state is read only after a draw.
    """

    def __init__(self) -> None:
        self._fingerprints: dict[str, Hashable] = {}
        self._states: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.save()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def save(self) -> None:
        """Save the state of each generator."""
        fingerprints = _fingerprints()
        if fingerprints != self._fingerprints:
            for name, fingerprint in fingerprints.items():
                if self._fingerprints.get(name) != fingerprint:
                    self._states[name] = _state(name)
            self._fingerprints = fingerprints

    def restore(self) -> tuple[str, ...]:
        """Restore what differs from the saved states; return the names of the generators: python, numpy, torch."""
        fingerprints = _fingerprints()
        if fingerprints == self._fingerprints:
            return ()
        drawn = tuple(name for name in fingerprints if fingerprints[name] != self._fingerprints[name])
        for name in drawn:
            _set_state(name, self._states[name])
        return drawn


class DrawSeeds:
    """Finds which global generators of the CPU a function draws from, seeds just those, and restores them after it."""

    def __init__(self) -> None:
        self.drawn: tuple[str, ...] = ()
        """The generators that calls have drawn from so far: python, numpy, torch."""
        self._saved = SavedGenerators()

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of a function that calls `seed` for what it draws.

        Where it draws from a generator for the first time it is called again: its first draws were not seeded.
        """
        while True:
            self._saved.save()
            try:
                result = function()
            finally:
                drawn = self._saved.restore()
            if {*drawn} <= {*self.drawn}:
                return result
            self.drawn = tuple({*self.drawn, *drawn})

    def seed(self, seed: int) -> None:
        """Seed the generators that calls draw from."""
        for name in self.drawn:
            _seed(name, seed)


def _seed(name: str, seed: int) -> None:
    if name == "python":
        random.seed(seed)
    elif name == "numpy":
        _numpy_random().seed(seed % 2**32)
    else:
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` seeds every device, in 100 times as long


def _state(name: str) -> Any:
    if name == "python":
        return random.getstate()
    return _numpy_random().get_state() if name == "numpy" else torch.default_generator.get_state()


def _set_state(name: str, state: Any) -> None:
    if name == "python":
        random.setstate(state)
    elif name == "numpy":
        _numpy_random().set_state(state)
    else:
        torch.default_generator.set_state(state)


def _fingerprints() -> dict[str, Hashable]:
    """Return for each generator what differs after a draw, in 2 us."""
    python: Any = random.random.__self__  # type: ignore[attr-defined] # the instance that the module's functions belong to
    numpy: Any = _numpy_random().random_sample.__self__
    state = torch.default_generator.get_state()
    return {
        "python": (_memory(python).raw, python.gauss_next),
        # The first has the second number of a normal draw, the other all else.
        "numpy": (_memory(numpy).raw, _memory(numpy._bit_generator).raw),
        "torch": ctypes.string_at(state.data_ptr(), state.nbytes),
    }


@cache  # which also keeps the object at its address
def _memory(instance: Any) -> Any:
    """Return the fields of a C object, which contain its state: `getstate` takes 10 us, and numpy's `get_state` 30."""
    header = object.__basicsize__  # with the count of references, which changes
    return (ctypes.c_char * (type(instance).__basicsize__ - header)).from_address(id(instance) + header)


def _numpy_random() -> Any:
    import numpy as np

    return np.random
