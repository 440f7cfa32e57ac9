"""The command that shows how a pipeline would be cut."""

import multiprocessing
import subprocess
import sys

import pytest

from trainkit.command_line.cli import main

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
                "strategy.cuts=[blocks.1,blocks.3]",
                "strategy.shared=replicated",
            ]
        )
        == 0
    )

    shown = capsys.readouterr().out
    assert "char_lm in 3 stages" in shown
    assert "gradients added up: tokens.weight" in shown
    assert shown.count("received for each micro-batch") == 2
    assert "stage 2" in shown and "rank 2  .. .. F0 B0 B0 F1" in shown
    assert list(tmp_path.iterdir()) == []


def test_another_strategy_is_refused(capsys):
    assert main(["partition", *SMALL, "strategy=ddp"]) == 2
    assert "only strategy=pipeline cuts a task" in capsys.readouterr().err


def test_a_cut_that_names_nothing_is_told_with_the_nearest(capsys):
    assert main(["partition", *SMALL, "strategy.cuts=[block.1]"]) == 2
    assert "blocks.1" in capsys.readouterr().err


def test_a_task_with_phases_is_refused_with_what_to_type(capsys):
    assert main(["partition", "recipe=gan"]) == 2
    told = capsys.readouterr().err
    assert "DigitsGAN has phases, which Pipeline cannot train: each has a step" in told
    assert "Type strategy=ddp" in told
