"""Random tasks of pieces in random order, with random cuts, train as in one process."""

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.marks import in_make_zoo
from tests.strategies.pipeline.zoo import tasks
from tests.strategies.pipeline.zoo.chain import Chain
from tests.strategies.pipeline.zoo.comparison import differences, places

BOUND = 1e-9
PIECES = sorted(name for name in tasks.PIECES if name in tasks.EQUAL)


@st.composite
def _random_tasks(draw):
    """Draw a chain of pieces, called by the step or as modules, and how to choose the cuts among its places."""
    names = draw(st.lists(st.sampled_from(PIECES), min_size=4, max_size=7))
    build = partial(Chain, *(tasks.PIECES[name] for name in names), inside=draw(st.booleans()))
    shares = draw(st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1, max_size=3))
    return names, build, shares


def _assert_equal(random_task, **settings_of_training):
    names, build, shares = random_task

    def chosen(graph):
        found = places(graph)
        return [sorted({found[int(share * len(found))] for share in shares})] if found else []

    for cuts, value in differences(build, chosen, **settings_of_training).items():
        assert value <= BOUND, f"{names} with stages that begin at {cuts}"


_SETTINGS = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
_IGNORED = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.mark.slow
@_IGNORED
@settings(max_examples=25, **_SETTINGS)
@given(random_task=_random_tasks())
def test_random_tasks_train_as_in_one_process(random_task):
    _assert_equal(random_task, num_steps=1)


@pytest.mark.slow
@in_make_zoo
@_IGNORED
@settings(max_examples=500, **_SETTINGS)
@given(random_task=_random_tasks())
def test_many_random_tasks_train_as_in_one_process(random_task):
    _assert_equal(random_task, num_steps=2)
