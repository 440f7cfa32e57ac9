"""Stages: each a process with a time limit, a log, and a line in the report."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.figures import VARIABLE

ROOT = Path(__file__).parents[2]
SOURCES = ("trainkit", "strategies", "callbacks", "conf", "recipes", "tests", "benchmarks", "pyproject.toml")
_MARK = "TRAINKIT_GPU_STAGE"
_SECONDS_FOR_STACKS = 5


@dataclass(frozen=True)
class Stage:
    """A named part of the day."""

    name: str
    command: Callable[[Runner], Sequence[str] | None]
    """Returns what follows `python`; `None` if there is nothing to do."""
    expected: float
    """Seconds that it takes; it is not begun with less time left."""
    limit: float
    """Seconds after which it has hung."""
    environment: Mapping[str, str] = field(default_factory=dict)


class Runner:
    """Runs stages and keeps their results in a folder."""

    def __init__(self, folder: Path, *, deadline: float) -> None:
        self.folder, self.deadline = folder.resolve(), deadline
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results, self.sources = self.folder / "stages.jsonl", digest()

    @property
    def site(self) -> Path:
        """The folder that `install` fills, from which later stages import."""
        return self.folder / "site"

    def run(self, stages: Sequence[Stage], *, again: bool = False) -> int:
        """Run those that were not ok and fit into the time; return 1 if one failed or is left."""
        left = []
        for stage in stages:
            if not again and self.last().get(stage.name, {}).get("ok"):
                continue
            remaining = self.deadline - time.monotonic()
            if remaining < stage.expected:
                left.append(f"{stage.name} ({stage.expected:.0f} s)")
                continue
            result = self.attempt(stage, limit=min(stage.limit, remaining))
            with open(self.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{stage.name}: {'ok' if result['ok'] else 'FAILED'}, {result['seconds']} s", flush=True)
        last = {stage.name: self.last().get(stage.name) for stage in stages}
        show({name: result for name, result in last.items() if result})
        if left:
            print(f"left, as the time is short; type the same command again: {', '.join(left)}")
        return int(bool(left) or not all(result and result["ok"] for result in last.values()))

    def attempt(self, stage: Stage, *, limit: float) -> dict[str, Any]:
        """Return the result of one stage."""
        started, figures = time.monotonic(), self.folder / f"{stage.name}.figures"
        figures.unlink(missing_ok=True)
        print(f"{stage.name}: at most {limit:.0f} s", flush=True)
        code: int | str | None = 0
        command: Sequence[str] | None = None
        try:
            command = stage.command(self)
            code = self._call(stage, command, figures, limit) if command else code
        except Exception as error:  # one stage's mistake must not cost the others
            code = f"{type(error).__name__}: {error}"
        lines = _lines(figures) if code != 0 or command else [{"figure": "nothing to do", "value": ""}]
        failed = {line["failed"]: line["why"] for line in lines if "failed" in line}
        if code is None:
            failed[stage.name] = f"not ended after {limit:.0f} s; its stacks are in {stage.name}.log"
        elif code != 0 and not failed:
            failed[stage.name] = f"exit code {code}" if isinstance(code, int) else code
        counts = Counter(line["outcome"] for line in lines if "outcome" in line)
        return {
            "stage": stage.name,
            "ok": code == 0 and not failed,
            "seconds": round(time.monotonic() - started, 1),
            "sources": self.sources,
            "failed": failed,
            "figures": {**counts, **{line["figure"]: line["value"] for line in lines if "figure" in line}},
        }

    def last(self) -> dict[str, dict[str, Any]]:
        """Return the last result of each stage with these sources."""
        return {line["stage"]: line for line in _lines(self.results) if line["sources"] == self.sources}

    def environment(self) -> dict[str, str]:
        """Return the environment of a stage."""
        paths = [os.environ.get("PYTHONPATH", ""), str(self.site), str(ROOT)]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONSAFEPATH": "1",  # or the folder `trainkit` of the tree, which has no strategies, would come first
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }

    def _call(self, stage: Stage, command: Sequence[str], figures: Path, limit: float) -> int | None:
        """Return the exit code; `None` if the stage was killed at its limit."""
        mark = mark_of(stage.name)
        own = {_MARK: mark, VARIABLE: str(figures), **stage.environment}
        with open(self.folder / f"{stage.name}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**self.environment(), **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                signal_all(mark, signal.SIGABRT)  # faulthandler writes the stacks of all threads into the log
                end = time.monotonic() + _SECONDS_FOR_STACKS
                while processes_of(mark) and time.monotonic() < end:
                    time.sleep(0.1)
                return None
            finally:
                # Also what a stage that has ended left behind, in sessions of its own: it would hold the device.
                signal_all(mark, signal.SIGKILL)
                process.wait()


def mark_of(name: str) -> str:
    """Return what the environment of all processes of a stage says."""
    return f"{name}-{os.getpid()}"


def signal_all(mark: str, number: int) -> None:
    """Send a signal to each process of a stage."""
    for pid in processes_of(mark):
        with suppress(OSError):
            os.kill(pid, number)


def processes_of(mark: str) -> list[int]:
    """Return the processes of a stage, whatever group or session they are in."""
    entry, found = f"{_MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def digest() -> str:
    """Return a name for the present sources: there may be no git where they are tried."""
    total = hashlib.sha256()
    for path in sorted(file for name in SOURCES for file in _files(ROOT / name)):
        total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()[:12]


def _files(path: Path) -> Iterator[Path]:
    yield from (
        [path] if path.is_file() else (file for file in path.rglob("*.*") if file.suffix in (".py", ".yaml", ".cpp"))
    )


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a table of the stages, and what failed in them."""
    print(f"\n{'stage':<14}{'ok':<5}{'seconds':>8}  figures")
    for name, result in results.items():
        shown = ", ".join(f"{key} {_short(value)}" for key, value in list(result["figures"].items())[:6])
        print(f"{name:<14}{'yes' if result['ok'] else 'NO':<5}{result['seconds']:>8}  {shown}")
    for name, result in results.items():
        for what, why in result["failed"].items():
            print(f"{name}: {what}: {why.strip().splitlines()[-1][:160] if why.strip() else ''}")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:40]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # a process that was killed may have written half of its last line
            found.append(json.loads(line))
    return found
