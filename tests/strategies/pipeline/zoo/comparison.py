"""Training of a task of the zoo in stages and in one process, compared."""

import copy
from collections import deque
from itertools import pairwise

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from trainkit.strategies.pipeline.plan.partition import Partition, candidates, crossing_bytes
from trainkit.strategies.pipeline.plan.schedules import BACKWARD, FORWARD, Action
from trainkit.strategies.pipeline.plan.stage import owners, stage_graphs
from trainkit.strategies.pipeline.run.communication import StageChannel
from trainkit.strategies.pipeline.run.runtime import StepRun
from trainkit.strategies.pipeline.run.stage_executor import StageExecutor
from trainkit.strategies.pipeline.run.verification import FirstStepCheck
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.pipeline.trace.attributes import StageAttributes
from trainkit.strategies.pipeline.trace.graph import signature, tensors
from trainkit.strategies.single import SingleStrategy

from tests.strategies.pipeline.training import Training, finest_graph, make, step_batches
from trainkit.errors import UserError
from trainkit.strategy import named_state

# ---- On several ranks


def difference(build, *, num_steps=4, sizes=(4, 4, 4, 4), **settings):
    """Return the largest difference of weights, buffers and attributes on any rank from those of one process."""
    task, alone = make(build).double(), make(build).double()
    strategy = PipelineStrategy(stages=dist.get_world_size(), device="cpu", **settings)
    training = Training(task, strategy)
    training.run(step_batches(task, sizes=sizes, num_steps=num_steps))
    saved = copy.deepcopy(strategy.state_dict(task))
    strategy.final_state_dict(task)  # leaves the whole task on every rank
    strategy.teardown()
    reference = Training(alone, SingleStrategy(device="cpu"))
    reference.run(step_batches(alone, sizes=sizes, num_steps=num_steps))
    expected = alone.state_dict()
    found = [
        largest_difference(task.state_dict(), expected),
        largest_difference(observations(task), observations(alone)),
    ]
    if dist.get_rank() == 0:
        found.append(largest_difference(saved, expected))
    return max(found)


def observations(task):
    """Return the attributes of a task of the zoo that must be those of one process; other tasks have none."""
    return task.observations() if hasattr(task, "observations") else {}


# ---- In this process

SIZES = (3, 2)
"""Samples of the micro-batches of a step; the second one is short."""


def batches_of(task, *, num_steps=2):
    """Return the batches of the micro-batches of each step."""
    steps = step_batches(task, sizes=SIZES, num_steps=num_steps)
    return [[micro_batch.batch for micro_batch in step.micro_batches] for step in steps]


def places(graph):
    """Return the nodes that may begin a stage."""
    return candidates(graph, graph.constraints, crossing_bytes(graph))


def spread(found, count):
    """Return at most `count` of the places, evenly spread."""
    stride = max(len(found) / (count + 1), 1.0)
    return sorted({found[min(int(stride * (index + 1)), len(found) - 1)] for index in range(count)}) if found else []


def differences(build, partitions, *, num_steps=2):
    """Return the largest difference of losses, weights, buffers and attributes of each partition to one process.

    `partitions(graph)` returns lists of cuts. All stages are in this process, and so do not have buffers of their own.
    """
    whole = make(build).double()
    steps = batches_of(whole, num_steps=num_steps)
    graph = finest_graph(make(build).double(), steps[0][0])
    expected = _train(whole, copy.deepcopy(steps))
    found = {}
    for cuts in partitions(graph):
        task = make(build).double()
        losses = _train_staged(task, copy.deepcopy(steps), cuts, graph)
        found[", ".join(str(graph.nodes[cut]) for cut in cuts)] = max(
            largest_difference(losses, expected),
            largest_difference(dict(task.state_dict()), dict(whole.state_dict())),
            largest_difference(observations(task), observations(whole)),
        )
    return found


def _optimizer(task):
    trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.5)


def _loss(returned):
    return returned["loss"] if isinstance(returned, dict) else returned


def _train(task, steps):
    optimizer, losses = _optimizer(task), []
    for batches in steps:
        for batch in batches:
            loss = _loss(task.training_step(batch))
            loss.backward()
            losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train_staged(task, steps, cuts, graph):
    bounds = list(pairwise([0, *cuts, len(graph.nodes)]))
    stages = range(len(bounds))
    attributes = StageAttributes(task, owners([(graph, Partition(tuple(cuts), ()))]), stages)
    device = torch.device("cpu")
    graphs = stage_graphs(graph, bounds, [0] * len(bounds))
    executor = StageExecutor(
        graph, task, graphs, traced=signature(tensors(steps[0][0])), device=device, attributes=attributes
    )
    check = FirstStepCheck(task, graph.written | graph.replaced | graph.reset, named_state(task), ())
    optimizer, losses = _optimizer(task), []

    def read_loss(micro_batch, returned):
        losses.append(_loss(returned).detach().clone())
        return _loss(returned)

    for number, batches in enumerate(steps):
        channel = StageChannel(None, rank=0, device=device)
        run = StepRun(channel, executor, task.training_step, batches, 0, read_loss)
        numbers = range(len(batches))
        forwards = [Action(FORWARD, stage, micro_batch) for micro_batch in numbers for stage in stages]
        backwards = [Action(BACKWARD, stage, micro_batch) for micro_batch in numbers for stage in reversed(stages)]
        with executor.interceptor.installed():
            for action in [*forwards, *backwards]:
                run.post(action)
                run.carry_out(action)
        if number == 0:
            check.finish()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def refusal(build, partitions):
    """Return the message with which the task is refused; `None` if it is trained."""
    try:
        differences(build, partitions)
    except UserError as error:
        return str(error)
    return None


# ---- Nested values


def largest_difference(found, expected):
    """Return the largest difference of numbers in two nested values; infinity for another structure."""
    if isinstance(expected, dict):
        same = isinstance(found, dict) and list(found) == list(expected)
        return largest_difference([*found.values()], [*expected.values()]) if same else float("inf")
    if isinstance(expected, (list, tuple, deque)):
        same = isinstance(found, type(expected)) and len(found) == len(expected)
        return max(map(largest_difference, found, expected), default=0.0) if same else float("inf")
    if not isinstance(expected, (Tensor, numpy.ndarray, int, float)):
        return 0.0 if found == expected else float("inf")
    if isinstance(expected, Tensor) != isinstance(found, Tensor) or found is None:
        return float("inf")
    found, expected = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    if found.shape != expected.shape or not found.numel():
        return float("inf") if found.shape != expected.shape else 0.0
    wide = torch.complex128 if found.is_complex() else torch.float64
    return float((found.to(wide) - expected.to(wide)).abs().max())
