"""Where a rank is, told by a thread of its own when another rank asks: so also one that hangs can be found.

rank 0   waits ... for too long: asks           reads "step 12, Task.training_step, train.py:17"
rank 1   hangs in a read              its thread looks at the main thread's stack and answers
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from trainkit.failure import phase_in

from .failure import StoreBoard

POLL_SECONDS = 1.0  # between two looks whether a rank has asked
_NOT_THE_USERS = frozenset({"torch", "trainkit", *sys.stdlib_module_names})


class Whereabouts:
    """Answers on a board where the thread is that made it, until it is closed."""

    def __init__(self, board: StoreBoard, *, step: Callable[[], int]) -> None:
        """Begin to answer; `step` returns the step that the rank is in."""
        self.board, self.step = board, step
        self._watched = threading.get_ident()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, name="trainkit-whereabouts", daemon=True)
        board.is_answered = True
        self._thread.start()

    def close(self) -> None:
        """Answer no more; may be called twice."""
        self.board.is_answered = False
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _answer_all(self) -> None:
        answered = 0
        with suppress(RuntimeError):  # the store is gone, and with it whoever could ask
            while not self._closing.wait(POLL_SECONDS):
                asked = self.board.num_questions()
                if asked > answered:
                    answered = asked
                    frame = sys._current_frames().get(self._watched)
                    place = "nowhere: its thread has ended" if frame is None else place_of(frame)
                    self.board.answer(asked, f"step {self.step()}, {place}")


def place_of(innermost: FrameType) -> str:
    """Return in words what the stack below a frame is doing, and the innermost line that is the user's own."""
    frames: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None:
        frames.insert(0, frame)
        frame = frame.f_back
    own = [f for f in frames if str(f.f_globals.get("__name__")).partition(".")[0] not in _NOT_THE_USERS]
    line = f"{own[-1].f_code.co_filename}:{own[-1].f_lineno}" if own else ""
    return ", ".join(part for part in (phase_in(frames), line) if part)
