"""Fork server: it starts without torch in the caller, and ends with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

STARTED = """
import sys
from multiprocessing import forkserver
from trainkit.distributed.fork_server import start_fork_server

start_fork_server()
assert "torch" not in sys.modules
print(forkserver._forkserver._forkserver_pid)
"""


def test_the_server_is_started_without_torch_and_ends_with_its_caller_during_its_imports():
    ended = subprocess.run([sys.executable, "-c", STARTED], check=True, capture_output=True, text=True, timeout=120)
    server = Path(f"/proc/{int(ended.stdout)}")
    deadline = time.monotonic() + 120
    while server.exists() and "Z" not in (server / "stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
