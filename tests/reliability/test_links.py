"""Links between hosts are cut, for seconds and for good, and hosts vanish: the run goes on, or names the host.

Hosts are network namespaces; `make torture` runs this.
"""

import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.distributed import run as torchrun
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.single import SingleStrategy

from benchmarks.hosts import Hosts, become_bridge, why_no_hosts
from tests.tasks import Fitting, seeded
from tests.tasks import fit as train
from trainkit import Callback, Data, registry
from trainkit.errors import RemoteRankError

TIMEOUT, CUT_SECONDS, CUT_AT, STEPS = 12, 5, 3, 6
# After the time-out a rank may wait for the store (10 s) or the answers of others (3 s), and for its watchdog (5 s).
LAST_SECONDS = 25
CHECKS = 5  # that Ray makes before it gives a node up
NOTICE_SECONDS = 30  # until the caller asks for the node, and until what it prints is read
LIMIT_SECONDS = 400
PORT, RENDEZVOUS, NOBODY = 29401, "torch.rendezvous.links", b"Y2FuaW1hZGFt"  # torch's key of the hosts that are there
RAY = "10.77.0.1:6379"
STRATEGIES = ["ddp", "fusion", "fsdp", "torch_ddp", "pipeline"]


class NoteStart(Callback):
    """Tells at which step training starts on how many ranks."""

    def on_fit_start(self, run: Any) -> None:
        if run.is_main:
            print(f"step {run.state.step} on {run.strategy.comm.world_size}", flush=True)


class WaitForHost(Callback):
    """Tells that a rank is alone, and waits until the signal of another host."""

    def on_step_end(self, run: Any) -> None:
        if run.is_main and run.state.step == CUT_AT + 1 and run.strategy.comm.world_size == 1:
            print("alone", flush=True)
            while run.signals.received is None:
                time.sleep(0.05)


class WaitForCut(Callback):
    """Tells that a step has ended, and waits in one of them until the link is cut."""

    def on_step_end(self, run: Any) -> None:
        if run.is_main and run.state.step == CUT_AT and run.strategy.comm.num_processes > 1:
            print("cut", flush=True)
            time.sleep(1.0)


def fit(strategy: Any, run_dir: Path, *callbacks: Callback, resume: str | None = None) -> list[list[float]]:
    """Train, and return the weights of the last layer."""
    layers = seeded(lambda: nn.Sequential(*(nn.Linear(400, width) for width in (400, 400, 1))))
    task, samples = Fitting(layers), torch.randn(64, 400, generator=torch.Generator().manual_seed(0))
    settings = {"max_duration": f"{STEPS}step", "precision": "fp64", "run_dir": run_dir, "report": False}
    data = Data(train=TensorDataset(samples), batch_size=8)
    train(strategy, task, data, *callbacks, resume=resume, **settings)
    weights: list[list[float]] = task.net[-1].weight.tolist()
    return weights


def run_rank(name: str, run_dir: str) -> None:
    """Train on the rank of this host, and print its weights, or why it has ended, as JSON."""
    strategy = registry.make("strategy", name, {"timeout_seconds": TIMEOUT, "device": "cpu"})
    try:
        print(json.dumps(fit(strategy, Path(run_dir), WaitForCut())), flush=True)
    except RemoteRankError as error:
        print(json.dumps(str(error)), flush=True)


def forget_rank() -> int:
    """Remove the variables that make this process a rank; return the number of its host."""
    host = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return host


def run_agent(run_dir: str) -> None:
    """Run torchrun on this host: the first one has the rendezvous, and the last one joins when it is told to."""
    host = forget_rank()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/several_machines.md
    if host == 0:
        store = TCPStore("10.77.0.1", PORT, is_master=True, wait_for_workers=False)
        while not store.check([RENDEZVOUS]) or store.get(RENDEZVOUS) == NOBODY:
            time.sleep(0.05)
    while host == 2 and not Path(run_dir, "join").exists():
        time.sleep(0.05)
    # The host that comes first decides how long the second is waited for: at the start, but not when it has vanished.
    rendezvous = f"last_call_timeout={1 if host == 0 else 300},keep_alive_interval=1,keep_alive_max_attempt=5,is_host=0"
    torchrun.main(
        [
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=links"),
            *(f"--rdzv-endpoint=10.77.0.1:{PORT}", f"--rdzv-conf={rendezvous}"),
            *("-m", __spec__.name, "elastic", run_dir),
        ]
    )


