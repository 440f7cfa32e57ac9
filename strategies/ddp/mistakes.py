"""What is said of gradients that come too often, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

from .gradient_bucket import Slot

MAX_NAMES = 8  # in a message


def too_often(slot: Slot, *, has_changed: bool) -> str:
    """Return what to say of a parameter that was ready before; `has_changed`: unlike in a static graph's first step."""
    changed = "Your training graph has changed in this iteration, which static_graph=True rules out: "
    return (
        f"{changed if has_changed else ''}parameter {slot.name!r} got its gradient ready more often than expected in "
        f"one backward ({slot.expected} expected). Expected to mark a variable ready only once. This happens when a "
        "reentrant checkpoint runs a module several times, or when one forward's graph is run backward in "
        "parts; with static_graph=True the number of times is learned from the first step."
    )


def without_gradient(slots: Sequence[Slot], *, num_parameters: int) -> str:
    """Return what to say of parameters that took no part in the loss."""
    names = ", ".join(repr(slot.name) for slot in slots[:MAX_NAMES])
    more = f" and {len(slots) - MAX_NAMES} more" if len(slots) > MAX_NAMES else ""
    return (
        f"{len(slots)} of {num_parameters} parameters got no gradient in this backward: {names}{more}. They took no "
        'part in the loss; allow that with unused="auto" (find_unused_parameters=True in the drop-in '
        "DistributedDataParallel)."
    )
