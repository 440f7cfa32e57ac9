import gc
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trainkit.strategies.pipeline.trace.tracer import trace

from tests.strategies.pipeline.models import Gpt, Mlp, ResNet
from trainkit.errors import UserError


def _trace(task, batch, *leaf_modules, step=None):
    return trace(task, step or task.training_step, batch, leaf_modules=frozenset(leaf_modules)).graph


class _Step(nn.Module):
    """A task whose step is given."""

    def __init__(self, step, **modules):
        super().__init__()
        self._step = step
        for name, module in modules.items():
            setattr(self, name, module)

    def training_step(self, batch):
        return self._step(self, batch)


def _names(graph):
    return [node.name for node in graph.nodes]


def test_a_leaf_module_is_one_node_and_so_is_every_torch_call_between_leaf_modules():
    def step(task, batch):
        return F.relu(task.first(batch) + 1).mean()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    assert _names(graph) == ["first", "add", "relu", "mean", "return"]


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.sin() * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


_doubled = _Doubled.apply


def _of_function(call, second):
    """Trace a step that calls a Function, or a module whose code calls it."""

    def step(task, batch):
        return call(task.second(task.first(batch))).sum()

    task = _Step(step, first=nn.Linear(3, 3), second=second)
    return trace(task, task.training_step, torch.ones(2, 3), leaf_modules=frozenset(["first", "second"]))


def test_a_function_is_one_node_by_its_own_name_and_by_another_name_it_is_that_or_refused():
    def named(hidden):
        return _Doubled.apply(hidden)

    found, by_another_name = (_of_function(call, nn.Identity()) for call in (named, _doubled))

    assert _names(found.graph) == ["first", "second", "_Doubled.apply", "sum", "return"]
    assert found.refusal is None
    if by_another_name.refusal is None:
        assert _names(by_another_name.graph) == _names(found.graph)
    else:
        assert "calls `_Doubled.apply` (at test_tracer.py:" in by_another_name.refusal
        assert "Write `_Doubled.apply(...)` there. Do that inside one module's forward" in by_another_name.refusal


def test_a_module_may_call_a_function_by_every_name():
    class Doubling(nn.Module):
        def forward(self, inputs):
            return _doubled(inputs)

    found = _of_function(lambda hidden: hidden, Doubling())

    assert (_names(found.graph), found.refusal) == (["first", "second", "sum", "return"], None)


def test_calls_about_shapes_are_not_nodes():
    def step(task, batch):
        rows, width = batch.shape
        assert batch.dim() == 2 and len(batch) == rows and batch.size(1) == width and not batch.is_complex()
        return task.first(batch).sum()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    assert _names(graph) == ["first", "sum", "return"]


def test_what_follows_from_the_batch_alone_is_batch_only():
    def step(task, batch):
        mask = torch.ones(2, dtype=torch.bool) & (batch["x"].sum(1) > 0)
        return (task.first(batch["x"]).sum(1) * mask).sum()

    graph = _trace(_Step(step, first=nn.Linear(64, 64)), {"x": torch.randn(2, 64)}, "first")

    local = {node.name: node.is_batch_only for node in graph.nodes}
    assert local["__and__"] and local["gt"] and local["ones"]
    assert not local["first"] and not local["mul"]


def test_a_write_in_place_is_a_new_output_with_the_same_value():
    def step(task, batch):
        hidden = task.first(batch)
        hidden += 1
        return hidden.sum()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    first, added, *_ = graph.nodes
    assert [output.value for output in first.outputs] == [output.value for output in added.outputs]
    assert added.written == added.inputs


def test_a_switch_of_requires_grad_is_an_output():
    def step(task, batch):
        return task.first((batch * 2).requires_grad_()).sum()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    doubled, switched, *_ = graph.nodes
    assert [output.requires_grad for output in (*doubled.outputs, *switched.outputs)] == [False, True]


def test_random_calls_are_known_and_each_call_has_a_key_of_its_own():
    def step(task, batch):
        return F.dropout(F.dropout(task.first(batch))).sum()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    assert [node.name for node in graph.nodes if node.is_random] == ["dropout"] * 2
    assert len({node.key for node in graph.nodes}) == len(graph.nodes)


def test_a_leaf_module_uses_what_it_is_given_first_and_then_what_its_code_finds():
    found = []

    class Finds(nn.Module):
        def forward(self, x):
            return x + found[-1]

    def step(task, batch):
        found.append(task.first(batch))
        return task.last(batch).sum()

    graph = _trace(_Step(step, first=nn.Linear(3, 3), last=Finds()), torch.randn(2, 3), "first", "last")

    first, last, *_ = graph.nodes
    assert last.inputs == (*first.inputs, first.outputs[0].value) and last.num_given == 1


def test_a_module_that_asks_for_a_length_which_depends_on_elements_reads_them():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            positive = self.linear(x).flatten()
            doubled = positive[positive > 0] * 2
            return doubled.sum() / (len(doubled) + 1)

    task = _Step(lambda task, batch: task.asks(batch), asks=Asks())
    result = trace(task, task.training_step, torch.randn(2, 3), leaf_modules=frozenset({"asks.linear"}))

    assert result.reading_modules == {"asks"}


def test_a_constant_that_a_model_value_is_written_to_is_not_local():
    def step(task, batch):
        table = torch.zeros(2, 2, 3)
        table[:, 0] = task.first(batch)
        return table.sum()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    assert [node.name for node in graph.nodes if node.is_batch_only] == []


