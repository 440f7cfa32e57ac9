"""Checksums of tensors, and their comparison over ranks by two sums that any reduction can carry.

Sum of c and sum of c*c, for the checksum c of each rank: all are equal if ranks * sum(c*c) == sum(c) ** 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from trainkit.tree import dense_parts

_MODULUS = 1_048_573  # a prime below 2**20: the sum of squares over 8,192 ranks is exact in float64
_COLUMNS = 1021  # words that have weights of their own: a prime, so that no row of a matrix has its length
_SPREAD = 0x5851_F42D_4C95_7F2D  # any odd number with many bits would do
_SMALL = 65_536  # elements: smaller tensors are joined, as calling a kernel costs more than what it reads


def summands(parts: Sequence[Iterable[Tensor]]) -> Tensor:
    """Return this rank's checksum of each part and its square, shape (parts, 2); waits for nothing."""
    numbers = [checksum(part) for part in parts]  # of a task that is on several devices
    checksums = torch.stack([number.to(numbers[0].device, non_blocking=True) for number in numbers]).double()
    return torch.stack([checksums, checksums * checksums], dim=1)


def are_equal(sums: Sequence[float], *, num_ranks: int) -> bool:
    """Return True if a row of `summands`, summed over ranks, is of equal checksums (Cauchy-Schwarz, in integers)."""
    total, squares = map(int, sums)
    return num_ranks * squares == total * total


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return a number below 2**20 that depends on all bits, an int64 scalar on the device of the first tensor."""
    sums = [torch.zeros((), dtype=torch.int64)]
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with torch.no_grad():
        for part in (part for tensor in tensors for part in dense_parts(tensor.detach())):
            # The conjugate bit is not in the memory: without `resolve_conj`, equal values would have different bits.
            flat = (torch.view_as_real(part.resolve_conj()) if part.is_complex() else part).reshape(-1)
            if part.is_meta:
                continue
            if flat.numel() <= _SMALL:
                small.setdefault((flat.dtype, flat.device), []).append(flat)
            else:
                sums += _bit_sums(flat)
        for joined in small.values():
            sums += _bit_sums(torch.cat(joined))
        device = sums[-1].device
        # Moved without a wait: a checksum is computed in the step, where nothing waits for the device.
        stacked = torch.stack([bit_sum.to(device, non_blocking=True) for bit_sum in sums])
        # Weighed too: two tensors of one shape may have been exchanged.
        weighted_sums = torch.stack([_weighted_sum(part) for part in stacked.split(_COLUMNS)])
        return torch.remainder(weighted_sums.sum(), _MODULUS)


def _bit_sums(flat: Tensor) -> list[Tensor]:
    """Return weighted sums of the bits of a contiguous tensor, read as integers of 64 bits as far as possible."""
    # A view as int64 must begin at a multiple of 8 bytes, or torch refuses it.
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()
    # Integer sums wrap around, so that they are exact and do not depend on the order in which a kernel adds.
    num_wide = flat.numel() - flat.numel() % (8 // flat.itemsize)
    narrow = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize]
    words, rest = flat[:num_wide].view(torch.int64), flat[num_wide:].view(narrow).long()
    num_rows = len(words) // _COLUMNS
    parts = [words[num_rows * _COLUMNS :], rest]
    if num_rows:
        # Columns first: this reads the memory once, and weighing every word would also write as much.
        parts.append(words[: num_rows * _COLUMNS].view(num_rows, _COLUMNS).sum(0))
    return [_weighted_sum(part) for part in parts if len(part)]


def _weighted_sum(words: Tensor) -> Tensor:
    """Return a sum of integers that depends on their places; plain sums are equal where ranks mark different rows."""
    # The low bits of a float such as 1.0 are zeros, and the product with them keeps few bits of the weight. So all bits
    # are spread, and the high half mixed into the low one, before they are weighed; every step can be inverted, so that
    # no two words become the same. Masked, as `>>` repeats the sign.
    spread = words * _SPREAD
    mixed = spread ^ ((spread >> 32) & 0xFFFF_FFFF)
    return (mixed * _weights(words.device)[: len(words)]).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    """Return an odd random number for each column, the same in every process, without a draw of a global generator."""
    # Odd, or bits would be lost. Random: the sums over rows 0, 3 and 1, 2 of numbers in equal steps are the same.
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(2**62, (_COLUMNS,), generator=generator) + 1).to(device)
