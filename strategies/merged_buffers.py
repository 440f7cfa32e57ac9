"""Buffers of replicas after a step: statistics are those of the first replica, what else differs is merged.

    before     0 0 0 0     rank 0 writes to the rows of its samples     a 0 b 0     after, on every rank     a c b 0
                           rank 1                                       0 c 0 0

Ranks that write different values to one element have no common value: UserError. Integers (counters, pointers) are then
those of the first replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from trainkit.distributed.checksum import are_equal, summands
from trainkit.distributed.collectives import ProcessGroupCollectives, broadcast
from trainkit.errors import UserError
from trainkit.model.carried_state import changed_elements, is_counted, is_looked_at, may_be_merged, named_buffers

FIRST_STEPS = 2  # in which the buffers are found that depend on the samples of a replica


class MergedBuffers:
    """The buffers of a module that are made equal: those that it had when this object was made, on every rank."""

    def __init__(self, module: nn.Module, *, is_shared: Callable[[str], bool] = lambda name: True) -> None:
        self._tables: dict[str, dict[str, Tensor | None]] = {}  # the module's, by the name of the buffer
        self._tensors: dict[str, Tensor] = {}  # their shapes are the same on every rank
        self._last: dict[str, Tensor] = {}  # values from before the step, of buffers that may have to be merged
        self._merged: set[str] = set()
        self._conflicts: dict[str, Tensor] = {}
        self._steps = 0
        for name, owner, buffer in named_buffers(module):
            if is_shared(name):
                self._tables[name], self._tensors[name] = owner._buffers, buffer
                if may_be_merged(owner, buffer):
                    self._last[name] = buffer.clone()
        self._candidates = list(self._last)

    def merged_names(self) -> list[str]:
        """Return the names of the buffers to which ranks have written values of their own."""
        return sorted(self._merged)

    def remember(self, names: Iterable[str]) -> None:
        """Merge these buffers too, as a resumed run did: its first steps may not write to them."""
        self._merged.update(name for name in names if name in self._last)

    def named(self) -> dict[str, Tensor]:
        """Return the present tensors by name; one that is gone or has another shape is the last that fitted."""
        for name, table in self._tables.items():
            tensor, last = table.get(name.rpartition(".")[2]), self._tensors[name]
            if tensor is None or tensor is last or tensor.shape != last.shape:
                continue
            if tensor.dtype == last.dtype and tensor.device == last.device:
                self._tensors[name] = tensor
        return self._tensors

    def _present(self, name: str) -> Tensor:
        """Return the module's buffer, also if it got another shape."""
        tensor = self._tables[name].get(name.rpartition(".")[2])
        return self._tensors[name] if tensor is None else tensor

    def begin_step(self) -> None:
        """Keep the values from before the step of buffers that may have to be merged."""
        tensors = self.named() if self._last else {}
        for name, last in self._last.items():
            if last.shape == tensors[name].shape:
                last.copy_(tensors[name])
            else:  # a resume has given it the shape that was saved
                self._last[name] = tensors[name].clone()

    def synchronize(self, comm: ProcessGroupCollectives, *, strategy: str) -> None:
        """Merge the buffers, or give them the values of the first rank, after a step; collective."""
        tensors = self.named()
        if comm.world_size == 1 or not tensors:
            return
        merged = list(self._last)
        if self._steps < FIRST_STEPS:
            merged = self._differing(merged, comm)
        elif is_looked_at(self._steps + 1):
            self._check_others(comm, strategy)
        for name in merged:
            buffer, last = tensors[name], self._last[name]
            if self._present(name).shape != last.shape:  # it grew by the samples of each rank
                self._conflicts[name] = torch.tensor(True)
                continue
            reduced = comm.reduce_in_place(bounds(buffer, last), "max", where="merging buffers")
            values, conflict = merge(reduced, last)
            if is_counted(buffer):
                values = torch.where(conflict, buffer, values)  # rank 0's, by the broadcast below
            else:
                # A tensor on the device: reading it here would wait for the step.
                self._conflicts[name] = conflict.any() | self._conflicts.get(name, False)
            with torch.no_grad():
                buffer.copy_(values)
        self._merged.update(merged)
        broadcast(tensors.values(), comm.group)
        # Later on a GPU only when `replicated` is asked for, as the check waits for the device.
        if merged and (self._steps < FIRST_STEPS or comm.device.type == "cpu"):
            self.check(strategy)
        self._steps += 1
        # The others have had the same values on all ranks, and cost a copy and a checksum in every step.
        if self._steps == FIRST_STEPS:
            self._last = {name: self._last[name] for name in self._merged}

    def _differing(self, names: Sequence[str], comm: ProcessGroupCollectives) -> list[str]:
        """Return the buffers that differ between ranks; collective, and waits for the device."""
        if not names:
            return []
        # By checksums, a few numbers for each buffer; only buffers that differ are reduced in full.
        rows = comm.all_reduce(summands([[self._present(name)] for name in names])).tolist()
        return [n for n, sums in zip(names, rows, strict=True) if not are_equal(sums, num_ranks=comm.world_size)]

    def _check_others(self, comm: ProcessGroupCollectives, strategy: str) -> None:
        """Raise UserError for a buffer that ranks began to write to after the first steps; collective.

        Integers, which may be counts that had the same values on all ranks until now, are merged from the next step on.
        """
        for name in self._differing([name for name in self._candidates if name not in self._merged], comm):
            if is_counted(self._tensors[name]):
                self._merged.add(name)
                self._last[name] = self._tensors[name].clone()
                continue
            raise UserError(
                f"{strategy}: each rank has other values for {name}, a buffer, from its own samples, in step "
                f"{self._steps + 1} and not in the first {FIRST_STEPS}, which show what is merged. Write to its rows "
                "from the first step on; or set strategy.broadcast_buffers=false, with which each rank keeps its own "
                "values; or set strategy=single."
            )

    def check(self, strategy: str) -> None:
        """Raise UserError if ranks have written different values to one element; waits for the device."""
        for name, conflict in self._conflicts.items():
            if conflict:
                raise UserError(
                    f"{strategy}: each rank has other values for {name}, a buffer, from its own samples, and there is "
                    "no rule that makes them one: only the statistics of normalisation layers are those of rank 0. "
                    "Write to the rows of a rank's own samples, which are merged; or set "
                    "strategy.broadcast_buffers=false, with which each rank keeps its own values; or set "
                    "strategy=single."
                )


