"""Builds the device, and runs a command in whose processes torch sees it."""

import os
import subprocess
import sys

from tests.pretended_cuda import VARIABLE, build, environment, parsed, why_not

reason = why_not()
if reason is not None:
    print(f"skipped: {reason}")
    sys.exit(0)
build()
if len(sys.argv) > 1:
    setting = os.environ.get(VARIABLE, "2:late")
    parsed(setting)
    command = [sys.executable, "-m", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment(setting), check=False).returncode)
