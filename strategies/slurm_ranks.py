"""Ranks that SLURM has started: what `srun` or submitit tell each task, as torch.distributed wants it.

    srun --ntasks-per-node=4 trainkit fit ...       every task is a rank; they meet on the first node of the step

Only `srun` sets the variables that are read, so a batch script and its shell are no ranks. What is set already counts:
under torchrun nothing is done, and MASTER_ADDR or MASTER_PORT may be chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_FIRST_HOST = re.compile(r"(?P<name>[^,\[]+)(?:\[(?P<number>\d+)[^\]]*\](?P<rest>[^,\[]*))?")


def variables_of_task(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make this process a rank of its SLURM step; none where it is no task of several."""
    if "RANK" in environment:
        return {}
    for tasks, rank, local_rank, hosts, job in (
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"),
        ("SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_LOCALID", "", "SUBMITIT_LOCAL_JOB_ID"),
    ):
        if int(environment.get(tasks, "1")) > 1 and rank in environment:
            return {
                "RANK": environment[rank],
                "LOCAL_RANK": environment.get(local_rank, "0"),
                "WORLD_SIZE": environment[tasks],
                "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(environment.get(hosts, "127.0.0.1"))),
                "MASTER_PORT": environment.get("MASTER_PORT", str(port_of(environment.get(job, "0")))),
            }
    return {}


def first_host(hosts: str) -> str:
    """Return the first name of a list as SLURM writes it: `node[003-005,9],gpu1` begins with `node003`."""
    found = _FIRST_HOST.match(hosts)
    if found is None:
        return hosts
    return f"{found['name']}{found['number'] or ''}{found['rest'] or ''}"


def port_of(job: str) -> int:
    """Return a port that all tasks of a job know, and that is another one for jobs beside it."""
    return _FIRST_PORT + int(re.sub(r"\D", "", job) or 0) % _NUM_PORTS
