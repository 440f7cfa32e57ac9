"""Several short sequences in one row of a fixed length, so that nothing of a batch is padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainkit.errors import UserError


class Packed(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens, each made of whole sequences of another dataset, every one of them in one row.

        tokens      a a a b b b b b c c . .        padding
        positions   0 1 2 0 1 2 3 4 0 1 0 0        within its own sequence
        segments    1 1 1 2 2 2 2 2 3 3 0 0        0 is padding

    To the Trainer a row is a sample: its order, resuming and batches are those of any dataset, and each sequence comes
    once an epoch. What does not change from epoch to epoch is which sequences share a row. Return the number of real
    tokens as `weight` from `training_step`: then every token counts equally.

    Args:
        dataset: Map-style; its samples are one-dimensional tensors, or tuples of several of one length (tokens and
            targets), which become `tokens`, `tokens_1`, ...
        length: Tokens of a row; a longer sequence is cut.
        lengths: How long each sequence is; by default all of them are read once to know.
        padding: What fills the rest of a row.

    """

    def __init__(self, dataset: Any, length: int, *, lengths: Sequence[int] | None = None, padding: int = 0) -> None:
        if length < 1:
            raise UserError(f"Packed: length must be at least 1 token, got {length}.")
        known = lengths if lengths is not None else [len(_parts(dataset[index])[0]) for index in range(len(dataset))]
        if len(known) != len(dataset):
            raise UserError(f"Packed: {len(known)} lengths are given for {len(dataset)} sequences.")
        self.dataset = dataset
        self.length = length
        self.padding = padding
        self.rows = pack([min(int(one), length) for one in known], length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sequences = [[part[: self.length] for part in _parts(self.dataset[number])] for number in self.rows[index]]
        row: dict[str, Tensor] = {}
        for number, parts in enumerate(zip(*sequences, strict=True)):
            row["tokens" if number == 0 else f"tokens_{number}"] = self._filled(torch.cat(parts), self.padding)
        sizes = [len(parts[0]) for parts in sequences]
        row["positions"] = self._filled(torch.cat([torch.arange(size) for size in sizes]), 0)
        row["segments"] = self._filled(torch.repeat_interleave(torch.arange(1, len(sizes) + 1), torch.tensor(sizes)), 0)
        return row

    def _filled(self, values: Tensor, filling: int) -> Tensor:
        row = values.new_full((self.length, *values.shape[1:]), filling)
        row[: len(values)] = values
        return row


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return which sequences share a row: the longest first, each into the fullest row that has room (best fit).

    Needs O(n log n) time; the rows hold at most 11/9 of the least possible number, and a few more.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = bisect_left(room, (lengths[index], -1))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(room, (free - lengths[index], row))
    return [sorted(row) for row in rows]


def _parts(sample: Any) -> Sequence[Tensor]:
    return [sample] if isinstance(sample, Tensor) else [torch.as_tensor(part) for part in sample]
