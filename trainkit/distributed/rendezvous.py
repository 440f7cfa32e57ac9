"""Rendezvous of ranks: a fresh view of a store that outlives its ranks, and the variables of SLURM.

Under torchrun a store outlives its ranks: after a restart new ranks would find the addresses of dead ones.

    rank r    writes a random name          reads the reply to that name        acknowledges
    rank 0    reads the names and replies with the name of the attempt, until all ranks have acknowledged

Names of dead ranks get a reply too, which nobody reads.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # exported at run time
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from trainkit.distributed.failure_store import RankError

POLL_SECONDS = 0.02
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_FIRST_HOST = re.compile(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?")


def fresh_store(store: Store, *, rank: int, world_size: int, limit: timedelta) -> Store:
    """Return a view of the store without the keys of earlier attempts; collective."""
    meeting = PrefixStore("trainkit/meeting", store)
    deadline = time.monotonic() + limit.total_seconds()
    # Random for each start, so that it differs from the names that dead ranks have left in the store.
    name = secrets.token_hex(8)
    if rank == 0:
        _gather(meeting, name, world_size, deadline)
        return PrefixStore(f"trainkit/attempt_{name}", store)
    meeting.set(f"rank_{rank}", name)
    # `check` and not `get`, whose time-out would not name who is missing.
    while not meeting.check([name]):
        _sleep(deadline, "rank 0 did not arrive")
    attempt = meeting.get(name).decode()
    # Rank 0 waits for this: its reply may have gone to the name of a dead rank, which this rank then replaces.
    meeting.set(f"{attempt}/{rank}", "here")
    return PrefixStore(f"trainkit/attempt_{attempt}", store)


def _gather(meeting: Store, attempt: str, world_size: int, deadline: float) -> None:
    missing = set(range(1, world_size))
    replied: set[bytes] = set()
    while missing:
        for rank in sorted(missing):
            if meeting.check([f"{attempt}/{rank}"]):
                missing.discard(rank)
            elif meeting.check([f"rank_{rank}"]):
                who = meeting.get(f"rank_{rank}")
                # A rank that starts late replaces the name of its dead predecessor, so each new name gets a reply,
                # once.
                if who not in replied:
                    replied.add(who)
                    meeting.set(who.decode(), attempt)
        if missing:
            _sleep(deadline, f"ranks {sorted(missing)} did not arrive")


def _sleep(deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise RankError(f"the rendezvous timed out: {why} in time.")
    time.sleep(POLL_SECONDS)


def variables_of_task(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make this process a rank of its SLURM step; empty unless the step has several tasks."""
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


def store_of_environment(limit: timedelta) -> tuple[Store, int, int]:
    """Return the store that the environment names, this rank and the number of ranks.

    A store that rank 0 opens listens at MASTER_ADDR only. If that is an address of another machine, such as a gateway,
    or a name that this machine alone takes for itself (127.0.1.1), it listens on every network.
    """
    host, rank = os.environ.get("MASTER_ADDR", ""), os.environ.get("RANK")
    is_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own store
    if rank == "0" and not is_agent and {"WORLD_SIZE", "MASTER_PORT"} <= os.environ.keys():
        # The name is unknown, the address is not of this machine, or its port is in use: torch's rendezvous decides.
        with suppress(OSError):
            is_elsewhere = not host.startswith(("127.", "localhost")) and socket.gethostbyname(host).startswith("127.")
            if not is_elsewhere:
                store = store_at(host, int(os.environ["MASTER_PORT"]), limit=limit, is_shared=True)
                return store, 0, int(os.environ["WORLD_SIZE"])
    store, number, world_size = next(rendezvous("env://", timeout=limit))
    return store, number, world_size


def store_at(host: str, port: int = 0, *, limit: timedelta = default_pg_timeout, is_shared: bool = False) -> TCPStore:
    """Return a store that listens only at an address of this machine; TCPStore's own socket listens on every network.

    `is_shared` lets this process open the port again. Raises OSError if the address is not one of this machine, or the
    port is in use.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listening:
        # Else the port of a run that has just ended could not be opened for minutes (TIME_WAIT).
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(socket.SOMAXCONN)
        port = listening.getsockname()[1]
        # TCPStore takes over the descriptor and closes it.
        fd = listening.detach()
    return TCPStore(
        host,
        port,
        is_master=True,
        # Else the constructor would wait for all ranks.
        wait_for_workers=False,
        timeout=limit,
        multi_tenant=is_shared,
        master_listen_fd=fd,
    )


def is_main_process() -> bool:
    """Return True unless torchrun, SLURM or submitit started this process as another rank than 0."""
    return {**os.environ, **variables_of_task(os.environ)}.get("RANK", "0") == "0"


def first_host(hosts: str) -> str:
    """Return the first name of a list of hosts in SLURM's format: `node003` of `node[003-005,9],gpu1`."""
    match = _FIRST_HOST.match(hosts)
    return hosts if match is None else "".join(part or "" for part in match.groups())


def port_of(job: str) -> int:
    """Return a port that is the same for all tasks of a job, and differs between neighbouring jobs."""
    return _FIRST_PORT + int(re.sub(r"\D", "", job) or 0) % _NUM_PORTS
