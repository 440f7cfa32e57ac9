"""Packed: rows of a fixed length, each of several short sequences, with little padding."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge, Unit
from torch import Tensor
from torch.utils.data import Dataset

from trainkit.errors import UserError
from trainkit.settings import check_arguments


class Packed(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens, each made of complete sequences of another dataset.

        tokens      a a a b b b b b c c . .        padding
        positions   0 1 2 0 1 2 3 4 0 1 0 0        within the sequence
        segments    1 1 1 2 2 2 2 2 3 3 0 0        0 is padding

    To the Trainer a row is a sample. Each sequence comes once an epoch, in the same row in every epoch. Return the
    number of tokens without padding as `weight` from `training_step`, so that every token counts equally.

    Args:
        dataset: Map-style; its samples are one-dimensional tensors, or tuples of several of one length (tokens and
            targets), which become `tokens`, `tokens_1`, ...
        length: Tokens of a row; a longer sequence is truncated.
        lengths: The length of each sequence; by default all sequences are read once to measure them.
        padding: The value that fills the rest of a row of tokens.

    """

    def __init__(
        self,
        dataset: Any,
        length: Annotated[int, Ge(1), Unit("tokens")],
        *,
        lengths: Sequence[int] | None = None,
        padding: int = 0,
    ) -> None:
        check_arguments(Packed.__init__, locals(), of="Packed")
        sizes = lengths if lengths is not None else [len(_columns(dataset[index])[0]) for index in range(len(dataset))]
        if len(sizes) != len(dataset):
            raise UserError(f"Packed: {len(sizes)} lengths are given for {len(dataset)} sequences.")
        self.dataset = dataset
        self.length = length
        self.padding = padding
        self.rows = pack([min(int(size), length) for size in sizes], length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sequences = [
            [column[: self.length] for column in _columns(self.dataset[number])] for number in self.rows[index]
        ]
        row: dict[str, Tensor] = {}
        for number, column in enumerate(zip(*sequences, strict=True)):
            row["tokens" if number == 0 else f"tokens_{number}"] = self._padded(torch.cat(column), self.padding)
        sizes = [len(columns[0]) for columns in sequences]
        row["positions"] = self._padded(torch.cat([torch.arange(size) for size in sizes]), 0)
        row["segments"] = self._padded(torch.repeat_interleave(torch.arange(1, len(sizes) + 1), torch.tensor(sizes)), 0)
        return row

    def _padded(self, values: Tensor, padding: int) -> Tensor:
        row = values.new_full((self.length, *values.shape[1:]), padding)
        row[: len(values)] = values
        return row


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the sequences of each row: longest first, each into the fullest row with room (best fit).

    Takes O(n log n) time; the number of rows is at most 11/9 of the least possible, plus a small constant.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    # Ties by index, so that all ranks make the same rows.
    for index in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        # -1 is less than any row: this is the first entry with at least as much room, the best fit.
        position = bisect_left(room, (lengths[index], -1))
        if position < len(room):
            free, row = room.pop(position)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        insort(room, (free - lengths[index], row))
    return [sorted(row) for row in rows]


def _columns(sample: Any) -> Sequence[Tensor]:
    return [sample] if isinstance(sample, Tensor) else [torch.as_tensor(column) for column in sample]
