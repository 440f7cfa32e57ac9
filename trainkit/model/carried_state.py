"""State that a step leaves in a task for the next one: buffers, and attributes that it reads before it changes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.metrics.sync import metrics_in
from trainkit.model.attribute_snapshot import AttributeSnapshot
from trainkit.model.attribute_watch import AttributeWatch


class CarriedAttributes:
    """Finds the attributes that a step reads before it changes them; those of torch's modules and ours do not count."""

    def __init__(self, task: nn.Module) -> None:
        # Metric states add up over the steps by design, and are merged over ranks by the metrics.
        ignored = [module for metric in metrics_in(task) for module in metric.modules()]
        # torch's modules cache, as RNNs do, and a LightningTask has the proxy of a Lightning trainer.
        ignored += [module for module in task.modules() if _is_of(module, "torch.", "trainkit.")]
        self._snapshot = AttributeSnapshot(task, ignored)
        # Only the order of reads and writes counts here: all accesses are at the same node.
        self._watch = AttributeWatch(task, lambda: (0, ""))
        self._buffers = {name for name, _, _ in named_buffers(task)}

    def recorded(self) -> AbstractContextManager[None]:
        """Return the context of the step."""
        return self._watch.installed()

    def carried(self) -> dict[str, Any]:
        """Return the present values of these attributes by name."""
        return {name: value for name, value in self.changed().items() if self.reads(name)}

    def changed(self) -> dict[str, Any]:
        """Return the present values of all attributes that the step has changed."""
        return {name: value for name, value in self._snapshot.changed().items() if name not in self._buffers}

    def reads(self, name: str) -> bool:
        """Return True if the step reads the attribute, and not only what it has assigned itself."""
        return name in self._watch.accesses and self._watch.accesses[name].reads_first

    def tensors_in(self, value: Any) -> list[Tensor]:
        """Return the tensors in a value, its containers and plain objects."""
        return self._snapshot.tensors_in(value)


class BufferWrites:
    """Finds the buffers of which several micro-batches of a step change the same elements."""

    def __init__(self, held: Collection[str], task: nn.Module) -> None:
        self.names: dict[str, None] = {}
        """The buffers that were found, among those that this process holds."""
        self._held, self._task = held, task
        self._last = self._present()
        self._changed: dict[str, Tensor] = {}  # name -> the elements that a micro-batch has changed

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Note what the forward in the block changes; waits for the device."""
        try:
            yield
        finally:  # a stage of a pipeline leaves the step at its own end
            # Private: the stage follows all calls of the step, and must not see these.
            with torch._C.DisableTorchFunction():
                self._note_changes()

    def _note_changes(self) -> None:
        for name, values in self._present().items():
            last = self._last.get(name)
            # A buffer that was added or has grown has no elements to compare.
            if last is None or last.shape != values.shape:
                continue
            differences = changed_elements(values, last)
            if not differences.any():
                continue
            if name in self._changed and bool((differences & self._changed[name]).any()):
                self.names[name] = None
            self._changed[name] = differences | self._changed.get(name, differences)
            # Compared with the previous micro-batch, not with the start of the
            # step: what one changes counts for it alone.
            self._last[name] = values

    def _present(self) -> dict[str, Tensor]:
        return {
            name: buffer.clone()
            for name, owner, buffer in named_buffers(self._task)
            if name in self._held and may_be_merged(owner, buffer) and not is_counted(buffer)
        }


def shared_by_micro_batches(strategy: str, task: nn.Module, name: str) -> str:
    """Return the message for state that one micro-batch of a step leaves to the next one."""
    return (
        f"{strategy}: {type(task).__name__} reads and changes {name} in each micro-batch of a step, so that one "
        "micro-batch sees what another has left, and not what the step before has. Keep the state in a buffer with a "
        "row for each sample or lane, and write to the rows of the batch; change it in a callback's on_step_end; or "
        "set strategy.accumulate=1."
    )


def can_be_followed(task: nn.Module) -> bool:
    """Return True if the classes of modules may be replaced for a step: none is compiled or lists its subclasses."""
    # Private: torch has no question for whether a module is compiled.
    is_compiled = any(
        m._compiled_call_impl is not None or hasattr(type(m), "_opt_mod_attributes") for m in task.modules()
    )
    # The watch makes subclasses: __init_subclass__ would run for them, and may enter them in a registry.
    kinds = {kind for module in task.modules() for kind in type(module).__mro__}
    return not is_compiled and not any("__init_subclass__" in vars(kind) for kind in kinds - {object})


def named_buffers(module: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield each buffer with its name and the module that has it; one that two modules have comes twice."""
    for prefix, owner in module.named_modules():
        # Private: named_buffers() yields a buffer that two modules share only once.
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{key}" if prefix else key, owner, buffer


def unsaved_buffers(task: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that no state dict has, with their names."""
    return [
        (name, buffer)
        for name, owner, buffer in named_buffers(task)
        # Private: torch has no question for whether a buffer is persistent.
        if name.rpartition(".")[2] in owner._non_persistent_buffers_set and not _is_of(owner, "torch.")
    ]


def may_be_merged(owner: nn.Module, buffer: Tensor) -> bool:
    """Return True for buffers except those of torch's modules and of other normalisations, which are statistics."""
    is_statistic = _is_of(owner, "torch.") or "norm" in type(owner).__name__.lower()
    return not is_statistic and buffer.layout is torch.strided and not buffer.is_meta


def changed_elements(values: Tensor, last: Tensor) -> Tensor:
    """Return where two tensors of one shape differ; NaN that was there, as in unwritten rows, has not changed."""
    return (values != last) & ~(values.isnan() & last.isnan())


def is_looked_at(step: int) -> bool:
    """Return True in steps 1, 2, 4, 8, ...: a buffer may be written to after a warm-up, and looking costs a copy."""
    return step & (step - 1) == 0


def is_counted(buffer: Tensor) -> bool:
    """Return True for integers and truth values, which count or point: their last values may differ by design."""
    return not (buffer.is_floating_point() or buffer.is_complex())


def _is_of(module: nn.Module, *packages: str) -> bool:
    return type(module).__module__.startswith(packages)
