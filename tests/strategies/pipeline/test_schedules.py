import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainkit.strategies.pipeline.plan.schedules import (
    BACKWARD,
    FORWARD,
    SCHEDULES,
    SEVERAL_STAGES,
    Schedule,
    gpipe,
    idle_share,
    interleaved_one_f_one_b,
    one_f_one_b,
    prerequisites,
    simulate,
)

from tests.strategies.pipeline.simulation import draw


def _actions(schedule, num_ranks, num_micro_batches, **settings):
    return [list(schedule(rank, num_ranks, num_micro_batches, **settings)) for rank in range(num_ranks)]


def _costs(num_stages, *, backward=2.0):
    return {
        (kind, stage): 1.0 if kind == FORWARD else backward
        for kind in (FORWARD, BACKWARD)
        for stage in range(num_stages)
    }


def _drawing(function):
    lines = [line.strip() for line in function.__doc__.splitlines()]
    return "\n".join(line for line in lines if line.startswith("rank "))


def _most_in_flight(actions):
    in_flight = most = 0
    for action in actions:
        in_flight += 1 if action.kind == FORWARD else -1
        most = max(most, in_flight)
    return most


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_drawing_in_the_docstring_is_the_schedule(schedule):
    spans = simulate(_actions(schedule, 3, 4), _costs(3), 3)

    assert draw(spans) == _drawing(schedule)


def test_the_drawing_of_several_stages_a_rank_is_the_schedule():
    spans = simulate(_actions(interleaved_one_f_one_b, 2, 4), _costs(4, backward=1.0), 4)

    assert draw(spans, with_stage=True) == _drawing(interleaved_one_f_one_b)


sizes = {"num_ranks": st.integers(1, 6), "num_micro_batches": st.integers(1, 17)}


@settings(deadline=None, max_examples=60)
@given(schedule=st.sampled_from([*SCHEDULES.values()]), **sizes)
def test_every_micro_batch_goes_once_forward_and_once_backward_in_an_order_that_can_be_run(
    schedule, num_ranks, num_micro_batches
):
    actions = _actions(schedule, num_ranks, num_micro_batches)

    spans = simulate(actions, _costs(num_ranks), num_ranks)

    _assert_complete(actions, num_ranks, num_micro_batches)
    _assert_happens_before(spans, num_ranks)


@settings(deadline=None, max_examples=60)
@given(schedule=st.sampled_from([*SEVERAL_STAGES.values()]), stages_per_rank=st.integers(1, 4), **sizes)
def test_several_stages_a_rank_never_wait_for_themselves_also_with_a_short_last_group(
    schedule, num_ranks, num_micro_batches, stages_per_rank
):
    num_stages = num_ranks * stages_per_rank
    actions = _actions(schedule, num_ranks, num_micro_batches, stages_per_rank=stages_per_rank)

    spans = simulate(actions, _costs(num_stages), num_stages)

    _assert_complete(actions, num_stages, num_micro_batches)
    _assert_happens_before(spans, num_stages)
    assert all(action.stage % num_ranks == rank for rank in range(num_ranks) for action in actions[rank])


def _assert_complete(actions, num_stages, num_micro_batches):
    everything = sorted((action.kind, action.stage, action.micro_batch) for todo in actions for action in todo)
    assert everything == sorted(
        (kind, stage, micro_batch)
        for kind in (FORWARD, BACKWARD)
        for stage in range(num_stages)
        for micro_batch in range(num_micro_batches)
    )
    assert all(rank_actions[-1].kind == BACKWARD for rank_actions in actions)
    for stage in range(num_stages):
        for kind in (FORWARD, BACKWARD):
            of_stage = [a.micro_batch for todo in actions for a in todo if (a.stage, a.kind) == (stage, kind)]
            assert of_stage == sorted(of_stage)


def _assert_happens_before(spans, num_stages):
    ends = {span.action: span.end for rank_spans in spans for span in rank_spans}
    starts = {span.action: span.start for rank_spans in spans for span in rank_spans}
    for action, start in starts.items():
        assert all(ends[need] <= start for need in prerequisites(action, num_stages))


