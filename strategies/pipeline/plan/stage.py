"""Stages of a partition: nodes, transfers and parameters of each, and initial values of meta parameters."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from trainkit.errors import UserError
from trainkit.rng import preserve_rng
from trainkit.strategy import named_state
from trainkit.tree import tree_leaves

from ..trace.graph import Node, ParameterRef, TracedGraph, ValueRef
from .partition import Partition


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of a value from the stage that last wrote it to a stage that uses it."""

    value: int
    source: int
    destination: int
    differentiable: bool
    """True if a gradient is sent back."""


@dataclass(slots=True)
class StageGraph:
    """The nodes from `start` to before `stop`, which one stage runs, and their transfers."""

    index: int
    start: int
    stop: int
    rank: int
    is_last: bool
    executes: list[bool]
    """For each node before `stop`: true for its own nodes, batch-only ones, and those that read received values."""
    receives: list[Transfer]
    sends: list[Transfer]
    cloned: frozenset[int]
    """Received values that its nodes write in place, so that they need a copy."""
    given: dict[int, list[int]]
    """For each of its nodes: the received values among the arguments of the call."""
    made_by: dict[int, tuple[int, list[tuple[int, int]]]]
    """For each of its nodes, and for those of the batch alone whose values other nodes return: the number of tensors in
    its result, and pairs of a position there and a value."""


def stage_graphs(graph: TracedGraph, bounds: Sequence[tuple[int, int]], ranks: Sequence[int]) -> list[StageGraph]:
    """Return the stages with these bounds, on these ranks."""
    stages: list[StageGraph] = []
    writers: dict[int, tuple[int, bool]] = {}  # the last stage that wrote each value, and true if gradients flow back
    returned = _returned_local_values(graph)
    for index, (start, stop) in enumerate(bounds):
        nodes = graph.nodes[start:stop]
        # Code of the step may branch on what these return, so that every later stage runs them again.
        reading = [node for node in graph.nodes[:start] if node.reads and not node.is_batch_only]
        needed = dict.fromkeys(value for node in [*reading, *nodes] for value in node.inputs)
        receives = [
            Transfer(value, writers[value][0], index, writers[value][1])
            for value in needed
            if value in writers and not graph.values[value].local
        ]
        # Numbers go from stage to stage, not from where they are made: each stage adds those of its nodes.
        if graph.numbers is not None and any(node.sends_numbers for node in graph.nodes[:start]):
            receives.append(Transfer(graph.numbers, index - 1, index, False))
        for transfer in receives:
            stages[transfer.source].sends.append(transfer)
        # Only now: a value that this stage writes comes from the stage that wrote it before.
        for node in nodes:
            writers |= {output.value: (index, output.requires_grad) for output in node.outputs}
        written = {value for node in nodes for value in node.written}
        received = {transfer.value for transfer in receives}
        unwritten = received - written  # a call may get a clone of the others, whose identity says nothing
        arguments = {
            node.index: [value for value in node.inputs[: node.num_given] if value in unwritten] for node in nodes
        }
        stages.append(
            StageGraph(
                index,
                start,
                stop,
                ranks[index],
                index == len(bounds) - 1,
                [node.is_batch_only or node.reads or node.index >= start for node in graph.nodes[:stop]],
                receives,
                [],
                frozenset(received & written),
                {node: values for node, values in arguments.items() if values},
                dict(_made_by(graph.nodes[:stop], start, returned)),
            )
        )
    return stages


def _returned_local_values(graph: TracedGraph) -> set[int]:
    """Return the values of the batch alone that other nodes return, such as a mask that a module passes on.

    A stage that skips such a node takes them from the nodes that compute them in every stage.
    """
    nodes = [node for node in graph.nodes if not node.is_batch_only]
    refs = [leaf.value for node in nodes for leaf in tree_leaves(node.result) if isinstance(leaf, ValueRef)]
    return {value for value in refs if graph.values[value].local}


