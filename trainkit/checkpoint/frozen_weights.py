"""Frozen weights: what a checkpoint of the trained parameters alone keeps of the others, their names and their hash."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import CheckpointError

FROZEN = "frozen_weights"
"""Key of a payload without frozen parameters: their `dtypes` by name, and the `digest` of their values."""


def frozen_names(task: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that do not train, tied ones under each name."""
    return frozenset(name for name, p in task.named_parameters(remove_duplicate=False) if not p.requires_grad)


def without(state: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a state dict without some entries, with the versions of its modules."""
    # copy.copy keeps `_metadata`, torch's attribute for the versions of modules; dict() would lose it.
    left = copy.copy(state)
    for name in names:
        left.pop(name, None)
    return left


def record_of(state: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return what a checkpoint keeps of the frozen parameters in a complete state."""
    # Sorted, since the hash depends on the order; the record keeps that order for the check.
    dtypes = {name: state[name].dtype for name in sorted(names)}
    return {"dtypes": dtypes, "digest": _digest(state, dtypes)}


def completed(saved: dict[str, Any], record: Mapping[str, Any] | None, task_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved weights, with those of the task for the parameters that a checkpoint is without."""
    return saved if record is None else {**{name: task_state.get(name) for name in record["dtypes"]}, **saved}


def check_frozen(record: Mapping[str, Any], state: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError unless the frozen parameters in a complete state are those that were trained on."""
    dtypes = record["dtypes"]
    if dtypes.keys() <= state.keys() and _digest(state, dtypes) != record["digest"]:
        raise CheckpointError(
            f"{where} holds the trained parameters only, and the task's {len(dtypes)} frozen ones have other values "
            "than those it was trained on. Build the task from the same pretrained weights (task.pretrained=...), or "
            "with the same seed."
        )


def _digest(state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> str:
    """Return the hash of tensors, each in the dtype that it was saved in."""
    digest = hashlib.sha256(usedforsecurity=False)
    for name, dtype in dtypes.items():
        # In the saved dtype: a run in another precision holds the same weights.
        tensor = state[name].detach().to("cpu", dtype).contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