def bounds(values: Tensor, last: Tensor) -> Tensor:
    """Return the changed values and their negatives, shape (2, ...), and elsewhere the lowest number twice.

    A new NaN is above all numbers in both, which no value is: the ranks have no common value.
    """
    # The largest of negatives is the negative of the smallest: one reduction gives both, and differing values show.
    values = _wide(values)
    is_changed = changed_elements(values, _wide(last))
    both = torch.stack([values, -values])
    if values.is_floating_point():
        both.nan_to_num_(torch.inf, torch.inf, -torch.inf)  # NaN may be lost in the largest of several values
    return both.where(is_changed, torch.full_like(values, _lowest(values)))


def merge(reduced: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of whoever has changed them, and which elements were changed to different ones."""
    highest, lowest = reduced[0], -reduced[1]
    # In either: a changed value may be the lowest number itself, and then its negative is not.
    is_changed = (reduced != _lowest(reduced)).any(0)
    return _narrow(torch.where(is_changed, highest, _wide(last)), last), is_changed & (highest != lowest)


def _wide(tensor: Tensor) -> Tensor:
    """Return the elements as float64 or int64, which hold those of every other type."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _narrow(values: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(values).to(like.dtype) if like.is_complex() else values.to(like.dtype)


def _lowest(values: Tensor) -> float:
    # One above the smallest integer, whose negative does not fit into 64 bits.
    return -torch.inf if values.is_floating_point() else torch.iinfo(torch.int64).min + 1
