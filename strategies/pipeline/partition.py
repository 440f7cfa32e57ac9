"""Where a recorded step is cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from trainkit.errors import UserError

from .events import Bond, Recording

SLACK = 0.04
"""How much dearer than the optimum the dearest stage may be for fewer bytes across cuts."""
TOGETHER_AT_MOST = 1.25
"""Users of a shared parameter stay in one stage if that makes the dearest stage at most this many times dearer."""
STATES_PER_PARAMETER = 4
"""Parameter, gradient and two moments of the optimizer."""
MOST_CANDIDATES = 160

Shared = Literal["auto", "together", "replicated"]
"""Where the parameters are that several places of the step use, as `partition` says."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The first event of every stage but the first, and the parameters that more than one stage uses."""

    cuts: tuple[int, ...]
    replicated: tuple[str, ...]

    def stage_of(self, event: int) -> int:
        """Return the stage that runs an event."""
        return sum(cut <= event for cut in self.cuts)

    @property
    def num_stages(self) -> int:
        """One more than there are cuts."""
        return len(self.cuts) + 1

    def bounds(self, num_events: int) -> list[tuple[int, int]]:
        """Return each stage's first event and the one after its last."""
        edges = [0, *self.cuts, num_events]
        return list(pairwise(edges))


@dataclass(slots=True)
class StageCosts:
    """What a stage from one event to another costs, as a share of the whole step; constant time for any stage."""

    seconds: list[float]
    parameter_bytes: list[float]
    activation_bytes: list[float]
    balance: float
    num_stages: int

    @classmethod
    def of(cls, recording: Recording, *, num_stages: int, balance: float) -> StageCosts:
        """Return the costs of a recording's stages; `balance` is 0 for speed and 1 for memory."""
        seen: set[str] = set()
        parameter_bytes = []
        for event in recording.events:
            new = set(event.parameters) - seen
            seen |= new
            parameter_bytes.append(float(sum(recording.parameter_bytes[name] for name in new)))
        costs = [event.cost for event in recording.events]
        return cls(
            list(accumulate((cost.seconds for cost in costs), initial=0.0)),
            list(accumulate(parameter_bytes, initial=0.0)),
            list(accumulate((cost.activation_bytes for cost in costs), initial=0.0)),
            balance,
            num_stages,
        )

    def __call__(self, stage: int, start: int, stop: int) -> float:
        """Return the cost of stage number `stage` if it were the events from `start` to before `stop`."""
        time = (self.seconds[stop] - self.seconds[start]) / (self.seconds[-1] or 1.0)
        states = STATES_PER_PARAMETER * (self.parameter_bytes[stop] - self.parameter_bytes[start])
        in_flight = self.num_stages - stage
        activations = in_flight * (self.activation_bytes[stop] - self.activation_bytes[start])
        whole = STATES_PER_PARAMETER * self.parameter_bytes[-1] + self.num_stages * self.activation_bytes[-1]
        return (1.0 - self.balance) * time + self.balance * (states + activations) / (whole or 1.0)


def partition(recording: Recording, *, num_stages: int, balance: float = 0.0, shared: Shared = "auto") -> Partition:
    """Return the cuts with the cheapest dearest stage, and among those nearly as good the fewest bytes across cuts.

    All users of a shared parameter are in one stage (`together`), or anywhere (`replicated`: stages have copies, whose
    gradients are added up), or in one stage unless that is much dearer (`auto`).
    """
    costs = StageCosts.of(recording, num_stages=num_stages, balance=balance)
    crossing = crossing_bytes(recording)
    kept = {} if shared == "replicated" else sharing_bonds(recording)
    while True:
        together = _best_cuts(recording, [*recording.bonds, *kept.values()], num_stages, costs, crossing)
        if not kept or shared == "together":
            break
        apart = _best_cuts(recording, recording.bonds, num_stages, costs, crossing)
        if together and apart:
            limit = TOGETHER_AT_MOST * dearest(apart, len(recording.events), costs)
            if dearest(together, len(recording.events), costs) <= limit:
                break
        widest = max(kept, key=lambda name: kept[name].last - kept[name].first)
        del kept[widest]
    if together is None:
        raise too_few_places(recording, num_stages, kept)
    return with_replicas(recording, together)


def with_replicas(recording: Recording, cuts: Sequence[int]) -> Partition:
    """Return the partition with these cuts."""
    bare = Partition(tuple(cuts), ())
    replicated = tuple(
        name for name, users in recording.parameter_users.items() if len({bare.stage_of(user) for user in users}) > 1
    )
    return Partition(tuple(cuts), replicated)


def dearest(cuts: Sequence[int], num_events: int, costs: Callable[[int, int, int], float]) -> float:
    """Return the cost of the dearest stage."""
    edges = [0, *cuts, num_events]
    return max(costs(stage, edges[stage], edges[stage + 1]) for stage in range(len(edges) - 1))


