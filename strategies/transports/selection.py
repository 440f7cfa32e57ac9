"""The selection of a transport: shared memory inside each host where that works, else the process group."""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from trainkit.distributed.collectives import gather

from .half_precision import HalfPrecisionTransport
from .hosts import HostLayout, OwnGroups
from .process_group import ProcessGroupTransport, Transport, TransportName
from .shared_memory import HierarchicalTransport, SharedMemoryTransport, why_no_shared_memory

logger = logging.getLogger(__name__)


def open_transport(
    process_group: ProcessGroupTransport,
    *,
    name: TransportName = "auto",
    reduce_dtype: torch.dtype | None = None,
    hosts: HostLayout | None = None,
    own_groups: OwnGroups | None = None,
) -> Transport:
    """Return the transport called `name` of the ranks of `process_group`. Collective.

    "auto" is shared memory inside each host where it works, else the process group. In `reduce_dtype` gradients are
    sent between the ranks of the process group, or between hosts; those in shared memory are exact. `hosts` are those
    of the ranks, if known. `own_groups` takes the groups of hosts; without it they end with the default group.
    """
    group, device = process_group.group, process_group.device
    store, seconds = process_group.failure_store, process_group.timeout_seconds

    def over(members: dist.ProcessGroup) -> ProcessGroupTransport:
        kind = ProcessGroupTransport if reduce_dtype is None else partial(HalfPrecisionTransport, dtype=reduce_dtype)
        return kind(members, failure_store=store, device=device, timeout_seconds=seconds)

    if reduce_dtype is not None:
        process_group = over(group)
    if name == "process_group" or (name == "auto" and (device.type != "cpu" or group.size() == 1)):
        return process_group
    hosts, own_groups = hosts or HostLayout.gather(group), own_groups or OwnGroups(timedelta(seconds=seconds))
    inside, reason = open_host_group(hosts, group, device=device, even=True, own_groups=own_groups)
    if reason is None and len(hosts.ranks) == 1:
        if reduce_dtype is not None and group.rank() == 0:
            logger.info("reduce_dtype rounds nothing: the ranks of one host sum gradients in shared memory")
        # Pages are taken bucket by bucket, as gradients move in and free their own: there are never two full sets.
        return SharedMemoryTransport(group, failure_store=store, timeout_seconds=seconds, preallocate=False)
    if reason is None:
        between = own_groups.new_of_sets(hosts.columns(hosts.fewest_ranks), group, backend="gloo")
        assert between is not None  # hosts are even: each rank is in one column
        names = hosts.ranks_on_host(group.rank())
        return HierarchicalTransport(inside, over(between), names=names, failure_store=store, timeout_seconds=seconds)
    if name == "shared_memory":
        raise ValueError(f'transport="shared_memory" cannot work here: {reason}. Use transport="auto".')
    if group.rank() == 0:
        logger.info("gradients go through the process group, not through shared memory: %s", reason)
    return process_group


def open_host_group(
    hosts: HostLayout, group: dist.ProcessGroup, *, device: torch.device, even: bool, own_groups: OwnGroups
) -> tuple[dist.ProcessGroup, str | None]:
    """Return the group of this host's ranks, and `None` if these can share memory on every host, else the reason.

    Collective, with the same reason on every rank: ranks on different transports would hang. `even`: each host must
    have the same number of ranks, above 1.
    """
    if len(hosts.ranks) > 1:
        if even and len(hosts.ranks) == group.size():
            return group, "every rank is on a different host"
        if even and not hosts.is_even:
            return group, "hosts have unequal numbers of ranks"
        if group.size() != dist.get_world_size():  # new groups are made by all ranks
            return group, "the ranks of several hosts are a part of all ranks"
    inside = group if len(hosts.ranks) == 1 else own_groups.new_of_sets(hosts.ranks, group, backend="gloo")
    assert inside is not None  # each rank is on a host
    # Over all hosts: if one of them cannot share memory, all ranks use another transport.
    reasons = gather(why_no_shared_memory(inside, device), group)
    return inside, next((reason for reason in reasons if reason is not None), None)
