"""Bucket plan: the bucket and offset of each parameter's gradient, computed without tensors or processes.

    parameters      0:w1   1:b1   2:w2   3:b2   4:emb(sparse)   5:w3      (order of `module.parameters()`)

    plan, reversed  [ 5 | 3 ]   [ 4 ]   [ 2 | 1 ]   [ 0 ]
                     small first  alone    up to the cap

Gradients become ready in about the reverse order of the parameters, so the buckets are filled in that order, and the
first one is small: its reduction starts early. After the first backward the plan is made again in the order in which
gradients arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

MIB = 1024 * 1024
DEFAULT_CAP_BYTES = 25 * MIB  # as in PyTorch


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """Size and type of one parameter's gradient."""

    numel: int
    element_bytes: int
    kind: str  # dtype and device; a bucket has one kind
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """One bucket: its parameters, side by side in a flat buffer."""

    kind: str
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]  # in elements, one for each parameter
    numel: int
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The buckets in the order of their reduction."""

    buckets: tuple[BucketLayout, ...]

    def draw(self) -> str:
        """Return the plan as a picture: `[5 3] [4*] [2 1]`, a star marking a sparse bucket."""
        return " ".join(
            f"[{' '.join(map(str, layout.parameters))}{'*' if layout.sparse else ''}]" for layout in self.buckets
        )


def plan_buckets(
    specs: Sequence[GradientSpec],
    *,
    cap_bytes: int,
    first_cap_bytes: int = MIB,
    caps_bytes: Sequence[int] = (),
    order: Sequence[int] | None = None,
    apart: Iterable[int] = (),
) -> BucketPlan:
    """Return buckets that hold every parameter exactly once, filled in `order` up to a cap.

    A bucket is closed when it has reached its cap, so a parameter larger than the cap is never split. Buckets of
    different kinds are filled side by side and reduced in the order in which they were closed. With `caps_bytes` the
    first buckets of each kind have these caps, and the others the last of them. `order` defaults to the reverse order
    of the parameters. Parameters in `apart` (unused in the first backward) come last and share no bucket with the
    others, so that they delay none.
    """
    order = range(len(specs) - 1, -1, -1) if order is None else order
    if sorted(order) != list(range(len(specs))):
        raise ValueError(f"order must name each of the {len(specs)} parameters once, got {list(order)}")
    last = frozenset(apart)
    caps = tuple(caps_bytes) or (min(first_cap_bytes, cap_bytes), cap_bytes)
    layouts = _fill(specs, [i for i in order if i not in last], caps)
    layouts += _fill(specs, [i for i in order if i in last], caps[-1:])
    return BucketPlan(tuple(layouts))


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of `num_bytes`: reduce-scatter, then all-gather."""
    return 2 * num_bytes * (world_size - 1) // world_size


def _fill(specs: Sequence[GradientSpec], order: Sequence[int], caps: Sequence[int]) -> list[BucketLayout]:
    closed: list[list[int]] = []
    open_buckets: dict[str, list[int]] = {}
    filled: dict[str, int] = {}  # bytes in the open bucket of each kind
    remaining: dict[str, Sequence[int]] = {}  # caps of the open bucket of each kind and of the next ones
    for index in order:
        spec = specs[index]
        if spec.sparse:  # without a place in a flat buffer: its size changes from step to step
            closed.append([index])
            continue
        open_buckets.setdefault(spec.kind, []).append(index)
        filled[spec.kind] = filled.get(spec.kind, 0) + spec.numel * spec.element_bytes
        caps_left = remaining.setdefault(spec.kind, caps)
        if filled[spec.kind] >= caps_left[0]:
            remaining[spec.kind] = caps_left[1:] or caps_left
            filled[spec.kind] = 0
            closed.append(open_buckets.pop(spec.kind))
    closed.extend(open_buckets.values())  # in the order in which they were opened, equal on every rank
    return [_lay_out(specs, members) for members in closed]


def _lay_out(specs: Sequence[GradientSpec], members: list[int]) -> BucketLayout:
    *offsets, end = accumulate((specs[index].numel for index in members), initial=0)
    first = specs[members[0]]
    return BucketLayout(first.kind, tuple(members), tuple(offsets), end, first.sparse)
