import json

from trainkit.strategies.pipeline.plan.plan_report import write_timeline
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
