"""Tasks larger than one memory: traced without computing, and created only on the stages that need them."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainkit.strategies.pipeline.plan.stage import materialize
from trainkit.strategies.pipeline.run.staged_model import cost_source
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.strategies.pipeline.models import OWN, EncoderDecoder, Mlp, ResNet
from tests.strategies.pipeline.training import Training, largest_difference, plan, step_batches
from trainkit.errors import UserError
from trainkit.testing import run_ranks


class _Own(EncoderDecoder):
    """Has direct parameters, a shared one, and a buffer."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.source.weight
        self.shift = nn.Parameter(torch.empty(16))
        self.register_buffer("scale", torch.empty(16))

    def reset_parameters(self):
        self.shift.normal_()
        self.scale.fill_(0.5)

    def training_step(self, batch):
        return super().training_step(batch) + (self.scale * self.shift).square().sum()

    def validation_step(self, batch):
        return {"loss": self.training_step(batch)}


def _on_meta(model):
    with torch.device("meta"):
        return model()


def _batch(model):
    return model.batch(4, torch.Generator().manual_seed(0))


def _described(graph):
    return [
        (node.name, node.inputs, node.outputs, node.parameters, node.is_batch_only, node.cost.flops)
        for node in graph.nodes
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "EncoderDecoder" else name for name in OWN]
)
def test_a_fake_trace_equals_an_eager_trace(name):
    task = OWN[name]()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in task.state_dict(keep_vars=True).items()}

    fake, cuts = plan(task, task.training_step, _batch(OWN[name]), num_stages=2, costs="fake")
    real, expected_cuts = plan(task, task.training_step, _batch(OWN[name]), num_stages=2, costs="estimated")

    assert _described(fake) == _described(real)
    assert [value.shape for value in fake.values] == [value.shape for value in real.values]
    assert cuts == expected_cuts
    for key, tensor in task.state_dict(keep_vars=True).items():
        assert id(tensor) == before[key][0] and torch.equal(tensor, before[key][1])


@pytest.mark.parametrize(
    ("trace_mode", "model", "costs"),
    [
        ("auto", Mlp, "measured"),
        ("eager", Mlp, "measured"),
        ("fake", Mlp, "fake"),
        ("auto", functools.partial(_on_meta, Mlp), "fake"),
    ],
)
def test_a_step_is_timed_only_where_it_is_run(trace_mode, model, costs):
    assert cost_source(trace_mode, model()) == costs


def test_a_task_on_the_meta_device_cannot_be_traced_eagerly():
    with pytest.raises(UserError, match=r"strategy\.trace=eager needs a task with real parameters"):
        cost_source("eager", _on_meta(Mlp))


def test_a_task_of_a_terabyte_is_planned():
    class Huge(Mlp):
        def __init__(self):
            super().__init__(width=200_000)

    task = _on_meta(Huge)

    graph, _ = plan(task, task.training_step, _batch(Mlp), num_stages=4, costs="fake")

    assert sum(graph.parameter_bytes.values()) > 1e12 * 0.9
    assert not graph.measured


def test_attributes_set_by_a_fake_trace_are_dropped():
    class Keeps(Mlp):
        def training_step(self, batch):
            self.kept = self.net(batch[0])
            return self.kept.sum()

    task = Keeps()
    plan(task, task.training_step, _batch(Mlp), num_stages=2, costs="fake")

    assert not hasattr(task, "kept")


def test_a_step_that_reads_elements_is_an_error_with_the_remedy():
    class Looks(Mlp):
        def training_step(self, batch):
            logits = self.net(batch[0])
            return logits.sum() if logits.max() > 0 else logits.mean()

    task = Looks()
    with pytest.raises(UserError, match=r"Looks's step reads elements.*strategy.trace=eager"):
        plan(task, task.training_step, _batch(Mlp), num_stages=2, costs="fake")


