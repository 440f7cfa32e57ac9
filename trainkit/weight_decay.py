"""Parameters that weight decay leaves alone, chosen by rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from trainkit.errors import UserError
from trainkit.model_settings import matches

if TYPE_CHECKING:
    from trainkit.optim.phase import Schedule

_NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
SPLIT_FROM = "split_from"
"""The setting of a group made here that says which one it was part of, and shares the learning rate with."""
_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")
"""Where schedulers of torch keep one value for each group of parameters."""


def exempt_from_decay(
    optimizer: Optimizer, schedules: Sequence[Schedule], task: nn.Module, rules: Sequence[str]
) -> None:
    """Move the parameters that a rule fits into groups without weight decay, at the end of the optimizer's groups.

    A rule is `bias`, `norm` (all parameters of normalisation layers), `embedding`, or a pattern of parameters' or
    modules' names. Raises UserError for a pattern that fits none of the optimizer's parameters.
    """
    groups = optimizer.param_groups
    ours = {id(parameter) for group in groups for parameter in group["params"]}
    chosen: set[int] = set()
    for rule in rules:
        fitting = _fitting(task, rule)
        if not fitting & ours and rule not in ("bias", "norm", "embedding"):
            raise UserError(f"no_weight_decay: {rule!r} fits none of the optimizer's parameters.")
        chosen |= fitting
    count = len(groups)
    for index in range(count):
        group = groups[index]
        exempt = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if not group.get("weight_decay") or not exempt:
            continue
        kept = [parameter for parameter in group["params"] if id(parameter) not in chosen]
        if not kept:
            group["weight_decay"] = 0.0
            continue
        group["params"] = kept
        optimizer.add_param_group({**group, "params": exempt, "weight_decay": 0.0, SPLIT_FROM: index})
        for scheduler in _all([schedule.scheduler for schedule in schedules]):
            for name in _OF_GROUPS:
                values = getattr(scheduler, name, None)
                if isinstance(values, list) and len(values) >= count:
                    values.append(values[index])


def _fitting(task: nn.Module, rule: str) -> set[int]:
    if rule == "bias":
        return {id(p) for name, p in task.named_parameters() if name.rpartition(".")[2] == "bias"}
    by_kind: dict[str, tuple[type[nn.Module], ...]] = {"norm": _NORMS, "embedding": (nn.Embedding,)}
    kinds = by_kind.get(rule)
    if kinds is not None:
        return {id(p) for module in task.modules() if _is_one(module, kinds) for p in module.parameters(recurse=False)}
    return {id(parameter) for name, parameter in task.named_parameters() if matches(name, rule)}


def _is_one(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return isinstance(module, kinds) or (nn.LayerNorm in kinds and type(module).__name__.endswith("Norm"))


def _all(schedulers: Sequence[Any]) -> list[Any]:
    """Return schedulers and those that they are made of."""
    found: list[Any] = []
    for scheduler in schedulers:
        found += [scheduler, *_all(getattr(scheduler, "_schedulers", ()))]
    return found
