"""The optimizer of a stage, divided over its replicas: the same weights and checkpoints, for a part of the memory."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.pipeline.run.optimizer_shards import owners_of
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.strategies.pipeline.models import Gpt, Mlp
from tests.strategies.pipeline.test_phases import WithoutStatistics
from tests.strategies.pipeline.training import Training, compare, largest_difference, make, step_batches
from trainkit import Data, Trainer
from trainkit.checkpoint.sharded_state import in_memory
from trainkit.checkpoint.store import load_from
from trainkit.errors import UserError
from trainkit.testing import run_ranks
from trainkit.tree import map_tensors

SIZES = [3, 3, 2, 4]


@given(sizes=st.dictionaries(st.text(), st.integers(0, 1000)), replicas=st.integers(1, 5))
def test_replicas_get_equal_shares_up_to_one_parameter(sizes, replicas):
    owners = owners_of(sizes, replicas)

    assert owners.keys() == sizes.keys()
    shares = [sum(size for name, size in sizes.items() if owners[name] == replica) for replica in range(replicas)]
    assert max(shares) - min(shares) <= max(sizes.values(), default=0)


def _training(model, clip, **settings):
    strategy = PipelineStrategy(stages=2, replicas=2, device="cpu", **settings)
    return Training(make(model), strategy, clip=clip)


def _state(training):
    state = training.strategy.optimizer_state_dict(training.task, training.phase_optimizer)
    return copy.deepcopy(state)


def _divided_and_whole(model, clip, settings):
    """Return how a run with a divided optimizer compares with one without, and what this rank holds of the former."""
    first, whole = (_training(model, clip, shard_optimizer=divided, **settings) for divided in (True, False))
    mine = step_batches(model, sizes=SIZES, num_steps=6, replica=first.strategy.comm.rank, num_replicas=2)
    for training in (first, whole):
        training.run(mine[:3])
    held = first.phase_optimizer.optimizer.state
    names = {id(parameter): name for name, parameter in first.task.named_parameters()}
    state_bytes = sum(value.nbytes for state in held.values() for value in state.values())
    facts = {
        "place": (first.strategy.mesh.replica, first.strategy.mesh.stage),
        "held": sorted(names[id(parameter)] for parameter in held),
        "bytes": state_bytes,
        "planned": first.strategy.plan_report.memory[first.strategy.mesh.stage].optimizer,
        "local": set(first.strategy.local_state(first.task)),
    }
    saved = [(_state(training), training.weights()) for training in (first, whole)]
    saved = _shared(saved)
    facts["same state"] = _is_same(saved[0], saved[1])
    for training in (first, whole):
        training.run(mine[3:])
    of_rank = [training.strategy.local_state(training.task) for training in (first, whole)]
    facts["same weights on this rank"] = _is_same(*of_rank)
    facts["weights"], *others = [training.weights() for training in (first, whole)]
    facts["states"] = []
    for is_partitioned, divided in itertools.product((True, False), repeat=2):
        settings = {**settings, "is_partitioned": is_partitioned, "shard_optimizer": divided}
        weights, num_states = _resumed(model, clip, saved[0], mine[3:], **settings)
        others.append(weights)
        facts["states"].append(num_states)
    facts["same weights"] = all(_is_same(weights, facts["weights"]) for weights in others)
    for training in (first, whole):
        training.strategy.teardown()
    return facts


def _resumed(model, clip, saved, batches, *, is_partitioned, **settings):
    state, weights = copy.deepcopy(saved)
    training = _training(model, clip, **settings)
    if is_partitioned:
        training.run(batches[:1])
    training.strategy.load_state_dict(training.task, weights)
    training.strategy.load_optimizer_state_dict(training.task, training.phase_optimizer, state)
    training.run(batches)
    found = training.weights(), len(training.phase_optimizer.optimizer.state)
    training.strategy.teardown()
    return found


def _shared(value):
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _is_same(first, second):
    """Return True if two trees are equal to the bit; state is whole on rank 0 only."""
    pairs = []
    map_tensors(first, pairs.append)
    others = []
    map_tensors(second, others.append)
    return len(pairs) == len(others) > 0 and all(map(torch.equal, pairs, others))


CASES = {
    "1f1b, clipped": (Mlp, 0.1, {"split_points": ["net.8"]}),  # not by measured times
    "a parameter that both stages use": (Gpt, None, {"split_points": ["blocks.2"], "shared_parameters": "replicated"}),
}


def _of_cases():
    return {name: _divided_and_whole(*case) for name, case in CASES.items()}


@pytest.mark.slow
def test_a_divided_optimizer_trains_and_resumes_to_the_weights_of_a_whole_one_and_each_replica_keeps_a_part_of_it():
    ranks = run_ranks(_of_cases, 4)
    for name, (model, clip, _) in CASES.items():
        of_ranks = [rank[name] for rank in ranks]
        assert of_ranks[0]["same state"] and of_ranks[0]["same weights"], name
        assert all(facts["same weights on this rank"] for facts in of_ranks), name
        for stage, of_stage in itertools.groupby(sorted(of_ranks, key=_stage), key=_stage):
            first, second = of_stage
            trained = {name for name, _ in make(model).named_parameters()} & first["local"]
            assert sorted(first["held"] + second["held"]) == sorted(trained), f"{name}, stage {stage}"
            for facts in (first, second):
                assert facts["states"] == [len(facts["held"]), len(trained)] * 2
            assert max(first["bytes"], second["bytes"]) == pytest.approx(first["planned"], rel=0.01)
        single = Training(make(model), SingleStrategy(device="cpu"), clip=clip)
        single.run(step_batches(model, sizes=SIZES, num_steps=6))
        assert largest_difference(of_ranks[0]["weights"], single.weights()) < 1e-10


def _stage(facts):
    return facts["place"][1]


def _fit(run_dir, *, steps, sharded, resume=None, **settings):
    """Return the whole weights on rank 0 of a run that saves its last step."""
    inputs, targets = Mlp.batch(48, torch.Generator().manual_seed(0))
    task = make(Mlp).double()
    strategy = PipelineStrategy(stages=2, replicas=2, device="cpu", split_points=["net.8"], **settings)
    saving = Checkpoint(every=f"{steps}step", sharded=sharded)
    trainer = Trainer(strategy, max_duration=f"{steps}step", run_dir=run_dir, callbacks=[saving], precision="fp64")
    trainer.fit(task, Data(train=TensorDataset(inputs.double(), targets), batch_size=8), resume=resume)
    return task.state_dict()


def _saved_and_resumed(run_dir):
    """Return final weights: of an uninterrupted run, and by resuming shards and a file with a whole optimizer."""
    whole = _fit(run_dir / "whole", steps=6, sharded=False)
    found = []
    for sharded in (True, False):
        first = run_dir / f"first {sharded}"
        _fit(first, steps=3, sharded=sharded, shard_optimizer=True)
        found.append(_fit(run_dir / f"{sharded}", steps=6, sharded=False, resume=str(first)))
    return whole, found


@pytest.mark.slow
def test_checkpoints_of_a_divided_optimizer_are_whole_in_shards_and_in_one_file(tmp_path):
    whole, found = run_ranks(_saved_and_resumed, 4, tmp_path)[0]
    for weights in found:
        assert _is_same(weights, whole)
    payloads = [in_memory(load_from(tmp_path / f"first {sharded}").payload) for sharded in (True, False)]
    assert _is_same(*({key: one[key] for key in ("task", "optimizer")} for one in payloads))


def _of_phases():
    return compare(WithoutStatistics, sizes=SIZES, replicas=2, device="cpu", shard_optimizer=True)


@pytest.mark.slow
def test_phases_with_divided_optimizers_have_the_weights_and_norms_of_one_process():
    assert run_ranks(_of_phases, 4)[0] < 1e-10


def _with_a_step_skipped(run_dir):
    """Return by precision the final weights of a divided and of a whole optimizer, in a run with a gradient of NaN."""
    inputs, targets = Mlp.batch(48, torch.Generator().manual_seed(0))
    inputs[9] = float("nan")
    found = {}
    for precision, divided in itertools.product(("fp32", "fp16-mixed"), (True, False)):
        task, run = make(Mlp), run_dir / f"{precision} {divided}"
        strategy = PipelineStrategy(stages=2, replicas=2, device="cpu", split_points=["net.8"], shard_optimizer=divided)
        trainer = Trainer(strategy, max_duration="6step", run_dir=run, precision=precision, on_nonfinite="skip")
        trainer.fit(task, Data(train=TensorDataset(inputs, targets), batch_size=8))
        found[precision, divided] = task.state_dict()
    return found


@pytest.mark.slow
def test_a_divided_optimizer_skips_the_steps_that_a_whole_one_skips(tmp_path):
    found = run_ranks(_with_a_step_skipped, 4, tmp_path)[0]
    start = make(Mlp).state_dict()
    for precision in ("fp32", "fp16-mixed"):
        assert _is_same(found[precision, True], found[precision, False])
        assert all(weight.isfinite().all() for weight in found[precision, True].values())
        assert not any(torch.equal(weight, start[name]) for name, weight in found[precision, True].items())


class Both(torch.optim.SGD):
    """Looks at all gradients."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        return super().step(closure)


def test_what_cannot_be_divided_is_refused_with_what_to_type():
    with pytest.raises(UserError, match=r"there is one\. Type strategy\.replicas=2, or strategy\.shard_optimizer=fal"):
        PipelineStrategy(stages=2, shard_optimizer=True)
    with pytest.raises(UserError, match="shard_optimizer must be True or False, got 'yes'"):
        PipelineStrategy(stages=2, replicas=2, shard_optimizer="yes")
    run_ranks(_refused, 2)


class _Own(Mlp):
    def configure_optimizers(self):
        return Both(self.parameters(), lr=0.1)


def _refused():
    strategy = PipelineStrategy(stages=1, replicas=2, shard_optimizer=True, device="cpu")
    with pytest.raises(UserError, match="Both may use several parameters or gradients together"):
        Training(make(_Own), strategy)
