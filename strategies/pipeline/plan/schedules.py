"""Schedules of micro-batches (GPipe, 1F1B, interleaved 1F1B): pure generators of actions, one list for each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

FORWARD = "F"
BACKWARD = "B"
AHEAD = 2
"""Number of actions for which receives are posted in advance, so that messages arrive during computation."""


@dataclass(frozen=True, slots=True)
class Action:
    """The forward or the backward of one micro-batch through one stage."""

    kind: str
    stage: int
    micro_batch: int

    def place(self) -> str:
        """Return the name of the action in messages."""
        work = "forward" if self.kind == FORWARD else "backward"
        return f"{work} of micro-batch {self.micro_batch} in stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule for a number of ranks; those in `SEVERAL_STAGES` have several stages per rank.

    With `max_in_flight` no rank has more micro-batches between forward and backward: ranks are idle for longer, or with
    `1f1b` and more of them than ranks wait less for messages.
    """

    name: str
    num_ranks: int
    stages_per_rank: int = 1
    max_in_flight: int | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return self.num_ranks * self.stages_per_rank

    def actions(self, rank: int, num_micro_batches: int) -> list[Action]:
        """Return the actions of a rank for one step batch, in order."""
        if self.name in SEVERAL_STAGES:
            interleaved = SEVERAL_STAGES[self.name]
            return list(interleaved(rank, self.num_ranks, num_micro_batches, stages_per_rank=self.stages_per_rank))
        generator = SCHEDULES[self.name]
        return list(generator(rank, self.num_ranks, num_micro_batches, max_in_flight=self.max_in_flight))

    def in_flight(self, num_micro_batches: int) -> list[int]:
        """Return for each stage the most micro-batches that are between its forward and its backward."""
        highest = [0] * self.num_stages
        for rank in range(self.num_ranks):
            present = [0] * self.num_stages
            for action in self.actions(rank, num_micro_batches):
                present[action.stage] += 1 if action.kind == FORWARD else -1
                highest[action.stage] = max(highest[action.stage], present[action.stage])
        return highest

    def bubble(self, num_micro_batches: int) -> float:
        """Return the idle share with equal stages: `(p - 1) / (m * stages_per_rank + p - 1)` with p ranks.

        With `max_in_flight` it is that of a simulation in which a backward takes twice as long as a forward.
        """
        num_micro_batches = max(num_micro_batches, 1)  # with none on one rank it would divide by zero
        # `interleaved_1f1b` does not follow `max_in_flight`: the strategy refuses a limit below what it needs.
        if self.max_in_flight is None or self.stages_per_rank > 1:
            return (self.num_ranks - 1) / (num_micro_batches * self.stages_per_rank + self.num_ranks - 1)
        actions = [self.actions(rank, num_micro_batches) for rank in range(self.num_ranks)]
        costs = {
            (kind, stage): cost for stage in range(self.num_stages) for kind, cost in ((FORWARD, 1), (BACKWARD, 2))
        }
        return idle_share(simulate(actions, costs, self.num_stages))


def most_in_flight(num_ranks: int, stages_per_rank: int) -> int:
    """Return the most micro-batches that a rank has in flight with `interleaved_1f1b`."""
    # The warm-up of the first rank, and the forward that follows it before the first backward.
    return (num_ranks - 1) * 2 + (stages_per_rank - 1) * num_ranks + 1


def gpipe(rank: int, num_ranks: int, num_micro_batches: int, *, max_in_flight: int | None = None) -> Iterator[Action]:
    """Yield all forwards, then all backwards; every micro-batch is in flight at once, or `max_in_flight` of them.

    Three ranks, four micro-batches, a backward twice as long as a forward::

        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
        rank 1  .. F0 F1 F2 F3 .. .. .. B0 B0 B1 B1 B2 B2 B3 B3 .. ..
        rank 2  .. .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .. .. .. ..
    """
    del num_ranks  # the parameters are those of `one_f_one_b`, which is called in the same way
    group_size = max_in_flight or max(num_micro_batches, 1)
    # Groups begin and end at the same micro-batches on all ranks: otherwise one could wait for a forward of the next
    # group on a rank that first needs a backward of this one.
    for first in range(0, num_micro_batches, group_size):
        group = range(first, min(first + group_size, num_micro_batches))
        for kind in (FORWARD, BACKWARD):
            for micro_batch in group:
                yield Action(kind, rank, micro_batch)


def one_f_one_b(
    rank: int, num_ranks: int, num_micro_batches: int, *, max_in_flight: int | None = None
) -> Iterator[Action]:
    """Yield each backward as early as possible; at most `num_ranks - rank` micro-batches are in flight.

    With `max_in_flight` at most so many are, also on the first ranks. What it exceeds `num_ranks` by, up to twice as
    many in all, are forwards that ranks run ahead, so that messages travel while both sides compute (Zhuang et al.,
    2023, "On optimizing the communication of model parallelism").

    Three ranks, four micro-batches, a backward twice as long as a forward::

        rank 0  F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3
        rank 1  .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..
        rank 2  .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..
    """
    limit, later_ranks = max_in_flight or num_ranks, num_ranks - rank - 1
    ahead = min(max(limit - num_ranks, 0), later_ranks)
    # One less than the limit, as the steady state begins with another forward.
    warm_up = min(later_ranks + ahead, num_micro_batches, limit - 1)
    forwards = (Action(FORWARD, rank, index) for index in range(num_micro_batches))
    backwards = (Action(BACKWARD, rank, index) for index in range(num_micro_batches))
    yield from _one_forward_one_backward(forwards, backwards, warm_up=warm_up)


