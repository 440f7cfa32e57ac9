"""`trainkit doctor`: checks of this machine, each with a remedy if it fails."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from trainkit import __version__, registry
from trainkit.cli.main import Arguments, print_table
from trainkit.cli.signatures import EXTRAS, is_installed
from trainkit.errors import UserError, nearest
from trainkit.storage import local_path

if TYPE_CHECKING:
    from trainkit.strategy import Strategy

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_GIB = 2**30
_LEAST_SHARED_MEMORY = _GIB
_LEAST_DISK = 2 * _GIB
_LEAST_FILES = 1024
_COLLECTIVE_SECONDS = 60
_SLOW_WRITE_MB_PER_SECOND = 20
_PROBE_MB = 16
_TIMES = 20  # of the all-reduce
_NAMES = ("run_dir", "devices")


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    subject: str
    state: str
    """`ok`, `warning` (training works, but not as well) or `problem` (it does not)."""
    text: str
    remedy: str = ""


def doctor(arguments: Arguments) -> int:
    """Print the result of every check and return 1 if one is a problem; `run_dir=PATH` is the folder for runs."""
    folder = local_path(arguments.take("run_dir") or "runs", what="run_dir of doctor")
    ranks = arguments.take("devices") or "2"
    if arguments.overrides:
        key = arguments.overrides[0].partition("=")[0]
        raise UserError(f"doctor does not take {key!r}.{nearest(key, _NAMES)} Type trainkit doctor [run_dir=PATH]")
    if not ranks.isdigit() or int(ranks) < 1:
        raise UserError(f"devices={ranks}: must be the number of ranks to test, such as devices=2.")
    results = list(run_checks(folder, ranks=int(ranks)))
    _print(results)
    return 1 if any(result.state == PROBLEM for result in results) else 0


def run_checks(folder: Path, *, ranks: int = 2) -> Iterator[Check]:
    """Yield the result of each check, the quick ones first."""
    for check in (_python, _torch, _devices, _backends, _packages, _shared_memory, _open_files, _clock):
        yield check()
    yield _run_folder(folder)
    yield _collective(ranks)


def _python() -> Check:
    description = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    threads = os.environ.get("OMP_NUM_THREADS")
    return Check("python", OK, description + (f", OMP_NUM_THREADS={threads}" if threads else ""))


def _torch() -> Check:
    try:
        import torch
    # A broken installation raises many types, such as OSError for a missing library.
    except Exception as error:
        return Check("torch", PROBLEM, f"cannot be imported: {error}", "pip install torch")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    from trainkit.devices import check_torch

    try:
        check_torch()
    except UserError as error:
        return Check("torch", PROBLEM, *str(error).split("; type: "))
    return Check("torch", OK, f"{torch.__version__}, {built}, {torch.get_num_threads()} threads")


def _devices() -> Check:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        shown = "; ".join(f"cuda:{i} {p.name}, {p.total_memory / _GIB:.0f} GiB" for i, p in enumerate(names))
        # A device may be listed and still not run: only a kernel shows that the driver fits the build.
        try:
            torch.ones(8, device="cuda").sum().item()
        except Exception as error:
            return Check("devices", PROBLEM, f"{shown}: {error}", "check the driver with nvidia-smi")
        return Check("devices", OK, shown)
    if torch.backends.mps.is_available():
        return Check("devices", OK, "cpu, mps")
    if shutil.which("nvidia-smi"):
        remedy = "install a torch build for CUDA, or check the driver: nvidia-smi"
        return Check("devices", WARNING, "cpu only, though nvidia-smi is installed", remedy)
    return Check("devices", OK, "cpu")


def _backends() -> Check:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return Check("backends", PROBLEM, "torch has no distributed package", "install another torch build")
    names = [name for name in ("gloo", "nccl", "mpi") if dist.is_backend_available(name)]
    if torch.cuda.is_available() and "nccl" not in names:
        return Check("backends", WARNING, ", ".join(names), "without nccl several GPUs are slow; set backend=gloo")
    return Check("backends", OK, ", ".join(names))


def _packages() -> Check:
    missing: dict[str, list[str]] = {}
    for package, extra in EXTRAS.items():
        if not is_installed(package):
            missing.setdefault(extra, []).append(package)
    installed = {"trainkit": __version__, **{name: version(name) for name in ("hydra-core", "omegaconf")}}
    description = ", ".join(f"{name} {number}" for name, number in installed.items())
    if not missing:
        return Check("packages", OK, f"{description}, and all optional packages")
    names = ", ".join(name for packages in missing.values() for name in packages)
    remedy = f"if needed: pip install 'trainkit-torch[{','.join(missing)}]'"
    return Check("packages", OK, f"{description}; not installed: {names}", remedy)


def _shared_memory() -> Check:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Check("shared memory", OK, "no /dev/shm; gradients go through sockets")
    usage = shutil.disk_usage(folder)
    description = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free in /dev/shm"
    if not os.access(folder, os.W_OK):
        return Check("shared memory", WARNING, "/dev/shm is not writable", "set strategy.transport=process_group")
    if usage.free < _LEAST_SHARED_MEMORY:
        instead = "set strategy.transport=process_group and data.num_workers=0"
        remedy = f"in Docker: --shm-size=8g (or --ipc=host); else {instead}"
        return Check("shared memory", WARNING, description, remedy)
    return Check("shared memory", OK, description)


def _open_files() -> Check:
    try:
        import resource
    except ModuleNotFoundError:
        return Check("open files", OK, "no limit")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    description = f"{soft} at once (hard limit: {'none' if hard == resource.RLIM_INFINITY else hard})"
    if soft < _LEAST_FILES:
        return Check("open files", WARNING, description, f"worker processes need more: ulimit -n {min(hard, 65536)}")
    return Check("open files", OK, description)


def _clock() -> Check:
    now = time.time()
    with tempfile.NamedTemporaryFile() as file:
        # The time is that of the file system, which may be another machine's.
        os.utime(file.name)
        ahead = os.stat(file.name).st_mtime - now
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    # November 2023: no clock that is right shows an earlier time.
    if now < 1.7e9:
        return Check("clock", WARNING, f"{shown} is wrong", "synchronize it: timedatectl set-ntp true")
    if abs(ahead) > 2:
        text = f"{shown}; file times differ by {ahead:+.0f} s"
        return Check("clock", WARNING, text, "synchronize the file server's clock")
    return Check("clock", OK, shown)


def _run_folder(folder: Path) -> Check:
    """Write and delete a file in `folder`, or in its nearest parent that exists."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return Check("run folder", PROBLEM, f"{existing} is a file", "choose another folder: run_dir=PATH")
    # Random, or a file system that compresses would look too fast.
    content = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".trainkit_doctor_") as file:
            start = time.perf_counter()
            for _ in range(_PROBE_MB):
                file.write(content)
            file.flush()
            # Included in the time: checkpoints are synced too.
            os.fsync(file.fileno())
            speed = _PROBE_MB / (time.perf_counter() - start)
    except OSError as error:
        remedy = "choose another folder: run_dir=PATH, or free disk space"
        return Check("run folder", PROBLEM, f"{existing} is not writable: {error.strerror}", remedy)
    free = shutil.disk_usage(existing).free
    description = f"{folder} is writable, {speed:.0f} MB/s with fsync, {free / _GIB:.0f} GiB free"
    if free < _LEAST_DISK:
        return Check("run folder", WARNING, description, "free disk space, or choose another disk: run_dir=PATH")
    if speed < _SLOW_WRITE_MB_PER_SECOND:
        return Check("run folder", WARNING, description, "slow: set callbacks.checkpoint.async_save=true")
    return Check("run folder", OK, description)