def _made_by(
    nodes: Sequence[Node], start: int, returned: set[int]
) -> Iterator[tuple[int, tuple[int, list[tuple[int, int]]]]]:
    for node in nodes:
        if node.index < start and not node.is_batch_only:
            continue
        refs = [leaf for leaf in tree_leaves(node.result) if isinstance(leaf, (ValueRef, ParameterRef))]
        places = [(position, ref.value) for position, ref in enumerate(refs) if isinstance(ref, ValueRef)]
        if node.is_batch_only:
            places = [(position, value) for position, value in places if value in returned]
        if places or not node.is_batch_only:
            yield node.index, (len(refs), places)


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of a pipeline that hold each parameter and buffer."""

    holders: dict[str, tuple[int, ...]]
    """By name of a parameter or buffer, or of an attribute that the step changes."""
    used: frozenset[str]
    """Parameters that training uses; the others are on every rank."""

    def is_held(self, name: str, rank: int) -> bool:
        """Return True if a rank holds a parameter or buffer."""
        return rank in self.holders[name]

    def counted(self, name: str, rank: int) -> bool:
        """Return True if a rank counts a parameter in norms and checkpoints: the first of its holders does."""
        return self.holders[name][0] == rank

    def shared_by(self) -> dict[tuple[int, ...], list[str]]:
        """Return the parameters that several ranks use, by the ranks."""
        shared: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, ranks in self.holders.items():
            if name in self.used and len(ranks) > 1:
                shared[ranks].append(name)
        return dict(shared)


def transferred_bytes(
    steps: Sequence[tuple[TracedGraph, Partition]], *, num_ranks: int, num_micro_batches: int
) -> dict[tuple[int, int], int]:
    """Return the bytes of activations and their gradients from each rank to another, with one batch of each step."""
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for graph, partition in steps:
        bounds = partition.bounds(len(graph.nodes))
        ranks = [index % num_ranks for index in range(len(bounds))]
        for transfer in (send for stage in stage_graphs(graph, bounds, ranks) for send in stage.sends):
            both_ways = 1 + transfer.differentiable
            size = graph.values[transfer.value].num_bytes * num_micro_batches * both_ways
            sizes[ranks[transfer.source], ranks[transfer.destination]] += size
    return sizes


def place_parameters(task: nn.Module, steps: Sequence[tuple[TracedGraph, Partition]], *, num_ranks: int) -> Placement:
    """Return the ranks of all parameters and buffers of these steps; stage `s` is on rank `s % num_ranks`."""
    everywhere = tuple(range(num_ranks))
    ranks: dict[str, set[int]] = defaultdict(set)
    used: set[str] = set()
    for graph, partition in steps:
        for node in graph.nodes:
            rank = partition.stage_of(node.index) % num_ranks
            for name in node.tensor_names:
                # A node of the batch alone runs in every stage, which saves its messages.
                ranks[name].update(everywhere if node.is_batch_only else (rank,))
            used.update(node.parameters)
    written = frozenset().union(*(graph.written for graph, _ in steps))
    # Sorted, as the order of a set differs from process to process, and collectives follow the order of `holders`.
    names = dict.fromkeys([*named_state(task), *sorted(written)])
    return Placement({name: tuple(sorted(ranks[name])) or everywhere for name in names}, frozenset(used))


def owners(steps: Sequence[tuple[TracedGraph, Partition]]) -> dict[str, int]:
    """Return the stage that writes each attribute or replaced buffer last; the last stage for a cache."""
    last_writers: dict[str, int] = {}
    for graph, partition in steps:
        # The last stage has run all of the step, and so has the cache that any call has filled.
        last_writers.update({name: last_writers.get(name, len(partition.cuts)) for name in graph.replaced})
        for node in graph.nodes:
            stages = {name: partition.stage_of(node.index) for name in node.written_buffers}
            last_writers.update({name: stage for name, stage in stages.items() if name in graph.replaced})
    return last_writers


def owners_of(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Return the replica of each name: the largest come first, to the replica that has least."""
    # Names decide between equal sizes: each replica, and the planner, computes this alone, and all must agree.
    owners, filled = {}, [0] * replicas
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owners[name] = filled.index(min(filled))
        filled[owners[name]] += size
    return owners


def keep_local_parameters(task: nn.Module, placement: Placement, *, rank: int, device: torch.device) -> None:
    """Move the parameters and buffers of `rank` to `device`, and reduce the others to one element in memory.

    These keep identity, name and shape, since an optimizer may have them; without a gradient it ignores them.
    """
    for name, tensor in named_state(task).items():
        held = placement.is_held(name, rank)
        tensor.data = tensor.data.to(device) if held else _one_element(tensor, device)


