"""Whether the tensors of a checkpoint are those of a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from trainkit.checkpoints.entry import CheckpointError
from trainkit.checkpoints.location import NAMES_SHOWN, first_names
from trainkit.errors import nearest


def check_state_dict_keys(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """Raise UserError with the keys that are missing in `found` or not expected there; `where` names the checkpoint."""
    wanted, present = list(expected), list(found)
    missing = [key for key in wanted if key not in set(present)]
    unexpected = [key for key in present if key not in set(wanted)]
    if not missing and not unexpected:
        return
    lines = [f"{where} belongs to another task, or to this one with other settings:"]
    if missing:
        lines.append(f"  {len(missing)} missing: {first_names(missing)}")
    if unexpected:
        lines.append(f"  {len(unexpected)} unexpected: {first_names(unexpected)}")
    raise CheckpointError("\n".join([*lines, _remedy(missing, unexpected)]))


def check_shapes(expected: Mapping[str, Any], found: Mapping[str, Any], where: str) -> None:
    """Raise UserError with the tensors that have the same name but another shape; `where` names the checkpoint."""
    differing = [
        f"{key}: {tuple(found[key].shape)} saved, {tuple(tensor.shape)} expected"
        for key, tensor in expected.items()
        if isinstance(tensor, Tensor) and isinstance(found.get(key), Tensor) and found[key].shape != tensor.shape
    ]
    if differing:
        shown = "\n".join(f"  {line}" for line in differing[:NAMES_SHOWN])
        more = f"\n  and {len(differing) - NAMES_SHOWN} more" if len(differing) > NAMES_SHOWN else ""
        raise CheckpointError(
            f"{where} has tensors of other shapes than the task:\n{shown}{more}\n"
            f"  Give the task the settings it was trained with; they are in the run folder's config.yaml."
        )


def _remedy(missing: list[str], unexpected: list[str]) -> str:
    prefixes = {key.split(".", 1)[0] + "." for key in unexpected if "." in key}
    for prefix in sorted(prefixes):
        if missing and {prefix + key for key in missing} <= set(unexpected):
            return f"  The keys have the prefix '{prefix}' in front: it was saved from inside a wrapper."
    near = nearest(missing[0], unexpected) if missing else ""
    return f" {near} Give the task the settings it was trained with; they are in the run folder's config.yaml."
