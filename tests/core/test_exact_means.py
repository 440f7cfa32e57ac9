"""Means that do not depend on the order of batches, nor on who had which."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainkit.exact_means import ExactMeans, ExactSum, means_over
from trainkit.step_output import StepOutput

CPU = torch.device("cpu")
NUMBERS = st.floats(-1e300, 1e300)


def means_of(*ranks):
    sums = {}
    for rank, outputs in enumerate(ranks):
        means = ExactMeans(CPU)
        for value, weight in outputs:
            means.add(StepOutput(None, weight, {"value": torch.tensor(value, dtype=torch.float64)}))
        sums[rank] = means.sums()
    return means_over(sums)


@given(values=st.lists(st.tuples(NUMBERS, st.integers(1, 9)), min_size=1, max_size=20), ranks=st.integers(1, 4))
def test_the_mean_is_the_same_bits_in_any_order_on_any_number_of_ranks(values, ranks):
    shuffled = random.Random(0).sample(values, len(values))
    mean = means_of(values)["value"]
    assert means_of(*(shuffled[rank::ranks] for rank in range(ranks))) == {"value": mean}
    exact = sum(Fraction(value) * weight for value, weight in values) / sum(weight for _, weight in values)
    assert abs(mean - exact) <= 1e-15 * max(abs(Fraction(value)) for value, _ in values) + Fraction(1, 2**1073)


@given(values=st.lists(NUMBERS, max_size=10))
def test_a_sum_is_not_rounded(values):
    total = ExactSum()
    for value in values:
        total.add(value)
    assert Fraction(total.units, 2**1074) == sum(map(Fraction, values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=12), share=st.floats(0, 1))
def test_a_share_of_right_answers_is_exact_however_samples_are_cut(dtype, counts, share):
    means, right = ExactMeans(CPU), [round(share * count) for count in counts]
    for part, count in zip(right, counts, strict=True):
        means.add(StepOutput(None, count, {"value": torch.tensor(part / count, dtype=torch.float64).to(dtype)}))
    expected = sum(right) / sum(counts)
    tolerance = 0.01 if dtype is torch.bfloat16 else 0.0  # it knows three digits only
    assert means_over({0: means.sums()})["value"] == pytest.approx(expected, rel=tolerance, abs=0.0)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([math.inf, 1.0], math.inf),
        ([1.0, -math.inf], -math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.inf, -math.inf], math.nan),
    ],
)
def test_what_is_not_finite_stays_so(values, mean):
    assert means_of([(value, 1) for value in values])["value"] == pytest.approx(mean, nan_ok=True)
    assert means_of(*([(value, 1)] for value in values))["value"] == pytest.approx(mean, nan_ok=True)


def test_a_weight_of_zero_alone_is_no_number():
    assert math.isnan(means_of([(1.0, 0)], [])["value"])
    assert means_of([(1.0, 0)], [(3.0, 2)]) == {"value": 3.0}


def test_the_loss_comes_first_and_only_those_count_that_have_the_name():
    means = ExactMeans(CPU)
    means.add(StepOutput(None, 3, {"rare": 4.0}))
    means.add(StepOutput(torch.tensor(2.0), 1, {"often": 1.0}))
    reduced = means_over({0: means.sums()})
    assert reduced == {"loss": 2.0, "rare": 4.0, "often": 1.0}
    assert next(iter(reduced)) == "loss"
