"""Training of a task with state under a pipeline and in one process, compared."""

import copy
from collections import deque

import torch.distributed as dist
from torch import Tensor
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.strategies.pipeline.training import Training, make, step_batches


def difference(model, *, num_steps=4, sizes=(4, 4, 4, 4), **settings):
    """Return the largest difference of weights, buffers and attributes on any rank from those of one process."""
    task, alone = make(model).double(), make(model).double()
    strategy = PipelineStrategy(stages=dist.get_world_size(), device="cpu", **settings)
    training = Training(task, strategy)
    training.run(step_batches(model, sizes=sizes, num_steps=num_steps))
    saved = copy.deepcopy(strategy.state_dict(task))
    strategy.final_state_dict(task)  # leaves the whole task on every rank
    strategy.teardown()
    reference = Training(alone, SingleStrategy(device="cpu"))
    reference.run(step_batches(model, sizes=sizes, num_steps=num_steps))
    expected = alone.state_dict()
    found = [
        largest_difference(task.state_dict(), expected),
        largest_difference(task.observations(), alone.observations()),
    ]
    if dist.get_rank() == 0:
        found.append(largest_difference(saved, expected))
    return max(found)


def largest_difference(found, expected):
    """Return the largest difference of numbers in two nested values; infinity for another structure."""
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            return float("inf")
        return float((found.detach().double() - expected.detach().double()).abs().max()) if found.numel() else 0.0
    if isinstance(expected, (int, float)):
        return abs(found - expected) if isinstance(found, (int, float)) else float("inf")
    if isinstance(expected, (list, tuple, deque)):
        same = isinstance(found, type(expected)) and len(found) == len(expected)
        return max(map(largest_difference, found, expected), default=0.0) if same else float("inf")
    if isinstance(expected, dict):
        same = found.keys() == expected.keys()
        return (
            max((largest_difference(found[k], v) for k, v in expected.items()), default=0.0) if same else float("inf")
        )
    return 0.0 if found == expected else float("inf")
