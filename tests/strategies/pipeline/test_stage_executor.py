import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from trainkit.strategies.pipeline.plan.stage import stage_graphs
from trainkit.strategies.pipeline.run.stage_executor import StageExecutor, TraceMismatchError
from trainkit.strategies.pipeline.trace.graph import signature, tensors

from tests.strategies.pipeline.models import OWN, Gpt, Mlp, UNet
from tests.strategies.pipeline.training import plan


class _Chain:
    """Stages of a task run one after the other in this process, values handed over by hand."""

    def __init__(self, task, batch, num_stages, **settings):
        self.task = task
        graph, partition = plan(task, task.training_step, batch, num_stages=num_stages, costs="estimated", **settings)
        self.shapes = [value.shape for value in graph.values]
        self.stage_graphs = stage_graphs(graph, partition.bounds(len(graph.nodes)), list(range(num_stages)))
        self.executor = StageExecutor(
            graph, task, self.stage_graphs, traced=signature(tensors(batch)), device=torch.device("cpu")
        )
        self.values = {}

    def run(self, batch, *, only=None):
        for stage_graph in self.stage_graphs:
            if only is None or stage_graph.index == only:
                received = {transfer.value: self.values[transfer.value] for transfer in stage_graph.receives}
                with self.executor.interceptor.installed():
                    returned, values = self.executor.run(
                        stage_graph, self.task.training_step, batch, received=received, shapes=self.shapes, seed=0
                    )
                self.values.update(values)
        return returned


