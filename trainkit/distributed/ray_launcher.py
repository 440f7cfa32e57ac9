"""Ray launcher: starts ranks as Ray actors, spread over the nodes of a cluster.

    caller (driver) ── placement group, one bundle per rank, spread ──┬── actor: rank 0   opens the store of all ranks
      │  watches, forwards signals                                    ├── actor: rank 1
      │  restarts on the remaining nodes when a node is lost          └── actor: rank 2

The caller raises the exception of the first rank that fails. Ranks that are lost with their node are restarted on the
remaining nodes; the run resumes from its last complete checkpoint, as long as each start has reached a later one.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it at run time

from trainkit.distributed.launcher import (
    GRACE_SECONDS,
    RankEnvironment,
    RankFailure,
    RankTraceback,
    is_consequence,
    prepare_rank,
)
from trainkit.distributed.pickling import pickled, unpickled
from trainkit.distributed.rank_log import log_copied
from trainkit.distributed.rank_loss import SavedStep
from trainkit.distributed.rendezvous import store_at
from trainkit.errors import Stopped, UserError
from trainkit.signals import recorded_signals

T = TypeVar("T")

PLACING_SECONDS = 60.0  # for a cluster that may be growing, or detecting a lost node
LOST_SECONDS = 90.0  # for Ray to detect a node that does not answer, after 5 checks of 10 s, 3 s apart
_POLL_SECONDS = 0.2

logger = logging.getLogger(__name__)


class RayRanksLost(RankFailure):
    """Ranks were lost with their node, or were killed."""


class RayWorker:
    """One rank; Ray runs its methods in the main thread of a separate process."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None

    def location(self) -> tuple[int, str, str]:
        """Return the pid of this process, the id of its node, and the name of its host."""
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id(), socket.gethostname()

    def open_store(self) -> tuple[str, int]:
        """Open a store that the ranks of all nodes can reach, and return its address."""
        import ray

        host: str = ray.util.get_node_ip_address()
        self._store = store_at(host)
        return host, self._store.port

    def run(self, payload: bytes, environment: RankEnvironment, variables: dict[str, str]) -> Any:
        """Run this rank; return its value on rank 0."""
        os.environ.update(variables)
        prepare_rank(environment)
        folder = environment.log_dir
        with nullcontext() if folder is None else log_copied(Path(folder), rank=environment.rank):
            enter, run = unpickled(payload)
            enter(environment)
            value = run()
        return value if environment.rank == 0 else None


def launch_on_ray(
    run: Callable[[], T],
    *,
    num_ranks: int,
    enter: Callable[[RankEnvironment], None],
    environment: RankEnvironment,
    signals: Sequence[int],
    on_gpus: bool,
    saved: Callable[[], SavedStep | None],
) -> T:
    """Return the value of `run` on rank 0 of `num_ranks` actors, or of fewer after a node was lost.

    `saved` returns the last checkpoint of this run, from which a new start goes on; `None` without one.
    """
    # By value, as actors on other nodes may not be able to import the caller's script.
    payload = pickled((enter, run), main_by_value=True)
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if on_gpus else {})}
    with _connected(), recorded_signals(signals) as received:
        attempt, reached = 0, -1
        while True:
            # The first start needs all ranks; a later one takes what the lost node has left.
            with _placed(bundle, num_ranks, at_least=1 if attempt else num_ranks) as ranks:
                started = replace(environment, world_size=len(ranks.actors), attempt=attempt)
                try:
                    value: T = ranks.run(payload, started, received)
                    return value
                except RayRanksLost as lost:
                    last = saved()
                    # Without a later checkpoint the next start would end at the same step, and so on forever.
                    if last is None or last.step <= reached or received:
                        raise
                    attempt, reached = attempt + 1, last.step
                    environment = replace(environment, checkpoint=str(last.path))
                    logger.warning("%s Resuming from step %d on the remaining nodes.", lost, last.step)