def test_a_write_through_a_view_constrains_all_tensors_that_share_the_memory():
    def step(task, batch):
        hidden = task.first(batch)
        part = hidden[:, :1]
        hidden = hidden.relu()
        part.mul_(2)
        return hidden.sum() + part.sum()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    assert any(
        constraint.forbids(2) and "several tensors share" in constraint.reason for constraint in graph.constraints
    )


def test_a_tensor_kept_in_a_module_constrains_its_maker_and_its_user():
    class Leaves(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            self.left = self.linear(x) * 2
            return x + 1

    def step(task, batch):
        out = task.last(task.first(batch))
        return (out + task.first.left).sum()

    graph = _trace(_Step(step, first=Leaves(), last=nn.Linear(3, 3)), torch.randn(2, 3), "first", "last")

    assert [(constraint.first, constraint.last) for constraint in graph.constraints] == [(0, 2)]
    assert "module 'first'" in graph.constraints[0].reason


def test_a_buffer_that_is_written_constrains_all_its_users():
    class Task(_Step):
        def __init__(self):
            super().__init__(None, first=nn.Linear(3, 3), last=nn.Linear(3, 3))
            self.register_buffer("mean", torch.zeros(3))

        def training_step(self, batch):
            hidden = self.first(batch)
            self.mean += hidden.detach().mean(0)
            return (self.last(hidden) - self.mean).sum()

    graph = _trace(Task(), torch.randn(2, 3), "first", "last")

    assert any("buffer 'mean'" in constraint.reason for constraint in graph.constraints)


def test_a_number_read_from_a_model_value_is_marked():
    def step(task, batch):
        hidden = task.first(batch)
        return hidden.sum() if hidden.abs().max() < 100 else hidden.mean()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    assert [node.name for node in graph.nodes if node.reads] == ["__bool__"]


def test_parameters_are_found_where_they_are_used():
    task = Gpt()
    graph = _trace(task, Gpt.batch(2, torch.Generator()), "tokens", "head", *(f"blocks.{i}" for i in range(4)))

    users = {name: [graph.nodes[i].name for i in users] for name, users in graph.parameter_users.items()}
    assert users["tokens.weight"] == ["tokens", "head"]
    assert users["positions"] == ["__getitem__"]
    assert users["blocks.1.qkv.bias"] == ["blocks.1"]


def test_a_conversion_that_changes_nothing_is_no_use_of_a_parameter():
    def step(task, batch):
        task.first.weight.to(torch.float32)
        return task.first(batch).sum()

    graph = _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")

    assert [graph.nodes[index].name for index in graph.parameter_users["first.weight"]] == ["first"]


def test_a_trace_preserves_buffers_gradients_batch_and_generators():
    task = ResNet()
    batch = ResNet.batch(4, torch.Generator())
    before = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    image = batch["image"].clone()
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    def step(batch):
        batch["image"] += torch.randn(()) * random.random()
        return task.training_step(batch)

    _trace(task, batch, "stem", step=step)

    assert all(torch.equal(tensor, before[name]) for name, tensor in task.state_dict().items())
    assert all(parameter.grad is None for parameter in task.parameters())
    assert torch.equal(batch["image"], image)
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state
    assert type(task.stem) is nn.Sequential


def test_the_place_of_a_call_may_be_in_a_package_whose_name_begins_with_torch():
    place = Path(torch.__file__).parents[1] / "torchlike" / "ops.py"
    space = {}
    exec(compile("def double(x):\n    return x * 2", str(place), "exec"), space)

    graph = _trace(
        _Step(lambda task, batch: space["double"](task.first(batch)).sum(), first=nn.Linear(3, 3)),
        torch.ones(2, 3),
        "first",
    )

    assert graph.nodes[1].location == "ops.py:2"


def test_a_trace_leaves_no_activation_behind():
    class Saturating(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 777)

        def forward(self, x):
            return self.layer(x).exp().tanh()  # whose backward needs their own results

    task = Saturating()
    trace(task, lambda batch: task(batch).sum(), torch.ones(2, 4), leaf_modules=frozenset({"layer"}))
    gc.collect()
    # isinstance would read `__class__`, which warns on a deprecated name of torch that lives among the objects.
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    alive = [tensor for tensor in tensors if tensor.shape == (2, 777)]
    assert alive == []


def test_a_task_on_the_meta_device_is_traced_with_its_operations_and_bytes():
    with torch.device("meta"):
        task = Mlp()
        batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))

    graph = _trace(task, batch, *(f"net.{index}" for index in range(20)))

    linear = next(node for node in graph.nodes if node.name == "net.1")
    assert linear.cost.flops == 2 * 4 * 16 * 16
    assert linear.cost.activation_bytes == 4 * 16 * 4


def test_a_step_that_runs_backward_itself_is_an_error():
    def step(task, batch):
        loss = task.first(batch).sum()
        loss.backward()
        return loss

    with pytest.raises(UserError, match="Return the loss"):
        _trace(_Step(step, first=nn.Linear(3, 3)), torch.randn(2, 3), "first")


def test_a_step_that_reads_the_graph_of_a_tensor_is_an_error():
    def hooked(task, batch):
        hidden = task.first(batch)
        hidden.grad_fn.register_hook(lambda inputs, outputs: None)
        return task.second(hidden).sum()

    def compared(task, batch):
        assert batch.grad_fn is None  # of a tensor that no stage has made
        return task.second(task.first(batch)).sum()

    layers = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}
    with pytest.raises(UserError, match=r"the step reads grad_fn of a tensor \(at test_tracer.py:\d+\)"):
        _trace(_Step(hooked, **layers), torch.ones(2, 4), "first", "second")
    assert _names(_trace(_Step(compared, **layers), torch.ones(2, 4), "first", "second"))[:2] == ["first", "second"]
