"""What a timeline is made of: spans of time that a request spent in one state, one by one and as columns. Light."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.events import RowKind


class SpanKind(enum.IntEnum):
    DECODE = RowKind.DECODE
    PREFILL = RowKind.PREFILL
    RECOMPUTE = RowKind.RECOMPUTE
    PADDING = RowKind.PADDING
    """In a static batch: behind its own tokens, or over already."""
    WAITING = 4
    """Waiting to join, or to join again."""
    SWAPPED = 5
    """Waiting to join again, its keys and values in host memory."""
    STALLED = 6
    """Running, but not part of the step: the budget went to others."""


WAITS = frozenset({SpanKind.WAITING, SpanKind.SWAPPED})


@dataclass(slots=True)
class Span:
    kind: SpanKind
    begin: float
    end: float
    tokens: int = 0
    drafts: int = 0
    """Drafted tokens among ``tokens``."""
    accepted: int = 0
    """Of the drafted ones."""


@dataclass(slots=True)
class Lane:
    """One request's lane, written out: for a tooltip, an export, a saved comparison. Times on the engine's clock."""

    request_id: int
    arrival: float
    spans: list[Span] = field(default_factory=list)
    """In order of time, without a gap between them."""
    preempted_at: list[float] = field(default_factory=list)
    finished_at: float | None = None
    finish_reason: str = ""
    priority: int = 0
    user: str = ""

    @property
    def end(self) -> float:
        return self.spans[-1].end if self.spans else self.arrival

    @property
    def running(self) -> bool:
        return self.finished_at is None and bool(self.spans) and self.spans[-1].kind not in WAITS

    def at(self, time: float) -> Span | None:
        """The span at a moment."""
        index = bisect_left(self.spans, time, key=lambda span: span.end)
        return self.spans[index] if index < len(self.spans) and self.spans[index].begin <= time else None


LANES_SAVED = 1000
"""Requests of a run whose timeline a comparison keeps, the first of the workload."""


def saved_lane(
    number: int,
    lane: Lane | None,
    start: float,
    *,
    priority: int,
    user: str,
    arrival: float,
    end: float | None,
    reason: str,
) -> dict[str, Any]:
    """Request ``number`` as a saved comparison has it: in seconds after ``start``, what lies before that
    cut off. ``lane`` None: no step tells of it. ``arrival`` and ``end``: engine clock, as those of the lane."""

    def at(instant: float) -> float:
        return round(max(instant - start, 0.0), 5)

    spans = [] if lane is None else [span for span in lane.spans if span.end > start]
    marks = [] if lane is None else [instant for instant in lane.preempted_at if instant >= start]
    return {
        "request": number,
        "priority": priority,
        "user": user,
        "arrival": at(arrival),
        "spans": [(int(span.kind), at(span.begin), at(span.end), span.tokens) for span in spans],
        "preempted_at": [at(instant) for instant in marks],
        "end": None if end is None else at(end),
        "reason": reason,
    }


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Lanes as columns, in order of arrival; arrays [n]."""

    number: np.ndarray
    """Counts the lanes of the run: what spans name their lane by."""
    request_id: np.ndarray
    arrival: np.ndarray
    finished: np.ndarray
    """NaN: not ended."""
    failed: np.ndarray
    """Ended by an error or an abort."""
    running: np.ndarray
    priority: np.ndarray
    user: np.ndarray
    """Index into :attr:`Lanes.users`."""

    def __len__(self) -> int:
        return len(self.number)

    def take(self, places: np.ndarray) -> LaneRows:
        return LaneRows(*(getattr(self, name)[places] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Spans of some lanes as columns, in no order; arrays [n]."""

    row: np.ndarray
    """Which of the lanes asked for."""
    kind: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    tokens: np.ndarray
    drafts: np.ndarray
    accepted: np.ndarray


def span_rows(lanes: Sequence[Lane]) -> SpanRows:
    """The spans of lanes that are written out, as columns."""
    spans = [span for lane in lanes for span in lane.spans]
    counts = [len(lane.spans) for lane in lanes]
    types = {"begin": np.float64, "end": np.float64}
    columns = (
        np.array([getattr(span, name) for span in spans], dtype=types.get(name, np.int64))
        for name in SpanRows.__slots__[1:]
    )
    return SpanRows(np.repeat(np.arange(len(lanes)), counts), *columns)


class RowIndex:
    """Which of some lanes a lane is, by their numbers; -1: none of them."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._lowest = int(numbers.min()) if len(numbers) else 0
        extent = int(numbers.max()) - self._lowest + 1 if len(numbers) else 0
        self._rows = np.full(extent + 1, -1, dtype=np.intp)  # the last place stands for all others
        self._rows[numbers - self._lowest] = np.arange(len(numbers))

    def may_be(self, numbers: np.ndarray) -> np.ndarray:
        """Whether a lane is at all between the first and the last of them: for less than looking it up takes."""
        return (numbers >= self._lowest) & (numbers < self._lowest + len(self._rows) - 1)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        # A number below the lowest becomes a huge one.
        shifted = np.subtract(numbers, self._lowest, dtype=np.int64).view(np.uint64)
        return self._rows[np.minimum(shifted, np.uint64(len(self._rows) - 1)).view(np.int64)]