def train_over_a_slow_link(name: str, run_dir: str) -> None:
    """Train on three hosts, of which the second receives slowly, and print the advice of the timeline, as JSON."""
    command = [sys.executable, "-m", __spec__.name, "timed", name, run_dir]
    with Hosts(command, count=3, ranks=1, megabits=1000) as hosts:
        hosts.limit(1, 20)
        hosts.read_lines(0)
    timeline = json.loads(Path(run_dir, "timeline_rank_0.json").read_text())
    print(json.dumps(timeline["otherData"]["advice"]))


def let_a_host_vanish(run_dir: str) -> None:
    """Run two hosts under torchrun, lose the second, let a third one join, and print what rank 0 has printed."""
    Path(run_dir).mkdir()
    command = [sys.executable, "-m", __spec__.name, "agent", run_dir]
    with Hosts(command, count=3, ranks=1, megabits=1000) as hosts:
        printed = []
        while line := hosts.read_line(0).strip():
            printed.append(line)
            if line == "cut":
                hosts.vanish(1)
            if line == "alone":
                Path(run_dir, "join").touch()
        print(json.dumps(printed))


def run_ray(run_dir: str) -> None:
    """Run a node of a Ray cluster on this host; the first one trains on all of them, and prints its weights as JSON."""
    host = forget_rank()
    os.makedirs("/tmp/ray", exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/tmp/ray"], check=True)  # as on machines of their own
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1", "--object-store-memory=80000000"]
    start += [f"--node-ip-address=10.77.0.{host + 1}", "--disable-usage-stats"]
    if host:
        others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_health_check")}
        subprocess.run([*start, f"--address={RAY}", "--block"], stdout=sys.stderr, check=True, env=others)
        return
    subprocess.run([*start, "--head", "--port=6379", "--include-dashboard=false"], stdout=sys.stderr, check=True)
    import ray

    ray.init(RAY)
    while len(ray.nodes()) < 2:
        time.sleep(0.5)
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)
    strategy = DDPStrategy(devices=2, device="cpu", launcher="ray", timeout_seconds=TIMEOUT)
    print(json.dumps(fit(strategy, Path(run_dir), NoteStart(), WaitForCut(), Checkpoint(every="2step"))), flush=True)


def let_a_host_vanish_under_ray(run_dir: str) -> None:
    """Run two nodes of a Ray cluster, lose the second, and print what rank 0 and the caller print, and when.

    Seconds are from the loss to the warning of the caller that the host is gone.
    """
    command = [sys.executable, "-m", __spec__.name, "node", run_dir]
    log = Path(run_dir, "rank_0.log")
    with Hosts(command, count=2, ranks=1, megabits=1000) as hosts:
        while not log.exists() or "cut\n" not in log.read_text():
            assert hosts.processes[0].poll() is None, "the caller has ended before the loss"
            time.sleep(0.1)
        hosts.vanish(1)
        vanished, printed, seconds = time.monotonic(), [], None
        while line := hosts.read_line(0):
            printed.append(line)
            if seconds is None and "is gone" in line:
                seconds = time.monotonic() - vanished
        print(json.dumps([log.read_text(), printed, seconds]))


def cut_the_link(name: str, mended: bool, run_dir: str) -> None:
    """Run two ranks on two hosts, cut the link of the second, and print as JSON what they print, and when.

    Seconds are from the cut to the end of a rank's process.
    """
    command = [sys.executable, "-m", __spec__.name, "rank", name, run_dir]
    with Hosts(command, count=2, ranks=1, megabits=1000) as hosts:
        while (line := hosts.read_line(0)) != "cut\n":
            assert line, "rank 0 has ended before the cut"
        hosts.link(1, "down")
        cut = time.monotonic()
        if mended:
            time.sleep(CUT_SECONDS)
            hosts.link(1, "up")
        with ThreadPoolExecutor() as pool:  # the ranks may end in any order
            print(json.dumps([*pool.map(lambda host: end_of(hosts, host, cut), (0, 1))]))


def end_of(hosts: Hosts, host: int, since: float) -> tuple[Any, float]:
    """Wait for the end of a host's program; return what it has printed last, and the seconds since a moment."""
    lines = hosts.read_lines(host)
    return json.loads(lines[-1]), time.monotonic() - since


