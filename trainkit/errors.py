"""Errors that are addressed to the user."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from sysconfig import get_path
from traceback import StackSummary, extract_tb, format_exception, format_exception_only, walk_tb
from types import FrameType


class UserError(ValueError):
    """A user's mistake; the message names what, where, the nearest valid name and what to type.

    The command line prints the message without a traceback and ends with exit code 2. A notebook shows the user's own
    calls before it.
    """

    def _render_traceback_(self) -> list[str]:  # which IPython calls
        calls = (call for call in walk_tb(self.__traceback__) if _is_of_the_user(call[0]))
        lines = ["Traceback (most recent call last):\n", *StackSummary.extract(calls).format()]
        return "".join([*lines, *format_exception_only(self)]).splitlines()


class NonFiniteLoss(UserError):
    """The loss became NaN or infinite."""


class CheckpointError(UserError):
    """A checkpoint that could not be written, found or used."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is missing, cut off or altered: an earlier one can take its place."""


class RemoteRankError(RuntimeError):
    """Another rank failed, died or did not join; the message names it, and the reason if it is known.

    The command line prints the message without a traceback, which the other rank has, and ends with exit code 1.
    """


class RankExit(RuntimeError):
    """Code of the user called `sys.exit` on a rank: the run has failed, and its exit code is 1."""


def rank_exit(error: SystemExit, rank: int, step: int | None = None) -> RankExit:
    """Return the error of a rank that was ended by `sys.exit`, in a step if it is known."""
    frames = extract_tb(error.__traceback__)
    line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    call = f"sys.exit({'' if error.code is None else repr(error.code)})"
    position = ", ".join(filter(None, ("" if step is None else f"in step {step}", line)))
    return RankExit(
        f"rank {rank} called {call} {position}. To end a run on all ranks, call run.request_stop('reason') in a "
        "callback, or raise an exception."
    )


def raising_module(error: BaseException) -> str:
    """Return the name of the module whose code raised `error`; empty without a traceback."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an error from the first call of the user's code on; empty if there is no such call."""
    calls = error.__traceback__
    while calls is not None and not _is_of_the_user(calls.tb_frame):
        calls = calls.tb_next
    return "" if calls is None else "".join(format_exception(type(error), error, calls))


def _is_of_the_user(frame: FrameType) -> bool:
    """Return True unless the frame is of trainkit, of Python or of an installed package."""
    module, path = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    # Recipes are read, copied and changed: their lines are the user's.
    if module.startswith("trainkit."):
        return module.startswith("trainkit.recipes.")
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)
    return not (is_installed or path.startswith((get_path("stdlib"), "<frozen")))


def nearest(name: object, valid: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` with the valid name nearest to `name`; empty if none is near."""
    matches = get_close_matches(str(name), list(valid), n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def check_monitored(what: str, metric: str, metrics: Iterable[str]) -> None:
    """Raise UserError, which begins with `what`, unless a validation or its sanity batches returned `metric`."""
    names = sorted(name.replace("sanity/", "validation/", 1) for name in metrics)
    if metric not in names:
        raise UserError(
            f"{what} is not a validation metric.{nearest(metric, names)} There are: {', '.join(names) or 'none'}."
        )


class Stopped(SystemExit):
    """A signal ended the run after its state was saved; uncaught, the exit code is 128 plus its number."""

    def __init__(self, signal_name: str, exit_code: int) -> None:
        super().__init__(exit_code)
        self.signal_name = signal_name
        self.exit_code = exit_code