def _collective(ranks: int) -> Check:
    """Start ranks with `strategy=ddp` and run an all-reduce."""
    import logging

    subject = f"{ranks} ranks"
    # The table is the only output: a failure to communicate is a row of it, and not a log of torch.
    logging.getLogger("torch").setLevel(logging.ERROR)
    start = time.perf_counter()
    try:
        settings = {"devices": ranks, "device": "cpu", "timeout_seconds": _COLLECTIVE_SECONDS}
        strategy = registry.make("strategy", "ddp", settings)
        total, seconds = strategy.launch(partial(_all_reduce, strategy))
    # Any failure here is the result of the check.
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        remedy = "check that processes can connect to 127.0.0.1 (firewall, GLOO_SOCKET_IFNAME) and use /dev/shm"
        return Check(subject, PROBLEM, f"cannot communicate: {type(error).__name__}: {first}", remedy)
    took = time.perf_counter() - start
    if total != sum(range(1, ranks + 1)):
        return Check(subject, PROBLEM, f"sum is {total}", "please report this: an all-reduce returned a wrong result")
    return Check(subject, OK, f"started and ended in {took:.1f} s; an all-reduce takes {seconds * 1e6:.0f} us")


def _all_reduce(strategy: Strategy) -> tuple[float, float]:
    """Return the sum of (rank + 1) over all ranks, and the seconds of a small all-reduce."""
    import torch

    from trainkit.optim.precision import Precision

    strategy.setup(Precision())
    try:
        # Not timed: the first one also opens the connections.
        total = strategy.comm.all_reduce(torch.tensor(float(strategy.comm.rank + 1))).item()
        start = time.perf_counter()
        for _ in range(_TIMES):
            strategy.comm.all_reduce(torch.ones(16))
        return total, (time.perf_counter() - start) / _TIMES
    finally:
        strategy.teardown()


def _print(results: list[Check]) -> None:
    """Print a row for each result, and its remedy below."""
    styles = {OK: "green", WARNING: "yellow", PROBLEM: "bold red"}
    rows: list[tuple[str | Text, ...]] = []
    for result in results:
        mark = result.state.upper() if result.state == PROBLEM else result.state
        rows.append((Text(mark, style=styles[result.state]), result.subject, result.text))
        if result.remedy:
            rows.append(("", "", Text(f"-> {result.remedy}", style="dim")))
    print_table(rows)
    problems, warned = (sum(result.state == state for result in results) for state in (PROBLEM, WARNING))
    print(f"{problems} problem{'s' * (problems != 1)}, {warned} warning{'s' * (warned != 1)}")
