"""Ranks started by SLURM: with submitit's local executor, and through an `sbatch` of a few lines."""

import os
import re
import socket
import sys
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest

from tests.program import Program
from trainkit.checkpoint.store import load_from
from trainkit.cli.main import main
from trainkit.distributed.ray_launcher import RayWorker
from trainkit.distributed.rendezvous import first_host, port_of, store_of_environment, variables_of_task

STEP = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_JOB_ID": "4711",
}
ELASTIC = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_a_task_of_srun_is_a_rank_with_its_rendezvous_on_the_first_node():
    assert variables_of_task(STEP) == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "node003",
        "MASTER_PORT": "24711",
    }
    chosen = variables_of_task({**STEP, "MASTER_ADDR": "fast", "MASTER_PORT": "5"})
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("fast", "5")


@pytest.mark.parametrize(
    "changed",
    [{"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}],
    ids=["under torchrun", "alone"],
)
def test_only_one_of_several_tasks_becomes_a_rank(changed):
    assert variables_of_task({**STEP, **changed}) == {}
    in_batch_script = {key: value for key, value in STEP.items() if key != "SLURM_STEP_NUM_TASKS"}
    assert variables_of_task({**in_batch_script, "SLURM_NTASKS": "4"}) == {}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a1,b2", "a1"),
        ("node[003-005,9],gpu1", "node003"),
        ("n[7,9]-ib", "n7-ib"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_host_is_read_from_a_list_in_slurms_format(hosts, first):
    assert first_host(hosts) == first


def test_neighbouring_jobs_have_different_ports():
    assert port_of("12") != port_of("13")
    assert all(1024 < port_of(str(job)) < 65536 for job in (0, 19_999, 20_000, 10**9))


JOB = str(1 + os.getpid() % 12_000)  # its port, below those that are given out, is not that of tests beside these
TOOLS = {
    "sbatch": """
        cp "$1" {folder}/submitted.sh
        SLURM_JOB_ID={job} SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_NODEID=0 bash "$1" > {folder}/batch.log 2>&1 &
        echo "Submitted batch job {job}"
    """,
    "srun": """
        while [ "${1#-}" != "$1" ]; do case "$1" in --output|--error) shift;; esac; shift; done
        for task in 0 1; do
            SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost "$@" &
        done
        wait
    """,
    "sacct": """
        printf 'JobID|State|NodeList\\n{job}|RUNNING|localhost\\n'
    """,
}


def sweep(*overrides: str, path: str) -> tuple[int, str]:
    """Run a sweep of one job in the working folder; return the exit code and what was printed."""
    environment = {key: value for key, value in os.environ.items() if key not in ELASTIC and "SLURM" not in key}
    task = ["recipe=digits_mlp", "strategy.device=cpu", "logger=jsonl", "callbacks=checkpoint"]
    limits = ["trainer.max_duration=2step", "trainer.limit_validation_batches=1", "run_dir=sweep"]
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{path}{environment['PATH']}"}
    with Path("printed.txt").open("w") as file:
        streams = (0, file.fileno(), file.fileno())
        argv = ["fit", "-m", *task, *limits, *overrides]
        with Program(command, argv, streams=streams, environment=environment) as program:
            code = program.wait(150)
    return code, Path("printed.txt").read_text()


def command(argv: list[str]) -> None:
    sys.exit(main(argv))


@pytest.mark.slow
def test_the_tasks_of_submitit_on_this_machine_train_together(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    # Three: on its own, each task would start two ranks.
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=3"]
    code, printed = sweep("strategy=fsdp", *launcher, path="")
    assert code == 0, printed
    payload = load_from(tmp_path / "sweep" / "0").payload
    assert payload["state"]["step"] == 2
    assert "world_size=3" in payload["layout"]


@pytest.mark.slow
def test_a_job_for_slurm_requests_its_resources_and_its_tasks_train_together(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.chdir(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, script in TOOLS.items():
        content = script.replace("{folder}", str(tmp_path)).replace("{job}", JOB)
        (tools / name).write_text("#!/bin/bash\n" + textwrap.dedent(content))
        (tools / name).chmod(0o755)
    launcher = ["nodes=1", "tasks_per_node=2", "timeout_min=90", "partition=gpu", "signal_delay_s=300"]
    code, printed = sweep(
        "strategy=ddp",
        "hydra/launcher=submitit_slurm",
        *(f"hydra.launcher.{setting}" for setting in launcher),
        path=f"{tools}:",
    )
    log = (tmp_path / "batch.log").read_text() if (tmp_path / "batch.log").exists() else ""
    assert code == 0, printed + log
    asked = set(re.findall(r"^#SBATCH --(\S+)", (tmp_path / "submitted.sh").read_text(), re.MULTILINE))
    wanted = {"nodes=1", "ntasks-per-node=2", "time=90", "partition=gpu", "signal=USR2@300"}
    assert wanted <= asked
    payload = load_from(tmp_path / "sweep" / "0").payload
    assert payload["state"]["step"] == 2
    assert "world_size=2" in payload["layout"]


def listens_at(port: int) -> list[str]:
    """Return the addresses at which something listens on a port; one of IPv6 as the kernel writes it."""
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    listening = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    found = [address.split(":")[0] for address in listening if int(address.split(":")[1], 16) == port]
    return [socket.inet_ntoa(bytes.fromhex(text)[::-1]) if len(text) == 8 else text for text in found]


def test_rank_0_listens_at_its_address_alone_and_may_come_twice(monkeypatch):
    host = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}.{1 + os.getpid() // 62_500}"  # nobody else's
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    first, rank, world_size = store_of_environment(timedelta(seconds=30))
    assert host in listens_at(port) and "0.0.0.0" not in listens_at(port) and (rank, world_size) == (0, 1)
    first.set("key", "value")
    second, _, _ = store_of_environment(timedelta(seconds=30))
    assert second.get("key") == b"value"


def test_the_store_of_ranks_on_ray_listens_at_the_address_of_its_node_alone():
    pytest.importorskip("ray")
    worker = RayWorker()
    host, port = worker.open_store()
    assert listens_at(port) == [host]
