"""The communication thread: concurrent transfers, shutdown, and errors that name the operation."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
import torch
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.transports.communication_thread import CHECK_SECONDS, CommunicationThread
from trainkit.strategies.transports.host_copy import HostCopier
from trainkit.strategies.transports.sharded import FusionSettings, ShardTransport

from tests.equality import Perceptron, numbers
from tests.strategies.fusion.test_failure import FailingOnOne
from tests.strategies.fusion.training import train, trained
from tests.tasks import Recorder
from trainkit import Data
from trainkit.distributed.failure_store import RankError
from trainkit.testing import rank_outcomes, run_ranks

WHERE = "backward of step 7, bucket 2 of 5"


class FakeWork:
    finished_at = None

    def __init__(self, transport):
        self.transport = transport

    def is_done(self):
        return self.transport.has_arrived

    def wait(self):
        self.transport.waited_on = threading.current_thread()

    def check_peers(self, *, waited):
        self.transport.checks.append(waited)


class FakeTransport(ShardTransport):
    """Completes buffers when the test sets `has_arrived`; records the threads that call it."""

    name = "fake"
    settings = FusionSettings(message_bytes=1, max_in_flight=1, reduce_dtype=None, sharded=False)
    has_arrived, error, is_closed = False, None, False
    waited_on = started_on = None

    def __init__(self):
        self.copier, self.copies_back, self.checks = MarkRecorder(), {}, []

    def num_gradients(self):
        return [1]

    def allocate(self, sizes):
        self.weight_sets = []
        return []

    def start(self, bucket, *, where, timed=False, ready=None):
        self.started_on = threading.current_thread()
        return FakeWork(self)

    gather_weights = start

    def progress(self):
        if self.error is not None:
            raise self.error

    def own_ranges(self, buffer):
        return []

    def used_flags(self, buffer):
        return torch.empty(0)

    @property
    def bytes_a_step(self):
        return 0

    def close(self):
        self.is_closed = True


class MarkRecorder(HostCopier):
    """Records the thread that marks the end of the work that fills a buffer."""

    marked_on = None

    def mark(self):
        self.marked_on = threading.current_thread()


class RecordingStore:
    """A failure store that records notes."""

    def __init__(self):
        self.notes = []

    def note_waiting(self, where):
        self.notes.append(where)


@pytest.fixture
def thread():
    failure_store = RecordingStore()
    thread = CommunicationThread(FakeTransport(), failure_store=failure_store, rank=3, device=torch.device("cpu"))
    thread.allocate([])
    yield thread
    thread.close()
    assert not any(other.name == "fusion communication" for other in threading.enumerate())
    assert thread.inner.is_closed


def test_transfers_run_on_the_thread_and_buffers_are_marked_ready_on_the_training_thread(thread):
    before = time.perf_counter()
    transfer = thread.start(0, where=WHERE)
    assert not transfer.is_done()
    thread.inner.has_arrived = True
    transfer.wait()
    assert transfer.is_done()
    inner = thread.inner
    assert inner.copier.marked_on is threading.main_thread()
    assert inner.started_on is inner.waited_on is not threading.main_thread()
    assert before < transfer.finished_at < time.perf_counter()


@pytest.mark.parametrize("call", ["wait", "start"])
def test_an_error_on_the_thread_reaches_the_training_thread_with_rank_step_and_bucket(thread, call):
    thread.inner.error = ZeroDivisionError("no such shard")
    transfer = thread.start(0, where=WHERE)
    with pytest.raises(RankError, match=r"no such shard") as caught:
        transfer.wait()
        thread.start(1, where="another")
    if call == "start":
        with pytest.raises(RankError, match=r"no such shard") as caught:
            thread.start(1, where="another")
    assert "thread of rank 3" in str(caught.value) and WHERE in str(caught.value)
    assert "ZeroDivisionError" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_closing_ends_a_thread_that_waits(thread):
    transfer = thread.start(0, where=WHERE)
    while thread.inner.started_on is None:
        time.sleep(1e-3)
    thread.close()
    assert not thread.inner.started_on.is_alive()
    with pytest.raises(RankError, match="closed in backward of step 7"):
        transfer.wait()


def test_a_waiting_thread_checks_its_peers_every_quarter_second_and_clears_its_note_afterwards(thread):
    transfer = thread.start(0, where=WHERE)
    waits = thread.inner.checks
    while len(waits) < 3:
        time.sleep(1e-3)
    assert CHECK_SECONDS == 0.25
    assert all(later - earlier >= 0.25 - 1e-6 for earlier, later in itertools.pairwise([0.0, *waits]))
    thread.inner.has_arrived = True
    transfer.wait()
    assert thread.failure_store.notes == [""]


# ---- Training


class SlowCopier(HostCopier):
    """Copies to the host that end after some polls, as those of a GPU do."""

    def to_host(self, source, target, *, after):
        return SlowCopy(source, target)


class SlowCopy:
    """An event after a copy that ends after some polls."""

    def __init__(self, source, target):
        self.source, self.target, self.polls = source, target, 0

    def query(self):
        self.polls += 1
        if self.polls == 3:
            self.target.copy_(self.source)
        return self.polls >= 3

    def synchronize(self):
        while not self.query():
            pass


def weights_by_thread_and_copier(run_dir):
    """Return the weights after every step, by transport, sharding, thread and copier."""
    from trainkit.strategies.transports import gloo_ring as exchange
    from trainkit.strategies.transports import shared_buffers

    found = {}
    for transport in ("shared_memory", "exchange"):
        for shard in (False, True):
            for thread, copier in ((False, HostCopier), (True, HostCopier), (True, SlowCopier), (False, SlowCopier)):
                for module in (exchange, shared_buffers):
                    module.open_host_copier = lambda device, copier=copier: copier()
                strategy = FusionStrategy(
                    device="cpu",
                    transport=transport,
                    reduce_dtype="bf16",  # which needs copies even on the CPU
                    shard_optimizer=shard,
                    communication_thread=thread,
                    buffer_mb=0.0005,
                    max_in_flight=2,
                )
                recorder = ThreadRecorder()
                steps = trained(strategy, "perceptron", recorder, run_dir=run_dir)
                found.setdefault((transport, shard), []).append(steps)
                assert recorder.had_thread == thread
                assert not any(other.name == "fusion communication" for other in threading.enumerate())
    return found


class ThreadRecorder(Recorder):
    """Records whether the communication thread is running."""

    had_thread = False

    def on_step_end(self, run):
        self.had_thread = any(other.name == "fusion communication" for other in threading.enumerate())


@pytest.mark.slow
def test_weights_are_bit_equal_with_and_without_thread_and_slow_copies(tmp_path):
    for found in run_ranks(weights_by_thread_and_copier, 2, tmp_path):
        for case, (first, *others) in found.items():
            for other in others:
                for ours, theirs in zip(first, other, strict=True):
                    assert all(torch.equal(ours[name], theirs[name]) for name in ours), case


def failing(transport, run_dir):
    strategy = FusionStrategy(device="cpu", transport=transport, communication_thread=True, timeout_seconds=600.0)
    try:
        train(strategy, FailingOnOne(), Data(train=numbers(24), batch_size=6), run_dir=run_dir, steps=6)
    finally:
        alive = [other.name for other in threading.enumerate() if other.name == "fusion communication"]
        assert not alive


@pytest.mark.parametrize("transport", ["shared_memory", "exchange"])
def test_another_ranks_exception_reaches_the_training_thread(transport, tmp_path):
    outcomes = rank_outcomes(failing, 2, transport, tmp_path, patience=60)
    assert "ZeroDivisionError: rank 1 cannot go on" in outcomes[1].failure
    message = next(line for line in outcomes[0].failure.splitlines() if "communication thread of rank" in line)
    assert "communication thread of rank 0" in message and "backward of step 2, bucket 0 of 1" in message
    assert "because rank 1 failed in step 2: ZeroDivisionError: rank 1 cannot go on" in message


def has_thread_by_setting(run_dir):
    """Return for each value of communication_thread whether a thread ran on the CPU."""
    found = {}
    for setting in ("auto", True, False):
        recorder = ThreadRecorder()
        strategy = FusionStrategy(device="cpu", communication_thread=setting)
        train(strategy, Perceptron(), Data(train=numbers(12), batch_size=6), recorder, run_dir=run_dir, steps=2)
        found[setting] = recorder.had_thread
    return found


def test_on_the_cpu_the_thread_runs_only_if_set(tmp_path):
    for found in run_ranks(has_thread_by_setting, 2, tmp_path):
        assert found == {"auto": False, True: True, False: False}
