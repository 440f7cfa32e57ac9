"""Parameters that the autograd graph behind a forward's outputs does not reach."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

HIDING_NODE = "CheckpointFunctionBackward"


def unreached_parameters(outputs: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return the indices of parameters that get no gradient from `outputs`, by a walk over the autograd graph.

    A reentrant checkpoint hides the graph behind it, so that nothing is said to be unreached.
    """
    reached: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            waiting.append(output.grad_fn)
        elif output.requires_grad:
            reached.add(id(output))  # a parameter that is itself an output
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == HIDING_NODE:
            return []
        variable = getattr(node, "variable", None)  # on AccumulateGrad nodes only
        if variable is not None:
            reached.add(id(variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return [index for index, parameter in enumerate(parameters) if id(parameter) not in reached]
