"""Which of several checkpoints is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trainkit.checkpoints.entry import CheckpointEntry, CheckpointError
from trainkit.errors import UserError, nearest


def ranked(
    entries: Sequence[CheckpointEntry], metric: str, mode: Literal["min", "max"], *, folder: Path
) -> list[CheckpointEntry]:
    """Return the entries that have a value of the metric, best first and the later of equals; NaN is no value."""
    if mode not in ("min", "max"):
        raise UserError(f"mode is 'min' or 'max', got {mode!r}.{nearest(str(mode), ('min', 'max'))}")
    known = sorted({key for entry in entries for key in entry.metrics})
    if known and metric not in known:
        raise CheckpointError(
            f"No checkpoint in {folder} has the metric '{metric}'.{nearest(metric, known)} "
            f"There are: {', '.join(known)}."
        )
    sign = 1.0 if mode == "min" else -1.0
    latest_first = [entry for entry in entries[::-1] if not math.isnan(entry.metrics.get(metric, math.nan))]
    return sorted(latest_first, key=lambda entry: sign * entry.metrics[metric])
