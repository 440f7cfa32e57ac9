"""The metric objects that steps have returned, by their names, until a pass ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError
from trainkit.metric_states import Part, compute_together, reset, take
from trainkit.step_output import StepOutput

Gathered = tuple[int, dict[str, list[Part]]]
"""A process's rank, and what it has counted under each name."""


class MetricObjects:
    """Knows which objects count for which name, and brings together what they have counted."""

    def __init__(self) -> None:
        self._found: dict[str, dict[int, tuple[nn.Module, int]]] = {}  # name -> id -> object, samples
        self._are_elsewhere = False  # on another process that shares this one's samples

    def __bool__(self) -> bool:
        return bool(self._found) or self._are_elsewhere

    def add(self, output: StepOutput) -> None:
        """Note what a step returned."""
        for name, metric, num_samples in output.objects:
            if metric is None:
                self._are_elsewhere = True
                continue
            of_name = self._found.setdefault(name, {})
            _, samples = of_name.get(id(metric), (metric, 0))
            of_name[id(metric)] = (metric, samples + num_samples)

    def reduce(self, comm: Collectives) -> dict[str, float]:
        """Return the numbers over what all ranks have counted, and begin anew; collective."""
        return self.compute(comm.all_gather_object(self.parts(comm.rank)), comm)

    def parts(self, rank: int) -> Gathered:
        """Return what this process has counted, in host memory."""
        return rank, {
            name: [Part(take(metric), samples) for metric, samples in of_name.values()]
            for name, of_name in self._found.items()
        }

    def compute(self, gathered: list[Gathered], comm: Collectives) -> dict[str, float]:
        """Return the numbers over what all processes have counted, and let the objects begin anew; collective.

        Each name is computed where it was counted first, so every rank has the same number.
        """
        counted: dict[str, dict[int, list[Part]]] = {}  # name -> rank -> parts: of ranks that share samples the first
        owners: dict[str, int] = {}
        for process, (rank, of_process) in enumerate(gathered):
            for name, parts in of_process.items():
                owners.setdefault(name, process)
                counted.setdefault(name, {}).setdefault(rank, parts)
        mine = {
            name: _numbers(name, self._compute(name, [part for parts in of_rank.values() for part in parts]))
            for name, of_rank in counted.items()
            if owners[name] == comm.process
        }
        self.reset()
        computed: dict[str, float] = {}
        for numbers in comm.all_gather_object(mine):
            for own in numbers.values():
                computed.update(own)
        return computed

    def reset(self) -> None:
        """Let the objects begin anew."""
        for of_name in self._found.values():
            for metric, _ in of_name.values():
                reset(metric)
        self._found.clear()
        self._are_elsewhere = False

    def _compute(self, name: str, parts: list[Part]) -> Any:
        metric, _ = next(iter(self._found[name].values()))
        return compute_together(metric, parts)


def _numbers(name: str, computed: Any) -> dict[str, float]:
    """Return a metric's result as numbers by name; a dict's entries lie below its name."""
    if isinstance(computed, Mapping):
        return {f"{name}/{key}": _number(f"{name}/{key}", value) for key, value in computed.items()}
    return {name: _number(name, computed)}


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(
            f"the metric {name!r} computed a tensor of shape {tuple(value.shape)}; what is logged is a number. Let "
            "compute return a scalar or a dict of scalars, for example {'class_0': value[0], 'class_1': value[1]}."
        )
    return float(value)
