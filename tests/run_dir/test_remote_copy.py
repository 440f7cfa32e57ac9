"""Runs in a store: copied there while they train, listed when whole, and continued from there."""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from hashlib import new as new_hash
from pathlib import Path
from threading import Event

import pytest
from trainkit.callbacks.checkpoint import Checkpoint

from tests.program import Program
from tests.tasks import AtStep, Regression, assert_same_bits, regression_data, sgd
from trainkit import Callback, Data, Strategy, Trainer, UserError, session
from trainkit.checkpoint.store import CheckpointStore, load_from, resolve
from trainkit.distributed.collectives import Collectives
from trainkit.run_dir import remote_copy
from trainkit.run_dir.remote_copy import RemoteCopy
from trainkit.run_dir.remote_run import RemoteRun, fetch
from trainkit.testing import run_ranks

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

URL = "memory://bucket/run7"


@pytest.fixture(autouse=True)
def _one_machine(tmp_path, monkeypatch):
    """An empty store, and a working folder without runs."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote_copy, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(remote_copy, "_FIRST_WAIT", 0.01)


def another_machine(tmp_path, monkeypatch):
    (tmp_path / "another").mkdir()
    monkeypatch.chdir(tmp_path / "another")


def data():
    return Data(train=regression_data(40), validation=regression_data(8, seed=1), batch_size=4)


def fit(steps, *, run_dir=URL, resume=None, more=(), strategy="single", report=False, **checkpoint):
    task = Regression(sgd, hidden=4, dropout=0.2)
    callbacks = [Checkpoint(**{"every": "2step", **checkpoint}), *more]
    trainer = Trainer(
        strategy, max_duration=f"{steps}step", run_dir=run_dir, callbacks=callbacks, loggers=["jsonl"], report=report
    )
    trainer.fit(task, data(), resume=resume)
    return task


def files_in(folder):
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def files_at(url=URL):
    fs, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(root).strip("/"): fs.cat_file(path) for path in fs.find(root)}


def listed(files):
    content = files.get("checkpoints/manifest.json")
    return [] if content is None else json.loads(content)["checkpoints"]


def assert_whole(files):
    """Fail unless every checkpoint that the manifest lists is there, as it was saved."""
    for entry in listed(files):
        algorithm, _, digest = entry["digest"].partition(":")
        content = files[f"checkpoints/{entry['file']}"]
        options = {"digest_size": 32} if algorithm == "blake2b" else {}
        assert new_hash(algorithm, content, **options).hexdigest() == digest


# ---- Copied


@pytest.mark.parametrize("url", [URL, "file://{folder}/store/run7"])
def test_the_store_has_the_files_of_the_run_when_it_ends(tmp_path, monkeypatch, url):
    url = url.format(folder=tmp_path)
    fit(5, run_dir=url, report=True)
    there = files_at(url)
    assert_whole(there)
    assert there == files_in(Path("runs", *url.replace("://", "/").split("/")))
    assert {"config.yaml", "metrics.jsonl", "summary.json", "report.html"} < there.keys()
    assert [entry["step"] for entry in listed(there)] == [5]


def waits(step, event):
    """Return a callback that waits for the event after a step."""

    def wait(run):
        assert event.wait(600)

    return AtStep(step, wait)


def notice_writes(monkeypatch, written):
    """Set the event when a manifest is written."""
    write = RemoteRun.write

    def noticed(self, name, content):
        write(self, name, content)
        if content:
            written.set()

    monkeypatch.setattr(RemoteRun, "write", noticed)


def test_a_kill_at_any_instant_leaves_whole_checkpoints_in_the_store(monkeypatch):
    seen = []

    def checked(name):
        method = getattr(MemoryFileSystem, name)

        def call(self, *arguments, **options):
            result = method(self, *arguments, **options)
            there = files_at()
            assert_whole(there)
            seen.append(tuple(entry["step"] for entry in listed(there)))
            return result

        monkeypatch.setattr(MemoryFileSystem, name, call)

    for name in ("put_file", "pipe_file", "rm_file"):
        checked(name)
    started = Event()  # after the first upload, so that several are needed

    notice_writes(monkeypatch, started)
    fit(8, more=[waits(4, started)])
    assert seen[-1] == (8,)
    assert len(set(seen)) > 1


def test_training_does_not_wait_for_the_store(monkeypatch):
    started, trained = Event(), Event()
    put_file = MemoryFileSystem.put_file

    def slow(*arguments, **options):
        started.set()
        assert trained.wait(600)
        return put_file(*arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)

    class Last(Callback):
        def on_fit_end(self, run):
            assert started.wait(600)
            assert listed(files_at()) == []
            trained.set()

    fit(8, more=[Last()])
    assert [entry["step"] for entry in listed(files_at())] == [8]


def test_metrics_are_in_the_store_while_the_run_trains(monkeypatch):
    monkeypatch.setattr(remote_copy, "_FILES_EVERY_SECONDS", 0.0)
    copied = Event()
    put_file = MemoryFileSystem.put_file

    def noticed(self, source, target, **options):
        put_file(self, source, target, **options)
        if target.endswith("metrics.jsonl") and self.cat_file(target):
            copied.set()

    monkeypatch.setattr(MemoryFileSystem, "put_file", noticed)
    steps = []

    def look(run):
        steps.extend(json.loads(line)["step"] for line in files_at()["metrics.jsonl"].splitlines())

    settings = {"max_duration": "4step", "loggers": ["jsonl"], "report": False, "log_every": "1step"}
    Trainer(run_dir=URL, callbacks=[waits(3, copied), AtStep(3, look)], **settings).fit(Regression(sgd), data())
    assert steps and steps[-1] < 4


@pytest.mark.parametrize(("copier", "name"), [(MemoryFileSystem, "put_file"), (RemoteCopy, "_link")])
def test_a_checkpoint_that_is_pruned_before_or_while_it_is_copied_is_not_missed(monkeypatch, caplog, copier, name):
    copying, pruned = Event(), Event()
    method = getattr(copier, name)

    def later(self, source, target, **options):
        if name == "_link" or target.endswith("00000002.pt"):
            copying.set()
            assert pruned.wait(600)
        return method(self, source, target, **options)

    monkeypatch.setattr(copier, name, later)

    def prune(run):
        assert not (run.run_dir / "checkpoints" / "step_00000002.pt").exists()
        pruned.set()

    fit(6, more=[waits(3, copying), AtStep(5, prune)])
    assert [entry["step"] for entry in listed(files_at())] == [6]
    assert_whole(files_at())
    assert not Path("runs/memory/bucket/run7/.copying").exists()
    assert "cannot be written to" not in caplog.text


def failing(monkeypatch, times):
    """Make the store refuse uploads a number of times."""
    left = [times]
    put_file = MemoryFileSystem.put_file

    def refuse(*arguments, **options):
        if left[0]:
            left[0] -= 1
            raise ConnectionError("the bucket is away")
        return put_file(*arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    return left


def test_a_store_that_is_away_for_a_while_has_everything_at_the_end(monkeypatch, caplog):
    left = failing(monkeypatch, 4)
    fit(5)
    assert left == [0]
    assert files_at() == files_in("runs/memory/bucket/run7")
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert "ConnectionError: the bucket is away" in warnings[0]
    assert "can be written to again" in warnings[1]


def test_a_store_that_stays_away_costs_a_warning_that_says_what_to_type(monkeypatch, caplog):
    monkeypatch.setattr(remote_copy, "_PATIENCE_SECONDS", 0.1)
    left = failing(monkeypatch, -1)
    whole = fit(5, run_dir="runs/whole")
    assert_same_bits(fit(5), whole)
    command = "python -m trainkit.run_dir.remote_copy runs/memory/bucket/run7 memory://bucket/run7"
    advice = next(message for message in reversed(caplog.messages) if "To copy it" in message)
    assert command in advice
    assert "checkpoints/step_00000005.pt" in advice
    assert listed(files_at()) == []
    assert CheckpointStore("runs/memory/bucket/run7/checkpoints").last().step == 5
    assert remote_copy.main(command.split()[3:]) == 1
    left[0] = 0
    assert remote_copy.main(command.split()[3:]) == 0
    assert files_at() == files_in("runs/memory/bucket/run7")


def test_a_store_that_takes_files_and_no_manifest_gets_each_file_once_and_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(remote_copy, "_PATIENCE_SECONDS", 5.0)
    copied, refused = [], Event()
    put_file, pipe_file = MemoryFileSystem.put_file, MemoryFileSystem.pipe_file

    def counted(self, source, target, **options):
        copied.append(target)
        return put_file(self, source, target, **options)

    def refuse(self, path, content, **options):
        if path.endswith("manifest.json"):
            refused.set()
            raise PermissionError("no manifest")
        return pipe_file(self, path, content, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", counted)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)

    fit(4, every="2step", save_last_k=None, more=[waits(3, refused)])
    assert sum(target.endswith("00000004.pt") for target in copied) == 1
    assert "lacks checkpoints/manifest.json: PermissionError: no manifest" in caplog.messages[-1]


def test_a_store_that_takes_bytes_and_no_file_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(remote_copy, "_PATIENCE_SECONDS", 0.5)
    put_file, tries = MemoryFileSystem.put_file, [20]

    def break_off(self, source, target, callback, **options):
        for _ in range(20):
            time.sleep(0.01)
            callback.relative_update(1)
        tries[0] -= 1
        if tries[0] > 0:
            raise ConnectionError("the connection is lost")
        return put_file(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", break_off)
    monkeypatch.setattr(remote_copy, "_LONGEST_WAIT", 0.01)
    fit(2)
    assert tries[0] > 0
    assert "lacks checkpoints/step_00000002.pt" in caplog.messages[-1]
    assert "ConnectionError: the connection is lost" in caplog.messages[-1]


def test_files_of_a_checkpoint_that_was_never_listed_are_removed_with_it(monkeypatch):
    first = Event()
    write = RemoteRun.write

    def refuse_the_first(self, name, content):
        if content and not first.is_set():
            first.set()
            raise ConnectionError("away")
        write(self, name, content)

    monkeypatch.setattr(RemoteRun, "write", refuse_the_first)

    fit(6, more=[waits(3, first)])
    assert [name for name in files_at() if name.endswith(".pt")] == ["checkpoints/step_00000006.pt"]


def test_a_run_that_another_process_writes_over_is_not_copied_any_more(monkeypatch, caplog):
    other = b'{"checkpoints": []}'

    first = Event()
    notice_writes(monkeypatch, first)
    write = AtStep(3, lambda run: MemoryFileSystem().pipe_file("/bucket/run7/checkpoints/manifest.json", other))
    fit(8, more=[waits(3, first), write])
    assert files_at()["checkpoints/manifest.json"] == other
    assert "Another process has written to memory://bucket/run7" in caplog.text


def test_ranks_are_copied_by_the_process_that_started_them():
    fit(4, strategy="ddp")
    assert_whole(files_at())
    assert files_at() == files_in("runs/memory/bucket/run7")


@pytest.mark.slow
def test_shards_are_copied_before_the_checkpoint_is_listed(tmp_path, monkeypatch):
    from trainkit.strategies.fusion.strategy import FusionStrategy

    def strategy():
        return FusionStrategy(devices=2, shard_optimizer=True)

    whole = fit(6, run_dir="runs/whole", strategy=strategy(), sharded=True)
    fit(3, strategy=strategy(), sharded=True)
    assert sum(name.endswith(".distcp") for name in files_at()) == 2
    another_machine(tmp_path, monkeypatch)
    assert_same_bits(fit(6, resume="auto", strategy=strategy(), sharded=True), whole)
    steps = {name.split("/")[1] for name in files_at() if ".shards" in name}
    assert steps == {"step_00000006.shards"}


def on_each_rank(url, steps):
    fit(steps, run_dir=url, resume="auto", strategy="ddp")


def test_of_ranks_that_were_started_separately_the_main_one_copies(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store/run7"
    run_ranks(on_each_rank, 2, url, 3)
    assert [entry["step"] for entry in listed(files_at(url))] == [3]
    another_machine(tmp_path, monkeypatch)
    run_ranks(on_each_rank, 2, url, 5)
    assert [entry["step"] for entry in listed(files_at(url))] == [5]
    assert_whole(files_at(url))


# ---- Continued


@pytest.mark.parametrize("resume", [URL, "auto", f"{URL}/checkpoints/step_00000003.pt", f"{URL}/"])
def test_a_run_continues_on_another_machine_with_the_weights_of_an_uninterrupted_one(tmp_path, monkeypatch, resume):
    whole = fit(8, run_dir="runs/whole")
    fit(3)
    another_machine(tmp_path, monkeypatch)
    assert_same_bits(fit(8, run_dir=URL if resume == "auto" else None, resume=resume), whole)
    assert [entry["step"] for entry in listed(files_at())] == [8]
    assert files_at() == files_in("runs/memory/bucket/run7")
    steps = [json.loads(line)["step"] for line in files_at()["metrics.jsonl"].splitlines()]
    assert steps == sorted(steps)


def killed_while_uploading(url):
    put_file = LocalFileSystem.put_file

    def half(self, source, target, **options):
        if target.endswith("00000004.pt"):
            content = Path(source).read_bytes()
            Path(target).write_bytes(content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        put_file(self, source, target, **options)

    LocalFileSystem.put_file = half
    copied = Event()
    notice_writes(pytest.MonkeyPatch(), copied)
    remote_copy._EVERY_SECONDS = 0.01

    fit(20, run_dir=url, more=[waits(3, copied)], save_last_k=None, async_save=False, every="2step")


def test_a_run_that_was_killed_while_uploading_continues_from_the_last_whole_checkpoint(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store/run7"
    whole = fit(20, run_dir="runs/whole")
    with Program(killed_while_uploading, url) as program:
        assert program.wait() == -signal.SIGKILL
    there = files_at(url)
    assert_whole(there)
    assert [entry["step"] for entry in listed(there)] == [2]
    assert "checkpoints/step_00000004.pt" in there
    another_machine(tmp_path, monkeypatch)
    assert_same_bits(fit(20, run_dir=url, resume="auto"), whole)
    assert_whole(files_at(url))


def test_auto_begins_a_run_where_the_store_has_none():
    fit(2, resume="auto")
    assert [entry["step"] for entry in listed(files_at())] == [2]


def test_a_damaged_checkpoint_in_the_store_falls_back_to_the_one_before(tmp_path, monkeypatch, caplog):
    whole = fit(8, run_dir="runs/whole")
    fit(4, save_last_k=None)
    MemoryFileSystem().pipe_file("/bucket/run7/checkpoints/step_00000004.pt", b"torn")
    another_machine(tmp_path, monkeypatch)
    assert_same_bits(fit(8, resume="auto"), whole)
    assert "Falling back to an earlier checkpoint" in caplog.text
    assert_whole(files_at())


def test_only_the_newest_checkpoint_is_fetched_and_the_others_remain_in_the_store(tmp_path, monkeypatch):
    fit(6, save_last_k=None)
    another_machine(tmp_path, monkeypatch)
    fit(8, resume="auto", save_last_k=None)
    here = {path.name for path in Path("runs/memory/bucket/run7/checkpoints").glob("*.pt")}
    assert here == {"step_00000006.pt", "step_00000008.pt"}
    assert [entry["step"] for entry in listed(files_at())] == [2, 4, 6, 8]
    assert_whole(files_at())


def test_checkpoints_that_the_store_lacks_are_continued_from_the_local_folder(monkeypatch):
    whole = fit(8, run_dir="runs/whole")
    fit(2)
    behind = files_at()
    fit(4, resume="auto")
    MemoryFileSystem.store.clear()
    for name, content in behind.items():
        MemoryFileSystem().pipe_file(f"/bucket/run7/{name}", content)
    assert_same_bits(fit(8, resume="auto"), whole)
    assert not list(Path("runs/memory/bucket").glob("run7_until_*"))
    assert_whole(files_at())


def test_a_local_folder_that_is_behind_the_store_is_renamed(tmp_path, caplog):
    whole = fit(8, run_dir="runs/whole")
    fit(2)
    shutil.copytree("runs/memory", "behind")
    fit(4, resume="auto")
    shutil.rmtree("runs/memory")
    shutil.copytree("behind", "runs/memory")
    assert_same_bits(fit(8, resume="auto"), whole)
    (renamed,) = Path("runs/memory/bucket").glob("run7_until_*")
    assert CheckpointStore(renamed / "checkpoints").last().step == 2
    assert "It is renamed to" in caplog.text


def test_a_run_of_a_store_can_continue_as_another_run(tmp_path, monkeypatch):
    whole = fit(8, run_dir="runs/whole")
    fit(3)
    before = files_at()
    assert_same_bits(fit(8, run_dir="runs/other", resume=URL), whole)
    assert_same_bits(fit(8, run_dir="memory://bucket/run8", resume=URL), whole)
    assert files_at() == before
    assert [entry["step"] for entry in listed(files_at("memory://bucket/run8"))] == [8]


def test_a_checkpoint_file_outside_of_a_run_is_fetched(monkeypatch, tmp_path):
    whole = fit(8, run_dir="runs/whole")
    fit(3)
    MemoryFileSystem().mv("/bucket/run7/checkpoints/step_00000003.pt", "/bucket/mine.pt")
    MemoryFileSystem().rm("/bucket/run7", recursive=True)
    another_machine(tmp_path, monkeypatch)
    assert_same_bits(fit(8, run_dir=None, resume="memory://bucket/mine.pt"), whole)
    assert list(files_at("memory://bucket")) == ["mine.pt"]


@pytest.mark.parametrize("name", ["", "/best", "/step_00000002", "/checkpoints", "/checkpoints/step_00000002.pt"])
def test_a_trained_task_is_evaluated_from_the_store(name):
    fit(14, monitor="validation/loss", save_last_k=None)  # validated after step 10
    steps = {"": 14, "/checkpoints": 14, "/best": 10}
    task = fit(steps.get(name, 2), run_dir="runs/as_long")
    evaluated = Regression(hidden=4, dropout=0.2)
    metrics = Trainer().validate(evaluated, data(), checkpoint=URL + name)
    assert_same_bits(evaluated, task)
    assert metrics.keys() == {"validation/loss", "validation/absolute"}


# ---- Refused


def test_an_existing_run_in_the_store_is_not_written_over(tmp_path, monkeypatch):
    fit(2)
    before = files_at()
    another_machine(tmp_path, monkeypatch)
    with pytest.raises(UserError, match=r"memory://bucket/run7 already contains a run, .* step 2\. .* resume=auto"):
        fit(4)
    assert files_at() == before


def test_a_store_that_cannot_be_written_to_is_refused_before_training(monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(UserError, match=r"run_dir=memory://bucket/run7 cannot be written to: PermissionError: Access"):
        fit(2)
    assert not Path("runs").exists()


def test_a_scheme_that_is_unknown_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"'memry' is unknown\. Did you mean 'memory'\?"):
        fit(2, run_dir="memry://bucket/run7")
    with pytest.raises(UserError, match="does not name a folder"):
        Trainer(run_dir="s3://")
    with pytest.raises(UserError, match="does not name a folder"):
        Trainer(run_dir="s3://bucket/../../run7")
    with pytest.raises(UserError, match=r"pass the URL as a string"):
        Trainer(run_dir=Path("s3://bucket/run7"))
    assert list(tmp_path.iterdir()) == []


def test_without_fsspec_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"pip install 'trainkit-torch\[remote\]'"):
        fit(2)


def test_a_run_that_is_not_there_is_named():
    with pytest.raises(UserError, match="There is no run or checkpoint at memory://bucket/run7"):
        fit(2, run_dir=None, resume=URL)
    with pytest.raises(UserError, match="There is no run or checkpoint at memory://bucket/run7"):
        Trainer().validate(Regression(), data(), checkpoint=URL)


def test_places_that_need_a_local_path_refuse_a_url(tmp_path):
    refused = [
        lambda: CheckpointStore("s3://bucket/run7/checkpoints"),
        lambda: load_from(Path("s3://bucket/run7")),
        lambda: resolve("s3://bucket/run7"),
        lambda: session("single", Regression(), data(), run_dir="s3://bucket/run7").__enter__(),
    ]
    for call in refused:
        with pytest.raises(UserError, match="must be a local path, got the URL"):
            call()
    assert list(tmp_path.iterdir()) == []


class TwoHosts(Collectives):
    def all_gather_object(self, value):
        return [value, "another"] if value == socket.gethostname() else super().all_gather_object(value)


class OnTwoHosts(Strategy):
    def setup(self, precision):
        super().setup(precision)
        self.comm = TwoHosts()


def test_shards_on_several_machines_are_refused_with_a_url():
    with pytest.raises(UserError, match=r"checkpoint\.sharded=true with run_dir=memory://bucket/run7 .* are on 2;"):
        fit(2, strategy=OnTwoHosts(device="cpu"), sharded=True)
    assert fit(2, run_dir="runs/local", strategy=OnTwoHosts(device="cpu"), sharded=True)


def test_a_fast_dev_run_writes_nothing_to_the_store():
    Trainer(fast_dev_run=True, run_dir=URL).fit(Regression(), data())
    assert files_at() == {}


def test_files_of_a_store_stay_in_the_folder_that_they_are_fetched_to(tmp_path, monkeypatch):
    fit(2)
    MemoryFileSystem.store["/bucket/run7/../../../escaped"] = MemoryFileSystem.store["/bucket/run7/metrics.jsonl"]
    another_machine(tmp_path, monkeypatch)
    fetch(URL)
    assert not list(tmp_path.rglob("escaped"))
