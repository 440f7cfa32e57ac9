"""The exchange of chunks: whatever has ended is acted on at once, so that no rank waits for what another waits for."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from trainkit.strategies.transports import gloo_ring as exchange_module
from trainkit.strategies.transports.gloo_ring import (
    GlooExchange,
    Messages,
    MessageThread,
    RingTransfer,
    equal_shards,
    split_into_chunks,
)
from trainkit.strategies.transports.host_copy import HostCopier
from trainkit.strategies.transports.sharded import FusionSettings, ServerGroups

from tests.strategies.fusion.training import imbalance, naive_bytes_per_server

NUM_CHUNKS = 7


class Network:
    """Messages without a network: all have ended at once, but for those that arrive while `is_cut`."""

    def __init__(self):
        self.is_cut = False
        self.changed = threading.Event()
        self.watched = []

    def watch(self, works):
        self.watched.append(works)
        messages = Messages(works)
        if not self.is_cut:
            messages.ended.set()
            self.changed.set()
        return messages

    def close(self):
        pass


class AllReduce:
    """A collective that ends when the test says so."""

    def __init__(self):
        self.ended = threading.Event()

    def is_completed(self):
        return self.ended.is_set()

    def wait(self, *timeout):
        assert self.ended.wait(600)
        return True


class Silent:
    """A failure store of ranks that do not fail."""

    def root_cause(self):
        return None

    def note_waiting(self, where):
        pass

    def check(self, *, where, waited, timeout_seconds):
        assert waited < timeout_seconds, f"waits in {where}"


@pytest.fixture
def network():
    return Network()


@pytest.fixture
def all_reduce():
    return AllReduce()


def open_first(*, world_size=2, **settings):
    """Return the exchange of the first rank, whose chunks have an element of each."""
    return GlooExchange(
        ServerGroups(rank=0, world_size=world_size, messages=None, flags=None),
        failure_store=Silent(),
        device=torch.device("cpu"),
        timeout_seconds=600.0,
        settings=FusionSettings(message_bytes=4, **settings),
        num_gradients=partial(list, (2 * NUM_CHUNKS, 2)),
    )


@pytest.fixture
def exchange(network, all_reduce, monkeypatch):
    """An exchange with a sharded optimizer, a buffer of `NUM_CHUNKS` chunks and one of a single chunk."""
    for name in ("send", "receive"):
        monkeypatch.setattr(exchange_module, name, lambda tensor, group, **settings: [])
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **settings: all_reduce)
    opened = open_first(max_in_flight=1, reduce_dtype=None, sharded=True)
    opened.allocate([(2 * NUM_CHUNKS + 1, torch.float32), (3, torch.float32)])  # a flag follows the gradients
    opened.arrivals = opened.returns = network
    network.changed = opened.changed
    yield opened
    opened.close()


def test_a_chunk_that_ends_makes_room_for_the_next_at_once(exchange, all_reduce):
    all_reduce.ended.set()
    first = exchange.start(0, where="the first buffer")
    assert all(transfer.is_complete for transfer in first.transfers)


def test_flags_that_become_known_while_chunks_of_the_next_buffer_are_under_way_are_acted_on(
    exchange, network, all_reduce
):
    first = exchange.start(0, where="the first buffer")
    network.is_cut = True  # the other rank sends its next chunk only after it has the weights of the first buffer
    exchange.start(1, where="the second buffer")
    network.is_cut = False
    assert not first.is_done()
    known = threading.Timer(0.2, all_reduce.ended.set)
    known.start()
    first.wait()
    assert first.is_done()


class Copies(HostCopier):
    """Copies to the host of which the first has not ended."""

    def __init__(self):
        self.ended = [False, True, True, True]
        self.started = 0

    def to_host(self, source, target, *, after):
        target.copy_(source)
        number, self.started = self.started, self.started + 1
        return SimpleNamespace(query=lambda: self.ended[number])


def test_chunks_are_summed_in_their_order_whichever_is_copied_to_the_host_first(network, all_reduce, monkeypatch):
    summed = []

    def record(tensor, **settings):
        summed.append(tensor.tolist())
        return all_reduce

    monkeypatch.setattr(dist, "all_reduce", record)
    exchange = open_first(max_in_flight=2, reduce_dtype=torch.bfloat16, sharded=False)
    exchange.copier, exchange.arrivals = Copies(), network
    flat, _ = exchange.allocate([(8, torch.float32), (2, torch.float32)])  # the first has four chunks
    flat.copy_(torch.arange(8.0))
    exchange.start(0, where="the buffer")
    assert summed == [], "the first chunk is not copied yet"
    exchange.copier.ended[0] = True
    exchange.progress()
    assert summed == [[0, 1], [2, 3], [4, 5], [6, 7]]
    exchange.close()


# ---- Shards


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


# ---- Messages


def test_weights_of_a_buffer_are_not_sent_before_those_of_the_buffers_before_it(exchange):
    summed, exchange.known_flags = [], Network()
    exchange.on_summed = summed.append
    exchange.known_flags.is_cut = True
    first = exchange.start(0, where="the first buffer")
    exchange.known_flags.is_cut = False
    exchange.start(1, where="the second buffer")
    assert summed == [], "the flags of the first buffer are not known yet"
    assert exchange.changed.is_set(), "what ends while chunks are advanced is not missed"
    first.flags.work.ended.set()
    exchange.progress()
    assert summed == [0, 1]


def test_weights_arrive_beside_those_in_use_and_are_there_once_all_is_sent(network):
    exchange = open_first(world_size=3, max_in_flight=1, reduce_dtype=None, sharded=True, second_weights=True)
    exchange.allocate([(2 * NUM_CHUNKS, torch.float32), (2, torch.float32)])
    received, exchange.arrivals = [], network
    exchange.receive = lambda tensor, tag: received.append(tensor) or ["a receive"]
    exchange.send = lambda tensor, tag: ["a send"]
    exchange.gather_weights(0, where="the test").wait()
    (used,), (arrived,) = ({flat.untyped_storage().data_ptr() for flat in flats[:1]} for flats in exchange.weight_sets)
    assert {tensor.untyped_storage().data_ptr() for tensor in received} == {arrived} != {used}
    assert network.watched[0] == ["a receive"] and network.watched[-1] == ["a receive", "a send", "a send"]


def test_a_single_server_sends_nothing():
    exchange = open_first(world_size=1, max_in_flight=1, reduce_dtype=None, sharded=True)
    exchange.allocate([(2 * NUM_CHUNKS, torch.float32), (2, torch.float32)])
    exchange.on_summed = lambda buffer: None
    assert exchange.start(0, where="the test").is_done()


def tags_of(kinds, *, first=0):
    """Return the tags of transfers of these kinds between three ranks, by kind; they are numbered from `first`."""
    exchange = open_first(world_size=3, max_in_flight=1, reduce_dtype=None, sharded=True)
    if first:
        exchange.numbers = {kind: count(first) for kind in exchange.numbers}
    tags = {kind: [] for kind in exchange.numbers}
    for kind in kinds:
        exchange.receive = lambda tensor, tag, kind=kind: tags[kind].append(tag)
        RingTransfer(exchange, kind, "the test").announce([torch.ones(1)] * 2)
    return tags


def test_no_two_messages_share_a_tag_whichever_kind_a_rank_starts_first():
    tags = tags_of([0, 1] * 10)
    assert tags == tags_of([1] * 10 + [0] * 10)
    assert len({*tags[0], *tags[1]}) == 40
    assert all(max(of_kind) < 2**31 for of_kind in tags_of([0, 1], first=2**40).values()), "gloo's limit"


class Broken:
    """A message whose sender is gone."""

    def wait(self):
        raise RuntimeError("the sender is gone")


def test_the_end_of_messages_is_told_with_their_error_and_their_thread_ends_when_it_is_closed(all_reduce):
    changed = threading.Event()
    thread = MessageThread(changed)
    broken, arrived = thread.watch([Broken()]), thread.watch([all_reduce])
    with pytest.raises(RuntimeError, match="the sender is gone"):
        broken.wait(timedelta(seconds=60))
    assert changed.wait(60) and broken.is_completed() and not arrived.is_completed()
    changed.clear()
    runner = thread._thread
    for _ in range(2):
        thread.close()
    all_reduce.ended.set()
    arrived.wait(timedelta(seconds=60))
    runner.join(60)
    assert changed.is_set() and not runner.is_alive() and runner.daemon
