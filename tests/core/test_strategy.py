"""The interface of strategies: one process and one device, unless overridden."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainkit.strategies.single import SingleStrategy

from tests.tasks import FakeRank, Regression, regression_data
from trainkit import BatchPlan, Data, UserError
from trainkit.optim.precision import Precision


@given(batch_size=st.integers(1, 200), world_size=st.integers(1, 9), size=st.integers(1, 50))
def test_micro_batches_of_limited_size_split_the_largest_shard(batch_size, world_size, size):
    plan = FakeRank(world_size=world_size, micro_batch_size=size).plan(batch_size)
    share = -(-batch_size // world_size)
    assert plan.micro_batch_size <= size
    assert (plan.micro_batches - 1) * plan.micro_batch_size < share <= plan.micro_batches * plan.micro_batch_size


@given(per_rank=st.integers(1, 20), world_size=st.integers(1, 5), accumulate=st.integers(1, 6))
def test_accumulate_is_the_number_of_micro_batches_where_it_divides(per_rank, world_size, accumulate):
    plan = FakeRank(world_size=world_size, accumulate=accumulate).plan(per_rank * accumulate * world_size)
    assert plan == BatchPlan(per_rank * accumulate * world_size, world_size, accumulate, per_rank)


@given(batch_size=st.integers(1, 60), world_size=st.integers(1, 5), accumulate=st.integers(1, 12))
def test_a_plan_that_need_not_be_even_never_fails_and_never_has_more_micro_batches(batch_size, world_size, accumulate):
    plan = FakeRank(world_size=world_size, accumulate=accumulate).plan(batch_size, even=False)
    assert 1 <= plan.micro_batches <= accumulate
    assert plan.micro_batches * plan.micro_batch_size >= -(-batch_size // world_size)


@given(batch_size=st.integers(1, 60), world_size=st.integers(1, 8), accumulate=st.integers(1, 70))
def test_what_a_refusal_suggests_works(batch_size, world_size, accumulate):
    try:
        plan = FakeRank(world_size=world_size, accumulate=accumulate).plan(batch_size)
    except UserError as error:
        words = str(error)
        suggested = int(words.split("set accumulate=")[1].split(",", maxsplit=1)[0])
        size = int(words.split("micro_batch_size=")[1].split(",", maxsplit=1)[0])
        assert FakeRank(world_size=world_size, accumulate=suggested).plan(batch_size).batch_size == batch_size
        assert FakeRank(world_size=world_size, micro_batch_size=size).plan(batch_size).batch_size == batch_size
    else:
        assert plan.micro_batches <= accumulate


def test_every_operation_has_its_meaning_for_one_process():
    strategy = SingleStrategy(device="cpu")
    tensor = torch.ones(3)
    assert (strategy.comm.rank, strategy.comm.world_size) == (0, 1)
    assert strategy.launch(lambda: 5) == 5
    assert all(strategy.comm.all_reduce(tensor, op) is tensor for op in ("sum", "min", "max"))
    assert strategy.comm.all_gather_object("a") == ["a"]
    assert strategy.comm.broadcast_object("a") == "a"
    assert strategy.comm.gather_predictions([1, 2]) == [1, 2]
    assert strategy.comm.any_rank(True) and strategy.comm.should_stop(True)
    assert not strategy.comm.any_rank(False) and not strategy.comm.should_stop(False)
    strategy.comm.barrier()
    strategy.teardown()
    strategy.teardown()


def test_no_values_sum_to_nothing():
    comm = SingleStrategy(device="cpu").comm
    names, sums = comm.all_reduce_metrics({}, device=torch.device("cpu"), dtype=torch.float64)
    assert names == []
    assert sums.shape == (0, 2)


def test_a_step_batch_without_samples_leaves_no_gradient():
    from trainkit.data.batch import StepBatch

    strategy, task = SingleStrategy(device="cpu"), Regression()
    strategy.setup(Precision())
    strategy.prepare(task)
    assert strategy.forward_backward(task, StepBatch([], 4, 4, False)) == []
    assert all(parameter.grad is None for parameter in task.parameters())


def test_gradients_are_synchronised_with_the_last_micro_batch_only(make_trainer):
    from contextlib import nullcontext

    class Sessions(SingleStrategy):
        def no_sync(self):
            sessions.append(False)
            return nullcontext()

        def _synced(self):
            sessions.append(True)
            return nullcontext()

    sessions = []
    data = Data(train=regression_data(10), batch_size=4)
    make_trainer(Sessions(device="cpu", accumulate=4)).fit(Regression(), data)
    assert sessions == [False, False, False, True] * 2 + [False, True]


def test_the_strategy_is_torn_down_also_after_an_error(make_trainer):
    class Torn(SingleStrategy):
        torn = 0

        def teardown(self):
            self.torn += 1

    class Broken(Regression):
        def training_step(self, batch):
            raise KeyError

    strategy = Torn(device="cpu")
    with pytest.raises(KeyError):
        make_trainer(strategy).fit(Broken(), Data(train=regression_data(8), batch_size=4))
    assert strategy.torn == 1
