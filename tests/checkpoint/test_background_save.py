import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import on_gpu
from tests.tasks import wait_for_saves
from trainkit.checkpoint.background_save import BackgroundSave, CpuSnapshot, _Status, save_copy
from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore
from trainkit.distributed.collectives import Collectives
from trainkit.errors import CheckpointError, UserError


class BlockedStore(CheckpointStore):
    """A store whose saves wait until the test releases them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.released = threading.Event()

    def save(self, *arguments: Any, **named: Any) -> CheckpointEntry:
        assert self.released.wait(600)
        return super().save(*arguments, **named)


def place(step: int) -> dict[str, Any]:
    return {"name": f"step_{step}", "step": step, "epoch": 0}


@pytest.fixture
def snapshot() -> Iterator[CpuSnapshot]:
    with closing(CpuSnapshot()) as snapshot:
        yield snapshot


def test_the_saved_state_is_that_of_the_call(tmp_path: Path, snapshot: CpuSnapshot) -> None:
    store = BlockedStore(tmp_path)
    weight, history = torch.zeros(1000), [1, 2]
    save = save_copy(store, {"weight": weight, "history": history}, snapshot, metrics={"loss": 1.0}, **place(1))
    weight.fill_(7)
    history.append(3)
    store.released.set()
    assert save.wait()
    assert save.entry is not None and save.entry.metrics == {"loss": 1.0}
    loaded = store.load(save.entry)
    assert loaded["weight"].abs().sum() == 0 and loaded["history"] == [1, 2]


def test_call_returns_before_the_save_is_done(tmp_path: Path, snapshot: CpuSnapshot) -> None:
    store = BlockedStore(tmp_path)
    save = save_copy(store, {"a": torch.ones(3)}, snapshot, **place(1))
    assert store.entries() == [] and save.entry is None
    assert not save.poll()
    store.released.set()
    save.close()
    assert save.entry == store.last() is not None


def test_completion_is_told_once(tmp_path: Path, snapshot: CpuSnapshot) -> None:
    save = save_copy(CheckpointStore(tmp_path), {"a": 1}, snapshot, **place(1))
    wait_for_saves()
    assert save.poll()
    assert not save.poll() and not save.wait()
    save.close()


@pytest.mark.parametrize("call", ["poll", "wait", "close"])
def test_error_of_the_thread_is_raised_once_by_the_next_call(tmp_path: Path, snapshot: CpuSnapshot, call: str) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    store = CheckpointStore(tmp_path / "checkpoints")
    save = save_copy(store, {"a": 1}, snapshot, **place(1))
    wait_for_saves()
    with pytest.raises(CheckpointError, match="could not be saved"):
        getattr(save, call)()
    assert not save.poll()
    save.close()
    (tmp_path / "checkpoints").unlink()
    again = save_copy(store, {"a": 2}, snapshot, **place(2))
    assert again.wait() and again.entry is not None and again.entry.step == 2


def test_error_of_the_callback_after_a_save_is_raised(tmp_path: Path, snapshot: CpuSnapshot) -> None:
    def fail(entry: CheckpointEntry) -> None:
        raise RuntimeError(f"after {entry.name}")

    save = save_copy(CheckpointStore(tmp_path), {"a": 1}, snapshot, then=fail, **place(1))
    with pytest.raises(RuntimeError, match="after step_1"):
        save.wait()


def test_retention_follows_each_save(tmp_path: Path, snapshot: CpuSnapshot) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(4):
        save_copy(store, {"a": step}, snapshot, keep=lambda entries: entries[-1:], **place(step)).wait()
    assert [entry.step for entry in store.entries()] == [3]


def test_payload_that_cannot_be_saved_is_refused_at_the_call(tmp_path: Path, snapshot: CpuSnapshot) -> None:
    with pytest.raises(UserError, match=r"'a\.b'"):
        save_copy(CheckpointStore(tmp_path), {"a": {"b": object()}}, snapshot, **place(1))
    assert list(tmp_path.iterdir()) == []


class TwoProcesses(Collectives):
    """The main one of two processes, of which the other has the status of this one until it is told another."""

    def __init__(self) -> None:
        super().__init__(num_processes=2)
        self.other: Any = None

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self.other or value]


def test_a_save_of_two_processes_is_registered_once_both_have_written() -> None:
    comm, registered = TwoProcesses(), []
    comm.other = _Status(False)
    save = BackgroundSave(lambda: "first", comm, name="a", register=registered.append)
    wait_for_saves()
    assert not save.poll() and registered == []
    comm.other = _Status(True, "second")
    assert not save.poll()
    wait_for_saves()
    assert registered == [["first", "second"]]
    assert save.poll()


def test_an_error_of_another_process_is_raised_and_what_was_written_removed() -> None:
    comm, removed = TwoProcesses(), []
    comm.other = _Status(True, error=CheckpointError("process 1 has no room"))
    save = BackgroundSave(int, comm, name="a", register=lambda results: None, abandon=lambda: removed.append(1))
    with pytest.raises(CheckpointError, match="process 1 has no room"):
        save.wait()
    assert removed == [1]
    save.close()
    assert removed == [1]


def test_a_save_that_others_may_have_left_is_abandoned_at_the_end() -> None:
    comm, removed = TwoProcesses(), []
    comm.other = _Status(False)
    BackgroundSave(int, comm, name="a", register=lambda results: None, abandon=lambda: removed.append(1)).close()
    assert removed == [1]


def test_an_error_that_no_message_can_be_reaches_the_other_processes_as_its_text() -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    with pytest.raises(CheckpointError, match="RuntimeError: broken"):
        BackgroundSave(fail, TwoProcesses(), name="a").wait()


@pytest.mark.slow
def test_interpreter_waits_for_the_save_before_it_exits(tmp_path: Path) -> None:
    code = (
        "import sys, torch\n"
        "from trainkit.checkpoint.store import CheckpointStore\n"
        "from trainkit.checkpoint.background_save import CpuSnapshot, save_copy\n"
        "store = CheckpointStore(sys.argv[1])\n"
        "save_copy(store, {'a': torch.ones(10_000_000)}, CpuSnapshot(), name='a', step=1, epoch=0)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=600, env=environment)
    assert CheckpointStore(tmp_path).load_last().payload["a"].sum() == 10_000_000


def test_memory_of_the_copy_is_used_again(snapshot: CpuSnapshot) -> None:
    weight = torch.randn(100, 10)
    first = snapshot.take({"task": {"weight": weight}, "old": torch.ones(3)})
    address = first["task"]["weight"].data_ptr()
    weight.add_(1)
    second = snapshot.take({"task": {"weight": weight}})
    assert second["task"]["weight"].data_ptr() == address != weight.data_ptr()
    assert torch.equal(second["task"]["weight"], weight)
    third = snapshot.take({"task": {"weight": torch.ones(5, dtype=torch.float64)}})
    assert third["task"]["weight"].dtype == torch.float64


def test_memory_is_ready_after_preparing(tmp_path: Path, snapshot: CpuSnapshot) -> None:
    payload = {"weight": torch.randn(100, 10), "tied": torch.ones(2)}
    payload["again"] = payload["weight"]
    snapshot.reserve(payload)
    buffers = set(snapshot._buffers)
    copied = snapshot.take(payload)
    assert len({tensor.data_ptr() for tensor in copied.values()}) == 2 == len(buffers)
    assert set(snapshot._buffers) == buffers
    save_copy(CheckpointStore(tmp_path), payload, snapshot, **place(1)).wait()
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


@on_gpu
def test_state_on_a_device_is_copied_before_the_call_returns(tmp_path: Path, snapshot: CpuSnapshot) -> None:
    weight = torch.zeros(4_000_000, device="cuda")
    for step in range(3):
        weight.fill_(step)
        payload = {"weight": weight, "count": torch.tensor(step, device="cuda")}
        save = save_copy(CheckpointStore(tmp_path), payload, snapshot, **place(step))
        weight.fill_(-1)
        save.wait()
    for entry in CheckpointStore(tmp_path).entries():
        loaded = CheckpointStore(tmp_path).load(entry)
        assert loaded["weight"].device.type == "cpu" and (loaded["weight"] == entry.step).all()
        assert int(loaded["count"]) == entry.step