def crossing_bytes(recording: Recording) -> list[int]:
    """Return for each event the bytes that cross a cut before it."""
    num_events = len(recording.events)
    made: dict[int, int] = {}
    used: dict[int, int] = {}
    for event in recording.events:
        for value in event.inputs:
            used[value] = event.index
        if event.reads and not event.is_local:
            used.update(dict.fromkeys(event.inputs, num_events))
        for product in event.products:
            made.setdefault(product.value, event.index)
    change = [0] * (num_events + 2)
    for value, last in used.items():
        if not recording.values[value].local and value in made:
            num_bytes = recording.values[value].num_bytes
            change[made[value] + 1] += num_bytes
            change[min(last, num_events) + 1] -= num_bytes
    return list(accumulate(change))[: num_events + 1]


def candidates(recording: Recording, bonds: Sequence[Bond], crossing: Sequence[int]) -> list[int]:
    """Return the events before which a cut may be: of very many, one between each two units with the fewest bytes."""
    units = [event.index for event in recording.events if event.is_unit or event.parameters]
    edges = sorted({0, *units, len(recording.events) - 1})
    allowed = _allowed(recording, bonds)
    places = [place for place in range(1, len(recording.events) - 1) if allowed[place]]  # a stage does more than return
    if len(places) <= MOST_CANDIDATES:
        return places
    chosen = set()
    for first, last in pairwise(edges):
        places = [place for place in range(first + 1, last + 1) if allowed[place]]
        if places:
            chosen.add(min(places, key=lambda place: (crossing[place], -place)))
        if allowed[last]:
            chosen.add(last)
    places = sorted(chosen - {0, len(recording.events) - 1})
    if len(places) > MOST_CANDIDATES:
        stride = len(places) / MOST_CANDIDATES
        places = [places[int(index * stride)] for index in range(MOST_CANDIDATES)]
    return places


def too_few_places(recording: Recording, num_stages: int, kept: Mapping[str, Bond]) -> UserError:
    """Return the error that says why the step does not come apart into so many stages; `kept` are shared parameters."""
    crossing = crossing_bytes(recording)
    found = len(candidates(recording, [*recording.bonds, *kept.values()], crossing)) + 1
    message = f"the step can be cut into at most {found} stages, but strategy.stages={num_stages} were asked for."
    if kept:
        names = ", ".join(f"'{name}'" for name in kept)
        message += f" The users of {names} are to stay together; strategy.shared=auto lets stages have copies."
    elif recording.bonds:
        widest = max(recording.bonds, key=lambda bond: bond.last - bond.first)
        message += f" What holds it together: {widest.reason}.{widest.advice}"
    else:
        dear = max(recording.events, key=lambda event: event.cost.seconds)
        message += f" The dearest piece that cannot be opened is {dear}."
    return UserError(f"{message} Or type strategy.stages={max(found, 1)}.")


def sharing_bonds(recording: Recording) -> dict[str, Bond]:
    """Return for each parameter that several events use the stretch that keeps them in one stage."""
    return {
        name: Bond(users[0], users[-1], f"parameter '{name}' is shared")
        for name, users in recording.parameter_users.items()
        if len(users) > 1
    }


def _best_cuts(
    recording: Recording,
    bonds: Sequence[Bond],
    num_stages: int,
    costs: StageCosts,
    crossing: Sequence[int],
) -> list[int] | None:
    places = candidates(recording, bonds, crossing)
    if len(places) < num_stages - 1:
        return None
    edges = [0, *places, len(recording.events)]
    limit = _least_dearest(edges, num_stages, costs) * (1.0 + SLACK)
    return _fewest_bytes(edges, num_stages, costs, crossing, limit)


def _least_dearest(edges: Sequence[int], num_stages: int, costs: StageCosts) -> float:
    last = len(edges) - 1
    best = [0.0] + [float("inf")] * last
    for stage in range(num_stages):
        # best[stop]: the dearest of the stages so far, if they end before edge `stop`
        best = [
            min(
                (max(best[start], costs(stage, edges[start], edges[stop])) for start in range(stop)),
                default=float("inf"),
            )
            for stop in range(last + 1)
        ]
    return best[last]


def _fewest_bytes(
    edges: Sequence[int], num_stages: int, costs: StageCosts, crossing: Sequence[int], limit: float
) -> list[int]:
    last = len(edges) - 1
    infinite = (float("inf"), float("inf"))
    best: list[tuple[float, float]] = [(0.0, 0.0)] + [infinite] * last
    origins: list[list[int]] = []
    for stage in range(num_stages):
        reached = [infinite] * (last + 1)
        origin = [0] * (last + 1)
        for stop in range(1, last + 1):
            crossed = float(crossing[edges[stop]]) if stop < last else 0.0
            for start in range(stop):
                cost = costs(stage, edges[start], edges[stop])
                if cost <= limit and best[start] < infinite:
                    found = (best[start][0] + crossed, max(best[start][1], cost))
                    if found < reached[stop]:
                        reached[stop], origin[stop] = found, start
        best = reached
        origins.append(origin)
    cuts = []
    stop = last
    for origin in reversed(origins):
        stop = origin[stop]
        cuts.append(edges[stop])
    return cuts[-2::-1]


def _allowed(recording: Recording, bonds: Sequence[Bond]) -> list[bool]:
    change = [0] * (len(recording.events) + 2)
    for bond in bonds:
        change[bond.first + 1] += 1
        change[bond.last + 1] -= 1
    return [depth == 0 for depth in accumulate(change)]
