"""What stands on top of a failed run's report."""

from __future__ import annotations

from datetime import datetime

from trainkit.failure import FailureRecord
from trainkit.report.markup import Markup, element, joined
from trainkit.report.page import pairs, table
from trainkit.report.record import RunRecord

_SAID_BY_MESSAGE = ("UserError", "NonFiniteLoss", "CheckpointError", "SettingsError", "RankFailure")
_PYTHON_HEADING = "Traceback (most recent call last)"


def failure_part(record: RunRecord) -> Markup | None:
    """Return who failed first, where and why, and what every rank did last; `None` for a run that did not fail."""
    cause = record.cause
    if record.status != "failed":
        return None
    if cause is None:
        reason = str(record.summary.get("exit_reason", "an error that was not kept"))
        return element("div", element("h2", "The run failed"), element("p", reason, class_="message"), class_="failure")
    heading = f"The run failed: {cause.error}"
    parts: list[Markup | None] = [
        element("h2", heading),
        element("p", cause.message, class_="message"),
        pairs([("where", _where(cause)), ("when", f"{datetime.fromtimestamp(cause.when):%Y-%m-%d %H:%M:%S}")]),
    ]
    if cause.traceback:
        # Such a message says it all; the way that it came is for the curious.
        shown = element("pre", cause.traceback.strip())
        folded = cause.error in _SAID_BY_MESSAGE
        parts.append(
            element("details", element("summary", "traceback"), shown, open=not folded)
            if folded or _PYTHON_HEADING in cause.traceback
            else shown
        )
    parts += [_others(record, cause), _logs(record)]
    return element("div", *parts, class_="failure", id="failure")


def _where(cause: FailureRecord) -> str:
    if cause.process is None:
        return "told to the caller of all ranks"
    step = f"after step {cause.step:,}" if cause.step else "before the first step"
    evaluation = f", in the evaluation of {cause.evaluation}" if cause.evaluation else ""
    return ", ".join(part for part in (f"rank {cause.process}", step, cause.phase) if part) + evaluation


def _others(record: RunRecord, cause: FailureRecord) -> Markup | None:
    """Return a table of all ranks that could still say something, the first to fail on top."""
    ranks = [item for item in record.failures if item.process is not None]
    if not [item for item in ranks if item is not cause]:
        return None
    first = ranks[0].when
    rows = [
        [
            f"rank {item.process}",
            f"+{item.when - first:.2f} s",
            str(item.step),
            item.phase,
            f"{item.error}: {item.message.splitlines()[0] if item.message else ''}",
        ]
        for item in ranks
    ]
    return joined(element("h3", "Every rank"), table(["", "failed", "steps", "in", "with"], rows))


def _logs(record: RunRecord) -> Markup | None:
    if not record.logs:
        return None
    parts = [
        element("details", element("summary", f"last lines of {name}"), element("pre", tail))
        for name, tail in record.logs.items()
    ]
    return joined(element("h3", "Last events"), *parts)
