"""The content of a run's report; it has no external resources and escapes names."""

import errno
import json
import re
import shutil
import subprocess
import time
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch

from tests.report.parsed import Page
from tests.tasks import Regression, regression_data
from trainkit import Callback, Data, Trainer
from trainkit.cli.main import main
from trainkit.errors import Stopped
from trainkit.profiling import Timeline, TimelineFigure, TimelineSpan, Track
from trainkit.report import run_report
from trainkit.report.run_report import reported, write_report
from trainkit.report.step_breakdown import breakdown
from trainkit.run_dir.failure import FailureRecord


class SlowHook(Callback):
    def on_step_end(self, run):
        time.sleep(0.005)


class SlowEvaluation(Callback):
    def on_evaluation_end(self, run, stage, metrics):
        time.sleep(0.05)


def test_a_callback_above_a_hundredth_of_the_time_is_named(tmp_path):
    trainer = Trainer(
        max_duration="20step",
        log_every="5step",
        run_dir=tmp_path / "run",
        callbacks=["speed_monitor", SlowHook(), SlowEvaluation()],
    )
    trainer.fit(Regression(), Data(train=regression_data(32), validation=regression_data(8, seed=1), batch_size=8))
    page = Page.of(tmp_path / "run" / "report.html")
    assert "of it SlowHook" in page.text
    assert "of it SlowEvaluation" not in page.text


def test_callbacks_take_no_more_of_a_step_than_is_left_beside_its_parts():
    """The host runs a callback while the device computes: that time is no part of the step twice."""
    line = {"step": 10, "steps": 10, "seconds": {"forward": 0.8, "rest": 0.2}, "callbacks": {"Slow": 0.3, "Also": 0.1}}
    page = Page(str(breakdown([line])))
    assert "Quick" not in Page(str(breakdown([{**line, "callbacks": {"Quick": 0.009}}]))).text
    assert "of it Slow 15 ms 15.0 %" in page.text and "of it Also 5 ms 5.0 %" in page.text


def test_a_finished_run_has_curves_checkpoints_settings_and_environment(finished_run):
    page = Page.of(finished_run / "report.html")
    assert page.open == []
    for words in (
        "finished reached max_duration=3epoch",
        "Learning curves",
        "Where the time goes",
        "waiting for data",
        "Checkpoints",
        "step_00000012",
        f"torch {torch.__version__}",
        "global batch 8 = 1 rank x 1 micro-batch x 8 samples",
        "started from Python, without a config",
    ):
        assert words in page.text, words
    titles = [attributes.get("class") for attributes in page.attributes("figure")]
    assert len(titles) >= 6


