"""How gradients are reduced, in what every part of the Reducer can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .transport import TransportName

Unused = Literal["auto", "error", "find"]


@dataclass(frozen=True, slots=True)
class ReducerSettings:
    """How gradients are reduced."""

    average: bool = True
    """Divide by the number of ranks; else the sum is left."""
    bucket_mb: float | None = None
    """Size of a bucket in MiB; by default 25, as in PyTorch's own Reducer."""
    first_bucket_mb: float = 1.0
    """Size of the first bucket, whose reduction should start early."""
    gradient_as_bucket_view: bool = True
    """Let `.grad` be the part of the bucket: nothing is copied back, and there is one set of gradients."""
    unused: Unused = "auto"
    """Parameters without a gradient: "auto" handles them, "error" names them, "find" looks for them beforehand."""
    static_graph: bool = False
    """Every step uses the same parameters equally often: those unused in the first hold up nobody later."""
    transport: TransportName = "auto"
    """How buckets travel: "shared_memory", "group" (gloo, nccl), or "auto": the first where it works."""
    timeout_seconds: float = 1800.0
    """How long to wait for another rank."""
