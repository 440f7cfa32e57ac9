"""Sample weights: checked, or computed so that all classes are drawn equally often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from trainkit.errors import UserError

_NAMES = ("targets", "labels")


def check_sample_weights(weights: Sequence[float] | Tensor) -> Tensor:
    """Return one float64 weight for each sample; raises UserError unless samples can be drawn by them."""
    try:
        numbers = weights if isinstance(weights, Tensor) else list(weights)
        known = torch.as_tensor(numbers, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"sample_weights must be one number for each training sample, got a {type(weights).__name__} that is not "
            "a list of numbers."
        ) from None
    if known.dim() != 1:
        raise UserError(f"sample_weights must be one number for each training sample, got shape {tuple(known.shape)}.")
    wrong = (~torch.isfinite(known) | (known < 0)).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise UserError(
            f"sample_weights must be 0 or more and finite, but that of sample {index} is {float(known[index]):g}."
        )
    if not bool((known > 0).any()):
        raise UserError("sample_weights must be above 0 for at least one sample, but are all 0.")
    return known


def balanced_weights(labels: Sequence[Any] | Tensor) -> Tensor:
    """Return 1 / (samples of its class) for each sample, as float64."""
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
    """Return the class of each sample, if the dataset defines them; raises UserError if it does not."""
    found = _known_labels(dataset)
    if found is None:
        raise UserError(
            f"balance_classes=true needs the class of each sample, which {type(dataset).__name__} does not define; "
            "give it an attribute `targets` or `labels`, or pass Data(balance_classes=[class of each sample])."
        )
    return found


def _known_labels(dataset: Any) -> Sequence[Any] | Tensor | None:
    if type(dataset) is TensorDataset:
        last = dataset.tensors[-1]
        return last if last.dim() == 1 and not last.is_floating_point() else None
    if type(dataset) is Subset:
        labels = _known_labels(dataset.dataset)
        return None if labels is None else [labels[int(index)] for index in dataset.indices]
    return next((getattr(dataset, name) for name in _NAMES if hasattr(dataset, name)), None)
