"""Ray launcher on a cluster of two nodes: ranks are spread, stop on signals, and continue when a node is lost."""

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.program import wait_until
from tests.tasks import Regression, adamw, regression_data
from trainkit import Callback, Data, Stopped, Trainer, UserError
from trainkit.checkpoint.store import load_from
from trainkit.distributed import ray_launcher
from trainkit.distributed.failure_store import RankError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # Ray's own
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
LOST_AT = 7
ROOM = {"num_cpus": 1, "object_store_memory": 80 << 20}


class Failing(Regression):
    def training_step(self, batch: Any) -> Any:
        print(f"rank {os.environ['RANK']} was here")
        raise KeyError("boom")


def regression() -> Regression:
    return Regression(adamw, hidden=16)


class NoteStart(Callback):
    def on_fit_start(self, run: Any) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        with open(run.run_dir / f"starts_{run.strategy.comm.rank}.txt", "a", encoding="utf-8") as file:
            file.write(f"{run.state.step} {run.strategy.comm.world_size} {run.plan.batch_size} {node}\n")


class LoseNode(Callback):
    """Kills a node's raylet and the rank there, as if the power had failed."""

    def __init__(self, kept: str) -> None:
        self.kept = kept

    def on_step_end(self, run: Any) -> None:
        import ray

        if run.state.step == LOST_AT and ray.get_runtime_context().get_node_id() != self.kept:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


class LoseRank(Callback):
    """Raises on rank 0 what a rank raises that waits in vain for one on a node that is gone."""

    def on_step_end(self, run: Any) -> None:
        if run.state.step == LOST_AT and run.is_main and run.strategy.comm.world_size == 2:
            raise RankError("rank 1 does not answer")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with room for one rank each."""
    ray = pytest.importorskip("ray")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    of_head = {**ROOM, "include_dashboard": False, "_system_config": soon}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=of_head)
    try:
        cluster.add_node(**ROOM)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def head(cluster: Any) -> str:
    """The name of the node that this process is connected to; there is another one."""
    import ray

    if sum(node["Alive"] for node in ray.nodes()) == 1:  # a test has lost the other
        cluster.add_node(**ROOM)
    name: str = ray.get_runtime_context().get_node_id()
    return name


def trainer(run_dir: Path, strategy: Any, steps: int, *callbacks: Callback) -> Trainer:
    saving = Checkpoint(every="3step")
    return Trainer(strategy, max_duration=f"{steps}step", callbacks=[*callbacks, saving], loggers=[], run_dir=run_dir)


def data() -> Data:
    return Data(train=regression_data(30), batch_size=8)


def on_ray() -> DDPStrategy:
    return DDPStrategy(devices=2, device="cpu", launcher="ray")


def test_an_error_of_the_task_is_raised_by_the_caller_and_is_in_the_logs_of_ranks(head, tmp_path):
    with pytest.raises(KeyError, match="boom") as caught:
        trainer(tmp_path, on_ray(), 5).fit(Failing(), data())
    assert "training_step" in str(caught.value.__cause__)
    for rank in range(2):
        log = (tmp_path / f"rank_{rank}.log").read_text()
        assert f"rank {rank} was here\n" in log
        assert log.endswith("KeyError: 'boom'\n") and log.count("Traceback") == 1


def test_a_signal_to_the_caller_stops_all_ranks_with_a_checkpoint(head, tmp_path):
    def send() -> None:
        wait_until(lambda: len(list(tmp_path.glob("starts_*.txt"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(Stopped) as caught:
        trainer(tmp_path, on_ray(), 1_000_000, NoteStart()).fit(regression(), data())
    assert caught.value.exit_code == 143
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_reason"] == "SIGTERM"
    assert load_from(tmp_path).entry.step == summary["steps"]  # of an interval, if that ended there too


def test_a_cluster_without_room_is_reported(head, tmp_path, monkeypatch):
    monkeypatch.setattr("trainkit.distributed.ray_launcher.PLACING_SECONDS", 0.1)
    strategy = DDPStrategy(devices=5, device="cpu", launcher="ray")
    with pytest.raises(UserError, match=r"needs 5 times 1 CPU, and the Ray cluster has room for 2; set .*devices=2"):
        trainer(tmp_path, strategy, 5).fit(regression(), data())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the caller has a GPU")
def test_a_caller_without_gpus_asks_the_cluster_for_them(head, tmp_path, monkeypatch):
    monkeypatch.setattr("trainkit.distributed.ray_launcher.PLACING_SECONDS", 0.1)
    strategy = FSDPStrategy(devices=2, device="cuda", launcher="ray", offload="cpu", units=["Linear"])
    with pytest.raises(UserError, match=r"needs 2 times 1 CPU and 1 GPU, and .* room for 0; set strategy\.device=cpu"):
        trainer(tmp_path, strategy, 5).fit(regression(), data())


def test_ranks_that_hold_shards_have_the_weights_of_one_process(head, tmp_path):
    strategy = FSDPStrategy(devices=2, device="cpu", launcher="ray", units=["Linear"])
    task, whole = regression(), regression()
    trainer(tmp_path / "run", strategy, 5, NoteStart()).fit(task, data())
    nodes = {(tmp_path / "run" / f"starts_{rank}.txt").read_text().split()[3] for rank in (0, 1)}
    assert len(nodes) == 2
    trainer(tmp_path / "whole", SingleStrategy(device="cpu"), 5).fit(whole, data())
    torch.testing.assert_close(dict(task.state_dict()), dict(whole.state_dict()))


@pytest.mark.parametrize("noticed_first_by", ["Ray", "a rank"])
def test_a_run_that_loses_a_node_continues_to_the_weights_of_an_uninterrupted_run(
    noticed_first_by, head, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(ray_launcher, "GRACE_SECONDS", 5.0 if noticed_first_by == "Ray" else 0.0)
    losses = [LoseNode(kept=head), *([] if noticed_first_by == "Ray" else [LoseRank()])]
    run = trainer(tmp_path / "run", on_ray(), 12, NoteStart(), *losses)
    task, whole = regression(), regression()
    result = run.fit(task, data())
    first, second = (
        [line.split() for line in (tmp_path / "run" / f"starts_{rank}.txt").read_text().splitlines()] for rank in (0, 1)
    )
    assert [start[:3] for start in first] == [["0", "2", "8"], ["6", "1", "8"]]
    assert [start[:3] for start in second] == [["0", "2", "8"]]
    assert first[0][3] != second[0][3]
    assert first[1][3] == head
    assert f" on {socket.gethostname()} is gone" in caplog.text
    assert result.steps == 12
    trainer(tmp_path / "whole", SingleStrategy(device="cpu"), 12).fit(whole, data())
    torch.testing.assert_close(dict(task.state_dict()), dict(whole.state_dict()))
