"""Installs the pack where trainkit is not installed, asks `trainkit doctor`, and describes the machine.

python -m tests.gpu.install FOLDER
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.gpu.figures import failed, figure
from tests.gpu.runner import ROOT, SOURCES

PACK = ROOT / "gpu_pack"


def main(folder: Path) -> None:
    """Leave in `folder/site` what the other stages import, and in `folder/environment.txt` what was found."""
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    if not _is_installed():
        wheels = sorted(map(str, PACK.glob("*.whl")))
        if not wheels:
            raise SystemExit(
                "trainkit is not installed and gpu_pack/ is empty: type `make gpu-pack` where there is a network"
            )
        # Without dependencies: torch is there, and pip would look for it among the wheels.
        install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        subprocess.run([sys.executable, "-m", "pip", *install, *wheels], check=True)
    call = subprocess.run(
        [sys.executable, "-m", "trainkit", "doctor"], cwd=folder, capture_output=True, text=True, check=False
    )
    print(call.stdout, call.stderr, sep="\n", flush=True)
    if call.returncode:
        failed("doctor", call.stdout + call.stderr)
    link(ROOT, site)  # after the wheel has shown that it works: mutants change the tree
    (folder / "environment.txt").write_text(environment(), encoding="utf-8")


def link(root: Path, site: Path) -> None:
    """Make `trainkit` in `site` that of the tree in `root`, whose folders are not where their import names say."""
    package = site / "trainkit"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for path in (root / "trainkit").iterdir():
        (package / path.name).symlink_to(path)
    for name in SOURCES[1:5]:
        (package / name).symlink_to(root / name)


def environment() -> str:
    """Return the versions of all that matters, and the driver's own words."""
    import torch

    lines = [f"python {sys.version}", f"torch {torch.__version__}, CUDA {torch.version.cuda}"]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        figure("device", properties.name)
        lines += [f"{torch.cuda.device_count()} x {properties}", f"cuDNN {torch.backends.cudnn.version()}"]
        if torch.distributed.is_nccl_available() and torch.version.cuda:
            lines.append(f"NCCL {torch.cuda.nccl.version()}")
    else:
        failed("device", "torch sees no CUDA device")
    for command in (["nvidia-smi"], ["nvidia-smi", "topo", "-m"], ["git", "log", "-1", "--oneline"]):
        if shutil.which(command[0]):
            call = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            lines += [f"$ {' '.join(command)}", call.stdout]
    packages = {f"{each.name}=={each.version}" for each in importlib.metadata.distributions()}
    return "\n".join([*lines, f"{os.cpu_count()} CPUs", *sorted(packages, key=str.lower), ""])


def _is_installed() -> bool:
    try:
        return bool(importlib.metadata.version("trainkit-torch"))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
