"""Facts about the strategy other than equal weights; the ranks are started once for all of them."""

import copy
import functools
import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.strategies.pipeline.models import Gpt, ManyInputs, Mlp, ResNet
from tests.strategies.pipeline.simulation import short
from tests.strategies.pipeline.training import Training, compare, largest_difference, make, step_batches
from trainkit import Data, TaskModule, Trainer
from trainkit.errors import UserError
from trainkit.testing import RankFailure, run_ranks

SIZES = [3, 3, 2]


def _facts():
    facts = {}
    for fact in FACTS:
        facts.update(fact())
    return facts


def _pipeline(model, *, task=None, precision="fp64", clip=None, settings=None, **options):
    task = make(model, **(settings or {})) if task is None else task
    strategy = PipelineStrategy(stages=dist.get_world_size(), device="cpu", **options)
    return Training(task, strategy, precision=precision, clip=clip)


def _ownership():
    training = _pipeline(Gpt, settings={"width": 64}, split_points=["blocks.2"], shared_parameters="replicated")
    before = {name: id(parameter) for name, parameter in training.task.named_parameters()}
    training.run(step_batches(Gpt, sizes=SIZES, num_steps=1))
    named = dict(training.task.named_parameters())
    held = {name for name, parameter in named.items() if parameter.untyped_storage().nbytes() > 8}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    state = training.phase_optimizer.optimizer.state
    return {
        "local": everyone,
        "identity": before == {name: id(parameter) for name, parameter in named.items()},
        "shapes": {name: tuple(parameter.shape) for name, parameter in named.items()},
        "optimizer": {name for name, parameter in named.items() if parameter in state} == held,
        "plan": str(training.strategy.plan_report),
    }


def _saving():
    """Save under these stages, go on under one process and under these stages again."""
    steps = step_batches(Gpt, sizes=SIZES, num_steps=6)
    first = _pipeline(Gpt).run(steps[:3])
    weights = first.weights()
    optimizer = copy.deepcopy(first.strategy.optimizer_state_dict(first.task, first.phase_optimizer))
    first.run(steps[3:])
    final = first.weights()
    box = [weights, optimizer]
    dist.broadcast_object_list(box, src=0)
    weights, optimizer = box

    def resumed(training):
        training.strategy.load_state_dict(training.task, weights)
        training.strategy.load_optimizer_state_dict(training.task, training.phase_optimizer, copy.deepcopy(optimizer))
        return training

    placed = _pipeline(Gpt).run(steps[:1])  # already partitioned when it is given the saved state
    again = resumed(placed).run(steps[3:]).weights()
    fresh = resumed(_pipeline(Gpt)).run(steps[3:]).weights()
    if dist.get_rank():
        return {}
    single = resumed(Training(make(Gpt), SingleStrategy(device="cpu"))).run(steps[3:]).weights()
    return {
        "keys": list(final) == list(make(Gpt).state_dict()),
        "pipeline to pipeline": largest_difference(final, fresh),
        "pipeline to running pipeline": largest_difference(final, again),
        "pipeline to single": largest_difference(final, single),
    }


class _Uneven(Mlp):
    """Is slow in one place, which another run may find elsewhere."""

    slow = "0"

    def __init__(self):
        super().__init__(dropout=0.4)
        for name, layer in self.net.named_children():
            layer.register_forward_hook(lambda *_, name=name: time.sleep(0.02 * (name == self.slow)))


class _SlowElsewhere(_Uneven):
    slow = "19"


def _resuming():
    """Go on with a run whose partition depends on times that differ now."""
    steps = step_batches(_Uneven, sizes=SIZES, num_steps=4)
    first = _pipeline(_Uneven).run(steps[:2])
    weights, optimizer = first.weights(), first.strategy.optimizer_state_dict(first.task, first.phase_optimizer)
    weights, optimizer, choices = _shared((weights, copy.deepcopy(optimizer), first.strategy.strategy_state()))
    generator = torch.get_rng_state()
    final = first.run(steps[2:]).weights()

    def resumed(choices):
        training = _pipeline(_SlowElsewhere)
        training.strategy.load_state_dict(training.task, weights)
        training.strategy.load_optimizer_state_dict(training.task, training.phase_optimizer, copy.deepcopy(optimizer))
        training.strategy.load_strategy_state(choices)
        torch.set_rng_state(generator)
        training.run(steps[2:])
        return training.weights(), training.strategy.strategy_state()

    again, kept = resumed(choices)
    _, without = resumed({})
    _, of_other = resumed({"pipeline": {**choices["pipeline"], "settings": "3 stages"}})
    _, of_changed = resumed({"pipeline": {**choices["pipeline"], "digest": 0}})
    return {
        "resumed to the bit": all(torch.equal(again[name], final[name]) for name in final),
        "same partition": kept == choices,
        "partitioned again": choices not in (without, of_other, of_changed),
    }


