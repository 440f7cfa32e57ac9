"""Changes to a task's modules: freezing, activation checkpointing, channels_last, SyncBatchNorm, compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.errors import UserError, nearest

_SHOWN = 20


@dataclass(frozen=True)
class ModelTransforms:
    """The Trainer's arguments of the same names."""

    freeze: Sequence[str] = ()
    activation_checkpointing: Sequence[str] = ()
    channels_last: bool = False
    sync_batch_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("freeze", "activation_checkpointing"):
            check_patterns(name, getattr(self, name))

    def check(self, task: nn.Module) -> None:
        """Raise UserError for a pattern that matches nothing in the task."""
        self._to_freeze(task)
        self._checkpointed(task)

    @contextmanager
    def applied(self, task: nn.Module, *, num_processes: int, device: torch.device) -> Iterator[None]:
        """Change the task's modules; entered before the optimizers are created.

        At the end, freezing and activation checkpointing are undone. The memory format and SyncBatchNorm stay.
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
                _sync_batch_norms(task, num_processes=num_processes, device=device)
            yield
        finally:
            for module, kind in changed:
                module.__class__ = kind
            for parameter in frozen:
                parameter.requires_grad_(True)

    def _freeze(self, task: nn.Module) -> list[nn.Parameter]:
        """Freeze the parameters that match a pattern, and return those that were trainable."""
        trained = [parameter for parameter in self._to_freeze(task) if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        return trained

    def _to_freeze(self, task: nn.Module) -> list[nn.Parameter]:
        named = dict(task.named_parameters())
        chosen: dict[str, nn.Parameter] = {}
        for pattern in self.freeze:
            matching = {name: named[name] for name in named if matches(name, pattern)}
            if not matching:
                raise UserError(_no_match("freeze", pattern, list(named), "parameter"))
            chosen |= matching
        if self.freeze and not any(p.requires_grad for name, p in named.items() if name not in chosen):
            raise UserError(f"freeze={list(self.freeze)} leaves no parameter to train.")
        return list(chosen.values())

    def _checkpointed(self, task: nn.Module) -> list[nn.Module]:
        named = {name: module for name, module in task.named_modules() if name}
        chosen: dict[str, nn.Module] = {}
        for pattern in self.activation_checkpointing:
            matching = {name: module for name, module in named.items() if fnmatchcase(name, pattern)}
            if not matching:
                raise UserError(_no_match("activation_checkpointing", pattern, list(named), "module"))
            chosen |= matching
        outermost = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
        return [chosen[name] for name in outermost]


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern matches a parameter's name, or the name of a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def check_patterns(setting: str, patterns: Sequence[str]) -> None:
    """Raise UserError unless `patterns` is a list of strings."""
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f"{setting}={patterns!r} is not a list of patterns; write {setting}=[{patterns!r}].")


def _no_match(setting: str, pattern: str, names: Sequence[str], what: str) -> str:
    shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
    return f"{setting}: {pattern!r} matches no {what}.{nearest(pattern, names)} There are: {shown}."


def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` whose forward is recomputed in backward.

    A class, not another `forward` on the object: it must also work in the copies of the module that strategies make.
    """

    class Checkpointed(kind):  # type: ignore[valid-type,misc] # made for each class of modules
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)

    Checkpointed.__name__, Checkpointed.__qualname__ = kind.__name__, kind.__qualname__
    Checkpointed.__module__ = kind.__module__
    return Checkpointed


def _sync_batch_norms(task: nn.Module, *, num_processes: int, device: torch.device) -> None:
    if num_processes == 1:
        return
    if device.type != "cuda":
        raise UserError("sync_batch_norm=true works on CUDA devices only; set trainer.sync_batch_norm=false.")
    nn.SyncBatchNorm.convert_sync_batchnorm(task)


def compile_forward(task: nn.Module) -> None:
    """Compile the task's forward with `torch.compile`, in place: the keys of its state dict do not change.

    For a task that does not override `forward`, each direct child module is compiled instead.
    """
    if type(task).forward is not nn.Module.forward:
        task.compile()
        return
    for module in task.children():
        _compile_call(module)


def _compile_call(module: nn.Module) -> None:
    """Compile a module's call as `module.compile()` does, also for modules of torch."""
    call = module._call_impl

    def inlined(*inputs: Any, **named: Any) -> Any:
        # A frame outside torch: the compiler skips calls whose outermost frame is torch's.
        return call(*inputs, **named)  # type: ignore[no-untyped-call] # torch does not annotate it

    module._compiled_call_impl = torch.compile(inlined)
