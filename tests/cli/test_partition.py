"""`trainkit partition`."""

import multiprocessing
import subprocess
import sys

import pytest

from trainkit.cli.main import main

SMALL = ["recipe=char_lm", "task.width=16", "task.layers=4", "task.heads=2", "data.context=16", "data.max_bytes=100000"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_plan_and_its_drawing_are_printed_and_nothing_is_started_or_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(multiprocessing.Process, "start", None)

    assert (
        main(
            [
                "partition",
                *SMALL,
                "strategy.stages=3",
                "strategy.split_points=[blocks.1,blocks.3]",
                "strategy.shared_parameters=replicated",
            ]
        )
        == 0
    )

    shown = capsys.readouterr().out
    assert "char_lm in 3 stages" in shown
    assert "gradients summed: tokens.weight" in shown
    assert shown.count("received for each micro-batch") == 2
    assert "stage 2  " in shown
    assert list(tmp_path.iterdir()) == []


def test_another_strategy_is_an_error(capsys):
    assert main(["partition", *SMALL, "strategy=ddp"]) == 2
    assert "only strategy=pipeline partitions a task" in capsys.readouterr().err


def test_a_split_point_that_names_no_module_is_reported_with_the_nearest_name(capsys):
    assert main(["partition", *SMALL, "strategy.split_points=[block.1]"]) == 2
    assert "blocks.1" in capsys.readouterr().err


def test_a_task_with_phases_is_partitioned_where_all_phases_allow_it(capsys):
    assert main(["partition", "recipe=gan", "task.width=16"]) == 0
    shown = capsys.readouterr().out
    first, second = (line.split() for line in shown.splitlines()[2:4])
    assert "gan in 2 stages" in shown
    assert first[1].startswith("generator") and second[1].startswith("discriminator")

    assert main(["partition", "recipe=gan", "task.width=16", "strategy.split_points=[discriminator.2]"]) == 2
    message = capsys.readouterr().err
    assert "a stage cannot begin at module 'discriminator.2'" in message
    assert "`autograd.grad`" in message and "differentiates by what module 'discriminator.0'" in message
