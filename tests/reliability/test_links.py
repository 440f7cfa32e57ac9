"""Links between hosts are cut: for seconds, which delays a step, and for good, which ends the run and names the host.

Hosts are network namespaces; `make torture` runs this.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit.strategies.single import SingleStrategy

from benchmarks.hosts import Hosts, become_bridge, why_no_hosts
from trainkit import Callback, Data, TaskModule, Trainer, registry
from trainkit.errors import RemoteRankError

TIMEOUT, CUT_SECONDS, CUT_AT, STEPS = 12, 5, 3, 6
LIMIT_SECONDS = 240
STRATEGIES = ["ddp", "fusion", "fsdp", "torch_ddp", "pipeline"]


class Regression(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1))

    def training_step(self, batch: Any) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WaitForCut(Callback):
    """Tells that a step has ended, and waits in one of them until the link is cut."""

    def on_step_end(self, run: Any) -> None:
        if run.is_main and run.state.step == CUT_AT:
            print("cut", flush=True)
            time.sleep(1.0)


def fit(strategy: Any, run_dir: Path, *callbacks: Callback) -> list[list[float]]:
    """Train, and return the weights of the last layer."""
    task = Regression()
    samples = torch.randn(64, 400, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {"callbacks": [*callbacks], "loggers": [], "report": False, "num_sanity_batches": 0}
    trainer = Trainer(strategy, max_duration=f"{STEPS}step", precision="fp64", run_dir=run_dir, **settings)
    trainer.fit(task, Data(train=TensorDataset(samples), batch_size=8))
    weights: list[list[float]] = task.net[-1].weight.tolist()
    return weights


def run_rank(name: str, run_dir: str) -> None:
    """Train on the rank of this host, and print its weights, or why it has ended, as JSON."""
    strategy = registry.make("strategy", name, {"timeout_seconds": TIMEOUT, "device": "cpu"})
    try:
        print(json.dumps(fit(strategy, Path(run_dir), WaitForCut())), flush=True)
    except RemoteRankError as error:
        print(json.dumps(str(error)), flush=True)


def cut_the_link(name: str, mended: bool, run_dir: str) -> None:
    """Run two ranks on two hosts, cut the link of the second, and print what they print, as JSON."""
    command = [sys.executable, "-m", __spec__.name, "rank", name, run_dir]
    with Hosts(command, count=2, ranks=1, megabits=1000) as hosts:
        while (line := hosts.read_line(0)) != "cut\n":
            assert line, "rank 0 has ended before the cut"
        hosts.link(1, "down")
        if mended:
            time.sleep(CUT_SECONDS)
            hosts.link(1, "up")
        print(json.dumps([json.loads(hosts.read_lines(host)[-1]) for host in (0, 1)]))


def outcomes(name: str, *, mended: bool, folder: Path) -> list[Any]:
    """Return for each of two ranks its weights, or the reason for which it has ended."""
    reason = why_no_hosts()
    if reason is not None:
        pytest.skip(reason)
    command = [sys.executable, "-m", __name__, "caller", name, "mended" if mended else "", str(folder)]
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
    for weights in outcomes(name, mended=True, folder=tmp_path / "hosts"):
        assert isinstance(weights, list), weights
        torch.testing.assert_close(torch.tensor(weights), expected)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_link_that_is_cut_for_good_ends_both_ranks_and_names_the_other_host(name, tmp_path):
    with_store, without = outcomes(name, mended=False, folder=tmp_path)
    assert "rank 1 on host1" in with_store
    assert "its machine or the link to it is down" in without


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "caller":
        become_bridge(sys.executable, "-m", __spec__.name, "bridge", *arguments)
    elif role == "bridge":
        cut_the_link(arguments[0], bool(arguments[1]), arguments[2])
    else:
        run_rank(*arguments)
