"""The way that buffers take, chosen from where the ranks are."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainkit.distributed.collectives import gather
from trainkit.distributed.failure_store import FailureStore
from trainkit.errors import UserError

from ..ddp.shared_memory import why_no_shared_memory
from .channels import Channels, open_channels
from .exchange import Exchange
from .host_buffers import HostBuffers
from .hosts import Hosts, Servers
from .part_transport import BufferSettings, PartTransport
from .staging import Staging, open_staging

logger = logging.getLogger(__name__)


def open_part_transport(
    name: str,
    group: dist.ProcessGroup,
    *,
    host: str,
    servers: Servers,
    device: torch.device,
    board: FailureStore,
    timeout_seconds: float,
    settings: BufferSettings,
    num_gradients: Callable[[], list[int]],
) -> PartTransport:
    """Return the transport called `name`; "auto" is shared memory inside each host where that works. Collective.

    `host` names the machine that this rank is on. Raises UserError on every rank for what cannot be.
    """

    def exchange(channels: Channels, device: torch.device, staging: Staging) -> Exchange:
        return Exchange(
            channels,
            board=board,
            device=device,
            staging=staging,
            timeout_seconds=timeout_seconds,
            settings=settings,
            num_gradients=num_gradients,
        )

    hosts = Hosts.of(gather(host, group))
    local = _local_group(hosts, group)
    reason = _why_no_host_buffers(hosts, group, local, servers)
    if name != "exchange" and reason is None:
        channels = open_channels(hosts.columns(servers), group)
        alone = len(hosts.ranks) == 1
        return HostBuffers(
            local,
            names=hosts.beside(group.rank()),
            between=None if alone or channels is None else exchange(channels, torch.device("cpu"), Staging()),
            num_servers=hosts.servers_of_a_host(servers),
            device=device,
            staging=open_staging(device),
            board=board,
            timeout_seconds=timeout_seconds,
            settings=settings,
            num_gradients=num_gradients,
        )
    if name == "shared_memory":
        raise UserError(f"transport=shared_memory cannot work here: {reason}. Set strategy.transport=auto.")
    if servers == "host" and group.size() > 1:
        why = "transport=exchange makes every rank one" if name == "exchange" else f"it cannot: {reason}"
        raise UserError(f"servers=host needs memory that a host's ranks share, and {why}. Set strategy.servers=rank.")
    if name == "auto" and group.rank() == 0 and group.size() > len(hosts.ranks):
        logger.info("buffers go through gloo, not through shared memory: %s", reason)
    channels = open_channels([range(group.size())], group)
    assert channels is not None
    return exchange(channels, device, open_staging(device))


def _local_group(hosts: Hosts, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group of this host's ranks. Collective."""
    if len(hosts.ranks) == 1:
        return group
    found = group
    for ranks in hosts.ranks:
        made = dist.new_group([dist.get_global_rank(group, rank) for rank in ranks], backend="gloo")
        if group.rank() in ranks:
            assert made is not None
            found = made
    return found


def _why_no_host_buffers(
    hosts: Hosts, group: dist.ProcessGroup, local: dist.ProcessGroup, servers: Servers
) -> str | None:
    """Return None if the ranks of every host can share memory, else the first reason. Collective."""
    if group.size() == 1:
        return "there is one rank only"
    if len(hosts.ranks) == group.size() and servers == "rank":
        return "every rank is on a host of its own"
    if servers == "rank" and not hosts.are_even:
        return "hosts have unequal numbers of ranks"
    reasons = gather(why_no_shared_memory(local, torch.device("cpu")), group)
    return next((reason for reason in reasons if reason is not None), None)


def host_name() -> str:
    """Return what tells this machine from others: a number that its kernel drew when it started."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        import socket

        return socket.gethostname()
