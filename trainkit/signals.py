"""Being asked to stop by SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets `received`; a second SIGINT interrupts at once.

    Handlers can only be set in the main thread; elsewhere nothing is changed and nothing received.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type] # what signal.signal returned

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
