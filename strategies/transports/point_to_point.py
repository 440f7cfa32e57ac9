"""Point-to-point messages between servers, of which every rank announces what it receives before it sends.

gloo sends data only after the receiver has announced the receive, over the connection that carries its own data to the
sender. In gloo's all-to-all a rank sends before it announces: the later of two ranks sends all of its data first, and
the link carries one direction at a time. Here the announcements go first, and both directions are busy:

    rank 0   announce  |=== to 1 ===|        rank 0   |=== to 1 ===|
    rank 1   announce  |=== to 0 ===|        rank 1                |=== to 0 ===|     gloo's all-to-all
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor


class Messages:
    """Messages under way, which are waited for as one work."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works
        self.error: RuntimeError | None = None
        self.ended = threading.Event()

    def is_completed(self) -> bool:
        """Return True if all have ended, successfully or not."""
        return self.ended.is_set()

    def wait(self, timeout: timedelta) -> None:
        """Return once all have arrived; raise RuntimeError if one failed or the timeout passes."""
        if not self.ended.wait(timeout.total_seconds()):
            raise RuntimeError(f"messages have not arrived in {timeout.total_seconds()} s")
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


class MessageThread:
    """Waits for messages in the order of `watch`: gloo does not tell whether one has ended to those that do not wait.

    The thread ends with `close` or with the process.
    """

    def __init__(self, changed: threading.Event) -> None:
        """Set `changed` whenever messages have ended."""
        self.changed = changed
        self._queue: SimpleQueue[Messages | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, works: Sequence[dist.Work]) -> Messages:
        """Return the messages of these works, which end once all works have."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fusion messages", daemon=True)
            self._thread.start()
        messages = Messages(works)
        self._queue.put(messages)
        return messages

    def close(self) -> None:
        """End the thread once it waits for nothing; may be called twice."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread = None

    def _run(self) -> None:
        while (messages := self._queue.get()) is not None:
            try:
                for work in messages.works:
                    work.wait()
            except RuntimeError as error:
                messages.error = error
            messages.ended.set()
            self.changed.set()


def receive(tensor: Tensor, group: dist.ProcessGroup | None, *, source: int, tag: int) -> list[dist.Work]:
    """Announce to rank `source` of the group that the tensor is received; nothing is if it is empty."""
    work = dist.irecv(tensor, group=group, group_src=source, tag=tag) if tensor.numel() else None
    return [] if work is None else [work]


def send(tensor: Tensor, group: dist.ProcessGroup | None, *, target: int, tag: int) -> list[dist.Work]:
    """Start to send the tensor to rank `target` of the group, unless it is empty."""
    work = dist.isend(tensor, group=group, group_dst=target, tag=tag) if tensor.numel() else None
    return [] if work is None else [work]
