"""A TensorBoard event file: records of protocol buffers, each with checksums.

    record      length   checksum of it   event   checksum of it
    bytes            8                4   length               4

`tensorboard`'s own writer needs a fifth of a second to import (seconds where TensorFlow is installed), a thread, and
loses what it holds back when the process is killed; this one hands every event to the system at once.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

PREFIX = "events.out.tfevents."

_CASTAGNOLI = 0x82F63B78
"""The polynomial of CRC-32C with its bits reversed."""
_MASK_DELTA = 0xA282EAD8


class EventFile:
    """One new event file in a folder; readers take it after all that are there already."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{PREFIX}{_next_stamp(folder):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        self._table = _crc_table()
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: Event) -> None:
        """Append the event; once returned, it outlives the process."""
        if self._file is not None:
            os.write(self._file, self._record(event.SerializeToString()))

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _record(self, data: bytes) -> bytes:
        length = struct.pack("<Q", len(data))
        return b"".join((length, self._checksum(length), data, self._checksum(data)))

    def _checksum(self, data: bytes) -> bytes:
        crc, table = 0xFFFFFFFF, self._table
        for byte in data:
            crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        crc ^= 0xFFFFFFFF
        masked = (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF
        return struct.pack("<I", masked)


def _next_stamp(folder: Path) -> int:
    """Return a time, in seconds, later than that of every event file in the folder: readers sort by it."""
    stamps = [path.name.removeprefix(PREFIX).split(".")[0] for path in folder.glob(f"{PREFIX}*")]
    return max([int(time.time()), *(int(stamp) + 1 for stamp in stamps if stamp.isdigit())])


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return table
