"""Hazards of a traced step: what the code of one stage does that other stages could not follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import UserError

from .graph import CutConstraint, Node, Value

ARRAYS = frozenset(("numpy", "__array__"))
"""Calls that return an array with the memory of their tensor."""


@dataclass(slots=True)
class Hazards:
    """What one trace has met, from which refusals and cut constraints follow."""

    random_states: set[bytes | int]
    """States of torch's generator at the start of the step and at the ends of nodes."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """The module whose own code does what cannot be followed, and the reason."""
    mutated: list[tuple[Node, str]] = field(default_factory=list)
    """Calls that change containers, and what these are: an argument, or the name of an attribute."""
    mutated_again: set[str] = field(default_factory=set)
    """The same of a second run of the step, which fills no caches."""
    layouts: dict[int, torch.layout] = field(default_factory=dict)
    """Values that cannot be sent, since they are not strided."""
    objects: list[tuple[Node, str]] = field(default_factory=list)
    """Leaf modules that return other objects than tensors, numbers and containers, and the type of these."""
    _arrays: list[tuple[Node, Tensor, int, Tensor]] = field(default_factory=list)

    def refuse(self, reason: str, path: str) -> None:
        """Keep the module `path` whole, whose own code does it, or refuse the step if that is impossible."""
        self.refused.append((path, f"{reason} Do that inside one module's forward, or type strategy=ddp."))

    # -- Random numbers and arrays

    def check_seed(self, node: Node, before: bytes | int, after: bytes | int) -> None:
        """Refuse a random call if the step has seeded the generator: every stage seeds it before each call."""
        # A state that no node has left is one that the step has set. In a stage that skips calls the generators are
        # elsewhere, so they are seeded before each random call, and what the step sets is lost.
        if node.is_random and before not in self.random_states:
            self.refuse(f"the step seeds torch's random generator itself before {node}.", node.path)
        self.random_states.add(after)

    def keep_array(self, node: Node, tensor: Tensor) -> None:
        """Keep the content of a tensor that shares its memory with an array from now on."""
        # Private: torch has no public name for it. The copy would be a call of the step.
        with torch._C.DisableTorchFunction():
            self._arrays.append((node, tensor, tensor._version, tensor.detach().clone()))

    def check_arrays(self) -> None:
        """Refuse arrays that were written, as a trace does not see that."""
        for node, tensor, version, content in self._arrays:
            with torch._C.DisableTorchFunction():
                # A write by torch counts up the version, and has its own node; one through the array does not.
                if tensor._version == version and not torch.equal(tensor, content):
                    self.refuse(f"the step writes to the array of {node}, which other stages do not see.", node.path)
        self._arrays.clear()  # copies of whole tensors

    # -- Containers and objects

    def mutations(self) -> set[str]:
        """Return the calls that change containers, with these."""
        return {f"{node.name} {container}" for node, container in self.mutated}

    def constraints(self, nodes: Sequence[Node], values: Sequence[Value]) -> Iterator[CutConstraint]:
        """Yield constraints from calls whose effect later stages would miss to its users, or to the end of the step."""
        end = len(nodes) - 1
        for node, container in self.mutated:
            # By name, as the nodes are of two runs. A cache, which only the first run fills, is no hazard.
            if f"{node.name} {container}" in self.mutated_again:
                reason = f"{node} changes the contents of {container}, which later code may read"
                yield CutConstraint(node.index, end, reason, " Return them from the module's forward.")
        for node, kind in self.objects:
            reason = f"{node} returns a {kind}, which later code may use and which cannot be sent"
            yield CutConstraint(node.index, end, reason, " Return tensors, numbers and containers.")
        # Reversed, so that the first node with a value counts, not one that writes to it later.
        makers = {output.value: node for node in reversed(nodes) for output in node.outputs}
        for value, layout in self.layouts.items():
            users = [node for node in nodes if value in node.inputs]
            if users and value in makers and not values[value].local:
                reason = f"{makers[value]} makes a tensor of the layout {layout}, which {users[-1]} uses"
                yield CutConstraint(makers[value].index, users[-1].index, reason, " Such tensors cannot be sent.")


def parameter_hook_constraints(task: nn.Module, nodes: Sequence[Node]) -> Iterator[CutConstraint]:
    """Yield a constraint around the users of each parameter that has a hook on its gradient: it needs the sum."""
    for name, parameter in task.named_parameters():
        users = [node.index for node in nodes if name in node.parameters]
        # Private: torch lists the hooks of a tensor nowhere else.
        has_hook = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if has_hook and len(users) > 1:
            reason = f"parameter '{name}' has a hook on its gradient, which is the sum over all nodes that use it"
            yield CutConstraint(users[0], users[-1], reason)


def check_iterators(names: Sequence[str]) -> None:
    """Raise UserError if a step reads attributes that are iterators."""
    if names:
        raise UserError(
            f"the step reads the iterator '{names[0]}', but planning and every stage would take items of their own. "
            f"Count in an attribute, and read what belongs to that number: self.{names[0].rpartition('.')[2]}[index]."
        )


def check_classes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if a step has changed a number of a class."""
    attribute = next((name for name, value in now.items() if name in before and before[name] != value), None)
    if attribute is not None:
        raise UserError(
            f"the step changes '{attribute}', an attribute of a class, which all of its modules share, but stages do "
            f"not. Change an attribute of the module: self.{attribute.rpartition('.')[2]} = ..., or type strategy=ddp."
        )
