"""Whether a global batch can be cut into equal micro-batches; plain arithmetic, without torch."""

from __future__ import annotations


def cutting_complaint(batch_size: int, *, accumulate: int, world_size: int) -> str | None:
    """Return why `accumulate` equal micro-batches on each rank cannot make up the batch, `None` if they can."""
    share = -(-batch_size // world_size)  # of the rank that has most
    if batch_size % accumulate == 0 and share >= accumulate:
        return None
    divisors = [n for n in range(1, min(batch_size // world_size, batch_size) + 1) if batch_size % n == 0]
    near = min(divisors, key=lambda n: abs(n - accumulate), default=1)
    size = max(1, batch_size // (accumulate * world_size))
    return (
        f"batch_size={batch_size} cannot be cut into accumulate={accumulate} equal micro-batches on {world_size} "
        f"rank(s); set accumulate={near}, or micro_batch_size={size}, which needs no even cut."
    )
