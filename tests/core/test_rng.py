"""The state of every random generator that training may draw from."""

import random

import numpy as np
import torch

from trainkit.checkpoint.store import CheckpointStore
from trainkit.rng import preserve_rng, rng_state, seed_everything, set_rng_state


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
