"""Finding tensors in a forward's outputs, and parameters that the graph behind them does not reach."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in `value`: containers and dataclasses are searched, other objects are not."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def unreached_parameters(outputs: Iterable[Tensor], parameters: Iterable[nn.Parameter]) -> list[int]:
    """Return the indices of parameters that get no gradient from `outputs`, by a walk over the autograd graph."""
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
        variable = getattr(node, "variable", None)  # on AccumulateGrad nodes only
        if variable is not None:
            reached.add(id(variable))
        waiting.extend(parent for parent, _ in node.next_functions)
    return [index for index, parameter in enumerate(parameters) if id(parameter) not in reached]
