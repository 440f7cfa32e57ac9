"""Being asked to stop: by SIGINT, by SIGTERM, or by a signal that announces that the job's time is over."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

from trainkit.errors import UserError, nearest

ALWAYS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODES = {number.name: 128 + number for number in signal.Signals}
"""What a program ends with that a signal ended."""

_PREEMPTION = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGHUP", "SIGXCPU")


def preemption_signal_named(name: str | None) -> signal.Signals | None:
    """Return the signal that a scheduler announces the end with; raises UserError for one that cannot be."""
    if name is None:
        return None
    if name not in _PREEMPTION:
        raise UserError(
            f"preemption_signal={name!r} is unknown.{nearest(str(name), _PREEMPTION)} Choose one of: "
            f"{', '.join(_PREEMPTION)}."
        )
    return signal.Signals[name]


class StopSignals:
    """While entered, the first of the signals only sets `received`; after it, SIGINT interrupts at once.

    Handlers can only be set in the main thread; elsewhere nothing is changed and nothing received.
    """

    def __init__(self, preemption: signal.Signals | None = None) -> None:
        self.received: signal.Signals | None = None
        self._signals = tuple(dict.fromkeys((*ALWAYS, *(() if preemption is None else (preemption,)))))
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type] # what signal.signal returned

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