def _batch(model):
    return model.batch(4, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("num_stages", [1, 3])
def test_stages_one_after_the_other_return_what_the_step_returns(name, num_stages):
    task = OWN[name]()
    expected = task.training_step(_batch(OWN[name]))
    chain = _Chain(task, _batch(OWN[name]), num_stages)

    returned = chain.run(_batch(OWN[name]))

    loss, expected_loss = (value["loss"] if isinstance(value, dict) else value for value in (returned, expected))
    assert torch.allclose(loss, expected_loss, atol=1e-7)


def test_a_stage_calls_its_own_modules_only():
    task = Mlp()
    called = []
    for name, module in task.net.named_children():
        module.register_forward_hook(lambda module, args, output, name=name: called.append(name))
    chain = _Chain(task, _batch(Mlp), 2, split_points=["net.9"])
    chain.run(_batch(Mlp), only=0)
    called.clear()

    chain.run(_batch(Mlp), only=1)

    assert called == [str(index) for index in range(9, 20)]


def test_skips_are_received_from_the_stage_that_made_them():
    chain = _Chain(UNet(), _batch(UNet), 4)

    sources = {transfer.source for transfer in chain.stage_graphs[3].receives}

    assert len(sources) > 1


def test_hooks_and_classes_of_modules_are_the_same_after_a_run():
    task = Gpt()
    classes = [type(module) for module in task.modules()]
    chain = _Chain(task, _batch(Gpt), 2)

    chain.run(_batch(Gpt))

    assert [type(module) for module in task.modules()] == classes


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.branch = False

    def training_step(self, batch):
        hidden = self.first(batch)
        if self.branch:
            hidden = hidden.sin()
        return self.second(hidden).sum()


def test_a_call_that_was_not_traced_is_named_with_the_traced_one():
    chain = _Chain(_Branches(), torch.ones(2, 3), 2)
    chain.task.branch = True

    with pytest.raises(
        TraceMismatchError, match=r"called `sin`, but the traced step calls module 'second'.*test_stage_executor"
    ):
        chain.run(torch.ones(2, 3))


class _Finds(nn.Module):
    def forward(self, x):
        return x, *self.found


class _Findings(_Branches):
    def __init__(self):
        super().__init__()
        self.finds = _Finds()

    def training_step(self, batch):
        hidden, *found = self.finds(self.first(batch))
        return self.second(hidden).sum() * found[0]


THREE = torch.tensor(3)


@pytest.mark.parametrize(
    ("traced", "found", "message"),
    [
        ((3,), (3.0,), r"module 'finds' .* has 3\.0 in its result where one of type int was"),
        ((3,), (3, "long"), "has 3 values in its result in place of 2"),
        ((3, "long"), (3, "short"), "has 'short' in its result where 'long' was"),
        ((3, None), (3, THREE), "has Tensor in its result where NoneType was"),
        ((THREE,), (THREE, THREE), "has 3 tensors in its result, and the traced step has 2 there"),
    ],
)
def test_a_module_whose_result_has_another_structure_than_traced_is_an_error(traced, found, message):
    task = _Findings()
    task.finds.found = traced
    chain = _Chain(task, torch.ones(2, 3), 2, split_points=["second"])
    assert chain.run(torch.ones(2, 3)) == task.training_step(torch.ones(2, 3))
    task.finds.found = found

    with pytest.raises(TraceMismatchError, match=message):
        chain.run(torch.ones(2, 3))


class _EndsEarly(_Branches):
    def training_step(self, batch):
        return self.first(batch).sum() if self.branch else super().training_step(batch)


def test_a_step_that_ends_before_its_traced_end_is_an_error():
    chain = _Chain(_EndsEarly(), torch.ones(2, 3), 2, split_points=["second"])
    chain.run(torch.ones(2, 3))
    chain.task.branch = True

    with pytest.raises(TraceMismatchError, match=r"called .*, but the traced step calls module 'second'"):
        chain.run(torch.ones(2, 3), only=1)


class _ReturnsEarly(_Branches):
    def training_step(self, batch):
        hidden = self.second(self.first(batch))
        return hidden if self.branch else hidden.sum()


def test_a_step_that_returns_before_its_last_call_is_an_error():
    chain = _Chain(_ReturnsEarly(), torch.ones(2, 3), 2, split_points=["second"])
    chain.run(torch.ones(2, 3))
    chain.task.branch = True

    with pytest.raises(TraceMismatchError, match="ended, but the traced step calls `sum`"):
        chain.run(torch.ones(2, 3), only=1)


KEPT = {}


class _Keeping(nn.Linear):
    """Keeps its result outside of the task."""

    def forward(self, x):
        KEPT["first"] = super().forward(x)
        return KEPT["first"]


class _Carries(nn.Module):
    """Goes on from what a leaf module keeps."""

    def __init__(self):
        super().__init__()
        self.first, self.second = _Keeping(3, 3), nn.Linear(3, 3)

    def training_step(self, batch):
        self.first(batch)
        return self.second(KEPT["first"]).sum()


def test_a_tensor_that_an_attribute_carries_to_another_stage_is_an_error():
    chain = _Chain(_Carries(), torch.ones(2, 3), 2, split_points=["second"])

    chain.run(torch.ones(2, 3), only=0)
    KEPT["first"] = torch.zeros(2, 3)  # of another micro-batch

    with pytest.raises(
        TraceMismatchError, match=r"module 'second'.*another tensor than the one that module 'first'.*Return"
    ):
        chain.run(torch.ones(2, 3), only=1)


class _Hooked(nn.Module):
    """Keeps the results of two modules by hooks of its constructor, and goes on from there."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.kept = []
        for module in (self.first, self.second[0]):
            module.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def training_step(self, batch):
        self.kept.clear()
        self.second(self.first(batch))
        return (self.kept[0] * self.kept[1]).sum()


def test_what_hooks_keep_of_modules_is_kept_in_every_stage():
    task = _Hooked()
    expected = task.training_step(torch.full((2, 3), 2.0))

    chain = _Chain(task, torch.ones(2, 3), 2, split_points=["second"])

    assert chain.executor.graph.hooks_capture
    assert torch.equal(chain.run(torch.full((2, 3), 2.0)), expected)


class _HookedBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        self.last = nn.Linear(16, 16)
        self.net.register_full_backward_hook(lambda module, inputs, outputs: None)

    def training_step(self, batch):
        return self.last(self.net(batch)).sum()


def test_a_module_with_a_backward_hook_is_a_leaf_module():
    chain = _Chain(_HookedBackward(), torch.ones(2, 16), 2)

    assert chain.executor.graph.leaf_modules == {"net", "last"}


def test_a_scripted_module_is_a_leaf_module():
    task = _Branches()
    task.first = torch.jit.script(task.first)
    expected = task.training_step(torch.full((2, 3), 2.0))

    chain = _Chain(task, torch.ones(2, 3), 2, split_points=["second"])

    assert torch.equal(chain.run(torch.full((2, 3), 2.0)), expected)


class _Asks(nn.Module):
    """Reads a value of the first stage at its very end."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def training_step(self, batch):
        hidden = self.first(batch)
        scale = hidden.abs().max().item()
        return (self.second(hidden) / scale).sum()


def test_a_number_read_in_an_early_stage_is_read_again_in_the_later_one():
    task = _Asks()
    batch = torch.full((2, 3), 5.0)  # not the traced one
    expected = task.training_step(batch)

    chain = _Chain(task, torch.ones(2, 3), 2, split_points=["second"])

    assert torch.allclose(chain.run(batch), expected)
    assert len(chain.stage_graphs[1].receives) == 2


class _Noisy(nn.Module):
    """Uses in the second stage what was drawn in a checkpoint of the first one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def part(self, batch):
        return nn.functional.dropout(self.first(batch), 0.5, True), torch.rand(3)

    def training_step(self, batch):
        hidden, noise = checkpoint(self.part, batch, use_reentrant=False)
        kept = noise + 0 * hidden.sum()
        return self.second(hidden).sum() * 0 + (kept - noise).abs().sum()


def test_numbers_drawn_in_a_checkpoint_are_the_same_in_every_stage():
    chain = _Chain(_Noisy(), torch.ones(2, 3), 2, split_points=["second"])

    assert float(chain.run(torch.ones(2, 3)).detach()) == 0.0


class _Fills(nn.Module):
    """Writes to one table in every stage."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

    def training_step(self, batch):
        table = torch.zeros(2, 3, 3)
        for index, layer in enumerate(self.layers):
            batch = layer(batch)
            table[:, index] = batch
        return table.square().sum()


def test_a_tensor_written_in_every_stage_comes_from_the_stage_that_wrote_it_last():
    task = _Fills()
    expected = task.training_step(torch.ones(2, 3))

    chain = _Chain(task, torch.ones(2, 3), 3, split_points=["layers.1", "layers.2"])

    assert torch.allclose(chain.run(torch.ones(2, 3)), expected)
    table = chain.stage_graphs[1].receives[-1].value
    arrivals = [
        transfer for stage_graph in chain.stage_graphs for transfer in stage_graph.receives if transfer.value == table
    ]
    assert [(transfer.source, transfer.differentiable) for transfer in arrivals] == [(0, True), (1, True)]
    assert table in chain.stage_graphs[1].cloned
