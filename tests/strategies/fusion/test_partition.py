"""The arithmetic of fusion buffers: every server sums as much as any other, whatever the variables are."""

from hypothesis import given
from hypothesis import strategies as st
from trainkit.strategies.fusion.partition import (
    bytes_per_server,
    equal_shards,
    imbalance,
    naive_bytes_per_server,
    split_into_chunks,
)


@given(numel=st.integers(0, 10_000), chunk=st.integers(1, 500))
def test_windows_cover_a_buffer_once_and_none_is_larger_than_asked_for(numel, chunk):
    chunks = split_into_chunks(numel, chunk)
    assert [element for start, stop in chunks for element in range(start, stop)] == list(range(numel))
    assert all(0 < stop - start <= chunk for start, stop in chunks)
    sizes = [stop - start for start, stop in chunks]
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(numel=st.integers(0, 10_000), world_size=st.integers(1, 64))
def test_parts_are_equal_but_for_one_element(numel, world_size):
    parts = equal_shards(numel, world_size)
    assert sum(parts) == numel and len(parts) == world_size
    assert max(parts) - min(parts) <= 1


def test_servers_are_balanced_where_whole_variables_cannot_be():
    variables = [1_000_000] + [1000] * 200  # one huge, many tiny
    chunks = [stop - start for start, stop in split_into_chunks(sum(variables), 100_000)]
    assert imbalance(bytes_per_server(chunks, 4)) < 1.0001
    assert imbalance(naive_bytes_per_server(variables, 4)) > 3.3


def test_whole_variables_are_placed_as_well_as_they_can_be():
    assert naive_bytes_per_server([5, 4, 3, 3, 3], 2) == [8, 10]
