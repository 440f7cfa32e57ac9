"""`trainkit report` for one run, several runs and sweeps, and its errors."""

import json
import os
import re
import shutil
from dataclasses import replace

import pytest

from tests.report.parsed import Page
from trainkit.checkpoint.store import CheckpointEntry, Manifest, Monitor
from trainkit.cli.main import main
from trainkit.report.comparison import comparison_report, short_names
from trainkit.report.config_diff import ConfigChange
from trainkit.report.record import read_run


@pytest.fixture
def two_runs(in_folder, finished_run, failed_run):
    for name, run in (("first", finished_run), ("second", failed_run)):
        shutil.copytree(run, in_folder / "runs" / name)
    for name, width in (("first", 8), ("second", 16)):
        text = f"recipe: digits\ntask:\n  width: {width}\n  lr: 0.1\nrun_dir: runs/{name}\n"
        (in_folder / "runs" / name / "config.yaml").write_text(text)
    return in_folder / "runs"


def test_a_report_is_written_again_from_the_run_folder_or_a_path_in_it(two_runs, capsys):
    (two_runs / "first" / "report.html").unlink()
    for path in ("runs/first", "runs/first/checkpoints", "runs/first/metrics.jsonl"):
        assert main(["report", path]) == 0
        assert capsys.readouterr().out == "runs/first/report.html\n"
    assert "Learning curves" in Page.of(two_runs / "first" / "report.html").text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("environment.json", {"versions": 3}),
        ("summary.json", {"status": "finished", "steps": "x", "metrics": {"loss": []}}),
        ("summary.json", {"seconds": {}}),
        ("profile.json", {"modules": 3, "steps": "x"}),
    ],
)
def test_a_file_that_no_run_writes_is_one_message_or_not_shown(two_runs, capsys, file, content):
    (two_runs / "first" / file).write_text(json.dumps(content))
    codes = [main(["report", "runs/first"]), main(["report", "runs/second", "runs/first"])]
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.count("error: a file in runs/") == codes.count(2) and set(codes) <= {0, 2}


def test_runs_are_compared(two_runs, capsys):
    assert main(["report", "runs/first", "runs/second"]) == 0
    assert capsys.readouterr().out == "runs/comparison.html\n"
    page = Page.of(two_runs / "comparison.html")
    assert "2 runs of digits" in page.text
    assert "task.width 8 16" in page.text and "task.lr" not in page.text and "run_dir" not in page.text
    pictures = [json.loads(script) for script in page.scripts if script.startswith("{")]
    assert ["first", "second"] in [[series["name"] for series in picture["series"]] for picture in pictures]
    assert "validation/loss" in page.text
    (two_runs.parent / "elsewhere" / "deep").mkdir(parents=True)
    shutil.move(two_runs / "second", two_runs.parent / "elsewhere" / "deep" / "second")
    assert main(["report", "runs/first", "elsewhere/deep/second"]) == 0
    assert capsys.readouterr().out == "elsewhere/deep/comparison.html\n"
    shutil.move(two_runs.parent / "elsewhere" / "deep" / "second", two_runs / "second")
    assert main(["report", "runs/first", "runs/second", "out=both.html"]) == 0
    assert os.path.exists("both.html")


def test_a_comparison_marks_the_best_value_and_shows_differences_to_the_first_run(tmp_path):
    for name, loss, accuracy in (("first", 0.5, 0.9), ("second", 0.25, 0.45)):
        (tmp_path / name).mkdir()
        line = {"step": 1, "time": 0.0, "validation/loss": loss, "validation/accuracy": accuracy}
        (tmp_path / name / "metrics.jsonl").write_text(f"{json.dumps(line)}\n")
    html = comparison_report([read_run(tmp_path / name) for name in ("first", "second")])
    marked = re.findall(r'<b class="good">([^<]*)</b>', html)
    assert sorted(marked) == ["0.25", "0.9"]  # the least loss, the greatest accuracy
    assert html.count("-50.0 %") == 2


def test_a_comparison_has_best_values_rates_of_the_whole_run_and_what_was_typed(two_runs):
    records = [
        replace(
            read_run(two_runs / name),
            summary={"steps": 8, "seconds": 2.0 * rate, "samples_per_second": 100.0 * rate, "metrics": {}},
            config={
                "recipe": name,
                "task": {"width": rate, "lr": 0.1},
                "strategy": {"bucket_cap_mb": rate, "devices": 2 * rate},
            },
            config_diff=[ConfigChange("strategy", "single", "ddp"), ConfigChange("strategy.devices", "1", "2")],
            environment={"strategy": f"strategy of {rate}"},
            manifest=Manifest(
                [
                    CheckpointEntry(two_runs, "x", step, 0, {"validation/loss": rate / step}, "best", "", 1, "", 1)
                    for step in (1, 4, 2)
                ],
                Monitor("validation/loss", "min"),
            ),
        )
        for name, rate in (("first", 1), ("second", 2))
    ]
    page = Page(comparison_report(records))
    for row in (
        "best validation/loss 0.25 0.5 +100.0 %",
        "time 2 s 4 s",
        "samples per second, whole run 100 200 +100.0 %",
        "strategy strategy of 1 strategy of 2",
        "task.width 1 2",
        "recipe first second",
        "strategy.devices 2 4",
    ):
        assert row in page.text, row
    assert "bucket_cap_mb" not in page.text
    titles = ["Result", "Speed", "Setup"]
    assert [page.text.index(title) for title in titles] == sorted(page.text.index(title) for title in titles)


