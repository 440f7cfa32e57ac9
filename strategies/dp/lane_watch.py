"""When the lanes of one process communicate, and when they compute.

    master     scatter  replicate | forward 0 | gather | backward            sum |
    device 1                        forward 1                   backward 1
    hidden: the part of "sum" in which device 1 still computes

A lane is a thread on the CPU, and a stream of a CUDA device, whose events are read when the step has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import get_ident
from typing import Any, TypeVar

import torch

from trainkit.overlap import Overlap

T = TypeVar("T")
Lane = tuple[int, int]
Moment = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """What a lane did from `start` to `end`, in seconds of a clock that all lanes share."""

    lane: Lane
    start: float
    end: float
    communicates: bool


@dataclass(slots=True)
class _Mark:
    lane: Lane
    start: Moment
    end: Moment
    communicates: bool


class LaneWatch:
    """Notes spans in steps that somebody looks at; each waits for CUDA devices where it begins and ends."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._cuda = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._first: dict[int, torch.cuda.Event] = {}
        self._marks: list[_Mark] = []
        self._in_step = False
        self._steps = 0
        self._communication = self._hidden = 0.0

    def begin_step(self) -> None:
        """Begin a step: what comes before its end counts."""
        self._in_step = True
        for device in self._cuda:
            torch.cuda.synchronize(device)
        self._first = {device.index: _recorded(device) for device in self._cuda}

    def end_step(self) -> None:
        """Count a step that was begun."""
        if not self._in_step:
            return
        self._in_step = False
        for device in self._cuda:
            torch.cuda.synchronize(device)
        spans = [
            LaneSpan(
                mark.lane, self._seconds(mark.lane, mark.start), self._seconds(mark.lane, mark.end), mark.communicates
            )
            for mark in self._marks
        ]
        self._marks = []
        communication, hidden = communicated(spans)
        self._communication += communication
        self._hidden += hidden
        self._steps += 1

    def overlap(self) -> Overlap | None:
        """Return the means over the steps; `None` without any."""
        if not self._steps:
            return None
        communication, hidden = self._communication / self._steps, self._hidden / self._steps
        note = "scatter, replicate, gather and sum"
        return Overlap(communication - hidden, communication, self._steps, note=note)

    @contextmanager
    def communicating(self, inner: AbstractContextManager[Any]) -> Iterator[None]:
        """Note what happens inside as communication, of all devices that take part."""
        with inner, self._noted(self._cuda, communicates=True):
            yield

    def computing(self, *devices: torch.device) -> AbstractContextManager[Any]:
        """Note what happens inside as computation of these devices, but for the communication in it."""
        return self._noted([device for device in dict.fromkeys(devices) if device.type == "cuda"], communicates=False)

    def timed(self, call: Callable[[], T], device: torch.device) -> Callable[[], T]:
        """Return `call`, noted as computation of the lane that it runs in."""

        def noted() -> T:
            with self.computing(device):
                return call()

        return noted

    @contextmanager
    def _noted(self, devices: Sequence[torch.device], *, communicates: bool) -> Iterator[None]:
        if not self._in_step:  # an evaluation
            yield
            return
        lanes: list[tuple[Lane, torch.device | None]] = [(_lane(device), device) for device in devices]
        lanes = lanes or [((-1, get_ident()), None)]
        starts = [_now(device) for _, device in lanes]
        try:
            yield
        finally:
            for (lane, device), start in zip(lanes, starts, strict=True):
                self._marks.append(_Mark(lane, start, _now(device), communicates))

    def _seconds(self, lane: Lane, moment: Moment) -> float:
        return moment if isinstance(moment, float) else self._first[lane[0]].elapsed_time(moment) / 1e3


def communicated(spans: Sequence[LaneSpan]) -> tuple[float, float]:
    """Return the seconds in which some lane communicates, and those of them in which another one computes."""
    communication = hidden = 0.0
    moments = sorted({moment for span in spans for moment in (span.start, span.end)})
    for start, end in pairwise(moments):
        present = [span for span in spans if span.start <= start and end <= span.end]
        busy = {span.lane for span in present if span.communicates}
        if busy:
            communication += end - start
            if {span.lane for span in present} - busy:
                hidden += end - start
    return communication, hidden


def _now(device: torch.device | None) -> Moment:
    return time.perf_counter() if device is None else _recorded(device)


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _lane(device: torch.device) -> Lane:
    return device.index, torch.cuda.current_stream(device).stream_id
