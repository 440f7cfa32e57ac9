"""What can be changed about a task's modules from outside: what is trained, kept in memory, and how it is laid out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.errors import UserError, nearest

if TYPE_CHECKING:
    from trainkit.strategy import Strategy
    from trainkit.task import TaskModule

_SHOWN = 20


@dataclass(frozen=True)
class ModelSettings:
    """The Trainer's settings of the same names."""

    freeze: Sequence[str] = ()
    checkpoint_activations: Sequence[str] = ()
    channels_last: bool = False
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("freeze", "checkpoint_activations"):
            check_patterns(name, getattr(self, name))

    def check(self, task: TaskModule) -> None:
        """Raise UserError for a pattern that fits nothing of the task."""
        self._to_freeze(task)
        self._checkpointed(task)

    @contextmanager
    def applied(self, task: TaskModule, strategy: Strategy) -> Iterator[None]:
        """Change the task's modules before anything is made of their parameters.

        At the end what is frozen may be trained again and modules keep their activations again; the layout in memory
        and synchronised batch norms stay.
        """
        frozen = self._freeze(task)
        changed = [(module, type(module)) for module in self._checkpointed(task)]
        checkpointing = {kind: _checkpointing(kind) for kind in {kind for _, kind in changed}}
        try:
            for module, kind in changed:
                module.__class__ = checkpointing[kind]
            if self.channels_last:
                task.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch leaves it out
            if self.sync_batch_norm:
                _synchronise(task, strategy)
            yield
        finally:
            for module, kind in changed:
                module.__class__ = kind
            for parameter in frozen:
                parameter.requires_grad_(True)

    def _freeze(self, task: TaskModule) -> list[nn.Parameter]:
        """Leave the parameters that fit a pattern without gradients, and return those that had one."""
        trained = [parameter for parameter in self._to_freeze(task) if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        return trained

    def _to_freeze(self, task: TaskModule) -> list[nn.Parameter]:
        named = dict(task.named_parameters())
        chosen: dict[str, nn.Parameter] = {}
        for pattern in self.freeze:
            fitting = {name: named[name] for name in named if fits(name, pattern)}
            if not fitting:
                raise UserError(_fits_nothing("freeze", pattern, list(named), "parameter"))
            chosen |= fitting
        if self.freeze and not any(p.requires_grad for name, p in named.items() if name not in chosen):
            raise UserError(f"freeze={list(self.freeze)} leaves no parameter to train.")
        return list(chosen.values())

    def _checkpointed(self, task: TaskModule) -> list[nn.Module]:
        named = {name: module for name, module in task.named_modules() if name}
        chosen: dict[str, nn.Module] = {}
        for pattern in self.checkpoint_activations:
            fitting = {name: module for name, module in named.items() if fnmatchcase(name, pattern)}
            if not fitting:
                raise UserError(_fits_nothing("checkpoint_activations", pattern, list(named), "module"))
            chosen |= fitting
        outermost = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
        return [chosen[name] for name in outermost]


def fits(name: str, pattern: str) -> bool:
    """Return whether a pattern fits a parameter's name, or that of a module that it lies in."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def check_patterns(setting: str, patterns: Sequence[str]) -> None:
    """Raise UserError unless `patterns` is a list of texts."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f"{setting}={patterns!r} is not a list of patterns; write {setting}=[{patterns!r}].")


def _fits_nothing(setting: str, pattern: str, names: Sequence[str], what: str) -> str:
    shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
    return f"{setting}: {pattern!r} fits no {what}.{nearest(pattern, names)} There are: {shown}."


def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class like `kind` whose forward is computed a second time for backward.

    A class and not another `forward` on the object: copies of the module, which strategies make, call it for
    themselves.
    """

    class Checkpointed(kind):  # type: ignore[valid-type,misc] # made for each class of modules
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)

    Checkpointed.__name__, Checkpointed.__qualname__ = kind.__name__, kind.__qualname__
    Checkpointed.__module__ = kind.__module__
    return Checkpointed


def _synchronise(task: TaskModule, strategy: Strategy) -> None:
    if strategy.comm.num_processes == 1:
        return
    if strategy.device.type != "cuda":
        raise UserError("sync_batch_norm=true works on CUDA devices only; set trainer.sync_batch_norm=false.")
    nn.SyncBatchNorm.convert_sync_batchnorm(task)
