"""Tasks with phases in a pipeline: every phase's step is partitioned at the same parameters."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from trainkit.strategies.pipeline.plan.merged_graph import merge_graphs
from trainkit.strategies.pipeline.plan.partition import partition
from trainkit.strategies.pipeline.plan.planner import TraceInput, TrainingStep, plan_steps
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.pipeline.trace.graph import (
    RETURN,
    CutConstraint,
    Node,
    NodeCost,
    NodeOutput,
    TracedGraph,
    Value,
)
from trainkit.strategies.pipeline.trace.tracer import trace

from tests.strategies.pipeline.models import Mlp
from tests.strategies.pipeline.recipe_models import SmallGAN
from tests.strategies.pipeline.training import Training, compare, make, step_batches
from trainkit import Phase, TaskModule
from trainkit.errors import UserError
from trainkit.testing import run_ranks

SIZES = [4, 4, 4, 3]


def _differences(cases):
    return [compare(model, sizes=SIZES, **settings) for model, settings in cases]


class Elsewhere(TaskModule):
    """A phase that uses both networks, one that uses the second alone, and one that uses the first alone."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))
        self.second = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.third = nn.Linear(6, 6)

    @staticmethod
    def batch(size, generator):
        return (torch.randn(size, 6, generator=generator),)

    def first_step(self, batch):
        return self.second(self.first(batch[0])).square().mean()

    def second_step(self, batch):
        return {"loss": (self.second(batch[0]) - 1).square().mean(), "weight": float(len(batch[0]))}

    def third_step(self, batch):
        return (self.third(self.first(batch[0])) - batch[0]).square().mean()

    def configure_phases(self):
        return [
            Phase("first", SGD(self.first.parameters(), lr=0.1, momentum=0.9), max_grad_norm=0.1),
            Phase("second", SGD(self.second.parameters(), lr=0.1)),
            Phase("third", SGD(self.third.parameters(), lr=0.1), every=3),
        ]


class WithoutStatistics(Elsewhere):
    """Normalizes each sample by itself: batch statistics would differ between replicas."""

    def __init__(self):
        super().__init__()
        self.first[1] = nn.LayerNorm(8)


class OutOfTurn(Elsewhere):
    """Takes gradients of one phase before the step of another."""

    manual = True

    def manual_step(self, control):
        control.backward("second")
        control.backward("first")
        control.step("first")
        control.step("second")
        for _ in range(2):
            control.backward("third")
        control.step("third")


def _in_two_stages(cases):
    differences = _differences(cases)
    training = Training(make(Elsewhere), PipelineStrategy(stages=2, split_points=["second"]))
    training.run(step_batches(Elsewhere, sizes=SIZES, num_steps=2))
    names = {id(parameter): name for name, parameter in training.task.named_parameters()}
    stated = {
        names[id(parameter)].split(".")[0]
        for phase_optimizer in training.phase_optimizers
        for parameter in phase_optimizer.optimizer.state
    }
    with pytest.raises(UserError) as refused:
        training.control.backward("second", step="first_step")
    training.strategy.teardown()
    return differences, stated, str(refused.value)


@pytest.mark.slow
def test_phases_in_two_stages_have_the_weights_of_one_process_and_state_where_their_parameters_are():
    cases = [
        (SmallGAN, {}),
        (SmallGAN, {"schedule": "gpipe", "clip": 0.3}),
        (SmallGAN, {"schedule": "interleaved_1f1b", "num_steps": 3}),
        (Elsewhere, {"split_points": ["second"]}),
        (OutOfTurn, {"split_points": ["second"], "clip": 0.3, "num_steps": 3}),
    ]

    (differences, first, refused), (_, second, _) = run_ranks(_in_two_stages, 2, cases, timeout=150)

    assert max(differences) <= 1e-10, differences
    assert first == {"first"} and second == set()  # SGD without momentum has no state
    assert "by first_step, but a pipeline partitions the task by second_step" in refused


@pytest.mark.slow
def test_phases_in_stages_with_copies_and_in_single_precision_have_the_weights_of_one_process():
    doubles = [
        (SmallGAN, {"replicas": 2, "clip": 0.3}),
        (WithoutStatistics, {"replicas": 2, "split_points": ["second"]}),
    ]
    singles = [(SmallGAN, {"precision": "fp32", "schedule": schedule}) for schedule in ("1f1b", "gpipe")]
    singles += [(SmallGAN, {"precision": "fp16-mixed", "clip": 0.3})]  # of which a step overflows

    differences = run_ranks(_differences, 4, doubles + singles, timeout=150)[0]

    assert max(differences[:2]) <= 1e-10 and max(differences[2:]) <= 1e-6, differences


def _step(*leaf_modules, constraints=()):
    """Return a graph of leaf modules in a row, each with a parameter of the same name and three seconds of time."""
    nodes = []
    for index, name in enumerate(leaf_modules):
        node = Node(index, name, True, "", "here", inputs=(index - 1,) if index else ())
        node.outputs = (NodeOutput(index, True),)
        node.parameters = (f"{name}.weight",)
        node.cost = NodeCost(forward_seconds=1.0, backward_seconds=2.0)
        nodes.append(node)
    nodes.append(Node(len(nodes), RETURN, False, "", "the end", inputs=(len(nodes) - 1,)))
    values = [Value((4,), torch.float32, False) for _ in leaf_modules]
    sizes = {f"{name}.weight": 4 for name in "abcde"}
    return TracedGraph(nodes, values, list(constraints), sizes)