def test_a_module_that_cannot_reset_itself_is_named_with_the_remedy():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        task = nn.Sequential(nn.Linear(3, 3), Silent())

    with pytest.raises(UserError, match=r"'1.weight' is on the meta device.*Silent \(1\).*reset_parameters"):
        materialize(task, seed=0)


def test_every_part_has_the_values_of_the_whole():
    whole = _on_meta(_Own)
    materialize(whole, seed=3)
    first, second = _on_meta(_Own), _on_meta(_Own)
    names = [name for name, _ in (*whole.named_parameters(), *whole.named_buffers())]
    parts = (set(names[::2]), set(names[1::2]))
    identities = {id(tensor) for tensor in (*first.parameters(), *first.buffers())}
    for task, part in zip((first, second), parts, strict=True):
        materialize(task, seed=3, keep=part.__contains__)

    assert {id(tensor) for tensor in (*first.parameters(), *first.buffers())} == identities
    for task, part in zip((first, second), parts, strict=True):
        for name, tensor in (*task.named_parameters(), *task.named_buffers()):
            expected = whole.get_parameter(name) if isinstance(tensor, nn.Parameter) else whole.get_buffer(name)
            assert tensor.shape == expected.shape and tensor.requires_grad == expected.requires_grad
            assert torch.equal(tensor, expected) if name in part else tensor.untyped_storage().nbytes() <= 8
    assert whole.head.weight is whole.source.weight
    assert not torch.equal(whole.encoder[0].linear1.weight, whole.encoder[1].linear1.weight)
    assert float(whole.head.weight.detach().std()) > 0.5  # that of an embedding, which comes first


def _train(model, num_steps):
    """Train a task that was built on the meta device, and stop and go on with another."""
    steps = step_batches(model, sizes=[3, 3, 2], num_steps=num_steps)
    torch.manual_seed(11)
    strategy = PipelineStrategy(stages=dist.get_world_size(), device="cpu")
    task = _on_meta(model)
    training = Training(task, strategy)
    strategy.prepare_steps(task, iter(steps))
    held = sum(p.untyped_storage().nbytes() for p in task.parameters() if p.untyped_storage().nbytes() > 8)
    training.run(strategy.step_batches(iter(()), pin_memory=False))
    weights = training.weights()
    saved = [weights, strategy.optimizer_state_dict(task, training.phase_optimizer)]
    dist.broadcast_object_list(saved, src=0)

    again = Training(_on_meta(model), PipelineStrategy(stages=dist.get_world_size(), device="cpu"))
    again.strategy.load_state_dict(again.task, saved[0])
    again.strategy.load_optimizer_state_dict(again.task, again.phase_optimizer, saved[1])
    again.run(steps[:1])
    training.run(steps[:1])
    both = training.weights(), again.weights()
    if dist.get_rank():
        return held, None, None
    whole = _on_meta(model).double()
    materialize(whole, seed=11)
    reference = Training(whole, SingleStrategy(device="cpu")).run(steps)
    return held, largest_difference(weights, reference.weights()), largest_difference(*both)


@functools.cache
def _trained(model):
    return run_ranks(_train, 2, model, 3)


@pytest.mark.slow
def test_a_task_on_the_meta_device_trains_to_the_weights_of_one_process():
    assert _trained(_Own)[0][1] <= 1e-10
    assert _trained(ResNet)[0][1] <= 1e-10


class _Accumulating(_Own):
    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.5)


@pytest.mark.slow
def test_the_state_that_an_optimizer_makes_in_its_constructor_has_its_values():
    assert _trained(_Accumulating)[0][1] <= 1e-10


@pytest.mark.slow
def test_a_stage_makes_its_own_parameters_only():
    sizes = sum(8 * parameter.numel() for parameter in ResNet().parameters())

    held = [answer[0] for answer in _trained(ResNet)]

    assert sum(held) == sizes and all(0 < size < sizes for size in held)


@pytest.mark.slow
def test_a_saved_run_goes_on_with_a_task_on_the_meta_device():
    assert _trained(_Own)[0][2] <= 1e-10