def _evaluation():
    steps = step_batches(Mlp, sizes=SIZES, num_steps=2)
    training = _pipeline(Mlp).run(steps)
    early = _pipeline(Mlp)
    whole = make(Mlp).double()
    whole.load_state_dict(_shared(training.weights()))
    batch = step_batches(Mlp, sizes=[7], num_steps=1, seed=9)[0].micro_batches[0]
    with torch.no_grad():
        found = training.strategy.evaluate(training.task.eval(), batch, "validation_step")
        predicted = training.strategy.predict(training.task, batch)
        expected, expected_prediction = whole.validation_step(batch.batch), whole.predict_step(batch.batch)
        before = early.strategy.evaluate(early.task.eval(), batch, "validation_step")
    trained = early.task.train() is early.task and early.run(steps)
    last = dist.get_rank() == dist.get_world_size() - 1
    return {
        "stops evaluating": [training.strategy.comm.should_stop_evaluation(asked) for asked in (last, False)],
        "evaluation": float(found.loss - expected["loss"]),
        "evaluated metric": float(found.metrics["accuracy"]) - float(expected["accuracy"]),
        "prediction": torch.equal(predicted, expected_prediction),
        "evaluated before training": float(before.loss),
        "trained after evaluating": largest_difference(_shared(trained.weights()), _shared(training.weights())),
        "weight": found.weight,
    }


def _shared(value):
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _norm():
    steps = step_batches(Gpt, sizes=SIZES, num_steps=1)
    _, norm = _pipeline(Gpt, clip=0.1).step(steps[0])
    if dist.get_rank():
        return {}
    _, expected = Training(make(Gpt), SingleStrategy(device="cpu"), clip=0.1).step(steps[0])
    return {"norm": float(norm - expected)}


def _scaler():
    """One stage overflows: no stage may step."""
    training = _pipeline(Mlp, precision="fp16-mixed", split_points=["net.7"])
    steps = step_batches(Mlp, sizes=SIZES, num_steps=2, dtype=torch.float32)
    training.step(steps[0])
    before, scale = training.weights(), training.precision.scaler.get_scale()
    training.strategy.forward_backward(training.task, steps[1])
    if training.strategy.mesh.stage == 1:
        next(p.grad for p in training.task.parameters() if p.grad is not None).fill_(float("inf"))
    training.strategy.optimizer_step(training.phase_optimizer)
    return {
        "skipped on all stages": largest_difference(before, training.weights()),
        "scale": (training.precision.scaler.get_scale(), scale),
    }


def _memory():
    """Count the activations that are alive at once."""
    cuts = {"gpipe": ["net.7"], "1f1b": ["net.7"], "interleaved_1f1b": ["net.4", "net.8", "net.12"]}
    return {
        f"micro-batches alive, {schedule}": _most_alive(_pipeline(Mlp, schedule=schedule, split_points=names))
        for schedule, names in cuts.items()
    }


def _most_alive(training):
    runtime = training.strategy.runtime
    step_batch = step_batches(Mlp, sizes=[2] * 12, num_steps=1)[0]
    training.strategy.forward_backward(training.task, step_batch)
    in_flight = most = 0
    for span in runtime.spans:
        in_flight += 1 if span.action.kind == "F" else -1
        most = max(most, in_flight)
    measured = _peak_of_saved_bytes(training, step_batch)
    return most, measured


def _peak_of_saved_bytes(training, step_batch):
    alive, peak = 0, 0

    class Saved:
        def __init__(self, tensor):
            nonlocal alive, peak
            self.tensor = tensor
            alive += tensor.nbytes
            peak = max(peak, alive)

        def __del__(self):
            nonlocal alive
            alive -= self.tensor.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        training.strategy.forward_backward(training.task, step_batch)
    return peak


def _new_shapes():
    """Train on batches of sizes, then of widths of another kind, than the traced one."""
    training = _pipeline(ManyInputs)
    reference = Training(make(ManyInputs), SingleStrategy(device="cpu"))
    for sizes in ([4, 4], [5, 2], [1], [2, 3, 4, 5, 1]):
        for step_batch in step_batches(ManyInputs, sizes=sizes, num_steps=1):
            training.step(step_batch)
            reference.step(step_batch)
    weights = training.weights()
    return {} if dist.get_rank() else {"new shapes": largest_difference(weights, reference.weights())}


def _timeline():
    training = _pipeline(Mlp, split_points=["net.7"]).run(step_batches(Mlp, sizes=SIZES, num_steps=1))
    spans = training.strategy.runtime.timeline()
    return {"timeline": [[short(span.action) for span in stage] for stage in spans]}