def _stages(steps, cuts):
    found = {}
    for step, cut in zip(steps, cuts, strict=True):
        for node in step.nodes:
            for name in node.parameters:
                found.setdefault(name.removesuffix(".weight"), set()).add(cut.stage_of(node.index))
    return found


def test_every_parameter_is_in_one_stage_in_all_steps_and_the_sum_of_their_costs_is_balanced():
    steps = [_step("a", "b", "c", "d"), _step("c", "d", "e", "c"), _step("b", "e")]
    merged = merge_graphs(steps, [1.0, 1.0, 1.0])

    for num_stages in (2, 3):
        whole = partition(merged.graph, num_stages=num_stages, shared_parameters="replicated")
        cuts = merged.partitions(whole, steps)

        stages = _stages(steps, cuts)
        assert all(len(found) == 1 for found in stages.values()), stages
        assert stages["c"] == stages["d"] == stages["e"] == {num_stages - 1}  # between two uses of c
        assert stages["a"] == {0}
        assert all(cut.cuts == tuple(sorted(cut.cuts)) for cut in cuts)
        assert all(cut.cuts[-1] < len(step.nodes) for cut, step in zip(cuts, steps, strict=True))
    assert [len(places) for places in merged.places] == [5, 5, 3]
    (reason,) = (
        constraint.reason for constraint in merged.graph.constraints if constraint.last - constraint.first == 6
    )
    assert reason.startswith("'c.weight' is used by module 'c'")


def test_a_step_that_is_made_less_often_counts_less():
    steps = [_step("a", "b", "c", "d"), _step("a")]

    often = partition(merge_graphs(steps, [1.0, 3.0]).graph, num_stages=2, shared_parameters="replicated")
    seldom = merge_graphs(steps, [1.0, 0.01])

    assert often.cuts == (2,)
    assert partition(seldom.graph, num_stages=2, shared_parameters="replicated").cuts == (3,)
    assert [node.cost.backward_seconds for node in seldom.graph.nodes[:2]] == [2.0, 0.02]


def test_stages_keep_the_memory_of_the_heaviest_step_alone():
    bond = [CutConstraint(0, 1, "they talk")]
    for constraints, kept in (((), [30, 0, 0, 20, 0, 0]), (bond, [30, 5, 0, 0, 0, 0])):
        steps = [_step("a", "b", constraints=constraints), _step("a", "b")]
        for step, sizes in zip(steps, ([30.0, 5.0, 0.0], [10.0, 20.0, 0.0]), strict=True):
            for node, size in zip(step.nodes, sizes, strict=True):
                node.cost.activation_bytes = size
        merged = merge_graphs(steps, [1.0, 1.0])
        assert [node.cost.activation_bytes for node in merged.graph.nodes] == kept


def test_steps_that_use_modules_in_opposite_orders_cannot_be_split_between_them():
    merged = merge_graphs([_step("a", "b"), _step("b", "a")], [1.0, 1.0])

    with pytest.raises(UserError, match=r"at most 1 stages.*module '[ab]'.*module '[ab]'.*in different orders"):
        partition(merged.graph, num_stages=2, shared_parameters="replicated")


def test_a_bond_of_one_step_holds_in_all():
    steps = [
        _step("a", "b", "c", constraints=[CutConstraint(1, 2, "they talk", "Let them be quiet.")]),
        _step("b", "c"),
    ]
    merged = merge_graphs(steps, [1.0, 1.0])

    assert merged.partitions(partition(merged.graph, num_stages=2, shared_parameters="replicated"), steps)[1].cuts == (
        0,
    )
    with pytest.raises(UserError, match=r"they talk.*Let them be quiet\."):
        partition(merged.graph, num_stages=3, shared_parameters="replicated")


def test_a_write_to_the_memory_of_the_batch_keeps_all_before_it_in_one_stage():
    steps = [_step("a", "b", "c", constraints=[CutConstraint(-1, 1, "writes to the batch")]), _step("c")]
    merged = merge_graphs(steps, [1.0, 1.0])

    assert partition(merged.graph, num_stages=2, shared_parameters="replicated").cuts == (2,)


class _Penalised(Mlp):
    """Asks for the slope of its last layers."""

    def training_step(self, batch):
        hidden = self.net[:6](batch[0]).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net[6:](hidden).sum(), hidden, create_graph=True)
        return slope.square().mean()


def test_what_a_gradient_is_asked_for_of_is_in_one_stage():
    task = _Penalised()
    leaf_modules = frozenset(name for name, module in task.named_modules() if name and not list(module.children()))

    graph = trace(task, task.training_step, _Penalised.batch(4, torch.Generator()), leaf_modules=leaf_modules).graph

    (constraint,) = graph.constraints
    names = [node.name for node in graph.nodes]
    assert names[constraint.last] == "autograd.grad" and names[constraint.first] in ("net.5", "detach")
    made = graph.nodes[constraint.last].outputs
    assert [output.requires_grad for output in made] == [True]


class _Leaves(Elsewhere):
    """Keeps what one phase made for another."""

    def first_step(self, batch):
        self.kept = self.first(batch[0])
        return self.second(self.kept).square().mean()

    def second_step(self, batch):
        return (self.second(self.kept.detach()) - 1).square().mean()


def test_a_tensor_that_one_phase_leaves_for_another_is_an_error():
    task = _Leaves()
    batch = _Leaves.batch(4, torch.Generator())
    trace_inputs = [
        TraceInput(task, TrainingStep(step), batch, "estimated") for step in (task.first_step, task.second_step)
    ]

    with pytest.raises(UserError, match=r"`detach`.*uses a tensor that the step of another phase has left behind"):
        plan_steps(trace_inputs, num_stages=2, balance=0.0, split_points=None, shared_parameters="auto")