@settings(deadline=None, max_examples=60)
@given(**sizes)
def test_1f1b_holds_no_more_micro_batches_than_there_are_stages_behind_it(num_ranks, num_micro_batches):
    for rank, actions in enumerate(_actions(one_f_one_b, num_ranks, num_micro_batches)):
        assert _most_in_flight(actions) <= num_ranks - rank


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from([*SCHEDULES]), limit=st.integers(1, 8), **sizes)
def test_no_rank_has_more_micro_batches_than_the_limit_for_more_idle_time(name, limit, num_ranks, num_micro_batches):
    schedule = Schedule(name, num_ranks, max_in_flight=limit)
    actions = [schedule.actions(rank, num_micro_batches) for rank in range(num_ranks)]

    spans = simulate(actions, _costs(num_ranks), num_ranks)

    _assert_complete(actions, num_ranks, num_micro_batches)
    _assert_happens_before(spans, num_ranks)
    assert schedule.in_flight(num_micro_batches) == [*map(_most_in_flight, actions)]
    assert max(map(_most_in_flight, actions)) <= limit
    assert idle_share(spans) == pytest.approx(schedule.bubble(num_micro_batches))
    assert schedule.bubble(num_micro_batches) >= Schedule(name, num_ranks).bubble(num_micro_batches) - 1e-9


@settings(deadline=None, max_examples=60)
@given(num_ranks=st.integers(2, 6), micro_batches_a_rank=st.integers(2, 5), share=st.floats(0.05, 0.5))
def test_with_more_micro_batches_than_ranks_in_flight_1f1b_hides_messages(num_ranks, micro_batches_a_rank, share):
    num_micro_batches, seconds = num_ranks * micro_batches_a_rank, []
    for limit in range(num_ranks, 2 * num_ranks):
        schedule = Schedule("1f1b", num_ranks, max_in_flight=limit)
        actions = [schedule.actions(rank, num_micro_batches) for rank in range(num_ranks)]
        spans = simulate(actions, _costs(num_ranks), num_ranks, message=share)
        _assert_happens_before(spans, num_ranks)
        seconds.append(spans[0][-1].end)

    computed = 3 * (num_micro_batches + num_ranks - 1)  # a backward takes twice as long as a forward of 1
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] - computed >= share * num_micro_batches - 1e-9
    assert seconds[-1] - computed == pytest.approx(2 * share * (num_ranks - 1))  # there and back once


@settings(deadline=None, max_examples=60)
@given(stages_per_rank=st.integers(2, 4), **sizes)
def test_several_stages_a_rank_hold_a_bounded_number_of_micro_batches(num_ranks, num_micro_batches, stages_per_rank):
    for rank, actions in enumerate(
        _actions(interleaved_one_f_one_b, num_ranks, num_micro_batches, stages_per_rank=stages_per_rank)
    ):
        limit = (num_ranks - rank - 1) * 2 + (stages_per_rank - 1) * num_ranks + 1
        assert _most_in_flight(actions) <= limit


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 16)])
def test_the_idle_share_of_balanced_stages_is_the_formula(schedule, num_ranks, num_micro_batches):
    spans = simulate(_actions(schedule, num_ranks, num_micro_batches), _costs(num_ranks), num_ranks)

    assert idle_share(spans) == pytest.approx(Schedule("1f1b", num_ranks).bubble(num_micro_batches))


def test_two_stages_a_rank_are_idle_for_half_as_long():
    one = simulate(_actions(one_f_one_b, 4, 8), _costs(4, backward=1.0), 4)
    two = simulate(_actions(interleaved_one_f_one_b, 4, 8), _costs(8, backward=1.0), 8)

    assert Schedule("interleaved_1f1b", 4, 2).bubble(8) == pytest.approx(idle_share(two))
    assert idle_share(two) < idle_share(one)


def test_a_schedule_that_deadlocks_is_an_error():
    first, second = _actions(gpipe, 2, 1)

    with pytest.raises(
        ValueError, match=r"deadlocks at the backward of micro-batch 0 in stage 0 and the backward .* in stage 1"
    ):
        simulate([first[::-1], second[::-1]], _costs(2), 2)
