"""A run folder of somebody else, on a full disk, or one that cannot be written to."""

import errno
import os
from pathlib import Path

import pytest
import torch
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.sample_writer import SampleWriter

from tests.seams.training import BATCH_SIZE, STEPS, Layers, samples
from trainkit import Callback, Data, Trainer, files
from trainkit.cli.main import main
from trainkit.errors import UserError
from trainkit.files import file_lock, open_to_append, write_text
from trainkit.run_dir.lock import lock_run_dir


class Predicting(Layers):
    predicted = 0

    def predict_step(self, batch):
        type(self).predicted += 1
        return self(batch[0])


def fit(*callbacks, resume=None, steps=STEPS, **settings):
    data = Data(train=samples(), validation=samples(), batch_size=BATCH_SIZE)
    where = {} if resume else {"run_dir": "run"}
    trainer = Trainer(max_duration=f"{steps}step", callbacks=[*callbacks], log_every="1step", **where, **settings)
    return trainer.fit(Predicting(), data, resume=resume)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files._warn_once.cache_clear()
    return tmp_path


LINKS = [
    ".config.yaml.part",
    ".summary.json.part",
    ".owner",
    ".lock",
    "config_diff.json",
    "environment.json",
    "rank_0.log",
    "step_times.jsonl",
    "metrics.jsonl",
    "warnings.jsonl",
    "checkpoints/.manifest.json.part",
]


@pytest.mark.parametrize("name", LINKS)
def test_a_run_folder_with_a_link_to_outside_is_not_written_to(folder, name):
    fit(Checkpoint(), steps=2)
    (folder / "secret").write_text("mine")
    path = folder / "run" / name
    path.unlink(missing_ok=True)
    path.symlink_to(folder / "secret")
    with pytest.raises(
        UserError, match=rf"the run folder run has the link {name}, which points out of it.*run_dir=PATH"
    ):
        fit("speed_monitor", Checkpoint(), resume="run")
    assert (folder / "secret").read_text() == "mine"


def test_a_linked_folder_of_checkpoints_is_not_pruned(folder):
    fit(Checkpoint(), steps=2)
    (folder / "run" / "checkpoints").rename(folder / "others")
    (folder / "run" / "checkpoints").symlink_to("../others")
    before = sorted(path.name for path in (folder / "others").iterdir())
    with pytest.raises(UserError, match=r"has the link checkpoints, which points out of it"):
        fit(Checkpoint(every="1step"), resume="run")
    assert sorted(path.name for path in (folder / "others").iterdir()) == before


def test_a_run_folder_may_be_a_link_and_have_links_inside(folder):
    (folder / "disk").mkdir()
    (folder / "run").symlink_to("disk")
    fit(Checkpoint(), steps=2)
    (folder / "run" / "latest").symlink_to("checkpoints")
    assert fit(Checkpoint(), resume="run").steps == STEPS


def test_no_file_is_written_through_a_link(folder):
    (folder / "secret").write_text("mine")
    for name in (".text.part", "appended", ".lock", ".owner", "environment.json"):
        (folder / name).symlink_to("secret")
    write_text(folder / "text", "other")
    with pytest.raises(OSError, match=r"symbolic links|levels"):
        open_to_append(folder / "appended")
    with lock_run_dir(folder):
        assert not (folder / ".lock").is_symlink()
    assert (folder / "secret").read_text() == "mine" and (folder / "text").read_text() == "other"


def test_a_lock_that_is_a_link_still_locks(folder, caplog):
    (folder / "nowhere").mkdir()
    (folder / ".lock").symlink_to(folder / "nowhere" / "missing" / "file")
    with file_lock(folder / ".lock") as error:
        assert error is None
        assert (folder / ".lock").exists() and not (folder / ".lock").is_symlink()


class FullDisk(Callback):
    """Refuses all that is written from step 2 on, except checkpoints."""

    def __init__(self, patch):
        self.patch, self.steps = patch, 0

    def on_step_end(self, run):
        self.steps = run.state.step
        if run.state.step == 2:
            write, opened = os.write, os.open

            def no_room(descriptor, content):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(Path("run").resolve())):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(descriptor, content)

            def no_file(path, flags, *mode, **options):
                is_written = flags & (os.O_WRONLY | os.O_RDWR) and "checkpoints" not in str(path)
                if is_written and str(Path(path).resolve()).startswith(str(Path("run").resolve())):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return opened(path, flags, *mode, **options)

            self.patch.setattr(os, "write", no_room)
            self.patch.setattr(os, "open", no_file)


def test_a_full_disk_does_not_end_training_at_what_is_not_essential(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        disk = FullDisk(patch)
        with pytest.raises(UserError, match=r"summary could not be written"):  # without it the run is not complete
            fit("speed_monitor", disk, SampleWriter(), "learning_rate_monitor", evaluate_every="1step")
    text = caplog.text
    assert disk.steps == STEPS
    assert text.count("step_times.jsonl cannot be written (No space left on device); training goes on") == 1
    assert text.count("run/samples cannot be written (No space left on device); training goes on") == 1


def test_a_disk_that_is_full_at_the_start_is_named(monkeypatch):
    def no_room(descriptor, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_room)
        with pytest.raises(UserError, match=r"config\.yaml cannot be written: No space left on device.*run_dir="):
            fit(report=False, config="seed: 0\n")


@pytest.fixture
def read_only(monkeypatch):
    """Return a function after which nothing can be written into the folder `run`."""

    def protect():
        opened = os.open

        def refuse(path, flags, *mode, **options):
            is_written = flags & (os.O_WRONLY | os.O_RDWR)
            if is_written and str(Path(path).resolve()).startswith(str(Path("run").resolve())):
                raise OSError(errno.EROFS, "Read-only file system")
            return opened(path, flags, *mode, **options)

        monkeypatch.setattr(os, "open", refuse)

    return protect


def test_a_report_of_a_folder_that_cannot_be_written_to_names_the_option(folder, read_only, capsys):
    fit(Checkpoint(), report=False)
    read_only()
    assert main(["report", "run"]) == 2
    assert "run/report.html cannot be written: Read-only file system. Type out=FILE" in capsys.readouterr().err
    assert main(["report", "run", "out=page.html"]) == 0
    assert (folder / "page.html").exists()


def test_predictions_for_a_folder_that_cannot_be_written_to_are_refused_before_predicting(folder, read_only, capsys):
    settings = ["fit", "recipe=digits_mlp", "strategy.device=cpu", "trainer.max_duration=1step", "run_dir=run"]
    assert main([*settings, "trainer.report=false", "trainer.evaluate_every=null", "data.num_workers=0"]) == 0
    read_only()
    assert main(["predict", "run", "trainer.limit_predict_batches=1"]) == 2
    assert "run/predictions.pt cannot be written: Read-only file system. Type out=FILE" in capsys.readouterr().err
    assert main(["predict", "run", "trainer.limit_predict_batches=1", "out=mine.pt"]) == 0
    assert len(torch.load(folder / "mine.pt")) > 0