def stage_bounds(
    graph: TracedGraph, placement: Placement, *, num_ranks: int
) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the bounds and ranks of the stages of an evaluation step, each on a rank that holds its parameters.

    Parameters stay on the ranks that training chose; the step may return to an earlier rank.
    """
    cuts: list[int] = [0]
    ranks: list[int] = []
    for node in graph.nodes:
        if not node.tensor_names or node.is_batch_only:
            continue
        held = [placement.holders[name] for name in node.tensor_names if name in placement.holders]
        able = set(range(num_ranks)).intersection(*held)  # all ranks for a node whose tensors only this step uses
        if not able:
            raise UserError(
                f"{node} uses parameters of different stages: {', '.join(node.tensor_names)}. Call the same modules as "
                "training_step, so that the parameters of each node are in one stage."
            )
        # A stage goes on for as long as its rank can run the nodes: each change costs a message.
        if ranks and ranks[-1] not in able:
            cuts.append(node.index)
        if not ranks or ranks[-1] not in able:
            ranks.append(min(able))
    for cut in cuts[1:]:
        for constraint in graph.constraints:
            if constraint.forbids(cut):
                raise UserError(
                    f"this step must change stage at {graph.nodes[cut]}, where its parameters are, but "
                    f"{constraint.reason}."
                )
    return list(pairwise([*cuts, len(graph.nodes)])), ranks or [0]


# The second name is that of torch's MultiheadAttention and Transformer, which have no public one.
RESETS = ("reset_parameters", "_reset_parameters")


def has_meta(task: nn.Module) -> bool:
    """Return True if any parameter or buffer is on the meta device."""
    return any(tensor.is_meta for tensor in named_state(task).values())


def materialize(
    task: nn.Module, *, seed: int, device: torch.device | str = "cpu", keep: Callable[[str], bool] = lambda name: True
) -> None:
    """Create every parameter and buffer of the meta device by its module's `reset_parameters`.

    It draws from a generator seeded by `seed` and the module's name, so stages that each `keep` a part have together
    the values of one process. Tensors not kept have one element in memory. Raises UserError for a module without
    `reset_parameters`.
    """
    # By identity, since modules may share a tensor under several names.
    missing = {id(tensor): name for name, tensor in named_state(task).items() if tensor.is_meta}
    device = torch.device(device)
    # Parents override their children, and the first of several modules that share a parameter overrides the others.
    for prefix, module in reversed(list(task.named_modules())):
        owned = (*module._parameters.values(), *module._buffers.values())
        direct = [tensor for tensor in owned if tensor is not None and id(tensor) in missing]
        # A container may reset its children, so it does that if any of them is kept.
        reached = direct or named_state(module).values()
        if not any(id(tensor) in missing and keep(missing[id(tensor)]) for tensor in reached):
            continue
        reset = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
        if reset is None:
            if direct:
                raise UserError(
                    f"'{missing[id(direct[0])]}' is on the meta device, and {type(module).__name__} "
                    f"({prefix or 'the task'}) has no reset_parameters. Define reset_parameters(self) there to fill "
                    "its parameters and buffers in place, or build the task outside of torch.device('meta')."
                )
            continue
        # Those that are not kept as well: a reset draws for all, and what is kept must get the same numbers everywhere.
        for tensor in direct:
            if tensor.is_meta:
                _replace_content(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        # A hash that is the same in all processes, unlike `hash`; 7 bytes fit into the seeds of torch.
        digest = hashlib.blake2b(f"{seed}/{prefix}".encode(), digest_size=7).digest()
        # Stages reset different modules, and their generators must go on from the same state.
        with preserve_rng(), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "big"))
            reset()
    for tensor in named_state(task).values():
        if id(tensor) in missing and not keep(missing[id(tensor)]):
            _replace_content(tensor, _one_element(tensor, device))


def _replace_content(tensor: Tensor, content: Tensor) -> None:
    """Replace the contents and the device of a tensor; it stays the same object, which an optimizer may have."""
    if isinstance(tensor, nn.Parameter):
        content = nn.Parameter(content, requires_grad=tensor.requires_grad)
    # A meta tensor's `.data` accepts no contents of another device.
    torch.utils.swap_tensors(tensor, content)


def _one_element(tensor: Tensor, device: torch.device) -> Tensor:
    # Strides of 0: all elements are the same one in memory.
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
