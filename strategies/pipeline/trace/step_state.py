"""The state of a task around a run of its step: kept before writes, restored, or replaced by fake tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Private: torch exports fake tensors nowhere else.
from torch._subclasses.fake_tensor import FakeTensorMode

from trainkit.metrics.sync import metrics_in
from trainkit.model.attribute_snapshot import AttributeSnapshot
from trainkit.rng import preserve_rng
from trainkit.strategy import named_state
from trainkit.tree import map_tensors

from .graph import (
    FlopCounter,
    Step,
)
from .memories import memory_of


def use_fake_tensors(task: nn.Module) -> None:
    """Put fake tensors in the place of the parameters and buffers of the task; `preserve_task` puts these back.

    Results of computations with them are fake too, with the device CPU. What depends on the batch alone is computed,
    so that the step takes its usual branches.
    """
    # Only made under the mode: calls with fake tensors find it through these, and calls without one are computed.
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes: dict[int, Any] = {id(tensor): _fake(tensor) for tensor in named_state(task).values()}
    for module in task.modules():
        for table in (module._parameters, module._buffers):
            table.update({name: fakes[id(tensor)] for name, tensor in table.items() if tensor is not None})


def _fake(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


class PreservedState:
    """State of a task before a step: its attributes, and the content of what the step writes in place."""

    def __init__(self, task: nn.Module) -> None:
        self.attributes = AttributeSnapshot(task, metrics_in(task))
        registered = named_state(task)
        ids = {id(tensor) for tensor in registered.values()}
        attributes = [(name, tensor) for name, tensor in self.attributes.tensors() if id(tensor) not in ids]
        self.tensors = [*registered.items(), *attributes]
        """Parameters, buffers and the tensors in attributes, by name."""
        self._sharing: dict[int, list[tuple[str, Tensor]]] = {}  # by memory
        for name, tensor in self.tensors:
            self._sharing.setdefault(memory_of(tensor), []).append((name, tensor))
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def keep_named(self, names: Collection[str]) -> None:
        """Keep the content of the tensors that the step is known to write."""
        for name, tensor in self.tensors:
            if name in names:
                self.keep(tensor)

    def keep_before_write(self, written: Tensor) -> list[str]:
        """Keep the tensors that share memory with one that is about to be written, and return their names."""
        sharing = self.sharing(written)
        for _, tensor in sharing:
            self.keep(tensor)
        return [name for name, _ in sharing]

    def sharing(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """Return the tensors that share memory with one, by name."""
        return self._sharing.get(memory_of(tensor), [])

    def keep(self, tensor: Tensor) -> None:
        """Keep the content of a tensor that is about to be written; another stage's has none."""
        # Strides of 0: all elements are one in memory, to which `copy_` refuses to write.
        has_content = not tensor.is_meta and (tensor.numel() == 1 or 0 not in tensor.stride())
        if id(tensor) not in self._kept and has_content:
            self._kept[id(tensor)] = tensor, tensor.data, tensor.detach().clone()

    @contextmanager
    def kept_before_writes(self) -> Iterator[None]:
        """Keep in the block what is written in place."""
        counter = FlopCounter()
        counter.before_write = self.keep_before_write
        with counter:
            yield

    def restore(self) -> None:
        """Restore what was kept."""
        with torch.no_grad():
            for tensor, memory, content in self._kept.values():
                # The step may have given the tensor other memory, by `.data =`.
                if memory_of(tensor) != memory_of(memory):
                    tensor.data = memory
                memory.copy_(content)


@contextmanager
def preserve_state(task: nn.Module, preceding: Sequence[Step] = (), batch: Any = None) -> Iterator[PreservedState]:
    """Restore generators and the tensors that are written in place at the end; the steps `preceding` run first."""
    state = PreservedState(task)
    try:
        with preserve_rng():
            if not preceding:
                yield state
                return
            with state.kept_before_writes():
                for step in preceding:
                    step(copy_batch(batch))
            # Again, so that `inner` has the state that these steps leave, and the writes of the traced one are undone
            # before theirs.
            with preserve_state(task) as inner:
                yield inner
    finally:
        state.restore()


def copy_batch(batch: Any) -> Any:
    """Return the batch with copies of its tensors."""
    return map_tensors(batch, lambda tensor: tensor.detach().clone())


class StateNames:
    """The names of a task's tensors, by identity.

    `before` keeps the tensors alive, also if the step replaces them: the id of a freed one would come back with another
    tensor. `left_behind` are the attributes in which steps of other phases leave tensors.
    """

    def __init__(self, task: nn.Module, before: PreservedState, *, left_behind: Collection[str]) -> None:
        # Under the first name: `named_parameters` gives a shared one once.
        named = task.named_parameters(), task.named_buffers()
        self.parameters, self.buffers = ({id(tensor): name for name, tensor in items} for items in named)
        self.attributes: dict[int, str] = {}
        for name, tensor in before.tensors:
            self.attributes.setdefault(id(tensor), name)
        self.of_another_phase = {id(tensor) for name, tensor in before.tensors if name in left_behind}
