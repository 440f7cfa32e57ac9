"""The arithmetic of fusion buffers: all servers sum the same number of elements, for parameters of any sizes."""

from hypothesis import given
from hypothesis import strategies as st
from trainkit.strategies.transports.partition import equal_shards, split_into_chunks

from tests.strategies.fusion.training import imbalance, naive_bytes_per_server


@given(numel=st.integers(0, 10_000), chunk=st.integers(1, 500))
def test_chunks_cover_a_buffer_once_and_do_not_exceed_the_limit(numel, chunk):
    chunks = split_into_chunks(numel, chunk)
    assert [element for start, stop in chunks for element in range(start, stop)] == list(range(numel))
    assert all(0 < stop - start <= chunk for start, stop in chunks)
    sizes = [stop - start for start, stop in chunks]
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(numel=st.integers(0, 10_000), world_size=st.integers(1, 64))
def test_shards_differ_by_at_most_one_element(numel, world_size):
    shards = equal_shards(numel, world_size)
    assert sum(shards) == numel and len(shards) == world_size
    assert max(shards) - min(shards) <= 1


def test_shards_balance_servers_and_whole_variables_do_not():
    variables = [1_000_000] + [1000] * 200  # one huge, many tiny
    chunks = [stop - start for start, stop in split_into_chunks(sum(variables), 100_000)]
    loads = [sum(of_server) for of_server in zip(*(equal_shards(size, 4) for size in chunks), strict=True)]
    assert imbalance(loads) < 1.0001
    assert imbalance(naive_bytes_per_server(variables, 4)) > 3.3


def test_whole_variables_go_to_the_least_loaded_server_largest_first():
    assert naive_bytes_per_server([5, 4, 3, 3, 3], 2) == [8, 10]