def test_compared_jobs_of_a_sweep_are_named_by_the_overrides_that_differ(tmp_path):
    rates = {"0": "1e-3", "1": "3e-3", "2": "3e-3"}
    jobs = [
        {
            "number": int(name),
            "overrides": ["recipe=digits", f"task.lr={lr}", "task.width=8"],
            "run_dir": f"sweep/{name}",
        }
        for name, lr in rates.items()
    ]
    objective = {"metric": "validation/loss", "mode": "min"}
    (tmp_path / "sweep.json").write_text(json.dumps({"objective": objective, "jobs": jobs}))
    for name in (*rates, "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("recipe: digits\n")

    def names(*folders):
        return short_names([read_run(tmp_path / folder) for folder in folders])

    assert names("0", "1") == ["task.lr=1e-3", "task.lr=3e-3"]
    assert names("1", "2") == ["1", "2"], "they have the same overrides"
    assert names("0", "other") == ["0", "other"], "one is not a job"
    assert "<title>Comparison: task.lr=1e-3, task.lr=3e-3" in comparison_report(
        [read_run(tmp_path / name) for name in ("0", "1")]
    )


def test_a_sweep_has_a_table_of_its_jobs_the_best_first(in_folder, capsys):
    sweep = in_folder / "sweep"
    sweep.mkdir()
    jobs = [
        {
            "number": number,
            "overrides": ["recipe=digits", f"task.lr={rate}", f"task.name=<{number}>"],
            "run_dir": f"sweep/{number}",
            "error": "ValueError: no\nmore" if rate == "1" else None,
            "metrics": {} if rate == "1" else {"validation/loss": loss, "validation/accuracy": 0.1},
            "value": None if rate == "1" else 1 - loss,
            "seconds": None if rate == "1" else 1.5,
        }
        for number, (rate, loss) in enumerate([("0.1", 0.5), ("0.01", 0.2), ("1", 0.0), ("0.001", None)])
        if loss is not None
    ]
    objective = {"metric": "validation/accuracy", "mode": "max"}
    (sweep / "sweep.json").write_text(json.dumps({"objective": objective, "jobs": jobs}))
    assert main(["report", "sweep"]) == 0
    assert capsys.readouterr().out == "sweep/report.html\n"
    page = Page.of(sweep / "report.html")
    assert "3 jobs, 1 failed, ordered by validation/accuracy, the largest first" in page.text
    rows = ["<1> 0.8 0.2 1.5 s finished", "<0> 0.5 0.5 1.5 s finished", "failed: ValueError: no"]
    assert [page.text.index(row) for row in rows] == sorted(page.text.index(row) for row in rows)
    assert "recipe" not in page.text and "<1>" in page.text
    assert [attributes.get("class") for attributes in page.attributes("tr")] == [None, "best", None, None]


def test_a_sweep_shows_the_curves_of_its_best_jobs_and_what_each_value_of_a_key_brought(in_folder, capsys):
    sweep, jobs = in_folder / "sweep", []
    for number in range(12):
        (sweep / str(number)).mkdir(parents=True)
        lines = [json.dumps({"step": step, "time": 0.0, "validation/loss": number / step}) for step in (1, 2)]
        (sweep / str(number) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        overrides = [f"task.lr={number // 4}", f"task.width={number % 4}", "task.depth=2"]
        jobs.append({"number": number, "overrides": overrides, "run_dir": str(number), "value": number / 2})
    objective = {"metric": "validation/loss", "mode": "min"}
    (sweep / "sweep.json").write_text(json.dumps({"objective": objective, "jobs": jobs}))
    assert main(["report", "sweep"]) == 0
    page = Page.of(sweep / "report.html")
    assert "Learning curves of the best 8 jobs" in page.text
    assert "7: task.lr=1 task.width=3" in page.text and "8: task.lr=2" not in page.text
    assert "task.lr jobs best validation/loss median 0 4 0 0.75 1 4 2 2.75 2 4 4 4.75" in page.text
    assert "task.width jobs best validation/loss median 0 3 0 2 1 3 0.5 2.5" in page.text
    assert "task.depth" not in page.text


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["runs/frist"], "runs/frist: {}/runs does not contain frist. Did you mean 'first'?"),
        (["rnus/first"], "rnus/first: {} does not contain rnus. Did you mean 'runs'?"),
        (["runs"], "runs contains 2 runs"),
        (["empty"], "empty is not a run folder"),
        ([], "report needs a run. Type trainkit report runs/"),
        (["runs/first", "runs/first"], "runs/first is given twice"),
        (["runs/first", "task.lr=1"], "report takes folders and out=FILE, not task.lr"),
    ],
)
def test_wrong_arguments_are_explained(two_runs, capsys, typed, words):
    (two_runs.parent / "empty").mkdir()
    assert main(["report", *typed]) == 2
    assert words.format(two_runs.parent) in capsys.readouterr().err


def test_settings_are_compared_with_the_recipe():
    from trainkit.cli.compose import compose_config
    from trainkit.cli.run_commands import recipe_diff
    from trainkit.report.config_diff import ConfigChange

    typed = ["recipe=digits_mlp", "strategy=ddp", "strategy.devices=3", "task.lr=0.5", "+callbacks=early_stopping"]
    with compose_config() as composer:
        settings = composer.settings([*typed, "callbacks.early_stopping.patience=9"])
    changes = recipe_diff(settings)
    assert changes[0] == ConfigChange("strategy", "SingleStrategy", "DDPStrategy")
    assert ConfigChange("strategy.devices", "auto", "3") in changes
    assert ConfigChange("task.lr", "0.002", "0.5") in changes
    (added,) = [change for change in changes if change.key == "callbacks.early_stopping"]
    assert added.before == "" and "patience=9" in added.after
    assert len(changes) == 4
    assert recipe_diff(replace(settings, tree={**settings.tree, "recipe": "gone"})) is None
    assert recipe_diff(replace(settings, tree={**settings.tree, "recipe": None})) is None
