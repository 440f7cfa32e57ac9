"""Who sums what: the pure arithmetic of buffers, windows and parts, without tensors or processes.

    gradients in their order of arrival   | w3 |b3|      w2      |b2| w1 |
    windows of at most buffer_mb          |     0     |     1     |   2   |
    parts, one for each server            | 0 | 1 | 2 | 0 | 1 | 2 |0 |1 |2|

Variables play no role in who sums what, so that every server handles the same number of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence


def cut_windows(numel: int, window: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive windows of nearly equal size, none larger than `window`."""
    if numel == 0:
        return []
    count = -(-numel // window)
    sizes = equal_parts(numel, count)
    stops = [sum(sizes[: index + 1]) for index in range(count)]
    return [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def equal_parts(numel: int, world_size: int) -> list[int]:
    """Return the elements that each server sums; they differ by one at most."""
    small, larger = divmod(numel, world_size)
    return [small + (server < larger) for server in range(world_size)]


def server_loads(windows: Sequence[int], world_size: int) -> list[int]:
    """Return how many elements each server sums over all windows (of the given sizes) of a step."""
    parts = [equal_parts(numel, world_size) for numel in windows]
    return [sum(part[server] for part in parts) for server in range(world_size)]


def whole_variable_loads(variables: Sequence[int], world_size: int) -> list[int]:
    """Return the servers' loads if each variable is kept whole, the largest first, where there is least so far."""
    loads = [0] * world_size
    for numel in sorted(variables, reverse=True):
        loads[loads.index(min(loads))] += numel
    return loads


def imbalance(loads: Sequence[int]) -> float:
    """Return the load of the busiest server relative to the mean."""
    return max(loads) * len(loads) / sum(loads)
