"""Training by a strategy without a Trainer, and the same training by one process."""

import copy
from itertools import chain

import torch
import torch.distributed as dist
from trainkit.strategies.pipeline.plan.planner import TraceInput, TrainingStep, plan_steps, trace_expanding
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.loops.fit_loop import make_phase_step
from trainkit.optim.optimizer import GradientClipping, configure_optimizers
from trainkit.optim.precision import Precision
from trainkit.phases import PhaseControl
from trainkit.task import has_phases
from trainkit.tree import map_tensors


def plan(task, step, batch, *, num_stages, costs="measured", **settings):
    """Return the graph and the partition of a task with one step."""
    planned = plan_steps([TraceInput(task, TrainingStep(step), batch, costs)], num_stages=num_stages, **settings)
    return planned.whole, planned.partition


def finest_graph(task, batch):
    """Return the graph of a task's step with as many nodes as possible."""
    trace_input = TraceInput(task, TrainingStep(task.training_step), batch, "estimated")
    survey = trace_input.trace(frozenset())
    return trace_expanding(trace_input, survey, limit=0.0, expanded=frozenset(), changed=frozenset())


def step_batches(model, *, sizes, num_steps, replica=0, num_replicas=1, dtype=torch.float64, seed=5):
    """Return step batches with micro-batches of `sizes` samples, all replicas' or one's."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_steps):
        batches = [model.batch(size, generator) for size in sizes]
        mine = [
            MicroBatch(_cast(batch, dtype), size)
            for index, (batch, size) in enumerate(zip(batches, sizes, strict=True))
            if index % num_replicas == replica
        ]
        found.append(StepBatch(mine, sum(sizes), sum(sizes), False))
    return found


def _cast(batch, dtype):
    return map_tensors(batch, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class Training:
    """A task under a strategy, step by step."""

    def __init__(self, task, strategy, *, precision="fp64", clip=None):
        self.task, self.strategy = task, strategy
        self.precision = Precision(precision)
        strategy.setup(self.precision)
        strategy.prepare(task)
        self.phase_optimizers = configure_optimizers(
            task, clip=GradientClipping(norm=clip), precision=self.precision, total_steps=100, fused=False, skip=False
        )
        for phase_optimizer in self.phase_optimizers:
            strategy.prepare_optimizer(task, phase_optimizer)
        self.phase_optimizer = self.phase_optimizers[0]
        steps = [make_phase_step(task, strategy, phase_optimizer) for phase_optimizer in self.phase_optimizers]
        self.control = PhaseControl(steps) if has_phases(task) else None
        self.losses = []
        self.norms = []

    def step(self, step_batch):
        if self.control is not None:
            return self._step_phases(step_batch)
        outputs = self.strategy.forward_backward(self.task, step_batch)
        self.losses.append([float(output.loss) for output in outputs])
        return outputs, self.strategy.optimizer_step(self.phase_optimizer)

    def _step_phases(self, step_batch):
        control = self.control
        control.begin(step_batch, num_steps=len(self.losses))
        if self.task.manual:
            self.task.manual_step(control)
        for phase_optimizer in [] if self.task.manual else self.phase_optimizers:
            if control.due(phase_optimizer.phase):
                control.backward(phase_optimizer.phase)
                control.step(phase_optimizer.phase)
        self.losses.append([float(output.loss) for output in control.outputs])
        self.norms.append({phase: float(norm) for phase, norm in control.norms.items()})
        return control.outputs, None

    def run(self, steps):
        for step_batch in steps:
            self.step(step_batch)
        return self

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.strategy.state_dict(self.task).items()}


def make(model, seed=0, **settings):
    torch.manual_seed(seed)
    return model(**settings)


def largest_difference(first, second):
    assert first.keys() == second.keys()
    return max(
        float((first[name].double() - second[name].double()).abs().max()) for name in first if first[name].numel()
    )


def compare(model, *, sizes, num_steps=4, precision="fp64", clip=None, replicas=1, settings=None, **pipeline):
    """Return the largest difference of weights and losses between a pipeline of all ranks and one process."""
    settings = settings or {}
    dtype = torch.float64 if precision == "fp64" else torch.float32
    task = make(model, **settings)
    single = copy.deepcopy(task)
    strategy = PipelineStrategy(stages=dist.get_world_size() // replicas, replicas=replicas, **pipeline)
    training = Training(task, strategy, precision=precision, clip=clip)
    mine = step_batches(
        model, sizes=sizes, num_steps=num_steps, replica=strategy.comm.rank, num_replicas=replicas, dtype=dtype
    )
    training.run(mine)
    weights = training.weights()
    strategy.teardown()
    if dist.get_rank():
        return None
    reference = Training(single, SingleStrategy(device="cpu"), precision=precision, clip=clip)
    reference.run(step_batches(model, sizes=sizes, num_steps=num_steps, dtype=dtype))
    difference = largest_difference(weights, reference.weights())
    if replicas == 1:
        losses = torch.tensor([*chain(*training.losses)]) - torch.tensor([*chain(*reference.losses)])
        difference = max(difference, float(losses.abs().max()))
    assert [norms.keys() for norms in training.norms] == [norms.keys() for norms in reference.norms]
    for norms, expected in zip(training.norms, reference.norms, strict=True):
        difference = max(difference, *(abs(norm - expected[phase]) for phase, norm in norms.items()), 0.0)
    return difference
