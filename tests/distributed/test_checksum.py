"""Checksums depend on all bits and on their places."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.distributed.checksum import are_equal, checksum, summands


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 5000),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]),
    data=st.data(),
)
def test_another_value_and_a_value_at_another_place_change_it(size, dtype, data):
    values = torch.zeros(size, dtype=dtype)
    place, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    first, second = values.clone(), values.clone()
    first[place], second[other] = 1, 1
    assert checksum([first]) != checksum([values])
    # Words of 8 bytes, of which those 1021 apart are added up before they are weighed.
    words = [index * values.itemsize // 8 for index in (place, other)]
    if (words[0] - words[1]) % 1021 and place != other:
        assert checksum([first]) != checksum([second])


@pytest.mark.parametrize("mark", [1, -1, -0.0, 2.0, float("inf")])
@pytest.mark.parametrize(
    ("size", "rows"),
    [
        (8, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (8, [[0, 3], [1, 2]]),
        (8, [[0, 3, 5, 6], [1, 2, 4, 7]]),
        (100_000, [slice(0, None, 2), slice(1, None, 2)]),
    ],
)
def test_ranks_that_mark_different_rows_differ(size, rows, mark):
    ranks = [torch.zeros(size, dtype=torch.tensor(mark).dtype) for _ in rows]
    for table, of_rank in zip(ranks, rows, strict=True):
        table[of_rank] = mark
    assert not are_equal(sum(summands([[table]])[0] for table in ranks).tolist(), num_ranks=2)
    assert are_equal(sum(summands([[ranks[0]]])[0] for _ in ranks).tolist(), num_ranks=2)


def test_exchanged_tensors_change_it():
    first, second = torch.rand(70_000), torch.rand(70_000)
    assert checksum([first, second]) != checksum([second, first])


def test_it_does_not_depend_on_the_offset_of_a_view_or_on_lazy_conjugation():
    values = torch.arange(9, dtype=torch.float32)
    assert checksum([values[1:]]) == checksum([values[1:].clone()])
    lazy = torch.tensor([1 + 2j]).conj()
    assert checksum([lazy]) == checksum([lazy.resolve_conj()])
