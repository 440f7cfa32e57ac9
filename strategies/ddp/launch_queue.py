"""The order in which buckets are started: always 0, 1, 2, ..., whatever order they are filled in.

    filled      2    0    1    3
    started          0    1 2  3

Every rank starts its buckets in the same order: started in different orders, collectives would add up different
buckets or wait for each other forever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .gradient_bucket import Bucket


class LaunchQueue:
    """Starts each bucket once it and all before it are filled."""

    def __init__(self, start: Callable[[Bucket], None]) -> None:
        self.buckets: list[Bucket] = []
        self.next = 0  # bucket to start
        self._start = start

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Wait anew for the gradients of all parameters in `buckets`."""
        self.buckets, self.next = list(buckets), 0
        for bucket in self.buckets:
            bucket.pending = len(bucket.slots)
            bucket.absent.clear()

    @property
    def is_complete(self) -> bool:
        """Whether every bucket has been started."""
        return self.next == len(self.buckets)

    def count(self, bucket: Bucket) -> bool:
        """Count one gradient that lies in its bucket; return whether that is filled now."""
        bucket.pending -= 1
        if bucket.pending:
            return False
        bucket.ready_at = time.perf_counter()
        return True

    def start_filled(self) -> None:
        """Start every bucket that is filled and whose predecessors have been started."""
        while self.next < len(self.buckets) and not self.buckets[self.next].pending:
            self._start(self.buckets[self.next])
            self.next += 1