def interleaved_one_f_one_b(
    rank: int, num_ranks: int, num_micro_batches: int, *, stages_per_rank: int = 2
) -> Iterator[Action]:
    """Yield `1f1b` work over several stages a rank: stage `s` belongs to rank `s % num_ranks`.

    Micro-batches go in groups of `num_ranks` through all stages of a rank, so the pipeline fills in one
    stage's time, not in one rank's: the idle share falls by `stages_per_rank`, for more messages and memory.
    Two ranks, two stages each, four micro-batches (`sFm`: stage s, micro-batch m), all equally long::

        rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
        rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...
    """
    # The order is defined for whole groups; the micro-batches that fill up the last one are left out below.
    padded = -(-num_micro_batches // num_ranks) * num_ranks
    total = padded * stages_per_rank
    warm_up = min((num_ranks - rank - 1) * 2 + (stages_per_rank - 1) * num_ranks, total)
    forwards = _grouped(FORWARD, range(rank, num_ranks * stages_per_rank, num_ranks), padded, num_ranks)
    backwards = _grouped(BACKWARD, range(rank, num_ranks * stages_per_rank, num_ranks)[::-1], padded, num_ranks)
    for action in _one_forward_one_backward(forwards, backwards, warm_up=warm_up):
        # The order of whole groups cannot deadlock, and neither can it without the actions of some micro-batches.
        if action.micro_batch < num_micro_batches:
            yield action


SCHEDULES: dict[str, Callable[..., Iterator[Action]]] = {"gpipe": gpipe, "1f1b": one_f_one_b}
"""Generators of the actions of a rank with one stage, by name.

What the runtime relies on, of these and of `SEVERAL_STAGES`:

- Each micro-batch goes once forward and once backward through each stage of the rank.
- Each stage has the micro-batches of a kind in ascending order, in which it sends to the stages beside it.
- The last action is a backward: gradients are reduced over replicas in it, and before it they only accumulate.
- With the actions of the other ranks it does not deadlock: `simulate` returns.
- At most `max_in_flight` micro-batches are between forward and backward, if it is given.
"""
SEVERAL_STAGES: dict[str, Callable[..., Iterator[Action]]] = {"interleaved_1f1b": interleaved_one_f_one_b}
"""Those of a rank with `stages_per_rank` stages, of which stage `s` belongs to rank `s % num_ranks`."""
SYNONYMS = {"simple": "gpipe", "interleaved": "1f1b"}


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its start and end in seconds."""

    action: Action
    start: float
    end: float


def idle_share(spans: Sequence[Sequence[Span]]) -> float:
    """Return the idle share of all ranks' time until the last end."""
    length = max((rank_spans[-1].end for rank_spans in spans if rank_spans), default=0.0)
    busy = sum(span.end - span.start for rank_spans in spans for span in rank_spans)
    return 1.0 - busy / (length * len(spans)) if length else 0.0


def simulate(
    actions: Sequence[Sequence[Action]],
    costs: Mapping[tuple[str, int], float],
    num_stages: int,
    *,
    message: float = 0.0,
) -> list[list[Span]]:
    """Return every rank's actions with their times if each is as early as possible.

    `actions` has one list for each rank; `costs` has the time of ("F" or "B", stage), and `message` is that of a
    message between two stages. Raises ValueError for a schedule that deadlocks.
    """
    # Each pass takes every rank as far as it can go; the order of ranks does not change the times, which depend only on
    # prerequisites and on the order within a rank.
    spans: list[list[Span]] = [[] for _ in actions]
    ends: dict[Action, float] = {}
    remaining = sum(len(rank_actions) for rank_actions in actions)
    while remaining:
        progress = False
        for rank_spans, rank_actions in zip(spans, actions, strict=True):
            while len(rank_spans) < len(rank_actions):
                action = rank_actions[len(rank_spans)]
                needs = prerequisites(action, num_stages)
                if any(need not in ends for need in needs):
                    break
                ready = max((ends[need] + message * (need.stage != action.stage) for need in needs), default=0.0)
                start = max(ready, rank_spans[-1].end if rank_spans else 0.0)
                ends[action] = start + costs[action.kind, action.stage]
                rank_spans.append(Span(action, start, ends[action]))
                remaining -= 1
                progress = True
        if not progress:
            blocked = [todo[len(done)] for done, todo in zip(spans, actions, strict=True) if len(done) < len(todo)]
            raise ValueError(f"the schedule deadlocks at the {' and the '.join(action.place() for action in blocked)}")
    return spans


def prerequisites(action: Action, num_stages: int) -> list[Action]:
    """Return the actions that must have ended before this one may start."""
    needs = []
    if action.kind == FORWARD and action.stage > 0:
        needs.append(Action(FORWARD, action.stage - 1, action.micro_batch))
    if action.kind == BACKWARD:
        needs.append(Action(FORWARD, action.stage, action.micro_batch))  # whose saved tensors it uses
        if action.stage < num_stages - 1:
            needs.append(Action(BACKWARD, action.stage + 1, action.micro_batch))
    return needs


def _grouped(kind: str, stages: Sequence[int], num_micro_batches: int, group_size: int) -> Iterator[Action]:
    for first in range(0, num_micro_batches, group_size):
        for stage in stages:
            for micro_batch in range(first, first + group_size):
                yield Action(kind, stage, micro_batch)


def _one_forward_one_backward(
    forwards: Iterator[Action], backwards: Iterator[Action], *, warm_up: int
) -> Iterator[Action]:
    for _ in range(warm_up):
        yield next(forwards)
    for forward in forwards:
        yield forward
        yield next(backwards)  # cannot be exhausted: there are as many backwards as forwards
    yield from backwards
