"""Failure store: the root cause of a failure and the position of every rank; it works while collectives hang.

rank 0   waits ... times out: asks              reads "step 12, Task.training_step, train.py:17"
rank 1   hangs in a read              its watchdog thread inspects the main thread's stack and answers
"""

from __future__ import annotations

import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainkit.errors import RemoteRankError

FAILURE_KEY = "failure"
WAITING_KEY = "waiting"
QUESTION_KEY = "where are you"
ANSWER_SECONDS = 3.0  # to wait for the answers to a question
POLL_SECONDS = 1.0  # between two checks for a question
STORE_SECONDS = 10.0  # to wait for the store, which answers at once unless its machine or the link to it is down

GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")
# gloo and NCCL have no exception types for these, only RuntimeError with such a text.
"""Parts of the messages of errors that are raised when a rank is gone."""
_LOST = (*GONE, "Timed out waiting", "wait timeout", "Application timeout")

_T = TypeVar("_T")
_NOT_THE_USERS = frozenset({"torch", "trainkit", *sys.stdlib_module_names})


class RankError(RemoteRankError):
    """Another rank failed, died or timed out; the message names it."""


class RankTimeout(RankError):
    """Another rank did not come in time; nobody has died."""


class RanksWanted(RankError):
    """The run is to go on with more ranks."""


def stopped(where: str, cause: str) -> RankError:
    """Return the error of a rank that stops waiting in `where` because of another rank's failure."""
    return RankError(f"stopped while waiting in {where}, because {cause}")


def timed_out(store: FailureStore, *, where: str, seconds: float) -> RankError:
    """Return the error of a rank that waited longer than `seconds` in `where`; it names the position of each rank."""
    rank, positions = store.rank, store.who_waits()
    return RankTimeout(f"rank {rank} timed out after {seconds:g} s in {where}. Position of each rank:\n{positions}")


def is_lost(error: BaseException) -> bool:
    """Return True if a collective broke because another rank is gone or timed out."""
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST)


class Host(NamedTuple):
    """The host of a rank."""

    name: str
    has_store: bool
    """True if the store of the ranks is on this host."""


def this_host(group: dist.ProcessGroup) -> Host:
    """Return the host of this process."""
    return Host(socket.gethostname(), is_of_this_machine(_address_of(_store_of(group))))


