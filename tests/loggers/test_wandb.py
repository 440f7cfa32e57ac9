"""Against the real package, offline: what it wrote is read back from its files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("wandb") is None, reason="needs wandb")]
_BLOCK = 32768


def blocks(content: bytes) -> Iterator[bytes]:
    """Return the records of a log file: split into blocks, each part with a header of seven bytes."""
    position, parts = 7, []
    while position + 7 <= len(content):
        if _BLOCK - position % _BLOCK < 7:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield b"".join(parts)
            parts = []


def history(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], set[str]]:
    """Return all rows, the settings, and the runs' names."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, config, names = [], {}, set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime):
        for content in blocks(path.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
                rows.append({key: value for key, value in items.items() if not key.startswith("_")})
            elif kind == "run":
                names.add(record.run.run_id)
            if kind in ("run", "config"):
                updates = record.run.config.update if kind == "run" else record.config.update
                config |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates}
    return rows, config, names


def test_curves_settings_and_media_are_in_one_run_also_after_a_resume(tmp_path: Path) -> None:
    """In a separate process: the package starts a service, and handles signals and the exit of Python."""
    program = textwrap.dedent(f"""
        import pathlib, torch
        from trainkit.loggers.media import histogram_of
        from trainkit.loggers.guarded import SafeLogger
        from trainkit.loggers.wandb import WandbLogger
        logger = SafeLogger(WandbLogger(mode="offline", project="p"))
        folder = pathlib.Path({str(tmp_path)!r})
        logger.open(folder, step=0)
        logger.write_config("trainer: {{seed: 7}}\\nlong: " + "a" * 5000)
        logger.write({{"train/loss": 0.5}}, step=1)
        logger.write({{"train/loss": 0.25}}, step=2)
        logger.write_histogram("weights", histogram_of(torch.arange(8.0), bins=4), step=2)
        logger.write_image("image", torch.zeros(2, 3, 3, dtype=torch.uint8), step=2)
        logger.write_text("samples", "<hello>", step=2)
        assert logger.failures == 0
        logger.close()
        logger.open(folder, step=1)
        logger.write({{"train/loss": 0.125}}, step=2)
        assert logger.failures == 0
        logger.close()
    """)
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:trainkit", "-c", program],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr

    rows, config, names = history(tmp_path)
    assert [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (1, 0.5),
        (2, 0.25),
        (2, 0.125),
    ]
    media = {name: value for row in rows for name, value in row.items() if name != "step"}
    assert media["weights/values"] == [2, 2, 2, 2]
    assert media["image/_type"] == "image-file"
    assert media["samples/_type"] == "html-file"
    assert "&lt;hello&gt;" in next(tmp_path.glob("wandb/*/files/media/html/*.html")).read_text()
    assert config["trainer.seed"] == 7
    assert len(config["long"]) == 2000
    assert names == {(tmp_path / "wandb_run_id").read_text().strip()}
