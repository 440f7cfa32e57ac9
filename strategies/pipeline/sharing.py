"""What the last stage's steps returned, given to all ranks of a pipeline in one small message."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.metrics.step_output import StepOutput

_UNCHANGED, _CHANGED = 0.0, 1.0


@dataclass(slots=True)
class _Form:
    """Outputs without their numbers: what to fill numbers into."""

    outputs: list[StepOutput]

    def fill(self, numbers: list[Tensor]) -> list[StepOutput]:
        rest = iter(numbers)
        filled = []
        for output in self.outputs:
            loss = None if output.loss is None else next(rest).to(output.loss.dtype)
            weight = next(rest)
            metrics: dict[str, Tensor | float] = {}
            for name, kind in output.metrics.items():
                number = next(rest)
                metrics[name] = number.to(kind.dtype) if isinstance(kind, Tensor) else float(number)
            kept = weight.to(output.weight.dtype) if isinstance(output.weight, Tensor) else float(weight)
            filled.append(replace(output, loss=loss, weight=kept, metrics=metrics))
        return filled


class OutputSharing:
    """Broadcasts step outputs from one rank of a pipeline to the others.

    The numbers travel as one float64 tensor; names and types only when they change.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, rank: int, device: torch.device):
        self._group = group
        self._rank = rank
        self._device = device
        self._forms: dict[str, _Form] = {}
        self._sizes: dict[str, int] = {}

    def share(self, outputs: list[StepOutput] | None, *, source: int, kind: str) -> list[StepOutput]:
        """Return the outputs of rank `source`, which alone gives them; `kind` names a sequence of like outputs."""
        if self._group is None or self._group.size() == 1:
            assert outputs is not None
            return outputs
        if self._rank == source:
            assert outputs is not None
            self._send(outputs, source, kind)
            return outputs
        return self._receive(source, kind)

    def _send(self, outputs: list[StepOutput], source: int, kind: str) -> None:
        numbers = _numbers(outputs)
        form = _Form([_blank(output) for output in outputs])
        known = self._forms.get(kind)
        is_new = known is None or repr(known) != repr(form)
        if known is None or not is_new:
            if known is not None:
                self._broadcast(torch.cat([torch.tensor([_UNCHANGED], dtype=torch.float64), numbers]), source)
        else:
            self._broadcast(torch.full((1 + self._sizes[kind],), _CHANGED, dtype=torch.float64), source)
        if is_new:
            dist.broadcast_object_list([(form, numbers)], group=self._group, group_src=source)
            self._forms[kind], self._sizes[kind] = form, numbers.numel()

    def _receive(self, source: int, kind: str) -> list[StepOutput]:
        if kind in self._forms:
            numbers = torch.empty(1 + self._sizes[kind], dtype=torch.float64)
            self._broadcast(numbers, source)
            if float(numbers[0]) == _UNCHANGED:
                return self._forms[kind].fill(list(numbers[1:].to(self._device)))
        box: list[tuple[_Form, Tensor] | None] = [None]
        dist.broadcast_object_list(box, group=self._group, group_src=source)
        assert box[0] is not None
        form, numbers = box[0]
        self._forms[kind], self._sizes[kind] = form, numbers.numel()
        return form.fill(list(numbers.to(self._device)))

    def _broadcast(self, numbers: Tensor, source: int) -> None:
        dist.broadcast(numbers, group=self._group, group_src=source)


def _numbers(outputs: list[StepOutput]) -> Tensor:
    found: list[Tensor | float] = []
    for output in outputs:
        if output.loss is not None:
            found.append(output.loss)
        found += [output.weight, *output.metrics.values()]
    return (
        torch.stack([torch.as_tensor(number).detach().reshape(()).to("cpu", torch.float64) for number in found])
        if found
        else torch.zeros(0, dtype=torch.float64)
    )


def _blank(output: StepOutput) -> StepOutput:
    """Return the output with zeros for its numbers."""
    return replace(
        output,
        loss=None if output.loss is None else torch.zeros((), dtype=output.loss.dtype),
        weight=torch.zeros((), dtype=output.weight.dtype) if isinstance(output.weight, Tensor) else 0.0,
        metrics={
            name: torch.zeros((), dtype=value.dtype) if isinstance(value, Tensor) else 0.0
            for name, value in output.metrics.items()
        },
        objects=[counted._replace(metric=None) for counted in output.objects],
    )
