"""Weighted means over samples, accumulated on the device until they are reduced."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from trainkit.distributed.collectives import Collectives
from trainkit.metrics.accumulate import _FOLD_AT, WeightedMeans
from trainkit.metrics.step_output import StepOutput

CPU = torch.device("cpu")


def means_of(*step_batches):
    means = WeightedMeans(CPU)
    for step, step_batch in enumerate(step_batches, start=1):
        means.add(step_batch, step=step)
    return means


def output(loss, weight=1, **metrics):
    return StepOutput(None if loss is None else torch.tensor(loss), weight, metrics)


@given(
    values=st.lists(
        st.tuples(st.floats(-100, 100, width=32), st.integers(1, 50), st.booleans()), min_size=1, max_size=30
    )
)
def test_the_mean_is_weighted_exactly(values):
    step_batches = [[output(loss, torch.tensor(weight) if tensor else weight)] for loss, weight, tensor in values]
    expected = math.fsum(loss * weight for loss, weight, _ in values) / sum(weight for _, weight, _ in values)
    assert means_of(*step_batches).reduce(Collectives())["loss"] == pytest.approx(expected, rel=1e-12, abs=1e-12)


class Ranks(Collectives):
    """Ranks whose sums are added up by hand."""

    def __init__(self, others):
        super().__init__(world_size=len(others) + 1)
        self.others = others

    def all_reduce_metrics(self, sums, *, device, dtype):
        of_ranks = [sums, *(other.state_dict(Collectives()) for other in self.others)]
        names = list(dict.fromkeys(name for own in of_ranks for name in own))
        added = [sum(torch.as_tensor(own[name], dtype=dtype) for own in of_ranks if name in own) for name in names]
        return names, torch.stack(added)


@given(
    values=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), min_size=1, max_size=20), ranks=st.integers(1, 4)
)
def test_the_mean_on_any_number_of_ranks_differs_by_rounding_of_float64_only(values, ranks):
    alone = means_of([output(loss, weight) for loss, weight in values]).reduce(Collectives())
    own, *others = (means_of([output(loss, weight) for loss, weight in values[rank::ranks]]) for rank in range(ranks))
    assert own.reduce(Ranks(others)) == pytest.approx(alone, rel=1e-12, abs=0)


def test_the_loss_comes_first_and_only_those_count_that_have_the_name():
    reduced = means_of([output(None, 3, rare=4.0), output(2.0, 1, often=1.0)]).reduce(Collectives())
    assert reduced == {"loss": 2.0, "rare": 4.0, "often": 1.0}
    assert next(iter(reduced)) == "loss"


def test_numbers_and_tensors_of_any_type_count_equally():
    outputs = [
        output(1.0, 1, accuracy=0.5),
        output(1.0, 1, accuracy=torch.tensor(1.0, dtype=torch.bfloat16)),
        output(1.0, 2, accuracy=torch.tensor([0.25], dtype=torch.float64)),
        output(1.0, torch.tensor(4), accuracy=True),
        output(1.0, 2.0, accuracy=torch.tensor(3)),
    ]
    expected = (0.5 + 1.0 + 0.25 * 2 + 1.0 * 4 + 3 * 2) / 10
    assert means_of(outputs).reduce(Collectives()) == {"loss": 1.0, "accuracy": expected}


def test_a_metric_counts_only_where_it_was_given():
    means = means_of([output(1.0, 2), output(4.0, 2, rare=10.0)], [output(1.0, 4, rare=40.0)])
    assert means.reduce(Collectives()) == {"loss": 14 / 8, "rare": pytest.approx(180 / 6)}


def test_an_evaluation_without_a_loss_has_its_metrics():
    assert means_of([output(None, 3, f1=0.5)]).reduce(Collectives()) == {"f1": 0.5}


def test_float64_sums_lose_nothing_that_float32_would():
    step_batches = [[output(1e8, 1)], *([output(1.0, 1)] for _ in range(99))]
    assert means_of(*step_batches).reduce(Collectives())["loss"] == (1e8 + 99) / 100


@pytest.mark.parametrize("count", [_FOLD_AT - 1, _FOLD_AT, 3 * _FOLD_AT + 5])
def test_folding_changes_nothing(count):
    means = WeightedMeans(CPU)
    for index in range(count):
        means.add([output(float(index), index % 3 + 1)], step=index)
        assert len(means._outputs) < _FOLD_AT
    weights = [index % 3 + 1 for index in range(count)]
    expected = sum(index * weight for index, weight in enumerate(weights)) / sum(weights)
    assert means.reduce(Collectives())["loss"] == pytest.approx(expected, rel=1e-12)


def test_adding_an_output_computes_nothing():
    class NothingComputed(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} was called")

    means, outputs = WeightedMeans(CPU), [output(2.0)]
    with NothingComputed():
        means.add(outputs)
    assert means.reduce(Collectives()) == {"loss": 2.0}


def test_reducing_resets_the_means():
    means = means_of([output(math.nan)])
    means.reduce(Collectives())
    assert means.reduce(Collectives()) == {}
    assert means.first_nonfinite_step() is None
    means.add([output(2.0)], step=9)
    assert means.reduce(Collectives()) == {"loss": 2.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [5, _FOLD_AT + 5])
def test_the_first_step_that_is_not_finite_is_named(bad, count):
    step_batches = [[output(1.0), output(bad if step in (3, 4) else 1.0)] for step in range(1, count)]
    means = means_of(*step_batches)
    assert means.first_nonfinite_step() == 3
    assert means.first_nonfinite_step() == 3  # asking changes nothing
    assert not math.isfinite(means.reduce(Collectives())["loss"])


def test_infinities_that_cancel_are_found():
    assert means_of([output(1.0)], [output(math.inf)], [output(-math.inf)]).first_nonfinite_step() == 2


def test_a_metric_that_is_not_finite_does_not_count_as_a_loss():
    means = means_of([output(1.0, 1, ratio=math.nan)])
    assert means.first_nonfinite_step() is None
    assert math.isnan(means.reduce(Collectives())["ratio"])


def test_a_weight_of_zero_does_not_count_and_a_sum_of_zero_gives_nan():
    assert means_of([output(1.0, 0), output(3.0, 2)]).reduce(Collectives()) == {"loss": 3.0}
    assert math.isnan(means_of([output(1.0, 0)]).reduce(Collectives())["loss"])


def test_the_sums_of_a_checkpoint_count_on_one_rank_only():
    saved = means_of([output(2.0, 3)]).state_dict(Collectives())
    for rank, expected in enumerate((saved, {})):
        means = WeightedMeans(CPU)
        means.load_state_dict(saved, Collectives(rank=rank, world_size=2))
        assert means.state_dict(Collectives()) == expected


def test_nothing_added_gives_nothing():
    means = WeightedMeans(CPU)
    assert means.reduce(Collectives()) == {}
    assert means.first_nonfinite_step() is None
