"""Random generators of python, numpy and torch: seed, capture and restore."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import torch

from trainkit.devices import accelerators_in_use, generator_state, set_generator_state

T = TypeVar("T")


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch on every device."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy refuses larger seeds
    torch.manual_seed(seed)


def rng_state(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Return the state of python's, numpy's and torch's generators, as tensors and plain values.

    Of torch those of the CPU and of `devices`, in their order.
    """
    import numpy as np

    # Plain values and tensors alone: checkpoints are read with `weights_only`, which refuses arrays of numpy.
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    version, internal, gauss = random.getstate()
    return {
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
        "numpy": {
            # As int64: few operations of torch know uint32.
            "keys": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": numpy_state["state"]["pos"],
            "has_gauss": numpy_state["has_gauss"],
            "cached": numpy_state["gauss"],
        },
        "torch": torch.get_rng_state(),
        "devices": [state for device in devices if (state := generator_state(device)) is not None],
    }


def set_rng_state(saved: dict[str, Any], devices: Iterable[torch.device] = ()) -> None:
    """Restore a state that `rng_state` returned, those of devices on `devices`, which may have other indices."""
    import numpy as np

    python, arrays = saved["python"], saved["numpy"]
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    keys = arrays["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, arrays["position"], arrays["has_gauss"], arrays["cached"]))
    torch.set_rng_state(saved["torch"])
    for device, state in zip(devices, saved["devices"], strict=False):
        set_generator_state(device, state)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore every generator at the end of the block, also those of all devices."""
    devices = accelerators_in_use()
    saved = rng_state(devices)
    try:
        yield
    finally:
        set_rng_state(saved, devices)


def python_rng_state() -> tuple[Any, ...]:
    """Return the state of python's generator and, where it is imported, numpy's; it differs after a draw."""
    # Not imported for this alone: what nobody has imported nobody has drawn from.
    if "numpy" not in sys.modules:
        return (random.getstate(),)
    kind, keys, *rest = sys.modules["numpy"].random.get_state()
    # As bytes, since states are compared and `==` of arrays gives an array.
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
    saved = python_rng_state()
    seed_python(seed)
    try:
        yield
    finally:
        set_python_rng_state(saved)


_GLOBAL = ("python", "python", "numpy", "numpy", "torch")
"""The generators of which `_fingerprints` has the parts."""


class SavedGenerators:
    """The states of the global generators of the CPU, to restore those that a block draws from.

    As a context manager it costs 4 us, where `preserve_rng` takes 200: a state is read only after a draw.
    """

    def __init__(self) -> None:
        # Equal to no fingerprint, so that the first `save` reads every state.
        self._fingerprints: tuple[Any, ...] = (None,) * len(_GLOBAL)
        self._states: dict[str, Any] = {}

    def __enter__(self) -> None:
        self.save()

    def __exit__(self, *_: object) -> None:
        self.restore()

    def save(self) -> None:
        """Save the state of each generator."""
        fingerprints = _fingerprints()
        if fingerprints != self._fingerprints:
            self._states |= {name: _state(name) for name in _differing(fingerprints, self._fingerprints)}
            self._fingerprints = fingerprints

    def restore(self) -> set[str]:
        """Restore what differs from the saved states; return the names of the generators: python, numpy, torch."""
        fingerprints = _fingerprints()
        if fingerprints == self._fingerprints:
            return set()
        # The fingerprints stay valid: with the saved states the generators have those of `save` again.
        drawn = _differing(fingerprints, self._fingerprints)
        for name in drawn:
            _set_state(name, self._states[name])
        return drawn

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed the generators in the block, and restore them at its end; 20 us."""
        self.save()
        seed_cpu(seed)
        try:
            yield
        finally:
            self.restore()


class DrawSeeds:
    """Finds which global generators of the CPU a function draws from, seeds just those, and restores them after it."""

    def __init__(self) -> None:
        self.drawn: set[str] = set()
        """The generators that calls have drawn from so far: python, numpy, torch."""
        self._saved = SavedGenerators()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function that calls `seed` for what it draws.

        Where it draws from a generator for the first time it is called again: its first draws were not seeded.
        """
        # Ends after four calls at most: each repetition adds one of three generators.
        while True:
            self._saved.save()
            try:
                result = function(*arguments)
            finally:
                drawn = self._saved.restore()
            if drawn <= self.drawn:
                return result
            self.drawn |= drawn

    def seed(self, seed: int) -> None:
        """Seed the generators that calls draw from."""
        for name in self.drawn:
            _seed(name, seed)


def seed_cpu(seed: int) -> None:
    """Seed python, numpy and torch on the CPU."""
    for name in ("python", "numpy", "torch"):
        _seed(name, seed)


def _seed(name: str, seed: int) -> None:
    if name == "python":
        random.seed(seed)
    elif name == "numpy":
        _numpy_random().seed(seed % 2**32)
    else:
        # Of the CPU alone: `torch.manual_seed` seeds every device, in 100 times as long.
        torch.default_generator.manual_seed(seed)


def _state(name: str) -> Any:
    if name == "python":
        return random.getstate()
    return _numpy_random().get_state() if name == "numpy" else torch.default_generator.get_state()


def _set_state(name: str, state: Any) -> None:
    if name == "python":
        random.setstate(state)
    elif name == "numpy":
        _set_numpy_state(*state)
    else:
        torch.default_generator.set_state(state)


def _set_numpy_state(kind: str, table: Any, position: int, has_normal: int, normal: float) -> None:
    if has_normal:
        _numpy_random().set_state((kind, table, position, has_normal, normal))
        return
    # `set_state` copies the table word by word, in 80 us.
    _numpy_random().seed(0)  # forgets the second normal number of a pair
    address = _numpy_random().random_sample.__self__._bit_generator.ctypes.state_address
    ctypes.memmove(address, table.ctypes.data, table.nbytes)
    ctypes.c_int.from_address(address + table.nbytes).value = position


def _fingerprints() -> tuple[Any, ...]:
    """Return what differs after a draw, in 1 us: `get_state` copies the tables, which takes up to 30 us.

    A generator draws from a table of 624 words, which it renews at its end: a draw changes the position, and a renewal
    the first word. Normal draws come in pairs, of which the second number is kept beside them.
    """
    # Private: numpy has no public way to the generator of its module's functions without a copy of the table.
    python, instance, numpy_normal, table, positions, torch_normals = _memory(
        _numpy_random().random_sample.__self__._bit_generator
    )
    return (
        python.tobytes(),
        instance.gauss_next,
        numpy_normal.tobytes(),
        table.tobytes(),
        (positions.tobytes(), torch_normals.tobytes()),
    )


# By numpy's generator of bits, which a call can replace. The cache holds it, so that its memory is not freed while a
# view of it is left; the other generators live as long as the process.
@cache
def _memory(bit_generator: Any) -> tuple[Any, ...]:
    """Return views of the memory of which `_fingerprints` has the parts, and python's generator."""
    python: Any = random.random.__self__  # type: ignore[attr-defined] # the instance that the module's functions belong to
    numpy: Any = _numpy_random().random_sample.__self__
    # 624 words and the position in them. `np.random.seed` has refused any other table.
    table = (ctypes.c_uint32 * 625).from_address(bit_generator.ctypes.state_address)
    positions, torch_normals = _torch_engine()
    return (
        memoryview(_fields(python, 12)),  # position, two words: `random.seed` gives the first one always the same value
        python,
        memoryview(_fields(numpy)),  # the second normal number of a pair
        memoryview(table).cast("B").cast("I")[::624],  # first word, position
        positions,
        torch_normals,
    )


def _differing(now: tuple[Any, ...], saved: tuple[Any, ...]) -> set[str]:
    return {name for name, part, other in zip(_GLOBAL, now, saved, strict=True) if part != other}


def _fields(instance: Any, size: int | None = None) -> Any:
    """Return the memory of an object's first fields in C, by default of all."""
    # In CPython the id is the address. The fields begin after what every object has: reference count and type.
    header = object.__basicsize__
    return (ctypes.c_char * (size or type(instance).__basicsize__ - header)).from_address(id(instance) + header)


def _torch_engine() -> tuple[Any, Any]:
    """Return the memory of torch's seed, position and first word, and of the kept numbers, on both sides of its table.

    The table is found in the C++ object by its first words, which are in the state at byte 24. Where it is not, as in
    another build of torch, what is returned reads the state.
    """
    generator = torch.default_generator
    # The state has each word of the table as 64 bits, the object as 32. Eight of them are not found by chance.
    words = struct.pack("8I", *generator.get_state()[24:88].view(torch.int64).tolist())
    # The first field of the Python object is the pointer to the C++ object.
    address = ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value or 0
    start = ctypes.string_at(address, 256).find(words)  # the object has 2.6 KB
    if start < 0:
        return _TorchState(), _TorchState()
    # Before the table: seed (8 bytes), left (4), seeded (4 with padding), next (4); 24 with its first word.
    positions = (ctypes.c_char * 24).from_address(address + start - 20)
    return memoryview(positions), memoryview((ctypes.c_char * 24).from_address(address + start + 4 * 624))


class _TorchState:
    """Has the `tobytes` of a view, and reads the whole state at each call."""

    def tobytes(self) -> bytes:
        return torch.default_generator.get_state().numpy().tobytes()


@cache
def _numpy_random() -> Any:
    import numpy as np

    return np.random
