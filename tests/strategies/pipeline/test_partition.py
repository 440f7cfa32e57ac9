import copy
from itertools import combinations, pairwise, product
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainkit.strategies.pipeline.plan import planner
from trainkit.strategies.pipeline.plan.partition import (
    SLACK,
    MemoryCosts,
    StageCosts,
    crossing_bytes,
    manual_partition,
    partition,
    replicate_shared,
)
from trainkit.strategies.pipeline.plan.plan_report import PlanReport
from trainkit.strategies.pipeline.plan.profile import estimate
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

from tests.strategies.pipeline.models import Gpt, Mlp, ResNet, UNet
from tests.strategies.pipeline.training import plan
from trainkit.errors import UserError


def _chain(seconds, num_elements, *, constraints=(), shared_parameters=()):
    """Return a graph of leaf modules in a row, each with a parameter; `shared_parameters`: pairs that share one."""
    nodes = []
    for index, (cost, _) in enumerate(zip(seconds, num_elements, strict=True)):
        node = Node(index, f"unit{index}", True, "", "here", inputs=(index - 1,) if index else ())
        node.outputs = (NodeOutput(index, True),)
        node.parameters = (f"weight{index}",)
        node.cost = NodeCost(forward_seconds=cost)
        nodes.append(node)
    for first, second in shared_parameters:
        nodes[second].parameters += (f"weight{first}",)
    nodes.append(Node(len(nodes), RETURN, False, "", "the end", inputs=(len(nodes) - 1,)))
    values = [Value((count,), torch.float32, False) for count in num_elements]
    sizes = {f"weight{index}": 4 for index in range(len(seconds))}
    return TracedGraph(nodes, values, list(constraints), sizes)


def _exhaustive(graph, num_stages, costs, forbidden=()):
    places = [index for index in range(1, len(graph.nodes) - 1) if not any(b.forbids(index) for b in forbidden)]
    return min(costs.slowest(cuts) for cuts in combinations(places, num_stages - 1))


chains = st.lists(st.tuples(st.floats(0.1, 10), st.integers(1, 50)), min_size=5, max_size=11)


@given(chain=chains, num_stages=st.integers(2, 4), balance=st.sampled_from([0.0, 0.5, 1.0]))
def test_the_slowest_stage_is_as_fast_as_that_of_an_exhaustive_search(chain, num_stages, balance):
    graph = _chain(*zip(*chain, strict=True))
    costs = StageCosts.of(graph, num_stages=num_stages, balance=balance)

    found = partition(graph, num_stages=num_stages, balance=balance)

    assert len(found.cuts) + 1 == num_stages
    cost = costs.slowest(found.cuts)
    assert cost <= _exhaustive(graph, num_stages, costs) * (1 + SLACK) * (1 + 1e-9)


def test_among_equally_good_partitions_the_one_with_fewest_bytes_is_chosen():
    graph = _chain([1, 1, 0.001, 1, 1], [9, 9, 1, 9, 9])

    assert partition(graph, num_stages=2).cuts == (3,)
    assert crossing_bytes(graph)[:5] == [0, 36, 36, 4, 36]


def test_no_cut_violates_a_constraint():
    graph = _chain([1, 1, 1, 1], [1] * 4, constraints=[CutConstraint(1, 2, "they talk")])

    assert partition(graph, num_stages=2).cuts in {(1,), (3,)}
    with pytest.raises(UserError, match=r"at most 3 stages.*they talk"):
        partition(graph, num_stages=4)


def test_users_of_a_shared_parameter_stay_together_where_it_costs_little():
    graph = _chain([1, 0.1, 0.1, 1], [1] * 4, shared_parameters=[(1, 2)])

    found = partition(graph, num_stages=2)

    assert found.replicated == () and found.cuts in {(1,), (3,)}


def test_a_shared_parameter_is_replicated_where_keeping_it_together_costs_much():
    graph = _chain([1, 1, 1, 1], [1] * 4, shared_parameters=[(0, 3)])

    found = partition(graph, num_stages=2)

    assert found.cuts == (2,) and found.replicated == ("weight0",)


