"""Which rank of a pipeline holds which parameter, and the task with only its own part on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from trainkit.errors import UserError

from .events import Recording
from .partition import Partition


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of a pipeline that hold each parameter and buffer."""

    holders: dict[str, tuple[int, ...]]
    used: frozenset[str]
    """What training uses at all; the rest is on every rank."""

    def is_held(self, name: str, rank: int) -> bool:
        """Return whether a rank holds a parameter or buffer."""
        return rank in self.holders[name]

    def counted(self, name: str, rank: int) -> bool:
        """Return whether a rank answers for a parameter: one of its holders does."""
        return self.holders[name][0] == rank

    def shared_by(self) -> dict[tuple[int, ...], list[str]]:
        """Return the parameters that several ranks use, by those ranks."""
        found: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, ranks in self.holders.items():
            if name in self.used and len(ranks) > 1:
                found[ranks].append(name)
        return dict(found)


def place(task: nn.Module, cut: Sequence[tuple[Recording, Partition]], *, num_ranks: int) -> Placement:
    """Return where the parts of `task` belong, which all these steps use; stage `s` is on rank `s % num_ranks`."""
    everywhere = tuple(range(num_ranks))
    ranks: dict[str, set[int]] = defaultdict(set)
    used: set[str] = set()
    for recording, partition in cut:
        for event in recording.events:
            rank = partition.stage_of(event.index) % num_ranks
            for name in (*event.parameters, *event.buffers, *event.written_buffers):
                ranks[name].update(everywhere if event.is_local else (rank,))
            used.update(event.parameters)
    names = [name for name, _ in (*task.named_parameters(), *task.named_buffers())]
    holders = {name: tuple(sorted(ranks[name])) if name in ranks else everywhere for name in names}
    return Placement(holders, frozenset(used))


def keep_own_part(task: nn.Module, placement: Placement, *, rank: int, device: torch.device) -> None:
    """Move what `rank` holds to `device`; everything else keeps identity, name and shape, but only one element.

    An optimizer may have been given the parameters before: those without a gradient are none of its business.
    """
    for name, tensor in (*task.named_parameters(), *task.named_buffers()):
        if placement.is_held(name, rank):
            tensor.data = tensor.data.to(device)
        else:
            tensor.data = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def owned_bounds(
    recording: Recording, placement: Placement, *, num_ranks: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return segments of another step (evaluation), each on a rank that holds all that its events use.

    Parameters stay where training put them, so that the segments follow them, forwards and back if need be.
    """
    cuts: list[int] = [0]
    ranks: list[int] = []
    for event in recording.events:
        names = [*event.parameters, *event.buffers, *event.written_buffers]
        if not names or event.is_local:
            continue
        able = set(range(num_ranks)).intersection(*(placement.holders[name] for name in names))
        if not able:
            raise UserError(
                f"{event} uses parameters that lie in different stages: {', '.join(names)}. Call the same modules as "
                "training_step does, so that each part of this step finds its parameters in one stage."
            )
        if not ranks:
            ranks.append(min(able))
        elif ranks[-1] not in able:
            cuts.append(event.index)
            ranks.append(min(able))
    edges = [*cuts, len(recording.events)]
    _check_bonds(recording, cuts[1:])
    return list(pairwise(edges)), ranks or [0]


def _check_bonds(recording: Recording, cuts: list[int]) -> None:
    for cut in cuts:
        for bond in recording.bonds:
            if bond.forbids(cut):
                raise UserError(
                    f"this step must change stage at {recording.events[cut]}, where its parameters are, but "
                    f"{bond.reason}."
                )