def _replicas():
    """Two copies of one stage: each sees other samples, and buffers are the first one's."""
    strategy = PipelineStrategy(stages=1, replicas=2, device="cpu", timeout_seconds=77.0)
    training = Training(make(ResNet), strategy)
    training.run(step_batches(ResNet, sizes=[3, 3, 2, 2], num_steps=2, replica=strategy.comm.rank, num_replicas=2))
    means = [None, None]
    dist.all_gather_object(means, training.task.stem[1].running_mean)
    reducer = strategy._gradients[""]._reducer
    return {"running means": means, "reductions": reducer.step, "patience": reducer.settings.timeout_seconds}


class _Masked(Mlp):
    """Reports how much of its input each micro-batch keeps."""

    def __init__(self):
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch):
        kept = self.drop(torch.ones(64, dtype=batch[0].dtype)) @ torch.arange(64, dtype=batch[0].dtype)
        return {**super().training_step(batch), "kept": kept}


def _masks():
    training = _pipeline(_Masked)
    steps = [training.step(step_batch)[0] for step_batch in step_batches(_Masked, sizes=[2, 2], num_steps=2)]
    _pipeline(Mlp, settings={"dropout": 0.4}, split_points=["net.7"]).run(step_batches(Mlp, sizes=[2, 2], num_steps=1))
    states = [None, None]
    dist.all_gather_object(states, torch.get_rng_state())
    return {
        "masks": [float(output.metrics["kept"]) for outputs in steps for output in outputs],
        "generators are equal": torch.equal(*states),
    }


FACTS = (
    _ownership,
    _saving,
    _resuming,
    _evaluation,
    _norm,
    _scaler,
    _memory,
    _new_shapes,
    _timeline,
    _replicas,
    _masks,
)


@functools.cache
def _found():
    return run_ranks(_facts, 2)[0]


def test_a_stage_has_only_its_parameters_and_these_keep_their_identity():
    found = _found()
    first, second = found["local"]

    assert first & second == {"tokens.weight"}
    assert first | second == set(found["shapes"])
    assert {"positions", "blocks.0.qkv.weight"} <= first
    assert {"norm.weight", "blocks.3.qkv.weight"} <= second
    assert found["identity"] and found["optimizer"]
    assert found["shapes"]["blocks.3.qkv.weight"] == (192, 64)


def test_a_saved_run_goes_on_under_other_strategies():
    found = _found()

    assert found["keys"]
    assert found["pipeline to pipeline"] <= 1e-10
    assert found["pipeline to running pipeline"] <= 1e-10
    assert found["pipeline to single"] <= 1e-10


def test_a_resumed_run_has_the_same_partition_and_is_bit_equal_with_dropout():
    assert _found()["same partition"]
    assert _found()["resumed to the bit"]


def test_a_resumed_run_with_other_stages_or_another_step_is_partitioned_again():
    assert _found()["partitioned again"]


def test_evaluation_and_prediction_are_those_of_the_whole_task():
    found = _found()

    assert abs(found["evaluation"]) < 1e-12 and abs(found["evaluated metric"]) < 1e-12
    assert found["prediction"] is True
    assert found["weight"] == 7


def test_a_task_may_be_evaluated_before_it_is_trained():
    assert _found()["evaluated before training"] > 0
    assert _found()["trained after evaluating"] <= 1e-10


def test_stages_stop_evaluating_together_when_one_is_asked_to():
    assert _found()["stops evaluating"] == [True, False]


def test_the_gradient_norm_counts_shared_parameters_once():
    assert abs(_found()["norm"]) < 1e-12


def test_a_step_that_overflows_on_one_stage_is_skipped_on_all():
    found = _found()
    scale, before = found["scale"]

    assert found["skipped on all stages"] == 0.0
    assert scale == before / 2


def test_1f1b_keeps_fewer_activations_than_gpipe():
    found = _found()
    simple, simple_bytes = found["micro-batches alive, gpipe"]
    interleaved, interleaved_bytes = found["micro-batches alive, 1f1b"]

    assert (simple, interleaved) == (12, 2)
    assert interleaved_bytes <= simple_bytes * 3 / 12


def test_several_stages_a_rank_keep_activations_of_a_bounded_number_of_micro_batches():
    found = _found()
    _, simple_bytes = found["micro-batches alive, gpipe"]
    virtual, virtual_bytes = found["micro-batches alive, interleaved_1f1b"]

    assert virtual == 5  # of 24: two for each rank behind this one, two for its second stage, and the one at work
    assert virtual_bytes <= simple_bytes * 5 / 12


def test_buffers_are_those_of_the_first_replica():
    first, second = _found()["running means"]

    assert torch.equal(first, second) and first.abs().max() > 0


