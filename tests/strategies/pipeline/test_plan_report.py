from xml.etree import ElementTree

from trainkit.strategies.pipeline.plan_report import timeline_svg
from trainkit.strategies.pipeline.schedules import one_f_one_b, simulate


def test_the_picture_has_every_action_of_every_rank_and_the_idle_share():
    actions = [list(one_f_one_b(rank, 2, 3)) for rank in range(2)]
    spans = simulate(actions, {(kind, stage): 1.0 for kind in "FB" for stage in range(2)}, 2)

    picture = ElementTree.fromstring(timeline_svg(spans, expected=0.25))

    titles = [title.text for title in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [str(action) for rank in actions for action in rank]
    assert "idle 25.0% (equal stages: 25.0%)" in next(picture.iter("{http://www.w3.org/2000/svg}text")).text
