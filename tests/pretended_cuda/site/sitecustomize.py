"""Python imports this at its start where the folder is on PYTHONPATH: torch then sees the pretended device."""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).parents[1]


class _BeforeTorch:
    """Loads the library before torch, which asks it once whether there is CUDA, and changes `torch.cuda` after it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.loader is not None
        load(spec)
        execute = spec.loader.exec_module

        def and_install(module: ModuleType) -> None:
            execute(module)
            sys.modules["pretended_torch"] = installed = module_of("pretended_torch", _PACKAGE / "torch_cuda.py")
            installed.install(*settings())

        spec.loader.exec_module = and_install  # type: ignore[method-assign]
        return spec


def module_of(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(torch: ModuleSpec) -> None:
    import ctypes

    libraries = Path(str(torch.origin)).parent / "lib"
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so", "libtorch_python.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    path = module_of("pretended_build", _PACKAGE / "__init__.py").build()
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    sys.path.append(str(path.parent))


def settings() -> tuple[int, str, int]:
    parsed: Any = module_of("pretended_build", _PACKAGE / "__init__.py").parsed
    return parsed(os.environ["TRAINKIT_PRETENDED_CUDA"])


if os.environ.get("TRAINKIT_PRETENDED_CUDA"):
    sys.meta_path.insert(0, _BeforeTorch())