def test_replicas_reduce_once_for_all_micro_batches_of_a_step():
    assert _found()["reductions"] == 2


def test_replicas_wait_for_each_other_as_long_as_stages_do():
    assert _found()["patience"] == 77.0


def test_stages_have_equal_generators_after_different_draws():
    assert _found()["generators are equal"]


def test_every_micro_batch_of_every_step_draws_another_mask():
    masks = _found()["masks"]

    assert len(masks) == 4 and len(set(masks)) == 4


def test_batches_of_new_shapes_are_negotiated():
    assert _found()["new shapes"] <= 1e-10


def test_the_timeline_has_every_stage_of_the_last_step():
    assert _found()["timeline"] == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]


def test_the_plan_is_kept_as_a_table():
    assert "tokens.weight" in _found()["plan"]


class _Departs(Mlp):
    def training_step(self, batch):
        hidden = self.net[:8](batch[0])
        if batch[0].shape[0] == 2:
            hidden = hidden.sin()
        return torch.nn.functional.cross_entropy(self.net[8:](hidden), batch[1])


class _Selects(Mlp):
    def training_step(self, batch):
        hidden = self.net[:8](batch[0])
        hidden = hidden[hidden.sum(1) > 0.0]
        return self.net[8:](hidden).square().sum()


def _train(model, cuts):
    _pipeline(model, split_points=cuts).run(step_batches(model, sizes=[5, 3, 2], num_steps=3))


def test_a_step_that_differs_from_the_trace_fails_with_the_place_and_the_remedy():
    with pytest.raises(RankFailure, match=r"micro-batch 2 in stage .*called `sin`.*.*Move the branch"):
        run_ranks(_train, 2, _Departs, ["net.8"])


def test_a_shape_that_depends_on_values_is_an_error_between_stages():
    with pytest.raises(RankFailure, match="its shape depends on the values"):
        run_ranks(_train, 2, _Selects, ["net.9"])


class _Compiled(Mlp):
    def __init__(self):
        super().__init__()
        self.compile()


@pytest.mark.slow
def test_a_task_compiled_as_one_piece_is_an_error_with_the_remedy():
    with pytest.raises(RankFailure, match=r"compiled as one piece.*trainer.compile=false"):
        run_ranks(_train, 2, _Compiled, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "interleave"}, "Did you mean 'interleaved'"),
        ({"stages": 0}, "stages must be a whole number"),
        ({"max_in_flight": 0}, "max_in_flight must be a whole number, at least 1, got 0"),
        ({"schedule": "interleaved_1f1b", "max_in_flight": 4}, r"max_in_flight=4 is too few .*max_in_flight=5, or"),
        ({"replicas": True}, "replicas must be"),
        ({"balance": "fast"}, "balance must be speed, memory"),
        ({"balance": 1.5}, "from 0 to 1"),
    ],
)
def test_settings_are_checked_at_once(settings, message):
    with pytest.raises(UserError, match=message):
        PipelineStrategy(**settings)


def test_micro_batches_fill_the_stages_unless_the_user_says_otherwise():
    assert str(PipelineStrategy(stages=2).plan(32)) == "global batch 32 = 1 rank x 4 micro-batches x 8 samples"
    assert PipelineStrategy(stages=4).plan(6).micro_batches == 6
    assert PipelineStrategy(stages=2, micro_batch_size=5).plan(32).micro_batches == 7


def _threads_after_training(times):
    """Return the number of threads of this process after each of several trainings in its process group."""
    counts = []
    for _ in range(times):
        compare(Mlp, sizes=(2, 2), num_steps=1, replicas=2)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_the_process_groups_of_a_pipeline_end_with_it():
    for first, second, third in run_ranks(_threads_after_training, 4, 3):
        assert first == second == third


class HeadWithoutParameters(TaskModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Tanh()

    def training_step(self, batch):
        return self.head(self.body(batch[0])).square().mean()

    def validation_step(self, batch):
        return {"loss": self.training_step(batch)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_replicas_with_a_stage_that_has_no_parameters_log_as_one_process_does():
    losses = []
    for strategy in (
        SingleStrategy(device="cpu"),
        PipelineStrategy(stages=2, replicas=2, split_points=["head"], device="cpu"),
    ):
        torch.manual_seed(0)
        rows = TensorDataset(torch.randn(16, 4))
        data = Data(train=rows, validation=rows, batch_size=8)  # from an evaluation ranks know the name of the loss
        trainer = Trainer(strategy, max_duration="3step", log_every="1step", precision="fp64", loggers=[], run_dir=None)
        losses.append(trainer.fit(HeadWithoutParameters(), data).metrics["train/loss"])
    assert abs(losses[0] - losses[1]) < 1e-12
