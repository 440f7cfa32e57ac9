"""The state of every random generator that training may draw from."""

import random

import numpy as np
import pytest
import torch

from trainkit.checkpoint.store import CheckpointStore
from trainkit.rng import SavedGenerators, preserve_rng, rng_state, seed_everything, set_rng_state


def draw():
    return (
        [random.random(), random.gauss(0, 1)],
        np.random.rand(3).tolist() + np.random.randn(1).tolist(),
        torch.randn(3).tolist(),
    )


def test_a_seed_fixes_what_all_generators_give():
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert draw() != first


def test_a_seed_may_be_larger_than_numpys():
    seed_everything(2**40 + 1)


def test_generators_continue_from_a_saved_state(tmp_path):
    draw()  # gauss and randn keep a second number for the next call
    state = rng_state()
    expected = draw(), draw()
    store = CheckpointStore(tmp_path)
    store.save({"rng": state}, name="step_1", step=1, epoch=0)
    draw()
    set_rng_state(store.load_last().payload["rng"])
    assert (draw(), draw()) == expected


def test_drawing_inside_leaves_the_generators_as_they_were():
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with preserve_rng():
        draw()
        torch.manual_seed(9)
    assert draw() == expected


def test_the_generators_are_as_they_were_also_after_an_error():
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    try:
        with preserve_rng():
            draw()
            raise RuntimeError
    except RuntimeError:
        pass
    assert draw() == expected


@pytest.mark.parametrize("draws", [0, 1])
@pytest.mark.parametrize("draws_before", [0, 1])
def test_seeds_of_a_block_are_undone_at_its_end(draws_before, draws):
    seed_everything(3)
    expected = [draw() for _ in range(draws_before + 1)][-1]
    seed_everything(3)
    for _ in range(draws_before):
        draw()  # which keeps the second of a pair of normal numbers
    generators = SavedGenerators()
    for seed in (4, 5):
        with generators.seeded(seed):
            for _ in range(draws):
                draw()
    assert draw() == expected


def test_a_seed_of_a_block_fixes_its_draws():
    generators, seen = SavedGenerators(), []
    for seed in (4, 5, 4):
        with generators.seeded(seed):
            seen.append(draw())
        draw()
    assert seen[0] == seen[2] != seen[1]
