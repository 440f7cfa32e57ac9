"""What is said of steps that were left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainkit.step_replay import Finding, in_words

SAMPLES_SHOWN = 20


class Told(NamedTuple):
    """What one rank knows of a step that was left out."""

    loss_was_bad: bool
    samples: list[int]
    found: Finding


def why_left_out(step: int, of_ranks: Mapping[int, Told]) -> str:
    """Return what was wrong with a step: the first rank whose loss was, and its samples, or those of all ranks."""
    bad = next((rank for rank, told in of_ranks.items() if told.loss_was_bad), None)
    samples = of_ranks[bad].samples if bad is not None else [i for told in of_ranks.values() for i in told.samples]
    why = "its gradient was not finite, or a spike" if bad is None else "its loss was NaN or infinite"
    on_rank = f" on rank {bad}" if bad is not None and len(of_ranks) > 1 else ""
    return f"step {step}, since {why}{on_rank}" + (f" (samples {listed(samples)})" if samples else "")


def what_was_seen(step: int, found: Sequence[Finding], *, late: int | None) -> str:
    """Return a sentence on what was not finite first in a step; `late` is the step whose weights it was seen with."""
    words = in_words(found)
    if not words:
        return ""
    where = (
        f"In step {step}"
        if late is None or late == step
        else f"In step {step}, computed with the weights of step {late},"
    )
    return f" {where} {words}."


def listed(samples: Sequence[int]) -> str:
    """Return samples in words, not more than can be read."""
    return ", ".join(map(str, samples[:SAMPLES_SHOWN])) + ", ..." * (len(samples) > SAMPLES_SHOWN)