class FailureStore:
    """The first failure and the position of each rank, in the key-value store of a process group.

    `token` names this store, equal on all ranks and unique among stores. `hosts` are those of the ranks, if known: the
    store cannot tell them once its own host is down.
    """

    def __init__(self, group: dist.ProcessGroup, *, token: str, hosts: Sequence[Host] = ()) -> None:
        self.rank, self.world_size = group.rank(), group.size()
        self.is_answered = False  # True while a RankWatchdog of each rank answers questions
        self.asks_who_is_silent = True
        """False where whoever started the ranks knows who died, and goes on: each answer takes its time."""
        store = _store_of(group)
        # A second connection: reading must not wait behind a collective that blocks the shared one.
        # Without a method `clone`, as in older versions of torch, the shared connection is used.
        connection = getattr(store, "clone", lambda: store)()
        # Instead of torch's limit of minutes, by which the error of a rank would be delayed.
        connection.set_timeout(timedelta(seconds=10))
        self.store = PrefixStore(f"trainkit/{group.group_name}/{token}", connection)
        self._address = _address_of(store)
        self._hosts = hosts
        self._is_silent = False  # True once the store has not answered

    def publish(self, message: str) -> None:
        """Store `message` as the root cause unless another rank was first."""
        with suppress(dist.DistNetworkError):  # no rank can read it then
            # `add` is atomic: only the first of several failing ranks gets 1, so that a consequence does not replace
            # the cause.
            if self._answer(lambda: self.store.add(f"{FAILURE_KEY}/count", 1)) == 1:
                self._answer(lambda: self.store.set(FAILURE_KEY, message))

    def root_cause(self) -> str | None:
        """Return the message of the rank that failed first; `None` if no rank has failed."""
        try:
            return self._read(FAILURE_KEY)
        except dist.DistNetworkError:
            return self._store_is_lost()

    def note_waiting(self, where: str) -> None:
        """Store that this rank has been waiting in `where` for a while; "": it waits no more."""
        self._answer(lambda: self.store.set(f"{WAITING_KEY}/{self.rank}", where))

    def check(self, *, where: str, waited: float, timeout_seconds: float) -> None:
        """Store that this rank waits in `where`; raise RankError if a rank has failed, or after the timeout.

        `waited` is in seconds.
        """
        cause = self.root_cause()
        if cause is not None:
            raise stopped(where, cause)
        self.note_waiting(where)
        if waited > timeout_seconds:
            raise timed_out(self, where=where, seconds=timeout_seconds)

    def broken(self, error: RuntimeError, *, where: str, seconds: float) -> RankError:
        """Return the error of a rank whose collective in `where`, with a time-out of `seconds`, failed in the backend.

        It names the root cause, or who waits where, or the ranks that do not answer.
        """
        cause = self.root_cause()
        # "Timed out" and "timed out". A published cause goes first: ranks also time out as a consequence of it.
        if cause is None and "imed out" in str(error):
            return timed_out(self, where=where, seconds=seconds)
        return stopped(where, cause or f"a rank is gone ({str(error).splitlines()[0]}){self._who_is_silent()}")

    def who_waits(self) -> str:
        """Return one line for each rank: the place where it waits, or its position if it is not waiting."""
        places, names = self.positions() if self.is_answered else {}, self._names()
        lines = []
        for rank, name in enumerate(names):
            where = self._read(f"{WAITING_KEY}/{rank}")
            if rank == self.rank or where:
                lines.append(f"  {name}: waits" + (f" in {where}" if where else ""))
            elif rank in places:
                lines.append(f"  {name}: has not come; it is in {places[rank]}")
            else:
                lines.append(f"  {name}: has not come" + (", and does not answer" if self.is_answered else ""))
        return "\n".join(lines)

    def _who_is_silent(self) -> str:
        """Return the ranks that do not answer as the end of a sentence; "" if that is not known."""
        if not self.is_answered or not self.asks_who_is_silent:
            return ""
        answered = {self.rank, *self.positions()}
        silent = [name for rank, name in enumerate(self._names()) if rank not in answered]
        return f"; no answer from {', '.join(silent)}" if silent else ""

    def _store_is_lost(self) -> str:
        """Return why the store does not answer, with the host that it was on and the ranks there."""
        ranks = [rank for rank, host in enumerate(self._hosts) if host.has_store]
        host = self._hosts[ranks[0]].name if ranks else self._address
        keeper = f"the process that kept the ranks' store{host and f' on {host}'}, rank 0 or the one that started them,"
        if not self._is_silent:
            return f"{keeper} is gone"
        there = f"; ranks there: {', '.join(map(str, ranks))}" if ranks else ""
        return f"{keeper} has not answered for {STORE_SECONDS:.0f} s: its machine or the link to it is down{there}"

    def _names(self) -> list[str]:
        """Return what each rank is called: its number, with its host if there are several."""
        several = len({host.name for host in self._hosts}) > 1
        if not several:
            return [f"rank {rank}" for rank in range(self.world_size)]
        return [f"rank {rank} on {host.name}" for rank, host in enumerate(self._hosts)]

    def positions(self) -> dict[int, str]:
        """Ask for the position of every rank; return those that answer in time."""
        question = self._answer(lambda: self.store.add(QUESTION_KEY, 1))
        positions: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(positions) < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            for rank in set(range(self.world_size)) - set(positions):
                # A watchdog answers only the newest question, which another rank may have asked meanwhile.
                for later in (question, question + 1):
                    position = self._read(f"{QUESTION_KEY}/{later}/{rank}")
                    if position is not None:
                        positions[rank] = position
        return positions

    def _read(self, key: str) -> str | None:
        # `get` would wait until the key is set.
        if not self._answer(lambda: self.store.check([key])):
            return None
        return self._answer(lambda: self.store.get(key)).decode()

    def _answer(self, question: Callable[[], _T]) -> _T:
        """Return what the store answers; raise DistNetworkError if it is gone or silent.

        Asked on a thread: torch's store waits without a limit for a machine that no longer sends.
        """
        if self._is_silent:
            raise dist.DistNetworkError("the store has not answered before")
        answer: Future[_T] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        # A daemon: a call that never returns must not keep the process from ending.
        threading.Thread(target=ask, name="trainkit-store", daemon=True).start()
        try:
            return answer.result(STORE_SECONDS)
        except TimeoutError:
            # The thread stays in its call, so each further question would leave one more.
            self._is_silent = True
            raise dist.DistNetworkError("the store does not answer") from None


