import json
import logging
import os
import pickle
import resource
import shutil
import threading
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from re import search
from typing import Any

import pytest
import torch

from trainkit.checkpoint import store as store_module
from trainkit.checkpoint.serialization import check_state_dict
from trainkit.checkpoint.store import (
    CheckpointEntry,
    CheckpointStore,
    Manifest,
    Monitor,
    load_from,
    resolve,
    write_manifest,
)
from trainkit.errors import CheckpointError, DamagedCheckpoint, UserError


def payload_of(step: int) -> dict[str, Any]:
    return {"task": {"weight": torch.full((50,), float(step)), "bias": torch.arange(3)}, "state": {"step": step}}


def filled(folder: Path, losses: list[float]) -> CheckpointStore:
    store = CheckpointStore(folder, monitor=Monitor("validation/loss", "min"))
    for step, loss in enumerate(losses):
        store.save(payload_of(step), name=f"step_{step}", step=step, epoch=0, metrics={"validation/loss": loss})
    return store


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_payload_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    payload = {
        "task": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "rng": [torch.get_rng_state(), (3, (1, 2**31, 2**32 - 1), None)],
        "plain": {
            "text": "ä",
            "bytes": b"\x00\xff",
            "none": None,
            7: 1.5,
            "big": 2**100,
            "set": {1, 2},
            "inf": float("inf"),
        },
        "dtype": torch.bfloat16,
    }
    store = CheckpointStore(tmp_path)
    loaded = store.load(store.save(payload, name="a", step=1, epoch=0))
    assert list(loaded) == list(payload)
    for key in ("rng", "plain", "dtype", "schedule"):
        if key != "rng":
            assert loaded[key] == payload[key]
    assert torch.equal(loaded["rng"][0], payload["rng"][0]) and loaded["rng"][1] == payload["rng"][1]
    assert type(loaded["schedule"]["milestones"]) is type(payload["schedule"]["milestones"])
    assert type(loaded["task"]) is OrderedDict
    assert loaded["task"]._metadata == payload["task"]._metadata
    module.load_state_dict(loaded["task"])
    optimizer.load_state_dict(loaded["optimizer"])
    for group in (0, 1, 2, 3):
        assert torch.equal(
            loaded["optimizer"]["state"][group]["exp_avg"], optimizer.state_dict()["state"][group]["exp_avg"]
        )


def test_file_is_readable_by_torch_alone(tmp_path: Path) -> None:
    entry = CheckpointStore(tmp_path).save(payload_of(3), name="a", step=3, epoch=1)
    content = torch.load(entry.path, weights_only=True)
    assert content["state"] == {"step": 3}
    assert content["trainkit_checkpoint"]["epoch"] == 1


def test_entries_are_in_the_order_of_saving(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.entries() == [] and store.last() is None
    for step in (5, 9, 2):
        store.save(payload_of(step), name=f"step_{step}", step=step, epoch=step // 5, metrics={"a": step}, reason="end")
    entries = CheckpointStore(tmp_path / "run" / "checkpoints").entries()
    assert [entry.step for entry in entries] == [5, 9, 2]
    last = entries[-1]
    assert (last.name, last.epoch, last.metrics, last.reason) == ("step_2", 0, {"a": 2.0}, "end")
    assert last.size == last.path.stat().st_size
    assert files(store.folder) == ["manifest.json", "step_2.pt", "step_5.pt", "step_9.pt"]


def test_hash_in_the_manifest_is_the_one_that_sha256sum_or_b2sum_prints(tmp_path: Path) -> None:
    import hashlib

    entry = CheckpointStore(tmp_path).save(payload_of(3), name="a", step=3, epoch=1)
    content = entry.path.read_bytes()
    known = {"sha256": hashlib.sha256(content), "blake2b": hashlib.blake2b(content, digest_size=32)}
    algorithm, digest = entry.digest.split(":")
    assert known[algorithm].hexdigest() == digest


@pytest.mark.parametrize("algorithm", ["sha256", "blake2b"])
def test_either_hash_detects_a_changed_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    monkeypatch.setattr("trainkit.files.fastest_algorithm", lambda: algorithm)
    store = CheckpointStore(tmp_path)
    entry = store.save(payload_of(3), name="a", step=3, epoch=1)
    assert entry.digest.startswith(algorithm)
    store.verify(entry)
    flip(entry.path, entry.size // 2)
    with pytest.raises(DamagedCheckpoint, match="altered"):
        store.verify(entry)


def test_metrics_that_are_not_finite_survive_the_manifest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(payload_of(0), name="a", step=0, epoch=0, metrics={"x": float("nan"), "y": float("-inf"), "z": 0.1})
    metrics = store.entries()[0].metrics
    assert metrics["x"] != metrics["x"] and metrics["y"] == float("-inf") and metrics["z"] == 0.1
    json.loads((tmp_path / "manifest.json").read_text(), parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))


def test_best_is_the_first_of_equals_and_never_nan(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0, 1.0, float("nan"), 1.0, 2.0])
    best, worst = store.best("validation/loss", "min"), store.best("validation/loss", "max")
    assert best is not None and best.step == 1
    assert worst is not None and worst.step == 0
    assert [entry.step for entry in store.ranked("validation/loss", "min")] == [1, 3, 4, 0]


def test_best_by_an_unknown_metric_names_the_nearest(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0])
    with pytest.raises(UserError, match=r"Did you mean 'validation/loss'"):
        store.best("validation/los", "min")
    with pytest.raises(UserError, match="'min' or 'max'"):
        store.best("validation/loss", "mix")  # type: ignore[arg-type]


