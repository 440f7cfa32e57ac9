"""Order of launches, and of arrival in the first backward, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from trainkit.strategies.reducer.bucket import Bucket, GradientEntry, LaunchQueue
from trainkit.strategies.reducer.bucket_plan import MIB, GradientSpec, plan_buckets
from trainkit.strategies.reducer.reducer import ReducerSettings
from trainkit.strategies.reducer.unused_parameters import FirstBackwardStats, make_plan

ALONE = SimpleNamespace(size=lambda: 1)


def entries(count: int) -> list[GradientEntry]:
    return [GradientEntry(index, f"p{index}", nn.Parameter(torch.zeros(10))) for index in range(count)]


def buckets(*members: str) -> list[Bucket]:
    """Return buckets of the parameters whose numbers are written side by side: `buckets("54", "3")`."""
    count = sum(map(len, members))
    plan = plan_buckets([GradientSpec(1, 4, "f32")] * count, cap_bytes=4)
    made = entries(count)
    return [
        Bucket(number, plan.buckets[number], [made[int(index)] for index in group], None)
        for number, group in enumerate(members)
    ]


def drawn(members: tuple[str, ...], arrivals: str) -> str:
    """Return after each arrival the buckets that are started then."""
    picture: list[str] = []
    queue = LaunchQueue(lambda bucket: picture.append(str(bucket.index)))
    made = buckets(*members)
    queue.reset(made)
    home = {entry.index: bucket for bucket in made for entry in bucket.entries}
    for index in arrivals:
        picture.append(" ")
        queue.count(home[int(index)])
        queue.start_filled()
    assert queue.is_complete == (len(set(arrivals)) == sum(map(len, members)))
    return "".join(picture)


@pytest.mark.parametrize(
    ("members", "arrivals", "started"),
    [
        #             5 4 3 2 1 0
        (("54", "32", "10"), "543210", "  0  1  2"),
        (("54", "32", "10"), "325410", "    01  2"),  # 1 is filled first, and waits for 0
        (("54", "32", "10"), "103254", "      012"),
        (("54", "32", "10"), "5432", "  0  1"),
    ],
)
def test_buckets_start_in_their_order_if_filled_in_another(members, arrivals, started):
    assert drawn(members, arrivals) == started


@given(st.permutations(range(7)))
def test_every_bucket_starts_once_and_in_order(arrivals):
    assert drawn(("65", "4", "321", "0"), "".join(map(str, arrivals))).replace(" ", "") == "0123"


def test_a_new_backward_waits_for_every_gradient_again():
    started: list[int] = []
    queue = LaunchQueue(lambda bucket: started.append(bucket.index))
    made = buckets("10")
    for _ in range(2):
        queue.reset(made)
        made[0].unused.append(1)
        assert not queue.count(made[0])
        queue.start_filled()
        assert queue.count(made[0])
        queue.start_filled()
    assert started == [0, 0]
    queue.reset(made)
    assert made[0].unused == []


SMALL = ReducerSettings(bucket_cap_mb=80 / MIB, first_bucket_cap_mb=40 / MIB)


@pytest.mark.parametrize(
    ("arrivals", "before", "after"),
    [
        # two parameters in a bucket, one in the first
        ("43210", "[4] [3 2] [1 0]", "[4] [3 2] [1 0]"),
        ("20413", "[4] [3 2] [1 0]", "[2] [0 4] [1 3]"),
        ("203", "[4] [3 2] [1 0]", "[2] [0 3] [4 1]"),  # unused: last, in separate buckets
        ("33120", "[4] [3 2] [1 0]", "[3] [1 2] [0] [4]"),  # the last firing counts
    ],
)
def test_buckets_are_rebuilt_in_the_order_of_arrival(arrivals, before, after):
    made = entries(5)
    assert make_plan(made, settings=SMALL).draw() == before
    first = FirstBackwardStats(made, settings=SMALL)
    for index in arrivals:
        first.record(made[int(index)])
    assert first.make_plan(ALONE, torch.device("cpu")).draw() == after
    assert [entry.index for entry in first.unused()] == sorted(set(range(5)) - set(map(int, arrivals)))


@pytest.mark.parametrize(("static_graph", "expected"), [(False, [1, 2, 1]), (True, [1, 2, 0])])
def test_a_hook_is_expected_as_often_as_it_fired_and_zero_times_only_in_a_static_graph(static_graph, expected):
    made = entries(3)
    first = FirstBackwardStats(made, settings=ReducerSettings(static_graph=static_graph))
    assert [first.record(made[index]) for index in (0, 1, 1)] == [1, 1, 2]
    first.make_plan(ALONE, torch.device("cpu"))
    assert [entry.expected for entry in made] == expected


def test_a_backward_that_did_not_complete_is_discarded():
    made = entries(2)
    first = FirstBackwardStats(made, settings=SMALL)
    first.record(made[0])
    first.reset()
    assert [entry.index for entry in first.unused()] == [0, 1]
    assert first.record(made[0]) == 1
