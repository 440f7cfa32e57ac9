"""Errors that are addressed to a person."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A mistake of the user's that the message explains: what, where, the nearest valid name, what to type.

    The command line prints the message without a traceback and ends with exit code 2.
    """


class NonFiniteLoss(UserError):
    """The loss became NaN or infinite."""


class FailedElsewhere(RuntimeError):
    """Another process failed, died or did not come; the message names it, and says why where that is known.

    The command line prints the message without a traceback, which that other process has, and ends with exit code 1.
    """


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` with the valid name nearest to `name`, or nothing where none is near."""
    matches = get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""


class Stopped(SystemExit):
    """SIGINT or SIGTERM ended the run, after its state was saved; not caught, it ends the program with 130 or 143."""

    def __init__(self, signal_name: str, exit_code: int) -> None:
        super().__init__(exit_code)
        self.signal_name = signal_name
        self.exit_code = exit_code