def test_there_is_no_best_before_the_first_evaluation(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(payload_of(0), name="a", step=0, epoch=0)
    assert store.best("validation/loss", "min") is None


def test_saving_under_a_name_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(4):
        store.save(payload_of(step), name="last", step=step, epoch=0)
        entry = store.last()
        assert entry is not None and store.load(entry)["state"] == {"step": step}
        assert len(store.entries()) == 1 and len(files(tmp_path)) == 2


def test_delete_takes_only_that_checkpoint(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0, 2.0, 1.0])
    store.delete(store.entries()[1])
    assert files(tmp_path) == ["manifest.json", "step_0.pt", "step_2.pt"]
    assert [entry.step for entry in store.entries()] == [0, 2]


def test_save_leaves_the_checkpoints_to_keep_and_the_new_one(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0, 1.0, 2.0, 4.0])
    seen = []

    def keep(entries: list[CheckpointEntry]) -> list[CheckpointEntry]:
        seen.extend(entry.step for entry in entries)
        return [entries[3], entries[1]]

    store.save(payload_of(4), name="step_4", step=4, epoch=0, keep=keep)
    assert seen == [0, 1, 2, 3, 4]
    assert [entry.step for entry in store.entries()] == [1, 3, 4]
    assert files(tmp_path) == ["manifest.json", "step_1.pt", "step_3.pt", "step_4.pt"]


def test_save_removes_nothing_when_the_new_checkpoint_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [3.0, 1.0])
    move = store_module.move

    def damaging(part: Path, path: Path) -> None:
        move(part, path)
        flip(path, 1000)

    monkeypatch.setattr(store_module, "move", damaging)
    with pytest.raises(DamagedCheckpoint):
        store.save(payload_of(2), name="step_2", step=2, epoch=0, keep=lambda entries: entries[-1:])
    assert files(tmp_path) == ["manifest.json", "step_0.pt", "step_1.pt"]
    assert store.load_last().entry.step == 1


