"""The operations of a training step as a graph, grouped by modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from trainkit.model.flops import module_scopes
from trainkit.tree import tensors_in

if TYPE_CHECKING:
    from trainkit.task import TaskModule

# Reads of attributes and shapes: nodes that compute nothing would hide those that do.
_NOT_SHOWN = ("__get__", "__set__", "size", "dim", "numel", "shape", "requires_grad", "is_floating_point", "__len__")


@dataclass(frozen=True)
class Operation:
    """One call of a torch function."""

    name: str
    """Unique, with the modules that it was called in: `net/0/linear`."""
    kind: str
    inputs: tuple[str, ...]
    """Names of the operations, parameters and inputs that it reads."""
    shape: tuple[int, ...]
    """The shape of its first output."""


@dataclass
class ModelGraph:
    """Operations in the order of their calls."""

    operations: list[Operation] = field(default_factory=list)


def record_graph(task: TaskModule, batch: Any, *, steps: Sequence[str] = ("training_step",)) -> ModelGraph:
    """Return the graph of a task's step, or of those of its phases, one after the other.

    The methods in `steps` are called with the batch once each, in evaluation mode and without gradients. Random
    generators and the modes of modules do not change.
    """
    recorder = _Recorder(task, batch)
    # The recorder is entered last and left first: it must not record how module_scopes saves and restores buffers.
    with torch.no_grad(), module_scopes(task) as recorder.scopes, recorder:
        for name in steps:
            getattr(task, name)(batch)
    return recorder.graph


class _Recorder(TorchFunctionMode):
    """Records each torch function with the module that called it and the operations that it reads."""

    def __init__(self, task: nn.Module, batch: Any) -> None:
        super().__init__()
        self.graph = ModelGraph()
        self.scopes: list[str] = []
        """The modules that are running, the innermost last."""
        self._used: dict[str, int] = {}
        self._sources: dict[int, str] = {}
        self._kept: list[Tensor] = []  # or another tensor could have the id of a freed one
        for number, tensor in enumerate(tensors_in(batch)):
            self._add(f"batch/{number}", "input", (), tensor)
        for name, parameter in task.named_parameters():
            self._add(name.replace(".", "/"), "parameter", (), parameter)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        kind = (resolve_name(func) or getattr(func, "__name__", "call")).rpartition(".")[2]
        outputs = list(tensors_in(returned))
        if outputs and kind not in _NOT_SHOWN:
            read = [*tensors_in(args), *tensors_in(dict(kwargs or {}))]
            inputs = dict.fromkeys(self._sources[id(tensor)] for tensor in read if id(tensor) in self._sources)
            scope = f"{self.scopes[-1]}.".replace(".", "/") if self.scopes and self.scopes[-1] else ""
            self._add(f"{scope}{kind}", kind, tuple(inputs), *outputs)
        return returned

    def _add(self, name: str, kind: str, inputs: tuple[str, ...], *outputs: Tensor) -> None:
        count = self._used[name] = self._used.get(name, 0) + 1
        # Inputs are names of operations: two with the same name could not be told apart.
        unique = name if count == 1 else f"{name}_{count}"
        self.graph.operations.append(Operation(unique, kind, inputs, tuple(outputs[0].shape)))
        for tensor in outputs:
            self._sources[id(tensor)] = unique
            self._kept.append(tensor)
