"""How often each sample is drawn, so that all classes are drawn alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from trainkit.errors import UserError

_NAMES = ("targets", "labels")


def sample_weights(weights: Sequence[float] | Tensor) -> Tensor:
    """Return one weight for each sample; raises UserError for what nothing can be drawn by."""
    try:
        numbers = weights if isinstance(weights, Tensor) else list(weights)
        known = torch.as_tensor(numbers, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"weights must be one number for each sample of training, got a {type(weights).__name__} that is no list "
            "of numbers."
        ) from None
    if known.dim() != 1:
        raise UserError(f"weights must be one number for each sample of training, got shape {tuple(known.shape)}.")
    wrong = (~torch.isfinite(known) | (known < 0)).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise UserError(f"weights must be 0 or more and finite, and that of sample {index} is {float(known[index]):g}.")
    if not bool((known > 0).any()):
        raise UserError("weights are all 0, so there is nothing to draw; at least one must be above 0.")
    return known


def balanced_weights(labels: Sequence[Any] | Tensor) -> Tensor:
    """Return for each sample 1 / (samples of its class)."""
    if isinstance(labels, Tensor):
        if labels.dim() != 1 or labels.is_floating_point():
            raise UserError(
                "balance_classes must be one class for each sample, a list or a tensor of whole numbers; got shape "
                f"{tuple(labels.shape)} of {labels.dtype}."
            )
        labels = labels.tolist()
    classes = [label.item() if isinstance(label, Tensor) else label for label in labels]
    counts = Counter(classes)
    return torch.tensor([1 / counts[label] for label in classes], dtype=torch.float64)


def labels_of(dataset: Any) -> Sequence[Any] | Tensor:
    """Return the class of each sample of a dataset that knows them; raises UserError for one that does not."""
    found = _known_labels(dataset)
    if found is None:
        raise UserError(
            f"balance_classes=true needs the class of each sample, which {type(dataset).__name__} does not tell: give "
            "it an attribute `targets` or `labels`, or pass Data(balance_classes=[class of each sample])."
        )
    return found


def _known_labels(dataset: Any) -> Sequence[Any] | Tensor | None:
    if type(dataset) is TensorDataset:
        last = dataset.tensors[-1]
        return last if last.dim() == 1 and not last.is_floating_point() else None
    if type(dataset) is Subset:
        whole = _known_labels(dataset.dataset)
        return None if whole is None else [whole[index] for index in _listed(dataset.indices)]
    return next((getattr(dataset, name) for name in _NAMES if hasattr(dataset, name)), None)


def _listed(indices: Sequence[int]) -> list[int]:
    return [int(index) for index in indices]