def test_a_save_that_removes_a_checkpoint_is_one_change_in_an_order_that_no_power_cut_hurts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, [3.0])
    calls: list[str] = []

    def noted(module: Any, name: str, note: Callable[..., str]) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **settings: Any) -> Any:
            calls.append(note(*arguments))
            return function(*arguments, **settings)

        monkeypatch.setattr(module, name, call)

    noted(store_module, "only_writer", lambda folder: "lock")
    noted(os, "fsync", lambda descriptor: f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
    noted(os, "replace", lambda source, target: f"name {Path(target).name}")
    noted(os, "unlink", lambda path, *more, **named: f"remove {Path(path).name}")
    store.save(payload_of(1), name="step_1", step=1, epoch=0, keep=lambda entries: entries[-1:])
    folder = tmp_path.name
    assert [call for call in calls if not call.startswith("remove .")] == [
        "lock",
        *("sync .step_1.pt.part", "name step_1.pt", f"sync {folder}"),
        *("sync .manifest.json.part", "name manifest.json", f"sync {folder}"),
        *("remove step_0.pt", "remove step_0.shards"),
    ]
    assert [entry.step for entry in store.entries()] == [1]


def test_saving_again_under_a_name_keeps_the_earlier_one_until_the_new_one_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(payload_of(0), name="last", step=0, epoch=0)

    def damaged(entry: CheckpointEntry) -> None:
        raise DamagedCheckpoint("damaged by the disk")

    monkeypatch.setattr(store, "verify", damaged)
    with pytest.raises(DamagedCheckpoint):
        store.save(payload_of(1), name="last", step=1, epoch=0)
    assert CheckpointStore(tmp_path).load_last().payload["state"] == {"step": 0}
    assert files(tmp_path) == ["last.pt", "manifest.json"]


def test_damaged_checkpoint_is_skipped_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = filled(tmp_path, [3.0, 2.0, 1.0, 0.5])
    entries = store.entries()
    entries[3].path.unlink()
    flip(entries[2].path, 700)
    with caplog.at_level(logging.WARNING):
        loaded = store.load_last()
    assert loaded.payload["state"] == {"step": 1} and loaded.entry == entries[1]
    assert loaded.skipped[0] == f"{entries[3].path} is missing."
    assert loaded.skipped[1].startswith(f"{entries[2].path} was altered") and len(loaded.skipped) == 2
    assert "Continuing from" in caplog.text


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0, 2.0])
    cut(store.entries()[1].path, 100)
    with pytest.raises(DamagedCheckpoint, match=r"cut off.*100 bytes"):
        store.load(store.entries()[1])


def test_an_error_names_every_reason_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0, 2.0])
    for entry in store.entries():
        cut(entry.path, 10)
    with pytest.raises(DamagedCheckpoint, match=r"None of the 2 checkpoints.*step_1.*step_0"):
        store.load_last()


def test_empty_folder_has_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        CheckpointStore(tmp_path).load_last()


def test_file_that_the_manifest_does_not_list_is_never_chosen(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0])
    shutil.copy(tmp_path / "step_0.pt", tmp_path / "step_9.pt")
    assert [entry.step for entry in store.entries()] == [0]
    assert resolve(tmp_path).name == "step_0.pt"
    store.save(payload_of(1), name="step_1", step=1, epoch=0)
    assert (tmp_path / "step_9.pt").exists()  # the user's own, perhaps


def test_named_file_outside_any_manifest_is_loaded(tmp_path: Path) -> None:
    filled(tmp_path / "checkpoints", [3.0])
    copy = shutil.copy(tmp_path / "checkpoints" / "step_0.pt", tmp_path / "copy.pt")
    loaded = load_from(copy)
    assert loaded.payload["state"] == {"step": 0} and loaded.entry.name == "step_0"


