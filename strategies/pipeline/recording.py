"""A step run once under observation, and written down as a list of events."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .faking import faked
from .interception import Interception
from .observation import Observation
from .recorder import Recorder
from .untouched import copied, unchanged

Step = Callable[[Any], Any]


def observe(
    task: nn.Module,
    step: Step,
    batch: Any,
    *,
    units: frozenset[str],
    fake: bool = False,
    earlier: Sequence[weakref.ref[Tensor]] = (),
) -> Observation:
    """Return what one run of `step` on a copy of `batch` showed; the task and all generators are as they were.

    Calls of the modules named in `units` are one event each; every torch call outside of them is one too. With `fake`
    nothing is computed and no memory is taken: parameters may lie on the meta device. `earlier` are tensors of other
    steps, which this one cannot use.
    """
    modules = {name: module for name, module in task.named_modules() if name}
    interception = Interception(modules)
    with ExitStack() as stack:
        stack.enter_context(unchanged(task))
        batch = copied(batch)
        if fake:
            stack.enter_context(faked(task))
        recorder = Recorder(task, batch, units, draws_are_real=not fake, earlier=earlier)
        with ExitStack() as observing:
            observing.enter_context(interception.installed())
            observing.enter_context(interception.session(recorder))
            observing.enter_context(recorder.counter)
            observing.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.count_saved, _same))
            observing.enter_context(recorder)
            result = step(batch)
        return recorder.finish(result)


def _same(value: Any) -> Any:
    return value