def test_balance_trades_time_for_memory():
    graph = _chain([8, 1, 1, 1, 1, 1], [1] * 6)
    graph.parameter_bytes = {f"weight{index}": 1000 if index > 3 else 1 for index in range(6)}

    assert partition(graph, num_stages=2, balance=0.0).cuts == (1,)
    assert partition(graph, num_stages=2, balance=1.0).cuts == (5,)


def test_early_stages_hold_the_activations_of_more_micro_batches():
    graph = _chain([1] * 6, [1] * 6)
    for node in graph.nodes[:-1]:
        node.cost.activation_bytes = 1000.0

    memory = MemoryCosts([2, 1], {})
    assert partition(graph, num_stages=2, balance=1.0, memory=memory).cuts == (2,)  # 2 micro-batches x 2 nodes, 1 x 4
    memory = MemoryCosts([4, 4], {})
    assert partition(graph, num_stages=2, balance=1.0, memory=memory).cuts == (3,)  # as with gpipe


@pytest.mark.parametrize("model", [Gpt, ResNet, UNet])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_partition_is_within_5_percent_of_the_best_one_between_nodes(model, num_stages):
    task = model()
    survey = trace(task, task.training_step, model.batch(4, torch.Generator()), leaf_modules=frozenset())
    leaf_modules = frozenset(name for name, call in survey.module_calls.items() if name and not call.callees)
    graph = trace(task, task.training_step, model.batch(4, torch.Generator()), leaf_modules=leaf_modules).graph
    estimate(graph)
    costs = StageCosts.of(graph, num_stages=num_stages, balance=0.0)

    found = partition(graph, num_stages=num_stages)

    best = _best(graph, num_stages, costs)
    assert costs.slowest(found.cuts) <= 1.05 * best


def _best(graph, num_stages, costs):
    """Return the cost of the slowest stage when any node may begin one: bisection over limits, filled greedily."""
    nodes = len(graph.nodes)
    single = [costs(0, index, index + 1) for index in range(nodes)]
    low, high = max(single), sum(single)
    for _ in range(60):
        middle = (low + high) / 2
        stages, filled = 1, 0.0
        for cost in single:
            if filled + cost > middle:
                stages, filled = stages + 1, 0.0
            filled += cost
        low, high = (low, middle) if stages <= num_stages else (middle, high)
    return high


def test_users_of_a_shared_parameter_are_in_one_stage_or_have_copies():
    graph = _chain([1, 1, 1, 1], [1] * 4, shared_parameters=[(0, 2)])

    together = partition(graph, num_stages=2, shared_parameters="same_stage")
    replicated = partition(graph, num_stages=2, shared_parameters="replicated")

    assert (together.cuts, together.replicated) == ((3,), ())
    assert (replicated.cuts, replicated.replicated) == ((2,), ("weight0",))
    with pytest.raises(
        UserError, match=r"at most 2 stages.*'weight0' must be in one stage; strategy.shared_parameters=auto"
    ):
        partition(graph, num_stages=3, shared_parameters="same_stage")


def _plan(model, *, sizes=None, **settings):
    task = model(**(sizes or {}))
    return plan(task, task.training_step, model.batch(4, torch.Generator()), costs="estimated", **settings)


def test_split_points_begin_stages_at_the_named_modules():
    graph, found = _plan(Gpt, num_stages=3, split_points=["blocks.1", "head"], shared_parameters="replicated")

    assert [graph.nodes[cut].name for cut in found.cuts] == ["blocks.1", "head"]
    assert found.replicated == ("tokens.weight",)


def _split_at(graph, *split_points):
    return manual_partition(graph, split_points, num_stages=len(split_points) + 1, shared_parameters="auto").cuts


def test_a_split_point_takes_calls_along_that_must_be_in_its_stage_but_no_module_and_no_parameter():
    constraints = [CutConstraint(2, 3, "they share memory"), CutConstraint(1, 2, "they talk")]
    graph = _chain([1] * 5, [1] * 5, constraints=constraints)
    for node in graph.nodes[1:3]:
        node.is_leaf_module, node.parameters = False, ()

    assert _split_at(graph, "unit3") == (1,)
    assert _split_at(graph, "unit3", "unit4") == (1, 4)
    for index, changes in product((1, 2), ({"is_leaf_module": True}, {"parameters": ("weight",)})):
        other = copy.deepcopy(graph)
        for name, value in changes.items():
            setattr(other.nodes[index], name, value)
        with pytest.raises(UserError, match=r"a stage cannot begin at module 'unit3'.*they (share memory|talk)"):
            _split_at(other, "unit3")


