"""Collects the wheels that trainkit and its tests need beside torch, for a machine without a network.

python -m tests.gpu.pack [--python 3.12]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.runner import ROOT

PACK = ROOT / "gpu_pack"
LIMIT_MB = 60
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
THERE = ("torch", "numpy")
"""Installed where the pack is used; wheels of numpy alone would take a third of the room."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> None:
    """Fill the folder, and say its size; exit with a message if it is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of Python that will install it")
    version = parser.parse_args().python
    shutil.rmtree(PACK, ignore_errors=True)
    PACK.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"  # setuptools would leave its build folder in the tree
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "gpu_*", "build", "docs", "runs", "*.egg-info"))
        _pip("wheel", "--no-deps", "--no-build-isolation", str(copy))
        pins = Path(folder) / "pins.txt"
        pins.write_text("".join(line for line in _pins() if _name(line) not in THERE), encoding="utf-8")
        for pin in _pins():
            if _name(pin) == "antlr4-python3-runtime":  # which has no wheel in any index
                _pip("wheel", "--no-deps", pin.strip())
        platforms = [option for name in PLATFORMS for option in ("--platform", name)]
        for_there = ["--python-version", version, "--only-binary=:all:", *platforms]
        _pip("download", "-c", str(pins), *for_there, "--find-links", str(PACK), *_requirements())
    for wheel in PACK.glob("*.whl"):
        if wheel.name.partition("-")[0] in THERE:
            wheel.unlink()
    refusal = too_large(PACK)
    if refusal is not None:
        sys.exit(refusal)
    wheels = list(PACK.glob("*.whl"))
    print(f"gpu_pack/: {len(wheels)} wheels, {_megabytes(wheels):.1f} MB")


def too_large(folder: Path, limit: float = LIMIT_MB) -> str | None:
    """Return why wheels cannot travel, with the largest ones; `None` if they can."""
    wheels = sorted(folder.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    size = _megabytes(wheels)
    if size <= limit:
        return None
    largest = ", ".join(f"{wheel.name.split('-')[0]} {_megabytes([wheel]):.1f} MB" for wheel in wheels[:5])
    return f"{folder.name}/ has {size:.1f} MB, more than {limit} MB. The largest: {largest}."


def _megabytes(wheels: list[Path]) -> float:
    return sum(wheel.stat().st_size for wheel in wheels) / 1e6


def _requirements() -> list[str]:
    """Return what our wheel depends on, and the tools of the tests, without what is there.

    Not what recipes need besides: scikit-learn and scipy alone have 44 MB.
    """
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [requirement for requirement in (*project["dependencies"], *TOOLS) if _name(requirement) not in THERE]


def _pins() -> list[str]:
    return (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower()


def _pip(verb: str, *arguments: str) -> None:
    where = "--wheel-dir" if verb == "wheel" else "--dest"
    subprocess.run([sys.executable, "-m", "pip", verb, "--quiet", where, str(PACK), *arguments], check=True)


if __name__ == "__main__":
    main()