@pytest.mark.parametrize("harm", ["remove", "empty", "cut", "other", "list", "text"])
def test_lost_manifest_is_rebuilt_from_undamaged_files(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path, [3.0, 2.0, 1.0])
    entries = store.entries()
    flip(entries[2].path, entries[2].size // 2)
    (tmp_path / "notes.pt").write_text("not a checkpoint")
    manifest = tmp_path / "manifest.json"
    harms: dict[str, Callable[[], object]] = {
        "remove": manifest.unlink,
        "empty": lambda: manifest.write_text(""),
        "cut": lambda: cut(manifest, manifest.stat().st_size // 2),
        "other": lambda: manifest.write_text('{"format_version": 1}'),
        "list": lambda: manifest.write_text("[]"),
        "text": lambda: manifest.write_bytes(b"\xff\xfe"),
    }
    harms[harm]()
    with caplog.at_level(logging.WARNING):
        again = store.entries()
    assert [(entry.name, entry.digest, entry.metrics) for entry in again] == [
        (entry.name, entry.digest, entry.metrics) for entry in entries[:2]
    ]
    assert "undamaged" in caplog.text
    store.save(payload_of(7), name="step_7", step=7, epoch=0)
    assert [entry.step for entry in store.entries()] == [0, 1, 7]


def test_a_folder_that_disappears_during_a_save_is_named_without_advice_about_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(part: Path, content: object) -> None:
        shutil.rmtree(part.parent)
        part.touch()

    monkeypatch.setattr("trainkit.checkpoint.store.write_payload", write)
    store = CheckpointStore(tmp_path / "checkpoints")
    message = (
        r"No such file or directory\. The folder was removed or moved during the save; the next save makes it again\."
    )
    with pytest.raises(CheckpointError, match=message) as raised:
        store.save(payload_of(1), name="step_1", step=1, epoch=0)
    assert "Make room" not in str(raised.value) and "intact" not in str(raised.value)
    monkeypatch.undo()
    store.save(payload_of(1), name="step_1", step=1, epoch=0)
    assert [entry.step for entry in store.entries()] == [1]


def test_a_lost_manifest_and_a_damaged_file_are_named_once_for_each_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        store = filled(tmp_path / name, [2.0, 1.0])
        flip(store.entries()[1].path, store.entries()[1].size // 2)
        (tmp_path / name / "manifest.json").unlink()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert len(CheckpointStore(tmp_path / name).entries()) == 1
        assert caplog.text.count(f"{name}/manifest.json is missing; using the 1 undamaged checkpoints") == 1
        assert caplog.text.count("skipped: ") == 1
        caplog.clear()


@pytest.mark.parametrize("version", ["x", "2", None, 2.0, True, 0, [2]])
def test_a_manifest_with_a_format_that_is_not_a_number_is_rebuilt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: object
) -> None:
    store = filled(tmp_path, [2.0, 1.0])
    forge(tmp_path / "manifest.json", lambda document: document.update(format_version=version))
    with caplog.at_level(logging.WARNING):
        assert [entry.step for entry in store.entries()] == [0, 1]
    assert "manifest.json is damaged; using the 2 undamaged checkpoints" in caplog.text


@pytest.mark.parametrize("numbered", [True, False])
def test_rebuilt_manifest_is_in_the_order_of_saving_after_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbered: bool
) -> None:
    store = CheckpointStore(tmp_path)
    for year, step in ((2030, 3), (2029, 8), (2020, 9)):
        monkeypatch.setattr(
            "trainkit.checkpoint.serialization.datetime",
            type("Clock", (datetime,), {"now": lambda zone, year=year: datetime(year, 1, 1, tzinfo=zone)}),
        )
        store.save(payload_of(step), name=f"step_{step}", step=step, epoch=0)
    if numbered:  # a resumed run
        store.save(payload_of(4), name="step_4", step=4, epoch=0)
    else:
        remove_numbers(tmp_path)
    (tmp_path / "manifest.json").unlink()
    assert [entry.step for entry in store.entries()] == ([3, 8, 9, 4] if numbered else [3, 8, 9])


def remove_numbers(folder: Path) -> None:
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        del content["trainkit_checkpoint"]["number"]
        torch.save(content, path)


def test_file_of_a_killed_save_is_not_chosen_without_a_manifest_either(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0, 2.0])
    (tmp_path / "manifest.json").unlink()
    (tmp_path / ".step_1.pt.unlisted").touch()
    assert [entry.step for entry in store.entries()] == [0]
    store.save(payload_of(2), name="step_2", step=2, epoch=0)
    assert files(tmp_path) == ["manifest.json", "step_0.pt", "step_2.pt"]


def test_edited_manifest_is_rebuilt_from_the_files(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0, 2.0])
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 100'))
    assert [entry.step for entry in store.entries()] == [0, 1]


