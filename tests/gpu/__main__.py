"""A short day with a real GPU: stages that are tried one after the other, and what each of them saw.

    make gpu-pack                     the wheels that a machine without a network needs, into gpu_pack/
    python3 -m tests.gpu              all stages that are left, as far as nine and a half minutes allow
    python3 -m tests.gpu parity       this stage alone; --again repeats one that was ok

Each stage is a process of its own. It writes gpu_report/<stage>.log, and a line of gpu_report/stages.jsonl. A stage
that fails or hangs ends no other one. The same command typed again goes on with what is left. This file and the runner
need the standard library alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.gpu.runner import Runner
from tests.gpu.stages import STAGES


def main() -> int:
    """Run the stages that were asked for, and return 1 if one failed or is left."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Try trainkit on a real GPU.")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--minutes", type=float, default=9.5, help="begin no stage that would take longer")
    parser.add_argument("--again", action="store_true", help="repeat stages that were ok")
    parser.add_argument("--report", type=Path, default=Path("gpu_report"), help="the folder of logs and results")
    options = parser.parse_args()
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    deadline = time.monotonic() + 60 * options.minutes
    runner = Runner(options.report, deadline=deadline)
    chosen = [STAGES[name] for name in options.stages or STAGES]
    return runner.run(chosen, again=options.again)


sys.exit(main())
