import os
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.program import wait_until
from trainkit.checkpoint.async_writer import AsyncWriter, CpuSnapshot
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore
from trainkit.errors import CheckpointError, UserError


class BlockedStore(CheckpointStore):
    """A store whose saves wait until the test releases them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.released = threading.Event()
        self.running = 0
        self.most_running = 0

    def save(self, *arguments: Any, **named: Any) -> CheckpointEntry:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        assert self.released.wait(600)
        try:
            return super().save(*arguments, **named)
        finally:
            self.running -= 1


def place(step: int) -> dict[str, Any]:
    return {"name": f"step_{step}", "step": step, "epoch": 0}


def test_the_saved_state_is_that_of_the_call(tmp_path: Path) -> None:
    store = BlockedStore(tmp_path)
    weight, history, metrics = torch.zeros(1000), [1, 2], {"loss": 1.0}
    with closing(AsyncWriter(store)) as writer:
        writer.save({"weight": weight, "history": history}, metrics=metrics, **place(1))
        weight.fill_(7)
        history.append(3)
        metrics["loss"] = 9.0
        store.released.set()
        entry = writer.wait()
    assert entry is not None and entry.metrics == {"loss": 1.0}
    loaded = store.load(entry)
    assert loaded["weight"].abs().sum() == 0 and loaded["history"] == [1, 2]


def test_call_returns_before_the_save_is_done(tmp_path: Path) -> None:
    store = BlockedStore(tmp_path)
    writer = AsyncWriter(store)
    writer.save({"a": torch.ones(3)}, **place(1))
    assert writer.busy and store.entries() == []
    writer.check()
    store.released.set()
    writer.close()
    assert not writer.busy and len(store.entries()) == 1


def test_one_save_at_most_is_in_flight(tmp_path: Path) -> None:
    store = BlockedStore(tmp_path)
    store.released.set()
    with closing(AsyncWriter(store)) as writer:
        for step in range(6):
            writer.save({"a": torch.full((50_000,), float(step))}, **place(step))
    assert store.most_running == 1
    assert [entry.step for entry in store.entries()] == list(range(6))
    for entry in store.entries():
        assert (store.load(entry)["a"] == entry.step).all()


@pytest.mark.parametrize("call", ["check", "save", "wait", "close"])
def test_error_of_the_writer_is_raised_once_by_the_next_call(tmp_path: Path, call: str) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    writer = AsyncWriter(CheckpointStore(tmp_path / "checkpoints"))
    writer.save({"a": 1}, **place(1))
    wait_until(lambda: not writer.busy)
    with pytest.raises(CheckpointError, match="could not be saved"):
        if call == "save":
            writer.save({"a": 1}, **place(2))
        else:
            getattr(writer, call)()
    writer.check()
    writer.close()


def test_writer_works_again_after_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("a file where the folder should be")
    with closing(AsyncWriter(CheckpointStore(folder))) as writer:
        writer.save({"a": 1}, **place(1))
        with pytest.raises(CheckpointError):
            writer.wait()
        folder.unlink()
        writer.save({"a": 2}, **place(2))
        entry = writer.wait()
    assert entry is not None and entry.step == 2


def test_error_of_the_callback_after_a_save_is_raised(tmp_path: Path) -> None:
    def fail(entry: CheckpointEntry) -> None:
        raise RuntimeError(f"after {entry.name}")

    writer = AsyncWriter(CheckpointStore(tmp_path))
    writer.save({"a": 1}, then=fail, **place(1))
    with pytest.raises(RuntimeError, match="after step_1"):
        writer.wait()


def test_retention_can_follow_each_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with closing(AsyncWriter(store)) as writer:
        for step in range(4):
            writer.save({"a": step}, keep=lambda entries: entries[-1:], **place(step))
    assert [entry.step for entry in store.entries()] == [3]


def test_payload_that_cannot_be_saved_is_refused_at_the_call(tmp_path: Path) -> None:
    with closing(AsyncWriter(CheckpointStore(tmp_path))) as writer:
        with pytest.raises(UserError, match=r"'a\.b'"):
            writer.save({"a": {"b": object()}}, **place(1))
        assert not writer.busy


@pytest.mark.slow
def test_interpreter_waits_for_the_save_before_it_exits(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from trainkit.checkpoint.store import CheckpointStore\n"
        "from trainkit.checkpoint.async_writer import AsyncWriter\n"
        "AsyncWriter(CheckpointStore(sys.argv[1])).save({'a': torch.ones(10_000_000)}, name='a', step=1, epoch=0)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=600, env=environment)
    assert CheckpointStore(tmp_path).load_last().payload["a"].sum() == 10_000_000


def test_memory_of_the_copy_is_used_again() -> None:
    snapshot = CpuSnapshot()
    weight = torch.randn(100, 10)
    first = snapshot.take({"task": {"weight": weight}, "old": torch.ones(3)})
    address = first["task"]["weight"].data_ptr()
    weight.add_(1)
    second = snapshot.take({"task": {"weight": weight}})
    assert second["task"]["weight"].data_ptr() == address != weight.data_ptr()
    assert torch.equal(second["task"]["weight"], weight)
    third = snapshot.take({"task": {"weight": torch.ones(5, dtype=torch.float64)}})
    assert third["task"]["weight"].dtype == torch.float64


def test_memory_is_ready_after_preparing(tmp_path: Path) -> None:
    snapshot = CpuSnapshot()
    payload = {"weight": torch.randn(100, 10), "tied": torch.ones(2)}
    payload["again"] = payload["weight"]
    snapshot.reserve(payload)()
    buffers = {tensor.data_ptr() for tensor in snapshot.take(payload).values()}
    assert len(buffers) == 2
    with closing(AsyncWriter(CheckpointStore(tmp_path))) as writer:
        writer.prepare(payload)
        writer.save(payload, **place(1))
    assert torch.equal(CheckpointStore(tmp_path).load_last().payload["weight"], payload["weight"])


def test_copy_keeps_ties_strides_and_own_bytes() -> None:
    bucket = torch.randn(1000)
    payload = {
        "a": bucket[:12].view(3, 4),
        "b": bucket[:12].view(3, 4),
        "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(4),
        "sparse": torch.eye(3).to_sparse(),
        "scalar": torch.tensor(2.0),
    }
    for _ in range(2):
        copy = CpuSnapshot().take(payload)
        assert copy["a"].data_ptr() == copy["b"].data_ptr() and copy["a"].untyped_storage().nbytes() == 48
        assert copy["channels"].stride() == payload["channels"].stride()
        for key, tensor in payload.items():
            assert torch.equal(copy[key].to_dense(), tensor.to_dense())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_state_on_a_device_is_copied_before_the_call_returns(tmp_path: Path) -> None:
    weight = torch.zeros(4_000_000, device="cuda")
    with closing(AsyncWriter(CheckpointStore(tmp_path))) as writer:
        for step in range(3):
            weight.fill_(step)
            writer.save({"weight": weight, "count": torch.tensor(step, device="cuda")}, **place(step))
            weight.fill_(-1)
    for entry in CheckpointStore(tmp_path).entries():
        loaded = CheckpointStore(tmp_path).load(entry)
        assert loaded["weight"].device.type == "cpu" and (loaded["weight"] == entry.step).all()
        assert int(loaded["count"]) == entry.step
