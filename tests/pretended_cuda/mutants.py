"""Tests of the tests: removes each wait of the library, one at a time, and says which test turns red.

python -m tests.pretended_cuda.mutants [WORD...] tries those whose file or name has one of the words. It changes files,
and puts them back; if it is killed, `git checkout` does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.pretended_cuda import VARIABLE, build, environment

ROOT = Path(__file__).parents[2]
POLICIES = ("late", "side_first", "random:1")
HERE = "tests/pretended_cuda"
STRATEGIES, PREFETCH = f"{HERE}/test_strategies.py", f"{HERE}/test_library.py"
COPIES = f"{HERE}/test_library.py"


@dataclass(frozen=True)
class Mutant:
    """A line without which the library is wrong, and what should notice."""

    name: str
    file: str
    line: str
    instead: str
    tests: tuple[str, ...]


def everything() -> list[Mutant]:
    """Return all mutants."""
    prefetch, copier = "trainkit/data/prefetch.py", "strategies/transports/host_copy.py"
    snapshot, reductions = "trainkit/checkpoint/background_save.py", "strategies/reducer/reductions.py"
    messages, group = "strategies/pipeline/run/communication.py", "strategies/transports/process_group.py"
    to_host = "            target.copy_(source.to(target.dtype), non_blocking=True)\n"
    fusion = ("tests/strategies/fusion/test_gpu.py", STRATEGIES + " -k fusion")
    pipeline = ("tests/strategies/pipeline/test_gpu.py", STRATEGIES + " -k pipeline")
    ddp = ("tests/strategies/ddp/test_gpu.py", STRATEGIES + " -k ddp")
    return [
        Mutant(
            "wait for the copy", prefetch, "        current_stream(device).wait_stream(copy_stream)\n", "", (PREFETCH,)
        ),
        Mutant("wait before a copy", prefetch, "copy_stream.wait_stream(current_stream(device))", "pass", (PREFETCH,)),
        Mutant("copy stream", prefetch, "with copy_stream:", "if True:", (PREFETCH,)),
        Mutant("pin", prefetch, "if pin_memory else step_batch", "if False else step_batch", (PREFETCH,)),
        Mutant("copy after its event", copier, "self.stream.wait_event(after)", "pass", (COPIES, *fusion)),
        Mutant(
            "end of a copy to the host",
            copier,
            f"{to_host}            return end_of(self.stream)",
            f"{to_host}            return torch.Event(self.device)",
            (COPIES, *fusion),
        ),
        Mutant(
            "end of a copy to the device",
            copier,
            "            target.copy_(source.to(self.device, non_blocking=True), non_blocking=True)\n"
            "            return end_of(self.stream)",
            "            target.copy_(source.to(self.device, non_blocking=True), non_blocking=True)\n"
            "            return torch.Event(self.device)",
            (COPIES, *fusion),
        ),
        Mutant("wait before unpinning", copier, "        self.stream.synchronize()\n", "", (COPIES,)),
        Mutant(
            "stream of a copy",
            copier,
            "    def to_host(self, source: Tensor, target: Tensor, *, after: Event) -> "
            "Event:\n        with self.stream:",
            "    def to_host(self, source: Tensor, target: Tensor, *, after: Event) -> Event:\n        if True:",
            (COPIES, *fusion),
        ),
        Mutant(
            "pinned buffer",
            copier,
            "return torch.empty(numel, dtype=dtype, pin_memory=True)",
            "return torch.empty(numel, dtype=dtype)",
            (COPIES, *fusion),
        ),
        Mutant("mark", copier, "return end_of(current_stream(self.device))", "return None", (COPIES, *fusion)),
        Mutant(
            "wait for the sum",
            "strategies/transports/sharded.py",
            "self.copies_back[buffer].wait()",
            "pass",
            fusion,
        ),
        Mutant(
            "wait for a snapshot",
            snapshot,
            "            synchronize(device)\n",
            "            pass\n",
            (COPIES, "tests/checkpoint/test_background_save.py"),
        ),
        Mutant(
            "pinned snapshot",
            snapshot,
            "            pin_in_place(buffer)",
            "            pass",
            (COPIES, "tests/checkpoint/test_background_save.py"),
        ),
        Mutant("wait for the streams of gradients", reductions, "current.wait_stream(stream)", "pass", ddp),
        Mutant(
            "streams of gradients",
            "strategies/reducer/reducer.py",
            "entry.bucket.streams.add(current_stream(device))",
            "pass",
            ddp,
        ),
        Mutant("wait for a reduction", group, "            self.work.wait()\n", "            pass\n", ddp),
        Mutant("copy before a send", messages, "        copied.synchronize()", "        pass", pipeline),
        Mutant(
            "order of lanes",
            messages,
            "        for lane in lanes.values():\n",
            "        for lane in list(lanes.values())[:: -1 if rank else 1]:\n",
            (STRATEGIES + " -k pipeline",),
        ),
        Mutant("mark before a send", messages, "after=self._copier.mark())", "after=None)", pipeline),
        Mutant(
            "device of a communication thread",
            "strategies/transports/communication_thread.py",
            "enter(self.device)",
            "pass",
            fusion,
        ),
        Mutant(
            "device of a rank",
            "strategies/multiprocess.py",
            "enter(self.device)",
            "pass",
            (STRATEGIES,),
        ),
    ]


def noticed(mutant: Mutant, root: Path, environments: Mapping[str, Mapping[str, str]]) -> str:
    """Return the environment and the first test in the tree `root` that fails, or `not noticed`."""
    for policy, settings in environments.items():
        for tests in mutant.tests:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-m",
                "gpu",
                "-x",
                "-q",
                "--tb=no",
                "--timeout=90",
                *tests.split(),
            ]
            ended = subprocess.run(command, cwd=root, env={**settings}, capture_output=True, text=True, check=False)
            failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            if ended.returncode not in (0, 5):
                return f"{policy}: {failed[0].split(' - ')[0] if failed else f'exit code {ended.returncode}'}"
    return "not noticed"


def main(words: list[str]) -> None:
    """Try each mutant."""
    build()
    os.environ.pop(VARIABLE, None)
    own = {"OMP_NUM_THREADS": "1", "TRAINKIT_PRETENDED_NCCL_SECONDS": "10"}
    environments = {policy: {**environment(f"2:{policy}"), **own} for policy in POLICIES}
    for mutant in everything():
        if words and not any(word in f"{mutant.file} {mutant.name}" for word in words):
            continue
        path, start = ROOT / mutant.file, time.monotonic()
        original = path.read_text()
        if original.count(mutant.line) != 1:
            print(f"{mutant.file}: {mutant.name}: has changed, mend the list", flush=True)
            continue
        path.write_text(original.replace(mutant.line, mutant.instead))
        try:
            found = noticed(mutant, ROOT, environments)
        finally:
            path.write_text(original)
        print(f"{mutant.file}: without {mutant.name}: {found} ({time.monotonic() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
