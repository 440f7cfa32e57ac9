"""One small run under NVIDIA's compute-sanitizer: reads and writes out of bounds, and races in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.gpu.figures import failed, figure

SMALL = ["-m", "pytest", "-q", "-W", "default", "tests/gpu/parity.py", "-k", "single-fp32 or gpt and single-bf16-mixed"]


def main() -> None:
    """Note for each tool whether it found something."""
    # Torch's own pool of memory would hide what is read behind the end of a tensor.
    settings = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in ("memcheck", "racecheck"):
        command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--error-exitcode", "9"]
        code = subprocess.run([*command, sys.executable, *SMALL], env=settings, check=False).returncode
        figure(tool, code)
        if code:
            failed(tool, f"exit code {code}; see sanitizer.log")


if __name__ == "__main__":
    main()
