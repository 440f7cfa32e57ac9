from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import re
import select
import struct
import sys
import termios
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pyte
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainkit.callbacks.progress_bar import Curve, LiveProgress, ProgressText, RunProgress, fitting

from tests.callbacks import progress_program
from tests.program import Program
from trainkit.metrics.latest import LatestLoss
from trainkit.metrics.step_output import StepOutput
from trainkit.run import EvaluationProgress, Run
from trainkit.state import TrainState

CURVE = "▁▂▃▄▅▆▇█"
SETTLED_SECONDS = 0.03  # without output; the display is drawn ten times a second


@dataclass
class Shown:
    """The screens of a terminal in which a program ran."""

    screens: list[list[str]] = field(default_factory=list)
    cursor_hidden: bool = False
    exit_code: int | None = None

    @property
    def last(self) -> str:
        return "\n".join(self.screens[-1])

    def having(self, *texts: str) -> list[list[str]]:
        """Return the screens that contain all texts."""
        return [screen for screen in self.screens if all(text in "\n".join(screen) for text in texts)]


def strictly(*arguments: str) -> None:
    warnings.simplefilter("error")
    progress_program.main(*arguments)


def run_in_terminal(
    folder: Path, mode: str, *, columns: int = 90, rows: int = 45, type_when: tuple[str, bytes] | None = None
) -> Shown:
    """Run the program in a pseudo-terminal; type something once a text is on the screen."""
    screen = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(screen)
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**_without_a_size(os.environ), "TERM": "xterm-256color"}
    program = Program(strictly, str(folder / "run"), mode, streams=(far, far, far), environment=environment)
    os.close(far)
    shown = Shown()
    try:
        for output in iter(lambda: _read(near), b""):
            stream.feed(output)
            if select.select([near], [], [], SETTLED_SECONDS)[0]:
                continue  # more comes: what is on the screen may be half of a picture
            shown.screens.append([line.rstrip() for line in screen.display])
            if type_when is not None and shown.having(type_when[0]):
                os.write(near, type_when[1])
                type_when = None
        shown.screens.append([line.rstrip() for line in screen.display])
        shown.exit_code = program.wait()
    finally:
        with program:  # ends it
            os.close(near)
    shown.cursor_hidden = screen.cursor.hidden
    return shown


