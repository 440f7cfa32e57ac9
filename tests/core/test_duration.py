"""Lengths of training written as text, and what is due how often."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit import Duration, TrainState, UserError
from trainkit.duration import Interval, log_interval


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("500step", 500, "step"),
        ("500 steps", 500, "step"),
        ("2epoch", 2, "epoch"),
        ("0.25epochs", 0.25, "epoch"),
        ("1e6sample", 1e6, "sample"),
        ("30min", 30, "minute"),
        ("90s", 90, "second"),
        ("1.5h", 1.5, "hour"),
        (" 2 Hours ", 2, "hour"),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text, value, unit):
    assert Duration.parse(text) == Duration(value, unit)


def test_a_duration_may_be_a_duration_already():
    assert Duration.parse(Duration(3, "step")) == Duration(3, "step")


@pytest.mark.parametrize("texts", ["10epoch,30min", ["10epoch", "30min"], ("10epoch", Duration(30, "minute"))])
def test_several_durations_are_a_list_or_separated_by_commas(texts):
    assert Duration.parse_all(texts, where="max_duration") == [Duration(10, "epoch"), Duration(30, "minute")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("500", r"max_duration = '500' is not a duration; write a number and a unit, for example '500step'"),
        (500, r"max_duration = 500 is not a duration"),
        ("ten epochs", r"is not a duration"),
        ("", r"is not a duration"),
        ("10epohc", r"unknown unit 'epohc'.* Did you mean 'epoch'"),
        ("5stp", r"Did you mean 'step'"),
        ("1.2.3epoch", r"'1\.2\.3' is not a number"),
        ("0step", r"must be positive and finite, got 0step"),
        ("-1epoch", r"is not a duration"),
        ("1e999epoch", r"must be positive and finite"),
        ("2.5step", r"number of steps must be whole, got 2\.5step"),
        ("0.5sample", r"number of samples must be whole"),
    ],
)
def test_an_invalid_duration_is_rejected_with_the_remedy(text, message):
    with pytest.raises(UserError, match=message):
        Duration.parse(text, where="max_duration")


@pytest.mark.parametrize("texts", [[], 5, None])
def test_no_duration_at_all_is_refused(texts):
    with pytest.raises(UserError, match=r"max_duration .*write for example '500step'"):
        Duration.parse_all(texts, where="max_duration")


def test_an_unknown_unit_of_an_object_is_refused():
    with pytest.raises(UserError, match="write one of step, epoch, sample, second, minute, hour"):
        Duration(3, "steps")


@pytest.mark.parametrize(
    ("duration", "state", "reached"),
    [
        ("5step", TrainState(step=4), False),
        ("5step", TrainState(step=5), True),
        ("5step", TrainState(step=6), True),
        ("20sample", TrainState(samples=19), False),
        ("20sample", TrainState(samples=20), True),
        ("2epoch", TrainState(epoch=1, position=9, epoch_length=10), False),
        ("2epoch", TrainState(epoch=2, epoch_length=10), True),
        ("1.5epoch", TrainState(epoch=1, position=5, epoch_length=10), True),
        ("1.5epoch", TrainState(epoch=1, position=4, epoch_length=10), False),
        ("1min", TrainState(_seconds_before=59.9), False),
        ("1min", TrainState(_seconds_before=60.0), True),
        ("1h", TrainState(_seconds_before=3600.0), True),
    ],
)
def test_a_duration_is_reached_when_so_much_was_trained(duration, state, reached):
    assert Duration.parse(duration).reached(state) == reached


def test_a_duration_is_written_as_it_is_read():
    for text in ("500step", "0.25epoch", "30minute"):
        assert str(Duration.parse(text)) == text


@given(per_epoch=st.integers(1, 200), parts=st.integers(1, 40), epochs=st.integers(1, 3))
def test_a_fraction_of_an_epoch_is_due_at_its_multiples_despite_rounding(per_epoch, parts, epochs):
    interval, state = Interval(Duration(1 / parts, "epoch")), TrainState(epoch_length=per_epoch)
    interval.start(state)
    due = []
    for step in range(1, per_epoch * epochs + 1):
        state.advance(items=1, samples=1, ends_epoch=step % per_epoch == 0)
        if interval.due(state):
            due.append(step)
    # The first step at or after each multiple; several multiples within one step are due once.
    multiples = range(1, parts * epochs + 1)
    assert due == sorted({-(-k * per_epoch // parts) for k in multiples})


@given(every=st.integers(1, 9), start=st.integers(0, 30))
def test_an_interval_counts_from_the_beginning_of_the_run_also_after_a_resume(every, start):
    interval, state = Interval(Duration(every, "step")), TrainState(step=start)
    interval.start(state)
    due = []
    for _ in range(20):
        state.advance(items=1, samples=1, ends_epoch=False)
        if interval.due(state):
            due.append(state.step)
    assert due == [step for step in range(start + 1, start + 21) if step % every == 0]


def test_multiples_passed_within_one_step_are_due_once():
    interval, state = Interval(Duration(3, "sample")), TrainState()
    interval.start(state)
    state.advance(items=8, samples=8, ends_epoch=False)
    assert interval.due(state)
    assert not interval.due(state)
    state.advance(items=1, samples=1, ends_epoch=False)
    assert interval.due(state)


def test_no_interval_is_never_due():
    interval = Interval(None)
    interval.start(TrainState())
    assert not interval.due(TrainState(step=10**9))


@pytest.mark.parametrize(
    ("max_steps", "first_points"),
    [
        (1, [1]),
        (60, [1, 2, 3]),
        (200, [1, 4, 8]),
        (2499, [1, 49, 98]),
        (100_000, [1, 50, 100]),
        (None, [1, 50, 100]),
    ],
)
def test_short_runs_have_fifty_log_points_and_all_runs_one_after_the_first_step(max_steps, first_points):
    interval, state = Interval(log_interval(max_steps), at_first=True), TrainState()
    interval.start(state)
    points = []
    for _ in range(max_steps or 100):
        state.advance(items=1, samples=1, ends_epoch=False)
        if interval.due(state):
            points.append(state.step)
    assert points[:3] == first_points
    assert max_steps is None or len(points) >= min(50, max_steps)


def test_a_resumed_run_has_no_log_point_after_its_first_step():
    interval, state = Interval(log_interval(None), at_first=True), TrainState(step=20)
    interval.start(state)
    state.advance(items=1, samples=1, ends_epoch=False)
    assert not interval.due(state)
