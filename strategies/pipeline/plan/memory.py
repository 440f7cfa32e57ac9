"""Memory of the ranks of a pipeline: parameters, gradients, optimizer state, and activations saved for backward."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.strategy import named_state

from ..trace.graph import TracedGraph, num_bytes, tensors
from .partition import Partition
from .schedules import AHEAD, BACKWARD, FORWARD, Action, Schedule
from .stage import owners_of, place_parameters, stage_graphs

ASSUMED_STATES = 2
"""State tensors per parameter of an optimizer that is neither torch's nor trainkit's and has no state yet."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank in training, in bytes, at its peak; without batches and the workspaces of kernels."""

    rank: int
    parameters: int
    """Parameters and buffers."""
    gradients: int
    optimizer: int
    activations: int
    """Values that backward needs of the micro-batches in flight."""
    messages: int
    """Values and gradients on their way from or to other ranks, and gradients of one backward that are not kept."""
    in_flight: int
    """Most micro-batches between forward and backward; one in two stages of a rank counts twice."""

    @property
    def peak(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.messages


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Memory that training keeps for each parameter, and the number of micro-batches of a step."""

    gradients: Mapping[str, Mapping[str, int]]
    """By step key: the bytes of the gradient of each parameter that the step trains."""
    optimizer: Mapping[str, int]
    """Bytes of the optimizers' state of each parameter."""
    num_micro_batches: int
    keeps_gradients: bool
    """True if gradients stay in memory between steps: those in the buckets of replicas."""
    optimizer_shards: int = 1
    """Number of replicas over which the optimizers' state is divided."""

    @classmethod
    def of(
        cls,
        task: nn.Module,
        optimizers: Mapping[str, PhaseOptimizer],
        *,
        num_micro_batches: int,
        replicas: int,
        shard_optimizer: bool,
    ) -> TrainingMemory:
        """Return the memory of a task whose steps are those of `optimizers`, by step key."""
        # By identity: optimizers know no names. Parameters that are not the task's are on no stage, and do not count.
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        gradients: dict[str, dict[str, int]] = {}
        states: dict[str, int] = defaultdict(int)
        for key, phase_optimizer in optimizers.items():
            # Another phase may train the same parameter: it has one gradient, but a state in each optimizer.
            trained = [parameter for parameter in phase_optimizer.parameters if id(parameter) in names]
            gradients[key] = {names[id(parameter)]: num_bytes(parameter) for parameter in trained}
            sizes = state_bytes(phase_optimizer.optimizer)
            for parameter in trained:
                states[names[id(parameter)]] += sizes[parameter]
        return cls(gradients, dict(states), num_micro_batches, replicas > 1, replicas if shard_optimizer else 1)

    def of_gradients(self) -> dict[str, int]:
        """Return the bytes of the gradient of each trained parameter."""
        return {name: size for step in self.gradients.values() for name, size in step.items()}

    def of_parameters(self, names: Iterable[str]) -> dict[str, int]:
        """Return the bytes of gradient and optimizer state of each parameter."""
        gradients = self.of_gradients()
        return {name: gradients.get(name, 0) + self.optimizer.get(name, 0) // self.optimizer_shards for name in names}


def state_bytes(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the bytes of state that an optimizer has for each of its parameters from its first step on.

    One of torch or trainkit makes that step on the meta device, without memory. Of others the present state counts, and
    before there is one, `ASSUMED_STATES` tensors like the parameter.
    """
    # The step of any other optimizer is code of the user, which may do more than a step.
    is_known = type(optimizer).__module__.partition(".")[0] in ("torch", "trainkit")
    sizes = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = _state_after_step(optimizer, group, parameter) if is_known else None
            state = state if state is not None else optimizer.state.get(parameter)
            assumed = ASSUMED_STATES * num_bytes(parameter)
            sizes[parameter] = assumed if state is None else sum(map(num_bytes, tensors(state)))
    return sizes


def _state_after_step(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> Any:
    """Return the state of a parameter after a step on the meta device, or `None` if the optimizer cannot make one."""
    on_meta = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    on_meta.grad = torch.empty_like(on_meta)
    # Not by the constructor, whose arguments are unknown, nor by `copy`, which gets only some attributes from torch.
    twin: Optimizer = object.__new__(type(optimizer))
    # Hooks of the user must not see this step. Torch has no public way to leave them out.
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    twin.__dict__.update(vars(optimizer), state=defaultdict(dict), **{name: OrderedDict() for name in hooks})
    twin.__dict__.pop("step", None)  # a schedule's, which would step the optimizer itself
    # These kernels refuse the meta device; the state is the same without them.
    plain = dict.fromkeys({"foreach", "fused", "capturable"} & group.keys(), False)
    twin.param_groups = [{**group, **plain, "params": [on_meta]}]
    try:
        twin.step()
    except (TypeError, AssertionError):
        return None
    except RuntimeError:  # reads elements, after it has made its state
        return twin.state[on_meta] or None
    return twin.state[on_meta]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of one stage in one step of the task, in bytes."""

    activations: int
    """Values that backward needs of one micro-batch: those that autograd saves, and those received and sent."""
    gradients: Mapping[str, int]
    """The gradient of each parameter."""
    temporaries: int
    """Gradients that the backward of one node has at once: of its inputs, its outputs and a parameter."""
    received: int
    """Values that forward receives of one micro-batch."""
    gradients_received: int
    gradients_sent: int


def rank_memories(
    task: nn.Module,
    steps: Mapping[str, tuple[TracedGraph, Partition]],
    schedule: Schedule,
    training: TrainingMemory,
) -> list[RankMemory]:
    """Return the memory of every rank of a replica; `steps` are partitioned, by step key."""
    placement = place_parameters(task, list(steps.values()), num_ranks=schedule.num_ranks)
    named = named_state(task)
    num_micro_batches = training.num_micro_batches
    actions = [schedule.actions(rank, num_micro_batches) for rank in range(schedule.num_ranks)]
    stages = [
        stage_memories(graph, partition, training.gradients.get(key, {})) for key, (graph, partition) in steps.items()
    ]
    memories = []
    for rank in range(schedule.num_ranks):
        held = partial(placement.is_held, rank=rank)
        step_gradients = [_gradient_bytes(step[rank :: schedule.num_ranks]) for step in stages]
        peaks = [peak_of_step(actions, step, rank=rank, keeps_gradients=training.keeps_gradients) for step in stages]
        # Without buckets each phase drops its gradients before the next one.
        others = sum(step_gradients) if training.keeps_gradients else 0  # gradients of other phases
        extra = [max(others - size, 0) for size in step_gradients]
        peak, extra_gradients = max(zip(peaks, extra, strict=True), key=lambda pair: pair[0].bytes + pair[1])
        parameters = sum(num_bytes(tensor) for name, tensor in named.items() if held(name))
        owners = owners_of(
            {name: named[name].numel() for name in training.optimizer if held(name)}, training.optimizer_shards
        )
        shards = [0] * training.optimizer_shards
        # Parameters that training does not use are on every rank, but never get a gradient, and so no state.
        for name, owner in owners.items():
            shards[owner] += training.optimizer[name] if name in placement.used else 0
        memories.append(
            RankMemory(
                rank,
                parameters=parameters,
                gradients=peak.gradients + extra_gradients,
                optimizer=max(shards),
                activations=peak.activations,
                messages=peak.messages,
                in_flight=max(peak.in_flight for peak in peaks),
            )
        )
    return memories


def _gradient_bytes(stages: Sequence[StageMemory]) -> int:
    # A parameter in several stages of a rank has one gradient there.
    return sum({name: size for stage in stages for name, size in stage.gradients.items()}.values())


def stage_memories(graph: TracedGraph, partition: Partition, trained: Mapping[str, int]) -> list[StageMemory]:
    """Return the memory of each stage; `trained` has the bytes of the gradient of each trained parameter."""
    bounds = partition.bounds(len(graph.nodes))
    values, stages = graph.values, []
    for stage in stage_graphs(graph, bounds, list(range(len(bounds)))):
        nodes = graph.nodes[stage.start : stage.stop]
        inputs = [transfer.value for transfer in stage.receives if transfer.differentiable]
        outputs = [transfer.value for transfer in stage.sends if transfer.differentiable]
        # A set, as views share a memory, and a value may be both saved and sent. -1: its memory is unknown.
        memories = {memory for node in nodes for memory in node.saved_memories}
        memories |= {values[value].memory for value in (*inputs, *outputs)} - {-1}
        temporaries = 0
        for node in nodes:
            near = {*node.inputs, *(output.value for output in node.outputs)}
            gradients = [trained[name] for name in node.parameters if name in trained]
            temporaries = max(temporaries, sum(values[value].num_bytes for value in near) + max(gradients, default=0))
        stages.append(
            StageMemory(
                activations=sum(graph.memory_bytes[memory] for memory in memories),
                gradients={name: trained[name] for node in nodes for name in node.parameters if name in trained},
                temporaries=temporaries,
                received=sum(values[transfer.value].num_bytes for transfer in stage.receives),
                gradients_received=sum(values[value].num_bytes for value in outputs),
                gradients_sent=sum(values[value].num_bytes for value in inputs),
            )
        )
    return stages


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a rank has at once in one step."""

    activations: int
    gradients: int
    messages: int
    """Of values and gradients between ranks, and of temporary gradients."""
    in_flight: int
    """Most micro-batches between forward and backward, at any moment; one in two stages of a rank counts twice."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.activations + self.gradients + self.messages


def peak_of_step(
    actions: Sequence[Sequence[Action]], stages: Sequence[StageMemory], *, rank: int, keeps_gradients: bool
) -> Peak:
    """Return the peak of a rank that carries out its part of `actions`, which are those of every rank.

    Gradients come with the first backward of their stage, or are there before with `keeps_gradients`. Receives are
    posted `AHEAD`, and a gradient is kept until the rank to which it is sent is known to have it.
    """
    rank_actions, num_ranks = actions[rank], len(actions)
    sizes = {name: size for stage in stages[rank::num_ranks] for name, size in stage.gradients.items()}
    # The same rules as in `PipelineRuntime`: what is posted, kept and released when.
    present = set(sizes) if keeps_gradients else set()
    sent: dict[Action, int] = {}
    activations = in_flight = 0
    peak, most_in_flight = Peak(0, 0, 0, 0), 0
    for index, action in enumerate(rank_actions):
        stage = stages[action.stage]
        # The inputs of this action itself are among its activations, or added below.
        posted = sum(_received(later, stages) for later in rank_actions[index + 1 : index + 1 + AHEAD])
        source = action.stage + (1 if action.kind == BACKWARD else -1)
        # Its input tells that the sender has begun all actions up to the one that made it, and has what these needed.
        if 0 <= source < len(stages):
            others = actions[source % num_ranks]
            for begun in others[: others.index(Action(action.kind, source, action.micro_batch)) + 1]:
                sent.pop(begun, None)
        messages = posted + sum(sent.values())
        gradients = sum(sizes[name] for name in present)
        if action.kind == FORWARD:
            activations, in_flight = activations + stage.activations, in_flight + 1
            moments = [Peak(activations, gradients, messages, in_flight)]
        else:
            in_backward = Peak(
                activations, gradients, messages + stage.gradients_received + stage.temporaries, in_flight
            )
            present |= set(stage.gradients)
            activations, in_flight = activations - stage.activations, in_flight - 1
            if action.stage:
                sent[Action(BACKWARD, action.stage - 1, action.micro_batch)] = stage.gradients_sent
            # The peak may be at the end, when the parameters have their gradients for the first time.
            gradients = sum(sizes[name] for name in present)
            moments = [in_backward, Peak(activations, gradients, messages, in_flight)]
        most_in_flight = max(most_in_flight, in_flight)
        peak = max(peak, *moments, key=lambda moment: moment.bytes)
    return replace(peak, in_flight=most_in_flight)


def _received(action: Action, stages: Sequence[StageMemory]) -> int:
    stage = stages[action.stage]
    return stage.received if action.kind == FORWARD else stage.gradients_received
