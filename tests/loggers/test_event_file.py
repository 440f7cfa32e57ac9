from __future__ import annotations

import struct
from pathlib import Path

import pytest

from trainkit.loggers.event_file import EventFile


@pytest.mark.parametrize("text", ["", "loss", "x" * 1000])
def test_checksums_are_those_that_tensorboard_writes(tmp_path: Path, text: str) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    file = EventFile(tmp_path)
    start = file.path.stat().st_size
    file.add(Event(step=3, file_version=text))
    file.close()

    record = file.path.read_bytes()[start:]
    data = record[12:-4]
    assert Event.FromString(data) == Event(step=3, file_version=text)
    assert record[:8] == struct.pack("<Q", len(data))
    assert record[8:12] == struct.pack("<I", masked_crc32c(record[:8]))
    assert record[-4:] == struct.pack("<I", masked_crc32c(data))
