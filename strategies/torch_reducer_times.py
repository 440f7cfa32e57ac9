"""What PyTorch's Reducer measures of its own steps."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from trainkit.overlap import Overlap

_ITS_RATE = 100  # of how many steps the Reducer measures one, unless asked for more
_SECOND = 1e9


class TorchReducerTimes:
    """Lets the Reducer measure every step until it is closed, and adds up what it says.

    The Reducer reads its clocks around its own reductions, so that a communication hook of the user's stays in place.
    It tells the times of a step when the next one begins.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._wrapped = wrapped
        self._looks = self._steps = 0
        self._communication = self._hidden = 0.0
        self._measure_one_in(1)

    def look(self) -> None:
        """Take what is known of the step before the one that has just been made."""
        self._looks += 1
        if self._looks == 1:
            return  # of a step that nobody asked about
        told = self._wrapped._get_ddp_logging_data()
        if "backward_comm_time" not in told:  # this kind of module or device is not measured
            return
        self._steps += 1
        self._communication += told["backward_comm_time"] / _SECOND
        self._hidden += min(told["backward_compute_comm_overlap_time"], told["backward_comm_time"]) / _SECOND

    def close(self) -> Overlap | None:
        """Let the Reducer measure as it did, and return the means; `None` where it told nothing."""
        self._measure_one_in(_ITS_RATE)
        if not self._steps:
            return None
        communication, hidden = self._communication / self._steps, self._hidden / self._steps
        note = "behind backward, from the first bucket to the last, on this rank"
        return Overlap(communication - hidden, communication, self._steps, note=note)

    def _measure_one_in(self, steps: int) -> None:
        self._wrapped._set_ddp_runtime_logging_sample_rate(steps)
