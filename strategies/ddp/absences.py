"""What a rank adds for parameters that get no gradient in a backward, so that their buckets can go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .filling import Filling
from .gradient_bucket import Bucket, Slot
from .launch_queue import LaunchQueue


class Absences:
    """Fills the places of parameters whose hooks will not fire, or not as often as expected.

    Args:
        slots: All parameters.
        filling: Puts gradients into buckets.
        queue: Counts the places that are filled.
        divide_carried_by: Ranks that will add up again what is left of an earlier sum; 1 where they take means, as the
            mean of equal gradients is that gradient.

    """

    def __init__(self, slots: Sequence[Slot], *, filling: Filling, queue: LaunchQueue, divide_carried_by: int) -> None:
        self.slots, self.filling, self.queue = slots, filling, queue
        self.divide_carried_by = divide_carried_by
        self.never: list[int] = []  # parameters that a static graph does not use on this rank
        self.is_shadow = False  # this rank only takes part in the backward of the others
        self._marked: set[int] = set()  # known not to take part, and not filled yet
        self._undivided: dict[int, Tensor] = {}  # earlier sums of parameters by index, see `share_carried`

    def begin(self) -> None:
        """Expect a backward into buckets that are there."""
        self._marked = set(self.never)
        for index in self.never:
            self.slots[index].remaining = 1  # until its place is filled with nothing
        self.share_carried()

    def mark(self, unused: Iterable[int]) -> None:
        """Know of parameters that will take no part."""
        self._marked.update(unused)

    def end(self) -> None:
        """Forget what was known of one backward."""
        self._marked.clear()
        self._undivided.clear()

    def share_carried(self) -> None:
        """Divide sums of an earlier reduction that are still in `.grad`: they will be added up over ranks again."""
        if self.divide_carried_by == 1:
            return
        for slot in self.slots:
            if slot.carried:
                slot.carried = False
                gradient = slot.parameter.grad
                if gradient is not None:
                    self._undivided[slot.index] = gradient.clone()
                    gradient.mul_(1.0 / self.divide_carried_by)

    def fill_marked(self) -> None:
        """Fill the places of parameters that are known to take no part."""
        for index in sorted(self._marked):
            slot = self.slots[index]
            if slot.remaining:
                self.fill(slot)
        self._marked.clear()

    def fill(self, slot: Slot) -> None:
        """Add what a parameter has whose hook will not fire: what was accumulated before, or nothing."""
        bucket = slot.bucket
        assert bucket is not None
        slot.remaining = 0
        if slot.touched:
            self.filling.fill(slot)
        else:
            self._fill_with_nothing(slot, bucket)
        self.queue.count(bucket)

    def _fill_with_nothing(self, slot: Slot, bucket: Bucket) -> None:
        """Let this rank add nothing to the gradient of a parameter; a gradient from before is kept."""
        gradient, kept = slot.parameter.grad, None
        if gradient is not None:
            undivided = self._undivided.get(slot.index)
            kept = gradient.clone() if undivided is None else undivided
        self.filling.add_nothing(slot, bucket, kept=kept, zeros=self.is_shadow)