def _without_a_size(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the size that pytest sets, which a program trusts more than the terminal."""
    return {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end of the pseudo-terminal is closed
        return b""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return run_in_terminal(tmp_path_factory.mktemp("whole"), "fit")


@pytest.mark.slow
def test_the_display_shows_epoch_step_loss_metrics_speed_and_time_left(whole_run: Shown) -> None:
    screen = whole_run.having("epoch 2/2", "ETA")[0]

    head, numbers = next((line, screen[i + 1]) for i, line in enumerate(screen) if "ETA" in line)
    assert "━" in head and "─" in head
    assert "/60" in head and "%" in head
    assert all(word in numbers for word in ("loss ", "accuracy 0.75", "samples/s"))


def test_the_bar_of_a_validation_is_below_that_of_training(whole_run: Shown) -> None:
    screen = whole_run.having("validation  ━", "/10")[0]

    headline = next(i for i, line in enumerate(screen) if "ETA" in line)
    assert screen[headline].startswith("epoch 1/2")
    assert screen[headline + 2].startswith("validation  ━")


def test_the_line_of_each_validation_stays_above_the_display(whole_run: Shown) -> None:
    lines = [line for line in whole_run.screens[-1] if re.match(r"epoch \d/2  step \d+  loss ", line)]

    assert [line.split()[3] for line in lines] == ["20", "40", "60"]
    assert all(re.search(r"  validation/loss \S+( \*)?  \d:\d\d$", line) for line in lines)
    assert "*" in lines[0]  # the first value is the best so far
    for screen in whole_run.having("epoch 1/2  step 20", "ETA"):
        evaluation = next(i for i, line in enumerate(screen) if line.startswith("epoch 1/2  step 20"))
        assert evaluation < next(i for i, line in enumerate(screen) if "ETA" in line)


def test_printed_lines_appear_above_one_complete_display(whole_run: Shown) -> None:
    screens = whole_run.having("printed by the task", "ETA")

    assert screens
    for screen in whole_run.having("ETA"):
        assert sum("ETA" in line for line in screen) == 1
        assert sum("samples/s" in line for line in screen) <= 1
    for screen in screens:
        assert screen.index("printed by the task") < next(i for i, line in enumerate(screen) if "ETA" in line)


def test_logged_lines_appear_above_the_display(whole_run: Shown) -> None:
    """Handlers hold the stream that they were made with, and would write into the middle of the display."""
    (screen,) = whole_run.screens[-1:]

    assert [line for line in screen if "logged: a warning" in line] == [
        "logged: a warning of step 16",
        "logged: a warning of step 40",
    ]


def test_saving_does_not_interrupt_the_display(whole_run: Shown) -> None:
    assert whole_run.having("Checkpoints in")
    assert not whole_run.having("logged: saved")


def test_the_end_shows_tables_of_metrics_and_checkpoints_without_the_display(whole_run: Shown) -> None:
    assert whole_run.exit_code == 0
    assert "ETA" not in whole_run.last
    assert not whole_run.cursor_hidden
    assert "reached max_duration=2epoch: 60 steps, 2 epochs, 240 samples" in whole_run.last
    assert "train/loss" in whole_run.last
    (best,) = [line for line in whole_run.screens[-1] if line.startswith("  step_00000060.pt")]
    assert best.endswith("best, last")


def test_the_table_of_a_terminal_draws_the_curve_of_each_metric_with_a_best_value(whole_run: Shown) -> None:
    rows = [line.split() for line in whole_run.screens[-1] if line.startswith(("  validation/loss", "  train/"))]

    drawn = {row[0]: set(row[-1]) for row in rows if row[-1][0] in CURVE}
    assert set(drawn) == {"validation/loss", "train/loss"}
    assert all({CURVE[0], CURVE[-1]} <= blocks <= set(CURVE) for blocks in drawn.values())


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(-1e9, 1e9) | st.just(math.inf)), max_size=1500),
    st.integers(1, 40),
)
def test_a_curve_has_at_most_the_asked_columns_with_the_lowest_and_highest_block(
    points: list[tuple[int, float]], width: int
) -> None:
    curve, step = Curve(), 0
    for more, value in points:
        step += more
        curve.add(step, value)

    drawn = curve.drawn(width)
    assert len(drawn) <= width
    assert set(drawn) <= set(CURVE)
    if len(set(drawn)) > 1:
        assert {CURVE[0], CURVE[-1]} <= set(drawn)


def test_a_curve_falls_and_rises_as_its_values_over_the_steps() -> None:
    curve = Curve()
    for step in range(0, 4001):
        curve.add(step, abs(step - 2000.0))

    assert curve.drawn(9) == "█▆▄▂▁▂▄▆█"


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_of_the_display_has_whole_items_and_the_first_ones_first(width: int) -> None:
    state = TrainState(metrics={f"train/{name}": 0.25 for name in ("loss", "accuracy", *map(str, range(30)))}, step=3)
    run = SimpleNamespace(state=state, max_steps=9, evaluation=None, means=None)
    run.signals = run.loader = run.phase_optimizer = SimpleNamespace(received=None, num_steps=3)
    text = ProgressText(RunProgress(cast(Run, run)), width=lambda: width)

    head, numbers, _ = text.draw().plain.split("\n")
    assert len(head) <= width
    assert width - len("  1 0.25") < len(numbers) <= width
    assert numbers.startswith("loss 0.25  accuracy 0.25  0 0.25  1 0.25")
    assert all(re.fullmatch(r"\S+ \S+|\d:\d\d", item) for item in numbers.split("  "))


@pytest.mark.parametrize(("logged_at", "shown"), [(0, "0.5"), (40, "0.5"), (41, "0.25")])
def test_between_log_points_the_display_shows_the_latest_loss(logged_at: int, shown: str) -> None:
    metrics = {"train/accuracy": 0.75, "train/loss": 0.25} if logged_at else {}
    run = SimpleNamespace(state=TrainState(metrics=metrics), means=SimpleNamespace(latest=LatestLoss()))
    run.logged_at = lambda name: logged_at
    run.means.latest.offer([StepOutput(torch.tensor(0.5), 4)], 41)

    progress = RunProgress(cast(Run, run))
    items = progress.training_metrics(progress.with_latest_loss(run.state.metrics))
    assert f"loss {shown}" in items and len(items) == (2 if metrics else 1)
    assert logged_at == 41 or items[0] == "loss 0.5"


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (120, "epoch 2/6  step 46  loss 0.1586  validation/loss 0.1262 *  validation/accuracy 0.96 *  0:02"),
        (88, "epoch 2/6  loss 0.1586  validation/loss 0.1262 *  validation/accuracy 0.96 *  0:02"),
        (80, "epoch 2/6  validation/loss 0.1262 *  validation/accuracy 0.96 *  0:02"),
        (60, "epoch 2/6  validation/loss 0.1262 *  0:02"),
    ],
)
def test_the_line_of_an_evaluation_keeps_its_metrics_where_the_terminal_is_narrow(
    width: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    display = LiveProgress.__new__(LiveProgress)
    display._width = lambda: width
    epoch, values = "epoch 2/6", ["validation/loss 0.1262 *", "validation/accuracy 0.96 *"]
    lines = [[epoch, "step 46", "loss 0.1586", *values], [epoch, "loss 0.1586", *values], [epoch, *values]]

    display.say(lines, last="0:02")
    assert capsys.readouterr().out == f"{shown}\n"


@pytest.mark.parametrize("width", [20, 80, 120])
def test_a_line_has_room_for_what_must_be_kept(width: int) -> None:
    items = ["epoch 1/2", *(f"metric_{i} {i}" for i in range(40)), "0:05"]

    line = fitting(items, width, keep="0:05")
    assert len(line) <= width
    assert line.endswith("  0:05")
    assert line.split("  ")[:-1] == [item for item in items if item in line.split("  ")][:-1]


def test_the_first_picture_is_drawn_before_any_other_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The background thread may draw its first while a line is printed, and neither would erase the other's."""
    output = io.StringIO(newline="")
    monkeypatch.setattr(sys, "stdout", output)
    evaluated = SimpleNamespace(phase_optimizer=None, evaluation=EvaluationProgress("validation", 8, 4))
    evaluated.state = TrainState()
    display = LiveProgress(RunProgress(cast(Run, evaluated)), refresh_per_second=0.01)
    screen = pyte.Screen(60, 8)
    try:
        assert "4/8" in output.getvalue()
        print("printed")
        pyte.Stream(screen).feed(output.getvalue().replace("\n", "\r\n"))
        bar = f"validation  {12 * '━'}{12 * '─'}  4/8"
        assert [line.rstrip() for line in screen.display if line.strip()] == ["printed", bar]
    finally:
        display.stop()


@pytest.mark.slow
def test_a_narrow_terminal_truncates_lines_instead_of_wrapping_them(tmp_path: Path) -> None:
    shown = run_in_terminal(tmp_path, "fit", columns=40)

    screens = shown.having("epoch 1/2  ━")
    assert screens
    for screen in screens:
        heads = [place for place, line in enumerate(screen) if line.startswith("epoch 1/2  ━")]
        assert len(heads) == 1, "\n".join(screen)
        assert screen[heads[0] + 1][:4] in ("loss", "0 sa"), "\n".join(screen)


def test_ctrl_c_removes_the_display_and_saves_a_checkpoint(tmp_path: Path) -> None:
    shown = run_in_terminal(tmp_path, "fit", type_when=("samples/s", b"\x03"))

    assert shown.exit_code == 130
    assert "ETA" not in shown.last
    assert not shown.cursor_hidden
    assert "SIGINT: " in shown.last
    assert list((tmp_path / "run" / "checkpoints").glob("step_*.pt"))


def test_an_exception_removes_the_display_and_is_readable(tmp_path: Path) -> None:
    shown = run_in_terminal(tmp_path, "raise")

    assert shown.exit_code == 1
    assert "ETA" not in shown.last
    assert not shown.cursor_hidden
    assert "RuntimeError: a bug in the task" in shown.screens[-1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("*.pt")].count("step_00000024.pt") == 1


@pytest.mark.slow
def test_validate_has_a_bar(tmp_path: Path) -> None:
    shown = run_in_terminal(tmp_path, "validate")

    assert shown.having("validation  ━", "/10")
    assert "━" not in shown.last
    assert "validation/loss" in shown.last


@pytest.fixture(scope="module")
def piped_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What a run writes into pipes, with the variables set that force colours: its standard output and its errors."""
    folder = tmp_path_factory.mktemp("piped")
    environment = {**os.environ, "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    (out, far_out), (errors, far_errors) = os.pipe(), os.pipe()
    streams = (0, far_out, far_errors)
    with Program(strictly, str(folder), "fit", streams=streams, environment=environment) as program:
        os.close(far_out)
        os.close(far_errors)
        with open(out, encoding="utf-8") as output, open(errors, encoding="utf-8") as logged:
            texts = output.read(), logged.read()  # the few errors fit into their pipe until they are read
        assert program.wait() == 0, texts
    return texts


@pytest.fixture(scope="module")
def piped(piped_run: tuple[str, str]) -> str:
    return piped_run[0]


def test_a_pipe_gets_no_control_characters(piped: str) -> None:
    assert {character for character in piped if not character.isprintable()} == {"\n"}


def test_a_pipe_gets_a_line_for_every_log_point_and_every_evaluation(piped: str) -> None:
    lines = piped.splitlines()

    def starts(text: str) -> int:
        return sum(line.startswith(text) for line in lines)

    assert [starts(f"step {step}/60  epoch {1 + (step > 30)}/2  loss ") for step in range(5, 61, 5)] == [1] * 12
    evaluations = [starts(f"step {step}/60  epoch {1 + (step > 30)}/2  validation/loss ") for step in (20, 40, 60)]
    assert evaluations == [1] * 3
    assert all(re.search(r"samples/s  \d:\d\d  ETA ", line) for line in lines if line.startswith("step 10/60  e"))


def test_a_pipe_gets_a_line_for_every_saved_checkpoint(piped_run: tuple[str, str]) -> None:
    assert piped_run[1].count("logged: saved") >= 2


def test_a_pipe_gets_the_final_tables(piped: str) -> None:
    lines = [line.split() for line in piped.splitlines()]
    assert ["metric", "last", "best", "at", "step"] in lines
    (last,) = (line for line in lines if len(line) == 4 and line[0] == "validation/loss")
    evaluations = {line[1]: line[5] for line in lines if line[:1] == ["step"] and line[4:5] == ["validation/loss"]}
    assert last[1] == evaluations["60/60"] and last[2] == evaluations[f"{last[3]}/60"] == min(
        evaluations.values(), key=float
    )
    assert ["train/epoch"] not in [line[:1] for line in lines]
    assert any(line[:1] == ["reached"] and line[-1] == "samples/s" for line in lines)
    assert any(line.endswith("best, last") for line in piped.splitlines())