def committed(folder):
    """Commit one file to a new repository, change it and return the commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b.c"]
    (folder / "notes.txt").write_text("one")
    for words in (["init", "-q"], ["add", "notes.txt"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    (folder / "notes.txt").write_text("two")
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_report_of_a_recipe_marks_the_best_checkpoint_and_shows_changed_settings_and_code(in_folder):
    commit = committed(in_folder)
    typed = ["task.width=8", "task.depth=1", "task.lr=0.3", "data.num_train=256"]
    typed += ["trainer.max_duration=4epoch"]
    assert main(["fit", "recipe=digits_mlp", *typed, "run_dir=run"]) == 0
    page = Page.of(in_folder / "run" / "report.html")

    lines = [json.loads(line) for line in (in_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    accuracies = {line["step"]: line["validation/accuracy"] for line in lines if "validation/accuracy" in line}
    assert page.text.count("★ best") == 1
    best = re.search(r"step_0*(\d+) ★ best", page.text)
    assert accuracies[int(best[1])] == max(accuracies.values()) > min(accuracies.values())
    assert f"git {commit[:12]}, with uncommitted changes" in page.text
    assert "Against the recipe digits_mlp:" in page.text
    assert "task.width 128 8" in page.text and "trainer.max_duration 20epoch 4epoch" in page.text
    assert "task.weight_decay" not in page.text.split("Against the recipe")[1].split("all settings")[0]


def test_training_and_validation_share_a_chart(finished_run):
    page = Page.of(finished_run / "report.html")
    pictures = [json.loads(script) for script in page.scripts if script.startswith("{")]
    names = [[series["name"] for series in picture["series"]] for picture in pictures]
    assert ["train", "validation"] in names


@pytest.mark.slow
def test_a_report_has_no_external_resources(finished_run, failed_run, long_run):
    for folder in (finished_run, failed_run, long_run):
        page = Page.of(folder / "report.html")
        kinds = {tag for tag, _ in page.elements}
        assert not kinds & {"link", "img", "iframe", "object", "embed", "base"}
        assert all("src" not in attributes for _, attributes in page.elements)
        links = [str(attributes.get("href")) for attributes in page.attributes("a")]
        assert not [link for link in links if re.match(r"[a-z]+:|//", link)]
        assert "url(" not in (folder / "report.html").read_text()
        policy = [a["content"] for a in page.attributes("meta") if a.get("http-equiv") == "Content-Security-Policy"]
        assert policy[0].startswith("default-src 'none'")


def test_a_report_that_could_not_be_written_is_not_named(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(run_report, "write_page", Mock(side_effect=full))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "time": 1.0, "train/loss": 2.0}\n')
    with pytest.raises(ZeroDivisionError) as failure, reported(tmp_path / "run", is_main=bool, config_diff=list):
        raise ZeroDivisionError
    assert "report:" not in "".join(getattr(failure.value, "__notes__", ()))


def test_markup_in_names_is_escaped(finished_run, failed_run):
    for folder in (finished_run, failed_run):
        page = Page.of(folder / "report.html")
        scripts = [script for script in page.scripts if not script.startswith("{")]
        assert len(scripts) == 1 and "alert" not in scripts[0]
        assert "i" not in {tag for tag, attributes in page.elements if not attributes}
    assert "</script><script>alert(1)</script>" in Page.of(finished_run / "report.html").text
    assert "the disk is full: <script>alert('x')</script>" in Page.of(failed_run / "report.html").text


def test_a_failure_is_shown_first_with_rank_step_hook_and_traceback(failed_run):
    text = Page.of(failed_run / "report.html").text
    assert text.index("The run failed: RuntimeError") < text.index("Learning curves")
    html = (failed_run / "report.html").read_text()
    assert html.index('id="failure"') < html.index('class="tiles"')
    assert "where rank 0, after step 5, the callback Failing.on_step_end" in text
    assert "Traceback (most recent call last)" in text


def test_the_first_rank_to_fail_is_the_cause_unless_it_was_killed(tmp_path):
    def write(name, message, when, process):
        record = FailureRecord("RuntimeError", message, "", when, process, 7, 0, "backward")
        (tmp_path / name).write_text(json.dumps(asdict(record)))

    write("failure_rank_0.json", "rank 1 is gone", 2.0, 0)
    write("failure_rank_1.json", "no room", 1.0, 1)
    for message in ("rank 1 is gone", "no room"):  # under torchrun by rank 0, else by the launcher
        write("failure.json", message, 3.0, None)
        assert "no room where rank 1, after step 7, backward" in Page.of(write_report(tmp_path)).text
    (tmp_path / "failure_rank_1.json").unlink()
    write("failure.json", "rank 1 was killed", 3.0, None)
    assert "rank 1 was killed where the process that started the ranks" in Page.of(write_report(tmp_path)).text


def test_values_that_are_not_finite_are_marked(finished_run):
    page = Page.of(finished_run / "report.html")
    assert any("not-finite" in str(attributes.get("class")) for attributes in page.attributes("line"))


@pytest.mark.slow
def test_a_long_run_is_small_and_keeps_its_extremes(long_run):
    path = long_run / "report.html"
    assert path.stat().st_size < 5_000_000
    page = Page.of(path)
    faint = [attributes for attributes in page.attributes("polyline") if "faint" in str(attributes["class"])]
    heights = sorted(int(point.partition(",")[2]) for point in str(faint[0]["points"]).split())
    # Of the losses all but the one spike lie near the floor.
    assert heights[0] < 500 and heights[1] > 8000


def test_a_timeline_is_drawn_to_scale_with_its_advice(tmp_path):
    (tmp_path / "config.yaml").write_text("recipe: null\n")
    bars = [TimelineSpan("forward", 10.0, 10.25, label="0"), TimelineSpan("backward", 10.5, 11.0, "<b>", "1")]
    figures = [TimelineFigure("hidden", 0.825, note="of all"), TimelineFigure("size", 2.5 * 2**20, "bytes")]
    Timeline("ddp", "a step", [Track("rank 0", bars)], 7, figures, ["Try strategy.bucket_cap_mb=2."]).write(tmp_path)
    page = Page.of(write_report(tmp_path))
    drawn = [(a["x"], a["width"]) for a in page.attributes("rect")]
    assert drawn == [("0.000%", "25.000%"), ("50.000%", "50.000%")]
    assert "a step, step 7" in page.text and "Try strategy.bucket_cap_mb=2." in page.text
    assert "82.5 %" in page.text and "2.5 MiB" in page.text and "<b>: 500 ms, from 500 ms" in page.text


def test_a_killed_run_is_reported_as_unfinished(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 1, "train/loss": 1.0}\n{"step": 2, "tra')
    text = Page.of(write_report(tmp_path)).text
    assert "unfinished no end was recorded: the run is still running, or was killed" in text


def test_a_report_that_cannot_be_written_does_not_end_training(make_trainer, monkeypatch, caplog):
    def refuse(text, path):
        raise OSError("no space left")

    monkeypatch.setattr("trainkit.report.run_report.write_page", refuse)
    result = make_trainer(max_duration="2step").fit(Regression(), Data(train=regression_data(8), batch_size=4))
    assert result.steps == 2
    assert "could not be written: OSError: no space left" in caplog.text


def test_no_report_is_written_if_disabled(make_trainer):
    trainer = make_trainer(max_duration="1step", report=False)
    trainer.fit(Regression(), Data(train=regression_data(8), batch_size=4))
    assert not (trainer.run_dir / "report.html").exists()


def test_a_run_that_is_stopped_before_it_has_written_anything_has_no_report(tmp_path, caplog):
    with pytest.raises(Stopped), reported(tmp_path, is_main=lambda: True, config_diff=lambda: None):
        raise Stopped("SIGTERM", 143)
    assert caplog.messages == [] and list(tmp_path.iterdir()) == []


def test_a_resume_clears_the_recorded_failure(tmp_path):
    class Once(Callback):
        fails = True

        def on_step_end(self, run):
            if run.state.step == 2 and Once.fails:
                raise RuntimeError("once")

    def trainer():
        return Trainer(max_duration="3step", run_dir=tmp_path, callbacks=["checkpoint", Once()], loggers=["jsonl"])

    data = Data(train=regression_data(32), batch_size=8)
    with pytest.raises(RuntimeError):
        trainer().fit(Regression(), data)
    assert "The run failed" in Page.of(tmp_path / "report.html").text
    Once.fails = False
    trainer().fit(Regression(), data, resume=tmp_path)
    assert "The run failed" not in Page.of(tmp_path / "report.html").text
    assert not list(tmp_path.glob("failure*.json"))


def test_warnings_are_in_the_report(make_trainer):
    import logging

    class Warn(Callback):
        def on_step_end(self, run):
            logging.getLogger("trainkit.test").warning("mind the <gap>")

    trainer = make_trainer(max_duration="3step", callbacks=[Warn()])
    trainer.fit(Regression(), Data(train=regression_data(16), batch_size=4))
    text = Page.of(trainer.run_dir / "report.html").text
    assert "Warnings (1)" in text and "mind the <gap>" in text
