"""Random generators of python, numpy and torch: seed, capture and restore."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
