"""The timeline of buckets, its summary and its advice."""

from __future__ import annotations

import json
from inspect import signature

import pytest
from trainkit.strategies.ddp import DDPStrategy
from trainkit.strategies.fusion import FusionStrategy
from trainkit.strategies.reducer.bucket_recorder import MIB, BucketTimes, StepTimes, Timeline


def timeline(*buckets: tuple[float, float, float], size: int = MIB, backward_end: float = 10.0) -> Timeline:
    made = Timeline(0)
    times = tuple(BucketTimes(*bucket, size) for bucket in buckets)
    end = max(backward_end, *(bucket.finished for bucket in times))
    made.steps.append(StepTimes(1, 0.0, backward_end, end, times))
    return made


def test_the_hidden_share_counts_overlapping_buckets_once():
    made = timeline((2, 2, 6), (4, 4, 8), (9, 10, 14))
    assert made.steps[0].communication == 10
    assert made.steps[0].hidden == 6
    assert made.hidden_share == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("made", "advice"),
    [
        (timeline((10, 10, 15)), "Try strategy.bucket_cap_mb=0.2"),
        (timeline(*[(1, 1, 1.0001)] * 10, size=1024), "take less than 0.3 ms"),
        (timeline((1, 1, 20), (2, 2, 30)), "cannot be hidden"),
        (timeline((9, 9, 9.5), (1, 9, 9.9)), "Bucket 1 was ready long before"),
    ],
)
def test_advice_names_a_setting(made, advice):
    assert advice in made.advice()[0]


@pytest.mark.parametrize("strategy", [DDPStrategy, FusionStrategy])
def test_advice_names_a_setting_that_the_strategy_has(strategy):
    made = strategy(device="cpu", record_timeline=True).gradients.make_timeline(0)
    for setting in (made.size_key, made.compressed):
        assert setting.removeprefix("strategy.").partition("=")[0] in signature(strategy).parameters


def test_communication_that_costs_next_to_nothing_needs_no_advice():
    assert timeline((10, 10, 10.1)).advice() == []


def test_a_step_whose_communication_is_hidden_needs_no_advice():
    assert timeline((1, 1, 5), (5, 5, 9.9)).advice() == []


def test_the_summary_has_the_hidden_share_and_the_advice():
    share, advice = timeline((1, 1, 20), (2, 2, 30)).summary()
    assert share == "31% of communication (29000.0 ms a step) ran behind backward"
    assert "cannot be hidden" in advice
    assert Timeline(0).summary() == []


def test_advice_without_a_compressing_setting_names_the_other_remedy():
    recorded = timeline((1, 1, 20), (2, 2, 30))
    assert "Try strategy.reduce_dtype=bf16, or more samples" in recorded.advice()[0]
    recorded.compressed = ""
    assert "Try more samples in a step" in recorded.advice()[0]


def test_the_trace_has_an_event_for_each_bar(tmp_path):
    path = tmp_path / "traces" / "timeline.json"
    timeline((2, 2, 6), (4, 6, 12)).write(path)
    trace = json.loads(path.read_text())
    rows = [(event["tid"], event["ts"], event["dur"]) for event in trace["traceEvents"]]
    assert rows == [
        ("compute", 0.0, 10e6),
        ("compute", 10e6, 2e6),
        ("bucket 0", 2e6, 4e6),
        ("bucket 1", 4e6, 2e6),
        ("bucket 1", 6e6, 6e6),
    ]
    assert trace["otherData"]["hidden_share"] == pytest.approx(0.8)
