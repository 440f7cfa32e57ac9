"""Runs and data in S3, as its own client sends the requests, from the command line."""

import json
import logging
import shutil
from importlib.util import find_spec

import pytest
import torch

from tests.s3_server import S3Server
from tests.tasks import Regression, regression_data
from trainkit import Data, Files, Trainer, UserError
from trainkit.checkpoint.store import load_from
from trainkit.cli.main import main
from trainkit.data.loader import open_loader
from trainkit.run_dir import remote_copy
from trainkit.strategy import Strategy

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("s3fs") is None, reason="needs s3fs")]

TINY = ["trainer.num_sanity_batches=0", "task.width=4", "data.batch_size=64", "callbacks=[checkpoint]"]


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with S3Server("bucket") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()  # of another server's address
        yield server
        s3fs.S3FileSystem.clear_instance_cache()


def weights(path):
    return load_from(path).payload["task"]


def names(server):
    return {name.removeprefix("bucket/run7/") for name in server.objects}


def test_a_run_in_s3_is_trained_continued_evaluated_and_exported(server, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    run = "s3://bucket/run7"
    fit = ["fit", "recipe=digits_mlp", *TINY, "callbacks.checkpoint.every=5step"]
    assert main([*fit, "run_dir=whole", "trainer.max_duration=20step"]) == 0
    assert main([*fit, f"run_dir={run}", "trainer.max_duration=10step"]) == 0
    assert {"config.yaml", "metrics.jsonl", "report.html", "summary.json"} < names(server)
    listed = json.loads(server.objects["bucket/run7/checkpoints/manifest.json"])["checkpoints"]
    assert [entry["step"] for entry in listed] == [10]
    assert "copied to s3://bucket/run7" in capsys.readouterr().out

    assert main([*fit, f"run_dir={run}"]) == 2
    assert "already contains" in capsys.readouterr().err
    shutil.rmtree("runs")  # another machine
    assert main([*fit, f"run_dir={run}"]) == 2
    assert "s3://bucket/run7 already contains a run" in capsys.readouterr().err
    assert main([*fit, f"run_dir={run}", "resume=auto", "trainer.max_duration=15step"]) == 0
    shutil.rmtree("runs")
    assert main(["resume", run, "trainer.max_duration=20step"]) == 0
    assert "copied to s3://bucket/run7" in capsys.readouterr().out
    shutil.rmtree("runs")
    for command in ("validate", "test"):
        assert main([command, f"checkpoint={run}"]) == 0
    assert "loss" in capsys.readouterr().out
    assert main(["export", f"checkpoint={run}/step_00000020", "out=model.safetensors"]) == 0
    assert main(["predict", run]) == 0
    assert main(["report", run]) == 0
    assert "runs/fetched/s3/bucket/run7/report.html" in capsys.readouterr().out
    whole, continued = weights("whole"), weights("runs/fetched/s3/bucket/run7")
    assert all(torch.equal(tensor, continued[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "recipe=digits_mlp", "-m", "task.lr=1,2", "run_dir=s3://bucket/sweep"],
        ["fit", "config=s3://bucket/run7"],
        ["export", "checkpoint=here", "out=s3://bucket/model.safetensors"],
        ["report", "here", "out=s3://bucket/report.html"],
        ["new", "s3://bucket/my_project"],
        ["doctor", "run_dir=s3://bucket/runs"],
        ["fit", "recipe=gpt", "data.text=s3://bucket/text"],
    ],
)
def test_a_command_that_needs_a_local_path_refuses_a_url(server, tmp_path, capsys, words):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    before = sorted(tmp_path.iterdir())
    assert main(words) == 2
    assert "must be a local path, got the URL 's3://bucket" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def data():
    return Data(train=regression_data(40), batch_size=4)


def test_a_bucket_that_is_missing_or_closed_is_refused_before_training(server):
    with pytest.raises(
        UserError, match=r"run_dir=s3://buckt/run7 cannot be written to: FileNotFoundError: NoSuchBucket"
    ):
        Trainer(run_dir="s3://buckt/run7").fit(Regression(), data())
    server.before = lambda method, name: 403
    with pytest.raises(UserError, match=r"run_dir=s3://bucket/run7 cannot be written to: PermissionError"):
        Trainer(run_dir="s3://bucket/run7").fit(Regression(), data())
    assert server.objects == {}


def test_a_server_that_fails_for_a_while_has_everything_at_the_end(server, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "trainkit")
    monkeypatch.setattr(remote_copy, "_FIRST_WAIT", 0.01)
    left = [0]

    def fail(method, name):
        if method == "PUT" and name.endswith((".pt", ".jsonl")) and left[0] < 9:
            left[0] += 1
            return 500
        return None

    server.before = fail
    trainer = Trainer(max_duration="10step", run_dir="s3://bucket/run7", callbacks=["checkpoint"], loggers=["jsonl"])
    trainer.fit(Regression(), data())
    assert left == [9]
    folder = trainer.run_dir
    here = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert names(server) == {name for name in here if not name.startswith(".")}
    assert all(server.objects[f"bucket/run7/{name}"] == here[name].read_bytes() for name in names(server))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_read_rows_from_s3(server, num_workers):
    for number in range(4):
        rows = "".join(json.dumps({"x": 100 * number + row}) + "\n" for row in range(6))
        server.objects[f"bucket/part-{number}.jsonl"] = rows.encode()
    dataset = Files("s3://bucket/part-*.jsonl")
    assert len(dataset) == 24  # this process has a connection before its workers start
    source = Data(train=dataset, batch_size=4, num_workers=num_workers).stage_data("train")
    loader = open_loader(source, Strategy(device="cpu"), seed=0)
    read = [int(x) for batch in loader.batches() for x in batch.batch["x"]]
    assert sorted(read) == [100 * number + row for number in range(4) for row in range(6)]