def outcomes(name: str, *, mended: bool, folder: Path) -> list[Any]:
    """Return for each of two ranks its weights, or the reason for which it has ended, and the seconds until its end."""
    return printed_by("cut", name, "mended" if mended else "", str(folder))


def printed_by(*arguments: str) -> list[Any]:
    """Return what is printed as JSON in namespaces that have hosts."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", __name__, "caller", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr
    found: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("TRAINKIT_KILLS" not in os.environ, reason="`make torture` runs it"),
]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_link_that_is_cut_for_seconds_delays_a_step_and_changes_no_weight(name, tmp_path):
    expected = torch.tensor(fit(SingleStrategy(device="cpu"), tmp_path / "one"))
    for weights, _ in outcomes(name, mended=True, folder=tmp_path / "hosts"):
        assert isinstance(weights, list), weights
        torch.testing.assert_close(torch.tensor(weights), expected)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_link_that_is_cut_for_good_ends_both_ranks_in_time_and_names_the_other_host(name, tmp_path):
    (with_store, seconds), (without, later) = outcomes(name, mended=False, folder=tmp_path)
    assert "rank 1 on host1" in with_store
    assert "the ranks' store on host0" in without
    assert "its machine or the link to it is down; ranks there: 0" in without
    assert max(seconds, later) < TIMEOUT + LAST_SECONDS


def test_under_torchrun_a_run_goes_on_without_a_host_that_vanishes_and_with_one_that_joins(tmp_path):
    expected = torch.tensor(fit(SingleStrategy(device="cpu"), tmp_path / "one"))
    *lines, weights = printed_by("vanish", str(tmp_path / "hosts"))
    assert lines == ["step 0 on 2", "cut", "step 2 on 1", "alone", "step 4 on 2"]
    torch.testing.assert_close(torch.tensor(json.loads(weights)), expected)


@pytest.mark.parametrize(("period", "timeout"), [(3, 10), (1, 1)], ids=["defaults", "documented"])
def test_under_ray_a_run_continues_without_a_host_that_vanishes(period, timeout, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    expected = torch.tensor(fit(SingleStrategy(device="cpu"), tmp_path / "one"))
    monkeypatch.setenv("RAY_health_check_period_ms", f"{1000 * period}")
    monkeypatch.setenv("RAY_health_check_timeout_ms", f"{1000 * timeout}")
    log, printed, seconds = printed_by("ray", str(tmp_path / "hosts"))
    told = [line for line in log.splitlines() if line == "cut" or line.startswith("step ")]
    assert told == ["step 0 on 2", "cut", "step 2 on 1"]
    assert any("on host1 is gone" in line and "Resuming from step 2" in line for line in printed), printed
    torch.testing.assert_close(torch.tensor(json.loads(printed[-1])), expected)
    assert seconds < CHECKS * (period + timeout) + NOTICE_SECONDS


@pytest.mark.parametrize("name", ["ddp", "fusion"])
def test_the_timeline_names_the_host_with_a_slow_link(name, tmp_path):
    advice = printed_by("slow", name, str(tmp_path / "hosts"))
    assert any("steps wait for host1" in sentence for sentence in advice), advice


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "caller":
        become_bridge(sys.executable, "-m", __spec__.name, *arguments)
    elif role == "cut":
        cut_the_link(arguments[0], bool(arguments[1]), arguments[2])
    elif role == "vanish":
        let_a_host_vanish(*arguments)
    elif role == "slow":
        train_over_a_slow_link(*arguments)
    elif role == "timed":
        fit(registry.make("strategy", arguments[0], {"device": "cpu", "record_timeline": True}), Path(arguments[1]))
    elif role == "agent":
        run_agent(*arguments)
    elif role == "node":
        run_ray(*arguments)
    elif role == "ray":
        let_a_host_vanish_under_ray(*arguments)
    elif role == "elastic":
        strategy = registry.make("strategy", "ddp", {"timeout_seconds": TIMEOUT, "device": "cpu"})
        callbacks = NoteStart(), WaitForCut(), WaitForHost(), Checkpoint(every="2step")
        weights = fit(strategy, Path(arguments[0], "run"), *callbacks, resume="auto")
        if os.environ["RANK"] == "0":
            print(json.dumps(weights), flush=True)
    else:
        run_rank(*arguments)
