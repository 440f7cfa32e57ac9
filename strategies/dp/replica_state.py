"""ReplicaState: what replicas write to besides gradients is merged into the task, or refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from trainkit.errors import UserError
from trainkit.model.attribute_snapshot import PLAIN
from trainkit.model.carried_state import CarriedAttributes, can_be_followed, is_counted, may_be_merged, named_buffers
from trainkit.task import TaskModule

from ..merged_buffers import FIRST_STEPS, bounds, merge

_REMEDY = (
    "Change it in a callback's on_step_end; keep state by samples in a buffer and write to their rows, which are "
    "merged; or set strategy=single."
)


class ReplicaState:
    """Follows training steps; replicas have copies of buffers and of parameters that do not train."""

    def __init__(self) -> None:
        self._rounds: Counter[str] = Counter()  # by the name of the step
        self._merged: set[str] = set()  # the tensors in which replicas have differed
        self._carried: dict[str, set[str]] = {}  # attributes, by the name of the step

    @contextmanager
    def merged(self, task: TaskModule, replicas: Sequence[TaskModule], step_name: str) -> Iterator[None]:
        """Merge at the end of the block what the replicas, of which the task is the first, have changed in it.

        Raises UserError for values that cannot be merged, for attributes that carry state from step to step, and for
        hooks that the step registers on the gradients of parameters.
        """
        self._rounds[step_name] += 1
        number = self._rounds[step_name]
        tensors = _fixed_tensors(task)
        # Private: only the version counter tells of writes in place without a copy and a comparison of every tensor.
        # The id tells of a tensor that the step puts in the place of another.
        versions = {name: (id(tensor), tensor._version) for name, tensor in tensors.items()}
        # Copies cost memory and time in every step, so tensors that never differed in the first steps get none.
        last = {name: t.clone() for name, t in tensors.items() if number <= FIRST_STEPS or name in self._merged}
        # Refused only if both steps carry it: what one of them reads and changes may be a cache.
        followed = (
            [CarriedAttributes(replica) for replica in replicas] if number in (2, 3) and can_be_followed(task) else []
        )
        with ExitStack() as stack:
            for attributes in followed:
                stack.enter_context(attributes.recorded())
            yield
        where = f"{type(task).__name__}.{step_name}"
        _check_hooks(replicas, where)
        if followed:  # the first step may fill caches
            carried = _differing([attributes.carried() for attributes in followed])
            if number == 3 and (names := sorted(carried & self._carried.get(step_name, set()))):
                raise UserError(
                    f"{where} reads and changes {names[0]}, an attribute, which each replica of strategy=dp would "
                    f"change from its own samples, and all but the first one's changes would be lost. {_REMEDY}"
                )
            self._carried[step_name] = carried
        tensors = _fixed_tensors(task)
        written = {name for name, tensor in tensors.items() if versions.get(name) != (id(tensor), tensor._version)}
        if written or last:
            self._merge(
                (written | last.keys()) & tensors.keys(),
                [_fixed_tensors(replica) for replica in replicas],
                last,
                where,
            )

    def _merge(
        self, names: Iterable[str], replicas: Sequence[Mapping[str, Tensor]], last: Mapping[str, Tensor], where: str
    ) -> None:
        for name in names:
            values = [tensors[name].to(replicas[0][name].device) for tensors in replicas if name in tensors]
            if len({tensor.shape for tensor in (*values, last.get(name, values[0]))}) > 1:
                continue  # refused elsewhere, or a cache
            # Replicas that agree need no rule, also where each wrote the same new value.
            if all(torch.equal(values[0], other) for other in values[1:]):
                continue
            merged, conflict = values[0], torch.tensor(True)
            if name in last:
                reduced = torch.stack([bounds(value, last[name]) for value in values]).amax(0)
                merged, conflict = merge(reduced, last[name])
            # Counters and pointers may differ by design; floats that differ have no common value.
            if is_counted(merged):
                merged = torch.where(conflict, values[0], merged)
            elif conflict.any():
                raise UserError(
                    f"{where} writes to {name} other values from the samples of each replica of strategy=dp, and there "
                    f"is no rule that makes them one: only statistics of normalisation layers are those of the first. "
                    f"{_REMEDY}"
                )
            # From here on it is copied before every step, so that later differences can be merged too.
            self._merged.add(name)
            with torch.no_grad():
                # Replica 0 is the task itself; the other replicas end with the step.
                replicas[0][name].copy_(merged)


def _check_hooks(replicas: Sequence[TaskModule], where: str) -> None:
    """Raise UserError if a replica's step hooked a gradient: the task's hook, for the sum of all, changes it again."""
    for replica in replicas[1:]:
        for name, copy in replica.named_parameters():
            # Private: torch lists the hooks of a tensor nowhere else.
            if copy._backward_hooks:
                raise UserError(
                    f"{where} registers a hook on the gradient of {name}, which each replica of strategy=dp would call "
                    "before the one for the sum of all. Register it in the task's constructor, or set strategy=ddp."
                )


def _fixed_tensors(task: TaskModule) -> dict[str, Tensor]:
    """Return the parameters that do not train, and the buffers except statistics, by name."""
    frozen = {name: parameter for name, parameter in task.named_parameters() if not parameter.requires_grad}
    return frozen | {name: buffer for name, owner, buffer in named_buffers(task) if may_be_merged(owner, buffer)}


def _differing(changes: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the attributes that replicas have changed, except to one number or text."""
    names = {name for values in changes for name in values}
    plain = {n for n in names if all(n in values and isinstance(values[n], PLAIN) for values in changes)}
    return {n for n in names if n not in plain or any(values[n] != changes[0][n] for values in changes)}