class _Ranks(NamedTuple):
    """The actors of one start, with their pids, nodes and hosts."""

    actors: list[Any]
    pids: list[int]
    nodes: list[str]
    hosts: list[str]

    def run(self, payload: bytes, environment: RankEnvironment, received: list[int]) -> Any:
        """Return rank 0's value; raise the exception of the first rank that fails."""
        import ray
        from ray.exceptions import RayTaskError

        host, port = _get(self.actors[0].open_store.remote())
        environment = replace(environment, store_host=host, store_port=port)
        job = ray.get_runtime_context().get_job_id()
        futures = [
            actor.run.remote(payload, replace(environment, rank=rank), _variables(rank, len(self.actors), job))
            for rank, actor in enumerate(self.actors)
        ]
        forwarded, waiting, deadline = 0, list(futures), float("inf")
        failures: dict[int, Exception] = {}  # in the order of failing
        while waiting and time.monotonic() < deadline:
            done, waiting = ray.wait(waiting, timeout=_POLL_SECONDS)
            for future in done:
                try:
                    ray.get(future)
                # Of any type: a rank raises what it likes, and a lost actor raises one of Ray's errors.
                except Exception as error:
                    failures[futures.index(future)] = error
                    # A rank that lost another one is earlier than Ray, which has to miss some answers of its node.
                    is_first = isinstance(error, RayTaskError) and is_consequence(error.cause)
                    deadline = min(deadline, time.monotonic() + (LOST_SECONDS if is_first else GRACE_SECONDS))
            for number in received[forwarded:]:
                self._send(number)
            forwarded = len(received)
        if failures:
            self._raise_first(failures, received)
        return ray.get(futures[0])

    def _send(self, number: int) -> None:
        """Send every rank a signal, by a task on its node: the actor itself is busy."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        def kill(pid: int) -> None:  # local, so that Ray pickles its code and the task need not import this module
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, number)

        # Without a CPU: the ranks have reserved theirs, and on a full node the task would wait for one.
        task = ray.remote(num_cpus=0)(kill)
        for pid, node in zip(self.pids, self.nodes, strict=True):
            # Not soft: on another node the pid would be that of a stranger.
            here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            task.options(scheduling_strategy=here).remote(pid)

    def _raise_first(self, failures: dict[int, Exception], received: list[int]) -> None:
        from ray.exceptions import RayTaskError

        raised = {rank: error for rank, error in failures.items() if isinstance(error, RayTaskError)}
        lost = [rank for rank in failures if rank not in raised]
        causes = {rank: error for rank, error in raised.items() if not is_consequence(error.cause)}
        if not causes and lost:
            if received:  # before it had signal handlers
                raise Stopped(signal.Signals(received[0]).name, 128 + received[0])
            name = f"rank {lost[0]} on {self.hosts[lost[0]]}"
            raise RayRanksLost(f"{name} is gone with its process or its node.") from failures[lost[0]]
        rank, error = next(iter((causes or raised).items()))
        if isinstance(error.cause, UserError | Stopped | KeyboardInterrupt):
            raise error.cause
        raise error.cause from RankTraceback(f"rank {rank}: {error}")


@contextmanager
def _connected() -> Iterator[None]:
    """Connect to the Ray cluster of the caller or of RAY_ADDRESS, or start one on this machine for the context."""
    import ray

    is_connected = ray.is_initialized()
    if not is_connected:
        ray.init(configure_logging=False, include_dashboard=False if "RAY_ADDRESS" not in os.environ else None)
    try:
        yield
    finally:
        if not is_connected:
            ray.shutdown()


@contextmanager
def _placed(bundle: dict[str, float], num_ranks: int, *, at_least: int) -> Iterator[_Ranks]:
    """Start an actor for each rank, spread over the nodes, and kill them on exit."""
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group, count = _reserve(bundle, num_ranks, at_least)
    actors: list[Any] = []
    try:
        for index in range(count):
            placement = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": placement}
            actors.append(ray.remote(RayWorker).options(**options).remote())
        pids, nodes, hosts = zip(*(_get(actor.location.remote()) for actor in actors), strict=True)
        yield _Ranks(actors, list(pids), list(nodes), list(hosts))
    finally:
        for actor in actors:
            # An actor that waits in a collective does not end by itself.
            ray.kill(actor)
        remove_placement_group(group)


def _reserve(bundle: dict[str, float], num_ranks: int, at_least: int) -> tuple[Any, int]:
    """Return a placement group and its size: `num_ranks`, or as many bundles as the cluster has room for."""
    from ray.util.placement_group import placement_group, remove_placement_group

    deadline = time.monotonic() + PLACING_SECONDS
    while True:
        count = min(num_ranks, max(_room(bundle), at_least))
        group = placement_group([bundle] * count, strategy="SPREAD")
        # Counted again in each turn, as nodes may join or be lost meanwhile.
        if group.wait(min(5.0, PLACING_SECONDS)):
            return group, count
        remove_placement_group(group)
        if time.monotonic() > deadline:
            needed = " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            room = _room(bundle)
            remedy = f"strategy.devices={room}" if room else "strategy.device=cpu" if "GPU" in bundle else ""
            raise UserError(
                f"strategy.devices={num_ranks} needs {num_ranks} times {needed}, and the Ray cluster has room for "
                f"{room}; {remedy and f'set {remedy}, or '}add nodes to the cluster."
            )


def _room(bundle: dict[str, float]) -> int:
    """Return the number of bundles that fit on the live nodes while nothing else uses them."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(int(min(has.get(name, 0.0) // amount for name, amount in bundle.items())) for has in nodes)


def _variables(rank: int, world_size: int, job: str) -> dict[str, str]:
    # Ray shows one GPU to each actor, so every local rank is 0.
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return {"RAY_JOB_ID": job, **{name: str(number) for name, number in numbers.items()}}


def _get(future: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(future)
    except RayError as error:
        raise RayRanksLost("a rank was lost before it started.") from error
