"""Changes to a task's modules: freezing, activation checkpointing, channels_last, SyncBatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

# Private: the one class of all modules with running statistics, batch and instance norms.
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from trainkit.devices import is_cuda
from trainkit.errors import UserError, nearest

T = TypeVar("T")
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

        Frozen batch norms keep their statistics and normalize with them. At the end, freezing and activation
        checkpointing are undone. The memory format and SyncBatchNorm stay.
        """
        to_freeze = self._to_freeze(task)
        # Only these are unfrozen at the end: others the user has frozen.
        frozen = {name: parameter for name, parameter in to_freeze.items() if parameter.requires_grad}
        checkpointed = [(module, type(module)) for module in self._checkpointed(task)]
        release_norms: list[Callable[[bool], None]] = []
        # One subclass for each class: modules of the same type must keep the same type.
        checkpointing = {kind: _checkpointing(kind) for kind in {kind for _, kind in checkpointed}}
        try:
            for parameter in frozen.values():
                parameter.requires_grad_(False)
            for module, kind in checkpointed:
                module.__class__ = checkpointing[kind]
            if self.channels_last:
                task.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch leaves it out
            if self.sync_batch_norm and num_processes > 1:
                if not is_cuda(device):
                    raise UserError(
                        "sync_batch_norm=true works on CUDA devices only; set trainer.sync_batch_norm=false."
                    )
                nn.SyncBatchNorm.convert_sync_batchnorm(task)
            parameters = list(to_freeze.values())
            for norm in frozen_batch_norms(task, parameters, self.freeze):  # after the conversion, which replaces them
                release_norms.append(freeze_statistics(norm))
            yield
        finally:
            # In the reverse order: a frozen batch norm may have the class of a checkpointed module as its base.
            for release in release_norms:
                release(task.training)
            for module, kind in checkpointed:
                module.__class__ = kind
            # By name: under fsdp the task may have shards in their place.
            for name, parameter in task.named_parameters():
                if name in frozen:
                    parameter.requires_grad_(True)

    def _to_freeze(self, task: nn.Module) -> dict[str, nn.Parameter]:
        named = dict(task.named_parameters())
        chosen = _matching("freeze", self.freeze, named, "parameter", matches)
        if self.freeze and not any(p.requires_grad for name, p in named.items() if name not in chosen):
            raise UserError(f"freeze={list(self.freeze)} leaves no parameter to train.")
        return chosen

    def _checkpointed(self, task: nn.Module) -> list[nn.Module]:
        named = {name: module for name, module in task.named_modules() if name}
        chosen = _matching("activation_checkpointing", self.activation_checkpointing, named, "module", fnmatchcase)
        # A checkpointed module inside another would be computed three times.
        outermost = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
        return [chosen[name] for name in outermost]


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern matches a parameter's name, or the name of a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def check_patterns(setting: str, patterns: Sequence[str]) -> None:
    """Raise UserError unless `patterns` is a list of strings."""
    is_list = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        example = patterns if isinstance(patterns, str) else "encoder"
        raise UserError(f"{setting}={patterns!r} is not a list of patterns; write {setting}=[{example!r}].")


def modules_named(
    setting: str, patterns: Sequence[str | type], named: dict[str, nn.Module], what: str = "module"
) -> dict[str, nn.Module]:
    """Return the modules that patterns of names, or classes or their names, match; raises UserError if one has none."""

    def match(name: str, pattern: str) -> bool:
        return fnmatchcase(name, pattern) or type(named[name]).__name__ == pattern

    names = [pattern.__name__ if isinstance(pattern, type) else pattern for pattern in patterns]
    classes = {type(module).__name__ for module in named.values()}
    return _matching(setting, names, named, what, match, others=classes)


def _matching(
    setting: str,
    patterns: Sequence[str],
    named: dict[str, T],
    what: str,
    match: Callable[[str, str], bool],
    *,
    others: Collection[str] = (),
) -> dict[str, T]:
    """Return the entries whose names match a pattern; raises UserError, with the nearest name, if one matches none."""
    chosen: dict[str, T] = {}
    for pattern in patterns:
        matching = {name: named[name] for name in named if match(name, pattern)}
        if not matching:
            shown = ", ".join(list(named)[:_SHOWN]) + ", ..." * (len(named) > _SHOWN)
            raise UserError(
                f"{setting}: {pattern!r} matches no {what}.{nearest(pattern, [*named, *others])} There are: {shown}."
            )
        chosen |= matching
    return chosen


def _checkpointing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `kind` whose forward is recomputed in backward.

    A class, not another `forward` on the object: it must also work in the copies of the module that strategies make.
    """

    class Checkpointed(kind):  # type: ignore[valid-type,misc] # made for each class of modules
        plain_forward = kind.forward  # for a strategy that has more to do in what is recomputed

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            # Without gradients nothing is saved, and checkpoint would still copy the state of the random generators.
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            # The reentrant form takes no keyword arguments, and gives no gradients unless an input requires one.
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)

    # The names of the original: reprs and messages stay as they were.
    Checkpointed.__name__, Checkpointed.__qualname__ = kind.__name__, kind.__qualname__
    Checkpointed.__module__ = kind.__module__
    return Checkpointed


def frozen_batch_norms(
    task: nn.Module, parameters: Sequence[nn.Parameter], patterns: Sequence[str] = ()
) -> list[nn.Module]:
    """Return the modules with running statistics whose name matches a pattern, or all of whose parameters are given."""
    frozen = {id(parameter) for parameter in parameters}

    def is_frozen(name: str, module: nn.Module) -> bool:
        ids = {id(parameter) for parameter in module.parameters()}
        return (bool(ids) and ids <= frozen) or any(matches(name, pattern) for pattern in patterns)

    named = [(name, module) for name, module in task.named_modules() if isinstance(module, _NormBase)]
    return [module for name, module in named if is_frozen(name, module)]


def freeze_statistics(norm: nn.Module) -> Callable[[bool], None]:
    """Keep a batch norm in evaluation mode, also after `train()`; return the function that ends this and sets a mode.

    By its class, as for activation checkpointing: it must also work in copies.
    """
    kind = type(norm)

    class Frozen(kind):  # type: ignore[valid-type,misc] # made for each class of modules
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    Frozen.__name__, Frozen.__qualname__, Frozen.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    # Set before eval(), which calls train(False) of this class.
    norm.__class__ = Frozen
    norm.eval()

    def release(training: bool) -> None:
        norm.__class__ = kind
        norm.train(training)

    return release
