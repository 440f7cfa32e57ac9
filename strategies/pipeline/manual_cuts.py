"""Where a user wants a recorded step to be cut: names of modules, or patterns of names with a stage each."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from trainkit.errors import UserError, nearest

from .events import Event, Recording
from .partition import Partition, Shared, sharing_bonds, with_replicas


def manual_cuts(
    recording: Recording, cuts: Sequence[str] | dict[str, int], *, num_stages: int, shared: Shared = "auto"
) -> Partition:
    """Return the cuts that a user asked for: names of the modules that begin a stage, or a stage for each pattern.

    Unless `shared` is `replicated`, they must not come between the users of a parameter.
    """
    if isinstance(cuts, dict):
        places = _cuts_of_patterns(recording, cuts, num_stages)
    else:
        places = [_first_event(recording, name) for name in cuts]
        if len(places) != num_stages - 1:
            raise UserError(
                f"strategy.cuts names {len(places)} modules, which makes {len(places) + 1} stages, but strategy.stages="
                f"{num_stages}. Type strategy.stages={len(places) + 1}, or name {num_stages - 1} modules."
            )
        if places != sorted(set(places)) or 0 in places:
            raise UserError(
                f"strategy.cuts={list(cuts)} must be in the order in which the step calls the modules, each once, "
                "and not begin with the first one: a cut is the beginning of the second and later stages."
            )
    for place in places:
        for bond in recording.bonds:
            if bond.forbids(place):
                raise UserError(f"a stage cannot begin at {recording.events[place]}: {bond.reason}.")
    if shared != "replicated":
        _check_sharing(recording, places)
    return with_replicas(recording, places)


def _check_sharing(recording: Recording, places: Sequence[int]) -> None:
    for name, bond in sharing_bonds(recording).items():
        for place in places:
            if bond.forbids(place):
                first, last = (_called(recording.events[index]) for index in (bond.first, bond.last))
                raise UserError(
                    f"strategy.cuts begins a stage at {_called(recording.events[place])}, between users of the "
                    f"parameter '{name}': {first} and {last}. Type strategy.shared=replicated to give each stage "
                    f"that uses it a copy, with gradients added up, or cut before {first} or after {last}."
                )


def _called(event: Event) -> str:
    return f"'{event.name}'" if event.is_unit else str(event)


def _first_event(recording: Recording, name: str) -> int:
    names = _module_names(recording)
    matches = [known for known in names if known == name or known.endswith(f".{name}")]
    full = name if name in matches else matches[0] if len(matches) == 1 else None
    if full is None:
        found = "more than one module" if matches else "no module that the step calls"
        raise UserError(f"strategy.cuts names '{name}', which is {found}.{nearest(name, names)}")
    return min(event.index for event in recording.events if _is_in(event, full))


def _cuts_of_patterns(recording: Recording, patterns: dict[str, int], num_stages: int) -> list[int]:
    names = _module_names(recording)
    for pattern, stage in patterns.items():
        if not any(_matches(name, pattern) for name in names):
            raise UserError(
                f"strategy.cuts has the pattern '{pattern}', which no module matches.{nearest(pattern, names)}"
            )
        if not 0 <= stage < num_stages:
            raise UserError(f"strategy.cuts puts '{pattern}' in stage {stage}; stages are 0 to {num_stages - 1}.")
    places: list[int] = []
    current = 0
    for event in recording.events:
        asked = [
            stage for pattern, stage in patterns.items() if any(_matches(name, pattern) for name in _ancestry(event))
        ]
        if asked and asked[0] < current:
            raise UserError(
                f"strategy.cuts puts {event} in stage {asked[0]}, but what runs before it in stage {current}: a step "
                "goes through the stages once, in order."
            )
        if asked and asked[0] > current + 1:
            raise UserError(f"strategy.cuts leaves stage {current + 1} empty: {event} is in stage {asked[0]}.")
        if asked and asked[0] == current + 1:
            places.append(event.index)
            current += 1
    if current < num_stages - 1:
        raise UserError(f"strategy.cuts leaves stage {current + 1} empty. Give it a pattern of its own.")
    return places


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _module_names(recording: Recording) -> list[str]:
    return list(dict.fromkeys(name for event in recording.events for name in _ancestry(event)))


def _ancestry(event: Event) -> list[str]:
    parts = (event.name if event.is_unit else event.path).split(".")
    return [".".join(parts[: length + 1]) for length in range(len(parts)) if parts[0]]


def _is_in(event: Event, name: str) -> bool:
    return name in _ancestry(event)