@pytest.mark.parametrize("first", [-1, 0, 1])
def test_a_split_point_takes_no_calls_along_up_to_the_split_point_before(first):
    graph = _chain([1] * 5, [1] * 5, constraints=[CutConstraint(first, 3, "they talk")])
    for node in graph.nodes[:3]:
        node.is_leaf_module, node.path, node.parameters = False, node.name, ()

    with pytest.raises(UserError, match=r"a stage cannot begin at module 'unit3'.*they talk"):
        _split_at(graph, *(["unit1", "unit3"] if first == 1 else ["unit3"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_stages": 2, "split_points": ["block.2"]}, "Did you mean 'blocks.2'"),
        ({"num_stages": 3, "split_points": ["blocks.2"]}, "Type strategy.stages=2"),
        ({"num_stages": 3, "split_points": ["blocks.2", "blocks.1"]}, "in the order"),
        ({"num_stages": 200}, r"at most .* stages"),
        (
            {"num_stages": 2, "split_points": ["blocks.2"]},
            r"users of the parameter 'tokens.weight'.*Type strategy.shared_parameters=replicated"
            r".*before .*tokens.* or after",
        ),
        (
            {"num_stages": 2, "split_points": ["blocks.2"], "shared_parameters": "same_stage"},
            "between users of the parameter",
        ),
    ],
)
def test_impossible_partitions_are_errors_with_the_remedy(settings, message):
    with pytest.raises(UserError, match=message):
        _plan(Gpt, **settings)


def test_modules_are_expanded_only_where_balance_needs_it():
    graph, _ = _plan(Mlp, num_stages=2)
    coarse, _ = _plan(Gpt, num_stages=2, sizes={"width": 64, "depth": 8})
    fine, _ = _plan(Gpt, num_stages=5, sizes={"width": 64, "depth": 8})

    assert "net" not in {node.name for node in graph.nodes}
    assert "blocks.1" in {node.name for node in coarse.nodes}
    assert len(fine.nodes) > len(coarse.nodes)


def test_a_step_is_traced_once_for_the_same_leaf_modules(monkeypatch):
    traced = Mock(wraps=trace)
    monkeypatch.setattr(planner, "trace", traced)

    _plan(Gpt, num_stages=5)

    choices = [call.kwargs["leaf_modules"] for call in traced.call_args_list]
    assert len(choices) == len(set(choices)) > 1


def test_the_plan_prints_every_stage_with_what_it_costs():
    graph, found = _plan(Gpt, num_stages=2, split_points=["blocks.2"], shared_parameters="replicated")

    shown = PlanReport.of(graph, found, bubble=0.2)

    lines = str(shown).splitlines()
    assert lines[0].split() == ["stage", "from", "to", "modules", "parameters", "time", "received"]
    assert lines[1].split()[:2] == ["0", "tokens"]
    assert "slowest stage" in lines[3] and "estimated" in lines[3]
    assert "tokens.weight" in lines[4]
    assert sum(stage.share for stage in shown.stages) == pytest.approx(1.0)
    assert shown.stages[1].received_bytes == 4 * 8 * 16 * 4
    assert shown.predicted_bubble >= 0.2


def test_stages_cover_the_step_without_gaps():
    graph, found = _plan(UNet, num_stages=4)

    bounds = found.bounds(len(graph.nodes))

    assert bounds[0][0] == 0 and bounds[-1][1] == len(graph.nodes)
    assert all(first[1] == second[0] for first, second in pairwise(bounds))
    assert replicate_shared(graph, found.cuts) == found


@pytest.mark.parametrize("model", [Gpt, UNet])
def test_times_are_measured_where_the_step_can_be_run_again(model):
    task = model()

    graph, _ = plan(task, task.training_step, model.batch(4, torch.Generator()), num_stages=2)

    expensive = [node for node in graph.nodes if node.cost.flops]
    assert graph.measured
    assert all(node.cost.forward_seconds > 0 and node.cost.backward_seconds > 0 for node in expensive)
