from __future__ import annotations

import sys

import pytest

from trainkit.console import Table, clock, number, plain, printable, say


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12345, "12,345"),
        (0.0123456, "0.01235"),
        (0.10000000149011612, "0.1"),  # 0.1 as fp32
        (1.2e-5, "1.2e-05"),
        (12345.678, "12,345.7"),
        (1.0, "1"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1e300, "1e+300"),
    ],
)
def test_numbers_are_written_for_people(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(5, "0:05"), (59.7, "1:00"), (3723, "1:02:03"), (90000, "25:00:00")])
def test_times_are_written_as_on_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_plain_table_is_aligned() -> None:
    table = Table("Sizes", ["name", "bytes"], [["a", "1"], ["long", "1,000"]])

    assert plain(table) == "Sizes\n  name  bytes\n  a         1\n  long  1,000"


def test_a_reader_that_has_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())

    say("still training")


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("a\x1b]0;title\x07b\rc\x9b31m\u202ed") == "a\\x1b]0;title\\x07b\\rc\\x9b31m\\u202ed"
    assert printable("two\n\tlines, Fréchet 時 [bold]") == "two\n\tlines, Fréchet 時 [bold]"
    say("\x1b]52;c;aGk=\x07")
    assert capsys.readouterr().out == "\\x1b]52;c;aGk=\\x07\n"
    assert "\x1b" not in plain(Table("\x1btitle", ["\x1bcolumn"], [["\x1bcell"]]))
