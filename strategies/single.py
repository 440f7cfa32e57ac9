"""The strategy `single`: one process on one device, which accumulates the gradients of micro-batches."""

from __future__ import annotations

from trainkit.strategy import PhaseTraining


class SingleStrategy(PhaseTraining):
    """One device, which accumulates the gradients of a step's micro-batches.

        micro-batch 0   forward  backward
        micro-batch 1                     forward  backward
        optimizer                                            step

    Args:
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `mps`.
        accumulate: Micro-batches of a step; the global batch must divide by it.
        micro_batch_size: Samples on the device at once, at most; use this or `accumulate`. `auto` halves it whenever it
            does not fit into memory.

    """

    supports_auto_micro_batch = True
    supports_manual_backward = True
