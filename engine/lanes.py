"""The timeline's model: a lane per request, made of spans of time spent in one state. Light.

::

    arrival                 admitted                    preempted           resumed              finished
       |░░░░░ waiting ░░░░░░░░|██ prefill ██|▓▓ decode ▓▓▓▓|▲░░ waiting ░░░░░░░|▒▒ recompute ▒▒|▓▓ decode ▓▓|

    swapped:        ▓▓ decode ▓▓▓▓|▲▚▚ swapped ▚▚▚|▓▓ decode ▓▓|
    static batch:   ░░ waiting ░░░|█ prefill █|╳ padding ╳|▓▓ decode ▓▓▓|╳╳╳ padding until the batch ends ╳╳╳|

A row that computes tokens and padding in one step has its time divided as its tokens are.
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
    SwapDropped,
)
from engine.request import RequestStatus
from engine.run_state import IN_BATCH

LANES_KEPT = 1000
"""Finished lanes beyond this many go, oldest first."""
SPANS_KEPT = 400
"""Spans of one lane; beyond it the two oldest become one."""


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
        return self.finished_at is None and bool(self.spans) and self.spans[-1].kind not in WAITS

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
        self.kinds_seen: set[SpanKind] = set()
        """Which kinds of span the run has had, besides waiting."""
        self._waiting: dict[int, SpanKind] = {}
        self._step = 0

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self._step or not self.lanes:
            self.lanes.clear()
            self.kinds_seen.clear()
            self.begin = self.end = 0.0
        self._step = keyframe.step
        alive = {request.request_id for request in keyframe.requests}
        for request_id in [i for i in self.open if i not in alive]:
            self._close(request_id, self.open[request_id].end, "")
        self.open.clear()
        self._waiting.clear()
        for request in keyframe.requests:
            lane = self._lane(request.request_id, request.arrival_time)
            if request.status in IN_BATCH:
                lane.extend(SpanKind.WAITING, request.admitted_time or request.arrival_time)
                lane.extend(SpanKind.DECODE if request.output_tokens else SpanKind.PREFILL, keyframe.time)
            else:
                swapped = request.status == RequestStatus.SWAPPED
                self._waiting[request.request_id] = SpanKind.SWAPPED if swapped else SpanKind.WAITING
                lane.extend(self._waiting[request.request_id], keyframe.time)
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
                self._extend(lane, record, row)
        for request_id, lane in self.open.items():
            if request_id not in scheduled:
                lane.extend(self._waiting.get(request_id, SpanKind.STALLED), ended)
        for event in finished:
            lane = self.open.get(event.request_id)
            if lane is not None:
                self._close(event.request_id, lane.end, event.reason)
        self.end = max(self.end, ended)

    def _extend(self, lane: Lane, record: StepRecord, row: int) -> None:
        kind, tokens = SpanKind(record.kinds[row]), record.num_tokens[row]
        padding = record.padding[row] if record.padding else 0
        took = record.timings.total
        if tokens:
            lane.extend(kind, record.time + took * tokens / (tokens + padding), tokens)
            self.kinds_seen.add(kind)
        if padding:
            lane.extend(SpanKind.PADDING, record.time + took, padding)
            self.kinds_seen.add(SpanKind.PADDING)

    def _event(self, event: AnyEvent, time: float) -> None:
        if isinstance(event, Arrived):
            self._lane(event.request_id, event.arrival_time)
            self._waiting[event.request_id] = SpanKind.WAITING
        elif isinstance(event, Admitted):
            waited = self._waiting.pop(event.request_id, SpanKind.WAITING)
            if event.request_id in self.open:
                self.open[event.request_id].extend(waited, time)
        elif isinstance(event, Preempted):
            swapped = event.mode == "swap"
            self._waiting[event.request_id] = SpanKind.SWAPPED if swapped else SpanKind.WAITING
            if swapped:
                self.kinds_seen.add(SpanKind.SWAPPED)
            if event.request_id in self.open:
                self.open[event.request_id].preempted_at.append(time)
        elif isinstance(event, SwapDropped):
            if event.request_id in self.open:
                self.open[event.request_id].extend(SpanKind.SWAPPED, time)
            self._waiting[event.request_id] = SpanKind.WAITING
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
        self._waiting.pop(request_id, None)
        if lane is None:
            return
        if not lane.spans:
            lane.extend(SpanKind.WAITING, time)
        lane.finished_at, lane.finish_reason = time, reason
        surplus = len(self.lanes) - LANES_KEPT
        if surplus > 0:
            for old in [i for i in self.lanes if i not in self.open][:surplus]:
                del self.lanes[old]
