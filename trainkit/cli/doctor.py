"""`trainkit doctor`: whether this machine can train, what is wrong, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from trainkit import registry
from trainkit.cli.main import Arguments, print_table
from trainkit.cli.signatures import EXTRAS
from trainkit.errors import UserError, nearest

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_GIB = 2**30
_LEAST_SHARED_MEMORY = _GIB
_LEAST_DISK = 2 * _GIB
_LEAST_FILES = 1024
_COLLECTIVE_SECONDS = 60
_SLOW_WRITE_MB_PER_SECOND = 20
_PROBE_MB = 16
_NAMES = ("run_dir", "devices")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    subject: str
    state: str
    """`ok`, `warning`: training works with less, or `problem`: it does not."""
    found: str
    remedy: str = ""


def doctor(arguments: Arguments) -> int:
    """Print the result of every check, and return 1 if there is a problem; `run_dir=PATH` is where runs would go."""
    folder = Path(arguments.take("run_dir") or "runs")
    ranks = arguments.take("devices") or "2"
    if arguments.overrides:
        key = arguments.overrides[0].partition("=")[0]
        raise UserError(f"doctor does not take {key!r}.{nearest(key, _NAMES)} Type trainkit doctor [run_dir=PATH]")
    if not ranks.isdigit() or int(ranks) < 1:
        raise UserError(f"devices={ranks}: write the number of ranks to test with, such as devices=2.")
    findings = list(run_checks(folder, ranks=int(ranks)))
    _print(findings)
    return 1 if any(finding.state == PROBLEM for finding in findings) else 0


def run_checks(folder: Path, *, ranks: int = 2) -> Iterator[Finding]:
    """Yield the result of each check, the quick ones first."""
    checks: list[Callable[[], Finding | Iterator[Finding]]] = [
        _python,
        _torch,
        _devices,
        _backends,
        _packages,
        _shared_memory,
        _open_files,
        _clock,
        lambda: _run_folder(folder),
        lambda: _collective(ranks),
    ]
    for check in checks:
        found = check()
        if isinstance(found, Finding):
            yield found
        else:
            yield from found


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    if sys.version_info < (3, 10):  # noqa: UP036 # the message is for those who have an older one
        return Finding("python", PROBLEM, found, "install Python 3.10 or later")
    threads = os.environ.get("OMP_NUM_THREADS")
    return Finding("python", OK, found + (f", OMP_NUM_THREADS={threads}" if threads else ""))


def _torch() -> Finding:
    try:
        import torch
    except Exception as error:
        return Finding("torch", PROBLEM, f"cannot be imported: {error}", "pip install torch")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    major, minor = (int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if (major, minor) < (2, 6):
        return Finding("torch", PROBLEM, torch.__version__, "pip install 'torch>=2.6'")
    return Finding("torch", OK, f"{torch.__version__}, {built}, {torch.get_num_threads()} threads")


def _devices() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        shown = "; ".join(f"cuda:{i} {p.name}, {p.total_memory / _GIB:.0f} GiB" for i, p in enumerate(names))
        try:
            torch.ones(8, device="cuda").sum().item()
        except Exception as error:
            return Finding("devices", PROBLEM, f"{shown}: {error}", "check the driver with nvidia-smi")
        return Finding("devices", OK, shown)
    if torch.backends.mps.is_available():
        return Finding("devices", OK, "cpu, mps")
    if shutil.which("nvidia-smi"):
        remedy = "install a torch build for CUDA, or check the driver: nvidia-smi"
        return Finding("devices", WARNING, "cpu only, though nvidia-smi is installed", remedy)
    return Finding("devices", OK, "cpu")


def _backends() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("backends", PROBLEM, "torch has no distributed package", "install another torch build")
    names = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    if torch.cuda.is_available() and "nccl" not in names:
        return Finding("backends", WARNING, ", ".join(names), "without nccl several GPUs are slow; set backend=gloo")
    return Finding("backends", OK, ", ".join(names))


def _packages() -> Finding:
    missing: dict[str, list[str]] = {}
    for package, extra in EXTRAS.items():
        if find_spec(package if not package.startswith("hydra_") else f"hydra_plugins.{package}") is None:
            missing.setdefault(extra, []).append(package)
    versions = []
    for name in ("trainkit", "hydra-core", "omegaconf"):
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"{name} (not installed by pip)")
    found = ", ".join(versions)
    if not missing:
        return Finding("packages", OK, f"{found}, and all optional ones")
    names = ", ".join(name for packages in missing.values() for name in packages)
    remedy = f"as you need them: pip install 'trainkit[{','.join(missing)}]'"
    return Finding("packages", OK, f"{found}; not installed: {names}", remedy)


def _shared_memory() -> Finding:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Finding("shared memory", OK, "no /dev/shm; ranks exchange gradients by sockets")
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free in /dev/shm"
    if not os.access(folder, os.W_OK):
        return Finding("shared memory", WARNING, "/dev/shm cannot be written to", "set strategy.transport=group")
    if usage.free < _LEAST_SHARED_MEMORY:
        remedy = "in Docker: --shm-size=8g (or --ipc=host); else set strategy.transport=group and data.num_workers=0"
        return Finding("shared memory", WARNING, found, remedy)
    return Finding("shared memory", OK, found)


def _open_files() -> Finding:
    try:
        import resource
    except ModuleNotFoundError:
        return Finding("open files", OK, "not limited here")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} at once, of {'any number' if hard == resource.RLIM_INFINITY else hard}"
    if soft < _LEAST_FILES:
        return Finding("open files", WARNING, found, f"worker processes need more: ulimit -n {min(hard, 65536)}")
    return Finding("open files", OK, found)


def _clock() -> Finding:
    wall, steady = time.time(), time.monotonic()
    with tempfile.NamedTemporaryFile() as file:
        os.utime(file.name)
        of_files = os.stat(file.name).st_mtime
    time.sleep(0.05)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if wall < 1.7e9 or abs(drift) > 0.02:
        return Finding("clock", WARNING, f"{now}, which jumps or is years behind", "set it: timedatectl set-ntp true")
    if abs(of_files - wall) > 2:
        return Finding("clock", WARNING, f"{now}; files say {of_files - wall:+.0f} s", "set the file server's clock")
    return Finding("clock", OK, now)


def _run_folder(folder: Path) -> Finding:
    """Write where runs would be, in the nearest folder that is there, and leave nothing."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return Finding("run folder", PROBLEM, f"{existing} is a file", "choose another: run_dir=PATH")
    content = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".trainkit_doctor_") as file:
            start = time.perf_counter()
            for _ in range(_PROBE_MB):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            speed = _PROBE_MB / (time.perf_counter() - start)
    except OSError as error:
        remedy = "choose another: run_dir=PATH, or make room"
        return Finding("run folder", PROBLEM, f"{existing} cannot be written to: {error.strerror}", remedy)
    free = shutil.disk_usage(existing).free
    found = f"{folder} can be written, {speed:.0f} MB/s with fsync, {free / _GIB:.0f} GiB free"
    if free < _LEAST_DISK:
        return Finding("run folder", WARNING, found, "make room, or choose another disk: run_dir=PATH")
    if speed < _SLOW_WRITE_MB_PER_SECOND:
        return Finding("run folder", WARNING, found, "slow: set callbacks.checkpoint.async_save=true")
    return Finding("run folder", OK, found)