def forge(manifest: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, with the hash of what it holds then."""
    document = json.loads(manifest.read_text())
    del document["digest"]
    change(document)
    document["digest"] = store_module._digest_of(document)
    manifest.write_text(json.dumps(document))


@pytest.mark.parametrize("file", ["../precious.txt", "..", ".", "notes.txt"])
def test_manifest_cannot_name_what_is_not_a_checkpoint(tmp_path: Path, file: str) -> None:
    store = filled(tmp_path / "checkpoints", [3.0])
    precious = [tmp_path / "precious.txt", store.folder / "notes.txt"]
    for path in precious:
        path.write_text("x")
    forge(store.folder / "manifest.json", lambda document: document["checkpoints"][0].update(file=file))
    for entry in store.entries():
        store.delete(entry)
    assert all(path.exists() for path in precious)


def test_hidden_files_of_others_are_not_removed_by_a_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.folder.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "run.shards").mkdir()
    hostile = ["....unlisted", "...unlisted", ".notes.txt.unlisted", "..hidden.pt.unlisted", "..part", ".notes.part"]
    for name in [*hostile, "notes.txt", ".hidden.pt"]:
        (store.folder / name).touch()
    (store.folder / "notes.shards").mkdir()
    before = set(files(store.folder))
    store.save({}, name="a", step=1, epoch=0)
    store.save({}, name="b", step=2, epoch=0)
    assert set(files(store.folder)) == before | {"a.pt", "b.pt", "manifest.json"}
    assert files(tmp_path) == ["run", "run.shards"] and files(tmp_path / "run") == ["checkpoints", "config.yaml"]


def test_folder_for_shards_is_made_below_the_store_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name"), CheckpointStore(tmp_path / "a").shard_folder("../b"):
        pass
    assert files(tmp_path) == []


def save_in_format(store: CheckpointStore, version: int) -> CheckpointEntry:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainkit.checkpoint.serialization.FORMAT_VERSION", version)
        return store.save(payload_of(1), name=f"step_{version}", step=1, epoch=0)


def test_newer_format_is_refused_not_skipped(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0])
    save_in_format(store, 3)
    with pytest.raises(CheckpointError, match=r"newer trainkit \(format 3.*pip install --upgrade trainkit-torch"):
        store.load_last()


def test_format_that_no_release_wrote_is_refused_and_older_ones_are_read(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0])
    with pytest.raises(CheckpointError, match="format 0"):
        store.load(save_in_format(store, 0))
    assert store.load(save_in_format(store, 1))["state"] == {"step": 1}


def test_manifest_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0])
    (tmp_path / "manifest.json").write_text('{"format_version": 3, "other": 1}')
    with pytest.raises(CheckpointError, match="newer trainkit"):
        store.load_last()
    with pytest.raises(CheckpointError, match="newer trainkit"):
        store.save(payload_of(1), name="step_1", step=1, epoch=0)
    assert files(tmp_path) == ["manifest.json", "step_0.pt"]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("legacy", [False, True])
def test_pickle_that_holds_code_is_refused_and_never_run(tmp_path: Path, legacy: bool) -> None:
    trap, file = tmp_path / "trap", tmp_path / "evil.pt"
    torch.save({"x": Evil(trap)}, file, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match="can run code"):
        load_from(file)
    assert not trap.exists()


def test_listed_file_that_holds_code_is_refused_too(tmp_path: Path) -> None:
    from trainkit.files import file_digest

    store = filled(tmp_path, [1.0])
    trap = tmp_path / "trap"
    entry = store.entries()[0]
    torch.save({"x": Evil(trap)}, entry.path)
    with open(entry.path, "rb", buffering=0) as file:
        size, digest = file_digest(file, "sha256")
    forged = CheckpointEntry(**{**vars(entry), "size": size, "digest": digest})
    write_manifest(tmp_path, Manifest([forged], None))
    with pytest.raises(CheckpointError, match=r"it names \S*mkdir"):
        store.load_last()
    assert not trap.exists()


@pytest.mark.parametrize(
    "content", [b"", b"x", b"hello world" * 50, pickle.dumps({"a": 1}), pickle.dumps([1], protocol=0)]
)
def test_file_that_is_not_a_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "some.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"some\.pt"):
        load_from(tmp_path / "some.pt")


def test_zip_file_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "some.pt", "w") as archive:
        archive.writestr("a.txt", "hello")
    with pytest.raises(CheckpointError, match=r"some\.pt"):
        load_from(tmp_path / "some.pt")


def test_state_dict_of_another_program_is_refused_with_what_to_type(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"Its keys: weight\..*torch\.load"):
        load_from(tmp_path / "model.pt")
    torch.save(torch.ones(2), tmp_path / "tensor.pt")
    with pytest.raises(CheckpointError, match="not saved by trainkit"):
        load_from(tmp_path / "tensor.pt")


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b", "a\n"])
def test_name_that_is_not_a_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="name"):
        CheckpointStore(tmp_path).save({}, name=name, step=0, epoch=0)


def test_reserved_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reserved"):
        CheckpointStore(tmp_path).save({"trainkit_checkpoint": 1}, name="a", step=0, epoch=0)


def test_payload_that_cannot_be_saved_leaves_nothing_behind(tmp_path: Path) -> None:
    store = filled(tmp_path, [1.0])
    with pytest.raises(UserError, match=r"callbacks\.mine"):
        store.save({"callbacks": {"mine": object()}}, name="a", step=0, epoch=0)
    assert files(tmp_path) == ["manifest.json", "step_0.pt"]


@pytest.mark.parametrize("where", ["run", "checkpoints", "manifest"])
def test_run_folder_and_checkpoints_folder_lead_to_the_last_and_the_best(tmp_path: Path, where: str) -> None:
    filled(tmp_path / "run" / "checkpoints", [3.0, 1.0, 2.0])
    path = {"run": "run", "checkpoints": "run/checkpoints", "manifest": "run/checkpoints/manifest.json"}[where]
    assert resolve(tmp_path / path).name == "step_2.pt"
    assert resolve(str(tmp_path / path), "best").name == "step_1.pt"
    assert resolve(tmp_path / path, "step_0").name == "step_0.pt"
    assert load_from(tmp_path / path).entry.step == 2
    assert load_from(resolve(tmp_path / path, "best")).entry.step == 1
    assert load_from(resolve(tmp_path / path, "step_0")).payload["state"] == {"step": 0}


def test_monitor_given_later_decides_what_is_best(tmp_path: Path) -> None:
    filled(tmp_path, [3.0, 1.0, 2.0])
    best = CheckpointStore(tmp_path, monitor=Monitor("validation/loss", "max"))
    assert best.monitor() == ("validation/loss", "max")
    best.save(payload_of(3), name="step_3", step=3, epoch=0)
    assert resolve(tmp_path, "best").name == "step_0.pt"


@pytest.mark.parametrize(
    ("monitor", "choice", "message"),
    [
        (None, "best", r"Choose 'last'.*step_0"),
        (Monitor("loss", "min"), "best", "value of 'loss' yet"),  # before the first evaluation
        (None, "lats", "Did you mean 'last'"),
    ],
)
def test_a_checkpoint_that_cannot_be_chosen_is_refused_with_what_to_choose(
    tmp_path: Path, monitor: Monitor | None, choice: str, message: str
) -> None:
    CheckpointStore(tmp_path, monitor=monitor).save(payload_of(0), name="step_0", step=0, epoch=0)
    with pytest.raises(UserError, match=message):
        resolve(tmp_path, choice)


def test_path_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    filled(tmp_path / "digits" / "2024-01-01_10-00-00" / "checkpoints", [3.0])
    with pytest.raises(UserError, match=r"Did you mean '2024-01-01_10-00-00'"):
        resolve(tmp_path / "digits" / "2024-01-01_10-00-01")
    with pytest.raises(UserError, match=r"Did you mean 'digits'"):
        resolve(tmp_path / "digit" / "2024-01-01_10-00-00" / "checkpoints")
    with pytest.raises(UserError, match=r"Did you mean 'step_0.pt'"):
        resolve(tmp_path / "digits" / "2024-01-01_10-00-00" / "checkpoints" / "step_1.pt")


def test_relative_path_that_is_not_there_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match=r"Did you mean 'runs'"):
        resolve("run/x")
    with pytest.raises(UserError, match="no run or checkpoint"):
        resolve("../nothing/like/this")


def test_folder_of_runs_names_the_latest_run(tmp_path: Path) -> None:
    for run in ("2024-01-01", "2024-01-02"):
        filled(tmp_path / run / "checkpoints", [3.0])
    with pytest.raises(UserError, match=r"holds 2 runs.*2024-01-02"):
        resolve(tmp_path)


def test_folder_without_a_listed_checkpoint_names_the_files(tmp_path: Path) -> None:
    store = filled(tmp_path, [3.0])
    shutil.copy(tmp_path / "step_0.pt", tmp_path / "copy.pt")
    store.delete(store.entries()[0])
    with pytest.raises(UserError, match=r"no complete checkpoint.*copy\.pt"):
        resolve(tmp_path)


def test_keys_of_another_task_are_listed() -> None:
    expected = dict.fromkeys([f"layer.{index}" for index in range(12)] + ["head"])
    with pytest.raises(UserError) as caught:
        check_state_dict(expected, {"head": 1, "stem": 2}, "runs/a/step_1.pt")
    message = str(caught.value)
    assert "runs/a/step_1.pt" in message and "12 missing: layer.0, " in message and "and 2 more" in message
    assert "1 unexpected: stem" in message
    check_state_dict({"a": 1, "b": 2}, {"b": 3, "a": 4}, "x")


def test_prefix_of_a_wrapper_is_recognised() -> None:
    with pytest.raises(UserError, match=r"prefix 'module\.'"):
        check_state_dict({"a.weight": 1, "b": 2}, {"module.a.weight": 1, "module.b": 2}, "x")


def test_shapes_that_differ_are_listed() -> None:
    ours = {"a": torch.ones(2, 3), "b": torch.ones(1), "note": 3}
    check_state_dict(ours, {"a": torch.zeros(2, 3), "b": torch.zeros(1), "note": 4}, "x")
    with pytest.raises(UserError, match=r"a: \(2, 4\) saved, \(2, 3\) expected"):
        check_state_dict(ours, {"a": torch.zeros(2, 4), "b": torch.zeros(1), "note": 4}, "x")


@pytest.fixture
def small_file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("tensors", [1, 1000])
def test_full_disk_raises_and_earlier_checkpoints_are_intact(
    tmp_path: Path, small_file_limit: None, tensors: int
) -> None:
    store = filled(tmp_path, [3.0])
    large = {str(index): torch.zeros(3_000_000 // tensors) for index in range(tensors)}
    with pytest.raises(CheckpointError) as caught:
        store.save({"large": large}, name="large", step=1, epoch=0)
    assert search(r"File too large\. It needs about 12,\d\d\d,\d\d\d bytes, [\d,]+ are free there", str(caught.value))
    assert "run_dir=" in str(caught.value)
    assert files(tmp_path) == ["manifest.json", "step_0.pt"]
    assert store.load_last().skipped == []
    store.save(payload_of(1), name="step_1", step=1, epoch=0)


def test_file_in_place_of_the_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    for folder in (tmp_path / "checkpoints", tmp_path / "checkpoints" / "inner"):
        with pytest.raises(CheckpointError, match="could not be saved"):
            CheckpointStore(folder).save(payload_of(0), name="a", step=0, epoch=0)


def test_failing_manifest_leaves_the_earlier_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, [3.0])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainkit.checkpoint.store.write_manifest", full)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(payload_of(1), name="step_1", step=1, epoch=0)
    with pytest.raises(CheckpointError, match="still usable"):
        store.delete(store.entries()[0])
    assert files(tmp_path) == ["manifest.json", "step_0.pt"]
    assert store.load_last().entry.step == 0


def test_interrupted_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, [3.0])

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(payload_of(1), name="step_1", step=1, epoch=0)
    assert files(tmp_path) == ["manifest.json", "step_0.pt"]


def test_file_and_its_name_are_on_the_disk_before_the_manifest_lists_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(f"fsync {target.name}")
        fsync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        events.append(f"rename {target.name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_rename)
    CheckpointStore(tmp_path / "c").save(payload_of(0), name="a", step=0, epoch=0)
    assert events == [
        "fsync .a.pt.part",
        "rename a.pt",
        "fsync c",
        "fsync .manifest.json.part",
        "rename manifest.json",
        "fsync c",
    ]


def test_error_of_bringing_it_to_the_disk_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path, [3.0])

    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.save({str(index): torch.zeros(1 << 20) for index in range(8)}, name="a", step=1, epoch=0)
    assert files(tmp_path) == ["manifest.json", "step_0.pt"]


def test_writers_of_one_folder_wait_for_each_other(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            store = CheckpointStore(tmp_path)
            for step in range(first, first + 10):
                store.save(payload_of(step), name=f"step_{step}", step=step, epoch=0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    entries = CheckpointStore(tmp_path).entries()
    assert sorted(entry.step for entry in entries) == [first + step for first in (0, 100, 200) for step in range(10)]
    for entry in entries:
        CheckpointStore(tmp_path).verify(entry)


def test_writer_that_never_ends_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainkit.files import only_writer

    monkeypatch.setattr("trainkit.files._WAIT_SECONDS", 0.2)
    with only_writer(tmp_path), pytest.raises(CheckpointError, match="another process"):
        CheckpointStore(tmp_path).save(payload_of(0), name="a", step=0, epoch=0)
    CheckpointStore(tmp_path).save(payload_of(0), name="a", step=0, epoch=0)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