class RankWatchdog:
    """A thread that answers questions for the position of the thread that made it, until it is closed.

    `describe` returns a description of a call stack, given with the outermost frame first, or "".
    """

    def __init__(
        self, store: FailureStore, *, step: Callable[[], int], describe: Callable[[Sequence[FrameType]], str]
    ) -> None:
        self.store, self.step, self.describe = store, step, describe
        # The thread that trains makes the watchdog: its stack tells where the rank is.
        self._watched = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, name="trainkit-watchdog", daemon=True)
        store.is_answered = True
        self._thread.start()

    def close(self) -> None:
        """End the thread; may be called twice."""
        self.store.is_answered = False
        self._closing.set()
        # Limited: the thread may be in a call to a store that does not answer.
        self._thread.join(timeout=5.0)

    def _answer_all(self) -> None:
        answered, store = 0, self.store.store
        with suppress(RuntimeError):  # the store is gone, so nobody can ask
            while not self._closing.wait(POLL_SECONDS):
                # Adding 0 reads the number of the newest question, or creates it, where `get` would wait for the first
                # one.
                asked = store.add(QUESTION_KEY, 0)
                if asked > answered:
                    answered = asked
                    # Private, as Python has no other way to see the stack of another thread. It works while that thread
                    # hangs in C.
                    frame = sys._current_frames().get(self._watched)
                    position = "nowhere: its thread has ended" if frame is None else place_of(frame, self.describe)
                    store.set(f"{QUESTION_KEY}/{asked}/{self.store.rank}", f"step {self.step()}, {position}")


def place_of(innermost: FrameType, describe: Callable[[Sequence[FrameType]], str]) -> str:
    """Return the description of the stack that ends in a frame, and the innermost line of the user's code."""
    frames = [frame for frame, _ in traceback.walk_stack(innermost)][::-1]
    # While a collective hangs, the innermost frame is torch's, which does not say which line of the user's code waits.
    user_frames = [f for f in frames if str(f.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS]
    line = f"{user_frames[-1].f_code.co_filename}:{user_frames[-1].f_lineno}" if user_frames else ""
    return ", ".join(part for part in (describe(frames), line) if part)


def _store_of(group: dist.ProcessGroup) -> Store:
    # Private, as older versions of torch have no public function; it returns the store of the default group.
    read = getattr(group, "get_group_store", dist.distributed_c10d._get_default_store)  # torch >= 2.9
    store: Store = read()
    return store


def _address_of(store: Store) -> str:
    """Return the address of the machine that a store is on, or its name; "" for a store without a network."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    address: str = getattr(store, "host", "")
    return address


def is_of_this_machine(address: str) -> bool:
    """Return True if this machine has an address, or the one of a name."""
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        # Only an address of this machine can be bound. Port 0 is any free port, so no service is disturbed.
        with socket.socket(family, kind) as bound:
            bound.bind(socket_address)
    except OSError:
        return False
    return True