def _collective(ranks: int) -> Finding:
    """Start ranks as `strategy=ddp` does and run an all-reduce."""
    import logging

    subject = f"{ranks} ranks"
    logging.getLogger("torch").setLevel(logging.ERROR)
    start = time.perf_counter()
    try:
        settings = {"devices": ranks, "device": "cpu", "timeout_seconds": _COLLECTIVE_SECONDS}
        strategy = registry.make("strategy", "ddp", settings)
        total, seconds = strategy.launch(_Sum(strategy))
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = "check that processes may talk through 127.0.0.1 (firewall, GLOO_SOCKET_IFNAME) and /dev/shm"
        return Finding(subject, PROBLEM, f"cannot communicate: {type(error).__name__}: {first}", remedy)
    took = time.perf_counter() - start
    if total != sum(range(1, ranks + 1)):
        return Finding(subject, PROBLEM, f"add up to {total}", "report this: a collective computes wrongly")
    return Finding(subject, OK, f"started and ended in {took:.1f} s; a sum over them takes {seconds * 1e6:.0f} us")


class _Sum:
    """The work of each rank; it is pickled and sent."""

    _TIMES = 20

    def __init__(self, strategy: object) -> None:
        self.strategy = strategy

    def __call__(self) -> tuple[float, float]:
        """Return the sum of all ranks plus one, and the seconds that a small sum takes."""
        import torch

        from trainkit.optim.precision import Precision
        from trainkit.strategy import Strategy

        assert isinstance(self.strategy, Strategy)
        self.strategy.setup(Precision())
        try:
            total = self.strategy.comm.all_reduce(torch.tensor(float(self.strategy.comm.rank + 1))).item()
            start = time.perf_counter()
            for _ in range(self._TIMES):
                self.strategy.comm.all_reduce(torch.ones(16))
            return total, (time.perf_counter() - start) / self._TIMES
        finally:
            self.strategy.teardown()


def _print(findings: list[Finding]) -> None:
    """Print a row for each finding, and one below it for what to do."""
    table = Table(box=None, show_header=False, pad_edge=False)
    styles = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
    for finding in findings:
        mark = finding.state.upper() if finding.state == PROBLEM else finding.state
        table.add_row(Text(mark, style=styles[finding.state]), finding.subject, Text(finding.found))
        if finding.remedy:
            table.add_row("", "", Text(f"-> {finding.remedy}", style="dim"))
    print_table(table)
    problems = sum(finding.state == PROBLEM for finding in findings)
    warned = sum(finding.state == WARNING for finding in findings)
    print(f"{problems} problem{'s' * (problems != 1)}, {warned} warning{'s' * (warned != 1)}")
