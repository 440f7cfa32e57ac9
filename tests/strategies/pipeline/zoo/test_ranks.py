"""Tasks of the zoo on several ranks have the weights and state of one process, under every schedule."""

import re
import warnings
from itertools import cycle

import pytest

from tests.marks import EVERY_CASE
from tests.strategies.pipeline import library_models, models, recipe_models
from tests.strategies.pipeline.zoo import tasks
from tests.strategies.pipeline.zoo.comparison import difference
from trainkit.errors import UserError
from trainkit.testing import run_ranks

BOUND = 1e-9
LIMIT_SECONDS = 3600 if EVERY_CASE else 600
TOO_FEW = re.compile(r"the step can be partitioned into at most \d+ stages")


def _outcomes(names, settings):
    """Return the differences of tasks, or the messages with which they are refused."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        try:
            found[name] = difference(tasks.find(name), num_steps=2, sizes=(3, 2, 3, 2), **settings)
        except UserError as error:
            found[name] = str(error)
    return found


def _not_equal(num_ranks, names, *, may_be_small, **settings):
    """Return what is not equal on some rank; with `may_be_small` a task may have too few places for the stages."""
    ranks = run_ranks(_outcomes, num_ranks, names, settings, timeout=LIMIT_SECONDS)
    num_tasks = sum(len(name.split(" + ")) for name in names)
    unequal = {}
    for found in ranks:
        assert list(found) == list(names)
        small = {name for name, outcome in found.items() if may_be_small and TOO_FEW.match(str(outcome))}
        assert len(small) <= 0.1 * num_tasks, sorted(small)
        of_rank = {name: outcome for name, outcome in found.items() if name not in small}
        unequal |= {name: each for name, each in of_rank.items() if isinstance(each, str) or not each <= BOUND}
    return unequal


@pytest.mark.slow
def test_a_rank_of_several_stages_has_placeholders_of_what_another_phase_assigns():
    assert _not_equal(2, ["CountedPhases"], may_be_small=False, schedule="interleaved_1f1b", verify="off") == {}


CASES = [(num_ranks, schedule) for num_ranks in (2, 4) for schedule in ("1f1b", "gpipe", "interleaved_1f1b")]
TURNS = [(2, "gpipe"), (2, "interleaved_1f1b"), (4, "1f1b")]
"""Cases that train a task of three, in the order in which they get them; test_zoo.py has all in one process."""
ELSEWHERE = models.OWN | recipe_models.RECIPES | library_models.LIBRARY
"""Tasks that test_equality.py trains on ranks."""
AT_ONCE = 12
"""Tasks of the library of one test, whose ranks import the code of each."""


def _shares():
    """Return ranks, schedules and tasks, each task in one case; `make zoo` has all, the library's too, in each."""
    if EVERY_CASE:
        return [(*case, names) for names in (tasks.EQUAL, *_pieces(tasks.OF_LIBRARY)) for case in CASES]
    names = tasks.in_chains(name for name in tasks.EQUAL if name not in ELSEWHERE)
    return [(*case, [name for name, turn in zip(names[::3], cycle(TURNS)) if turn == case]) for case in TURNS]


def _pieces(names):
    return [list(names)[first : first + AT_ONCE] for first in range(0, len(names), AT_ONCE)]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_SECONDS)
@pytest.mark.parametrize(("num_ranks", "schedule", "names"), _shares())
def test_tasks_have_the_state_of_one_process_on_every_rank(num_ranks, schedule, names):
    is_many = num_ranks == 4 or schedule == "interleaved_1f1b"
    verify = "auto" if schedule == "1f1b" else "off"

    assert _not_equal(num_ranks, names, may_be_small=is_many, schedule=schedule, verify=verify) == {}
