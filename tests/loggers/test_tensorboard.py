from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.loggers.tensorboard import TensorBoardLogger

Read = Callable[[Path], Any]


@pytest.fixture(scope="module")
def read() -> Read:
    """Read a run's folder as TensorBoard does, checksums included."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return lambda folder: EventAccumulator(str(folder / "tensorboard")).Reload()


def curve(events: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(name)]


def written(folder: Path, *steps: int, opened_at: int = 0) -> None:
    logger = TensorBoardLogger()
    logger.open(folder, step=opened_at)
    for step in steps:
        logger.write({"train/loss": 1.0 / step, "validation/accuracy": step / 64}, step=step)
    logger.close()


def test_tensorboard_reads_every_scalar_under_its_name(tmp_path: Path, read: Read) -> None:
    written(tmp_path, 2, 4)

    events = read(tmp_path)
    assert events.Tags()["scalars"] == ["train/loss", "validation/accuracy"]
    assert curve(events, "train/loss") == [(2, 0.5), (4, 0.25)]
    assert curve(events, "validation/accuracy") == [(2, 2 / 64), (4, 4 / 64)]


def test_resuming_does_not_double_the_curves(tmp_path: Path, read: Read) -> None:
    written(tmp_path, 1, 2, 4, 8)

    written(tmp_path, 4, 16, opened_at=2)

    assert [step for step, _ in curve(read(tmp_path), "train/loss")] == [1, 2, 4, 16]


def test_resuming_after_a_kill_in_the_middle_of_a_record_goes_on(tmp_path: Path, read: Read) -> None:
    written(tmp_path, 1, 2, 4)
    (path,) = (tmp_path / "tensorboard").iterdir()
    path.write_bytes(path.read_bytes()[:-5])

    written(tmp_path, 8, opened_at=2)

    assert [step for step, _ in curve(read(tmp_path), "train/loss")] == [1, 2, 8]


def test_the_settings_are_kept_as_text(tmp_path: Path, read: Read) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path, step=0)
    logger.write_config("trainer:\n  seed: 7\n")
    logger.close()

    (event,) = read(tmp_path).Tensors("config")
    assert b"seed: 7" in event.tensor_proto.string_val[0]


def test_numbers_that_are_not_finite_come_back_as_they_were(tmp_path: Path, read: Read) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path, step=0)
    for step, value in enumerate([math.nan, math.inf, -math.inf, 0.5]):
        logger.write({"train/loss": value}, step=step)
    logger.close()

    values = [value for _, value in curve(read(tmp_path), "train/loss")]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 0.5]


def test_a_killed_process_loses_nothing(tmp_path: Path, read: Read) -> None:
    program = (
        "import os, pathlib, signal\n"
        "from trainkit.loggers.tensorboard import TensorBoardLogger\n"
        f"logger = TensorBoardLogger(); logger.open(pathlib.Path({str(tmp_path)!r}), step=0)\n"
        "logger.write({'train/loss': 0.5}, step=7)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False, timeout=60, env=dict(os.environ))

    assert killed.returncode == -signal.SIGKILL
    assert curve(read(tmp_path), "train/loss") == [(7, 0.5)]


def test_files_are_read_in_the_order_of_their_opening_though_all_are_of_one_second(tmp_path: Path) -> None:
    names = []
    for step in (1, 2, 3):
        before = set((tmp_path / "tensorboard").glob("*"))
        written(tmp_path, step, opened_at=step - 1)
        names += [path.name for path in set((tmp_path / "tensorboard").iterdir()) - before]

    assert names == sorted(names)
    assert len(names) == 3
