"""Code that the step runs inside torch.utils.checkpoint, in modules and between them, when backward runs it again."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.strategies.pipeline.models import Mlp
from tests.strategies.pipeline.training import Training, make, plan, step_batches
from trainkit.errors import UserError
from trainkit.testing import run_ranks

CUTS = ("net.7",)


class _Checkpointed(Mlp):
    """Draws random numbers in leaf modules and in the step itself, in checkpoints before and after the split point."""

    reentrant = False

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def training_step(self, batch):
        hidden = self.net[0](batch[0])
        for start, stop in ((1, 4), (4, 7), (7, 13)):
            run = functools.partial(self.part, start, stop)
            hidden = checkpoint(run, hidden, use_reentrant=self.reentrant)
        return functional.cross_entropy(self.net[13:](hidden), batch[1])

    def part(self, start, stop, hidden):
        for layer in self.net[start:stop]:
            hidden = layer(hidden)
        hidden = functional.dropout(self.drop(hidden).tanh(), 0.3, True)
        return self.drop(hidden + torch.rand_like(hidden)) * torch.rand(hidden.shape[1], dtype=hidden.dtype)


class _Reentrant(_Checkpointed):
    reentrant = True


def _slope_and_norm(model, cuts):
    """Return the loss, its slope along the gradient, and the gradient's norm, which equals the slope if masks do."""
    strategy = PipelineStrategy(stages=dist.get_world_size(), device="cpu", split_points=cuts)
    training = Training(make(model), strategy)
    (step_batch,) = step_batches(model, sizes=[3, 4, 2], num_steps=1)
    parameters = [p for p in training.task.parameters() if p.requires_grad]

    def loss(length=0.0):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                if direction is not None:
                    parameter.add_(direction, alpha=length)
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(1)
        outputs = strategy.forward_backward(training.task, step_batch)
        return sum(float(output.loss) * output.weight for output in outputs) / 9

    directions = [None for _ in parameters]
    loss()  # partitions the task
    middle = loss()
    norm = float(strategy._grad_norm(training.phase_optimizer))
    directions = [None if p.grad is None else p.grad / norm for p in parameters]
    step = 1e-5
    high = loss(step)
    low = loss(-2 * step)
    return middle, (high - low) / (2 * step), norm


@functools.cache
def _found(num_stages, model=_Checkpointed, cuts=CUTS):
    return run_ranks(_slope_and_norm, num_stages, model, cuts if num_stages > 1 else None)[0]


@pytest.mark.parametrize(("model", "cuts"), [(_Checkpointed, CUTS), (_Reentrant, ("net.13",))])
def test_what_a_checkpoint_runs_again_draws_the_numbers_of_the_first_time(model, cuts):
    _, slope, norm = _found(2, model, cuts)

    assert slope == pytest.approx(norm, rel=1e-6)


def test_what_is_drawn_in_a_checkpoint_does_not_depend_on_the_number_of_stages():
    assert _found(2)[0] == pytest.approx(_found(1)[0], rel=1e-12)


def _plan(task, **settings):
    batch = _Checkpointed.batch(4, torch.Generator().manual_seed(0))
    return plan(task, task.training_step, batch, num_stages=2, costs="estimated", **settings)


def test_no_stage_begins_inside_a_checkpoint():
    graph, _ = _plan(_Checkpointed())

    regions = [node.checkpoint for node in graph.nodes]
    assert {0, 1, 2} <= set(regions)
    with pytest.raises(UserError, match=r"cannot begin at module 'net.8'.*one checkpoint runs .* again in backward"):
        _plan(_Checkpointed(), split_points=["net.8"])


def test_a_reentrant_checkpoint_in_the_step_itself_is_one_node():
    graph, _ = _plan(_Reentrant(), split_points=["net.13"])

    checkpoints = [node for node in graph.nodes if node.name == "CheckpointFunction.apply"]
    assert len(checkpoints) == 3
    assert checkpoints[0].parameters == ("net.1.weight", "net.1.bias")
    with pytest.raises(UserError, match=r"'net.7', which is called inside `CheckpointFunction.apply`.*one node"):
        _plan(_Reentrant(), split_points=["net.7"])
