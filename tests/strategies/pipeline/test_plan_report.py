import json

import pytest
from trainkit.strategies.pipeline.plan.plan_report import StepTimelines, write_timeline
from trainkit.strategies.pipeline.plan.schedules import one_f_one_b, simulate


def test_the_timeline_has_every_action_of_every_rank_and_the_idle_share(tmp_path):
    actions = [list(one_f_one_b(rank, 2, 3)) for rank in range(2)]
    spans = simulate(actions, {(kind, stage): 1.0 for kind in "FB" for stage in range(2)}, 2)

    write_timeline(spans, tmp_path, expected=0.25)

    timeline = json.loads((tmp_path / "timeline.json").read_text())
    names = [span["name"] for track in timeline["tracks"] for span in track["spans"]]
    assert names == [action.place() for rank in actions for action in rank]
    assert timeline["figures"][0]["value"] == 0.25
    assert "25.0% with equal stages" in timeline["figures"][0]["note"]


def test_the_timeline_is_that_of_the_full_step_of_median_length(tmp_path):
    def spans(cost, num_micro_batches=4):
        actions = [list(one_f_one_b(rank, 2, num_micro_batches)) for rank in range(2)]
        return simulate(actions, {(kind, stage): cost for kind in "FB" for stage in range(2)}, 2)

    timelines = StepTimelines()
    for step in (spans(1.0, 2), spans(9.0), spans(1.0), spans(2.0), spans(1.0, 2)):  # the first and last are ragged
        timelines.add(step, tmp_path, expected=0.2)
    figures = {one["name"]: one["value"] for one in json.loads((tmp_path / "timeline.json").read_text())["figures"]}
    assert (figures["one step"], figures["micro-batches"]) == (2.0 * (2 * 4 + 2), 4)
    assert figures["bubble, measured"] == pytest.approx(2 / 10)  # by hand: each rank waits for 2 of 10 actions
