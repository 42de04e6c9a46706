"""The timeline's model: a lane per request, made of spans of time spent in one state. Qt-free.

::

    arrival                 admitted                    preempted           resumed              finished
       |░░░░░ waiting ░░░░░░░░|██ prefill ██|▓▓ decode ▓▓▓▓|▲░░ waiting ░░░░░░░|▒▒ recompute ▒▒|▓▓ decode ▓▓|
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass, field

from engine.events import (
    Admitted,
    AnyEvent,
    Arrived,
    Finished,
    Keyframe,
    Preempted,
    Rejected,
    RowKind,
    StepRecord,
)
from engine.request import RequestStatus

LANES_KEPT = 1000
"""Finished lanes beyond this many go, oldest first."""
SPANS_KEPT = 400
"""Spans of one lane; beyond it the two oldest become one."""


class SpanKind(enum.IntEnum):
    DECODE = RowKind.DECODE
    PREFILL = RowKind.PREFILL
    RECOMPUTE = RowKind.RECOMPUTE
    WAITING = 3
    """Waiting to join, or to join again."""
    STALLED = 4
    """Running, but not part of the step: the budget went to others."""


@dataclass(slots=True)
class Span:
    kind: SpanKind
    begin: float
    end: float
    tokens: int = 0


@dataclass(slots=True)
class Lane:
    request_id: int
    arrival: float
    spans: list[Span] = field(default_factory=list)
    preempted_at: list[float] = field(default_factory=list)
    finished_at: float | None = None
    finish_reason: str = ""

    @property
    def end(self) -> float:
        return self.spans[-1].end if self.spans else self.arrival

    @property
    def running(self) -> bool:
        return self.finished_at is None and bool(self.spans) and self.spans[-1].kind != SpanKind.WAITING

    def extend(self, kind: SpanKind, end: float, tokens: int = 0) -> None:
        """Spends the time up to ``end`` in a state; going on in the same state makes its span longer."""
        last = self.spans[-1] if self.spans else None
        begin = self.end
        if last is not None and last.kind == kind:
            last.end = max(last.end, end)
            last.tokens += tokens
        elif end > begin or tokens:
            self.spans.append(Span(kind, begin, max(end, begin), tokens))
            if len(self.spans) > SPANS_KEPT:
                self.spans[1].begin = self.spans[0].begin
                del self.spans[0]

    def at(self, time: float) -> Span | None:
        """The span at a moment."""
        index = bisect_left(self.spans, time, key=lambda span: span.end)
        return self.spans[index] if index < len(self.spans) and self.spans[index].begin <= time else None


class Lanes:
    """All lanes in order of arrival; those that have ended are kept up to a bound."""

    def __init__(self) -> None:
        self.lanes: dict[int, Lane] = {}
        self.open: dict[int, Lane] = {}
        """Those that have not ended."""
        self.begin = 0.0
        """Engine clock of the first arrival."""
        self.end = 0.0
        """Engine clock at the end of the last step."""
        self._waiting: set[int] = set()
        self._step = 0

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self._step or not self.lanes:
            self.lanes.clear()
            self.begin = self.end = 0.0
        self._step = keyframe.step
        alive = {request.request_id for request in keyframe.requests}
        for request_id in [i for i in self.open if i not in alive]:
            self._close(request_id, self.open[request_id].end, "")
        self.open.clear()
        self._waiting.clear()
        for request in keyframe.requests:
            lane = self._lane(request.request_id, request.arrival_time)
            if request.status == RequestStatus.RUNNING:
                lane.extend(SpanKind.WAITING, request.admitted_time or request.arrival_time)
                lane.extend(SpanKind.DECODE if request.output_tokens else SpanKind.PREFILL, keyframe.time)
            else:
                self._waiting.add(request.request_id)
                lane.extend(SpanKind.WAITING, keyframe.time)
        if keyframe.requests:
            self.end = max(self.end, keyframe.time)

    def apply(self, record: StepRecord) -> None:
        self._step = record.step
        ended = record.time + record.timings.total
        finished: list[Finished] = []
        for event in record.events:
            if isinstance(event, Finished):
                finished.append(event)
            else:
                self._event(event, record.time)
        scheduled = set(record.request_ids)
        for row, request_id in enumerate(record.request_ids):
            lane = self.open.get(request_id)
            if lane is not None:
                lane.extend(SpanKind(record.kinds[row]), ended, record.num_tokens[row])
        for request_id, lane in self.open.items():
            if request_id not in scheduled:
                lane.extend(SpanKind.WAITING if request_id in self._waiting else SpanKind.STALLED, ended)
        for event in finished:
            lane = self.open.get(event.request_id)
            if lane is not None:
                self._close(event.request_id, lane.end, event.reason)
        self.end = max(self.end, ended)

    def _event(self, event: AnyEvent, time: float) -> None:
        if isinstance(event, Arrived):
            self._lane(event.request_id, event.arrival_time)
            self._waiting.add(event.request_id)
        elif isinstance(event, Admitted):
            self._waiting.discard(event.request_id)
            if event.request_id in self.open:
                self.open[event.request_id].extend(SpanKind.WAITING, time)
        elif isinstance(event, Preempted):
            self._waiting.add(event.request_id)
            if event.request_id in self.open:
                self.open[event.request_id].preempted_at.append(time)
        elif isinstance(event, Rejected):
            self._close(event.request_id, time, "error")

    def _lane(self, request_id: int, arrival: float) -> Lane:
        lane = self.lanes.get(request_id)
        if lane is None:
            lane = self.lanes[request_id] = Lane(request_id, arrival)
            self.begin = min(self.begin, arrival) if len(self.lanes) > 1 else arrival
        self.open[request_id] = lane
        return lane

    def _close(self, request_id: int, time: float, reason: str) -> None:
        lane = self.open.pop(request_id, None)
        self._waiting.discard(request_id)
        if lane is None:
            return
        if not lane.spans:
            lane.extend(SpanKind.WAITING, time)
        lane.finished_at, lane.finish_reason = time, reason
        surplus = len(self.lanes) - LANES_KEPT
        if surplus > 0:
            for old in [i for i in self.lanes if i not in self.open][:surplus]:
                del self.lanes[old]
