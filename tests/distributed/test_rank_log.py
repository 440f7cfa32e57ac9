"""Logs of ranks: plain output, progress displays and tracebacks."""

from __future__ import annotations

import io
import logging
import os
import stat
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console
from rich.live import Live
from rich.text import Text
from trainkit.strategies.ddp import DDPStrategy

from tests.program import Program
from trainkit.distributed.rank_log import LogPage, keep_log
from trainkit.optim.precision import Precision
from trainkit.testing import run_ranks


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (["one\ntwo\n"], ["one", "two"]),
        (["half", " a line\n"], ["half a line"]),
        (["10%\r20%\rdone\n"], ["done"]),
        (["\x1b[1mbold\x1b[0m\n"], ["bold"]),
        (["bar 1\nbar 2", "\r\x1b[2K\x1b[1A\x1b[2Kprinted\nbar 3\nbar 4", "\r\x1b[2K\x1b[1A\x1b[2K"], ["printed"]),
        (["no end"], ["no end"]),
        (["abcdef\rxy\n"], ["xycdef"]),
        (["".join(f"{i}\n" for i in range(50)) + "tail"], [*map(str, range(50)), "tail"]),
    ],
)
def test_a_page_has_the_lines_that_a_terminal_shows_in_the_end(tmp_path, written, lines):
    page = LogPage(tmp_path / "log")
    for text in written:
        page.write(text)
    page.close()
    page.close()
    assert (tmp_path / "log").read_text().splitlines() == lines


def printed_and_raised(folder: str) -> tuple[str, bool]:
    terminal, rank = io.StringIO(), dist.get_rank()
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = terminal
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)

    def run() -> None:
        strategy.setup(Precision())
        print("printed")
        logging.getLogger("trainkit").warning("logged")
        if rank == 1:
            raise ArithmeticError("of rank 1")

    strategy = DDPStrategy(device="cpu")
    strategy.log_dir = Path(folder if rank == 0 else "/elsewhere")  # each rank has its own time stamp
    try:
        strategy.launch(run)
    except ArithmeticError:
        pass
    finally:
        is_as_before = sys.stdout is sys.stderr is handler.stream is terminal
        sys.stdout, sys.stderr = before
        logging.getLogger().removeHandler(handler)
    return terminal.getvalue(), is_as_before


def test_ranks_started_by_others_write_to_their_logs_and_terminals(tmp_path):
    for rank, (shown, is_as_before) in enumerate(run_ranks(printed_and_raised, 2, str(tmp_path / "run"))):
        log = (tmp_path / "run" / f"rank_{rank}.log").read_text()
        assert shown == "printed\nlogged\n"
        assert log.startswith(shown)
        assert ("ArithmeticError: of rank 1" in log) == (rank == 1)
        assert is_as_before


def test_complete_lines_are_written_immediately(tmp_path):
    page = LogPage(tmp_path / "log")
    page.write("one\n")
    assert (tmp_path / "log").read_text() == "one\n"


class Screen(io.StringIO):
    def __init__(self, page: LogPage) -> None:
        super().__init__()
        self.page = page

    def write(self, text: str) -> int:
        self.page.write(text)
        return len(text)


def test_a_live_display_keeps_the_lines_printed_above_it(tmp_path):
    page = LogPage(tmp_path / "log")
    console = Console(file=Screen(page), force_terminal=True, width=80)
    with Live("first\nsecond", console=console, auto_refresh=False, transient=True) as live:
        for step in range(30):
            console.print(f"step {step}")
            live.update(Text(f"epoch {step}\nloss {step}\n"), refresh=True)  # the last line is empty
    console.print("the end")
    page.close()
    assert (tmp_path / "log").read_text().split() == [*(w for i in range(30) for w in ("step", str(i))), "the", "end"]


def print_and_log(folder: Path, rank: int) -> None:
    page = keep_log(folder, rank=rank)
    print("printed")
    print("an error", file=sys.stderr)
    sys.stdout.flush()
    page.write("a traceback\n")


@pytest.mark.parametrize(("rank", "shown"), [(0, ("printed\n", "an error\n")), (2, ("", ""))])
def test_rank_0_prints_and_logs_and_the_others_only_log(tmp_path, rank, shown):
    out, errors = tmp_path / "out.txt", tmp_path / "errors.txt"
    with (
        out.open("w") as first,
        errors.open("w") as second,
        Program(print_and_log, tmp_path / "run", rank, streams=(0, first.fileno(), second.fileno())) as program,
    ):
        assert program.wait() == 0
    assert (out.read_text(), errors.read_text()) == shown
    log = (tmp_path / "run" / f"rank_{rank}.log").read_text().splitlines()
    assert sorted(log) == ["a traceback", "an error", "printed"]


def log_with_umask(folder: Path, rank: int) -> int:
    os.umask(0o002)
    keep_log(folder, rank=rank).write("a line\n")
    return stat.S_IMODE((folder / f"rank_{rank}.log").stat().st_mode)


@pytest.mark.parametrize("rank", [0, 1])
def test_log_of_a_rank_has_the_mode_of_the_umask(tmp_path, rank):
    assert run_ranks(log_with_umask, 1, tmp_path, rank) == [0o664]
