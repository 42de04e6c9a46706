"""The timeline's model: a lane per request, made of spans of time spent in one state. Light.

::

    arrival                 admitted                    preempted           resumed              finished
       |░░░░░ waiting ░░░░░░░░|██ prefill ██|▓▓ decode ▓▓▓▓|▲░░ waiting ░░░░░░░|▒▒ recompute ▒▒|▓▓ decode ▓▓|

    swapped:        ▓▓ decode ▓▓▓▓|▲▚▚ swapped ▚▚▚|▓▓ decode ▓▓|
    static batch:   ░░ waiting ░░░|█ prefill █|╳ padding ╳|▓▓ decode ▓▓▓|╳╳╳ padding until the batch ends ╳╳╳|

A row that computes tokens and padding in one step has its time divided as its tokens are. Every chunk of a prompt is a
span of its own; decodes are one span, except that rows with drafts are told apart :data:`DRAFTED_ROWS` at a time.

Memory is bounded: :data:`SPANS_KEPT` ended spans of 29 bytes, :data:`LANES_KEPT` ended lanes of 41 and the marks, with
a quarter of room more: 18.8 MB when full, taken as it is needed. So 20,000 steps of 100 requests are kept whole as long
as a request changes what it does every seventh step, or less often, and takes part in 30 steps or more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.columns import Columns, fitting
from engine.events import (
    Admitted,
    Arrived,
    Finished,
    Keyframe,
    Preempted,
    Rejected,
    Reprioritised,
    RequestState,
    RunTotals,
    StepRecord,
    SwapDropped,
)
from engine.open_lanes import DRAFTED_ROWS, NONE, OpenLanes
from engine.request import FinishReason, RequestStatus
from engine.run_state import IN_BATCH
from engine.spans import WAITS, Lane, LaneRows, RowIndex, Span, SpanKind, SpanRows

SPANS_KEPT = 400_000
"""Ended spans beyond this many go, oldest first."""
LANES_KEPT = 65_536
"""Ended lanes beyond this many go, and those of which no span is kept."""
MARKS_KEPT = 65_536
"""Preemptions."""
USERS_KEPT = 4096
"""Users told apart; what further ones are called is not kept."""
__all__ = ["DRAFTED_ROWS", "WAITS", "Lane", "LaneRows", "Lanes", "Span", "SpanKind", "SpanRows"]
_REASONS: tuple[str, ...] = ("", *(str(reason) for reason in FinishReason))
_FAILED = [_REASONS.index(reason) for reason in (FinishReason.ABORT, FinishReason.ERROR)]


class Lanes:
    """All lanes of a run as a fold over its records; those that have ended are kept up to a bound."""

    def __init__(self) -> None:
        self._begin_run()

    def _begin_run(self) -> None:
        self.begin = 0.0
        """Engine clock of the first arrival."""
        self.end = 0.0
        """Engine clock at the end of the last step."""
        self.kinds_seen: set[SpanKind] = set()
        """Which kinds of span the run has had, besides waiting."""
        self.users: list[str] = [""]
        self._user_codes: dict[str, int] = {"": 0}
        self._open = OpenLanes()
        self._spans = Columns(
            SPANS_KEPT,
            lane=np.int32,
            kind=np.int8,
            begin=np.float64,
            end=np.float64,
            tokens=np.int32,
            drafts=np.uint16,
            accepted=np.uint16,
        )
        self._ended = Columns(
            LANES_KEPT,
            number=np.int64,
            request_id=np.int64,
            arrival=np.float64,
            finished=np.float64,
            priority=np.int32,
            user=np.int32,
            reason=np.int8,
        )
        self._marks = Columns(MARKS_KEPT, lane=np.int32, time=np.float64)
        self._next_number = 0
        self._step = 0
        self._totals = RunTotals()

    # What it is asked --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._open.places) + len(self._ended)

    @property
    def open(self) -> set[int]:
        """The requests that have not ended."""
        return set(self._open.places)

    @property
    def drafted(self) -> bool:
        """Whether the run has had drafts."""
        return self._open.drafted

    @property
    def oldest(self) -> float:
        """From when on all spans are kept."""
        return float(self._spans["end"][0]) if self._spans.dropped else self.begin

    @property
    def nbytes(self) -> int:
        return self._spans.nbytes + self._ended.nbytes + self._marks.nbytes + self._open.table.nbytes

    def between(self, begin: float = -math.inf, end: float = math.inf) -> LaneRows:
        """The lanes that have something in a stretch of time."""
        if self._spans.dropped:
            begin = max(begin, self.oldest)
        ended = self._ended
        old = np.flatnonzero((ended["finished"] >= begin) & (ended["arrival"] <= end))
        table = self._open.table
        new = np.flatnonzero((table["number"] >= 0) & (table["arrival"] <= end))
        number = np.concatenate([ended["number"][old], table["number"][new]])
        order = np.argsort(number)
        nothing, never = np.zeros(len(old), bool), np.zeros(len(new), bool)
        kinds = table["kind"][new]
        runs = (kinds >= 0) & (kinds != SpanKind.WAITING) & (kinds != SpanKind.SWAPPED)

        def joined(before: np.ndarray, after: np.ndarray) -> np.ndarray:
            return np.concatenate([before, after])[order]

        return LaneRows(
            number[order],
            joined(ended["request_id"][old], table["request_id"][new]),
            joined(ended["arrival"][old], table["arrival"][new]),
            joined(ended["finished"][old], np.full(len(new), np.nan)),
            joined(np.isin(ended["reason"][old], _FAILED), never),
            joined(nothing, runs),
            joined(ended["priority"][old], table["priority"][new]),
            joined(ended["user"][old], table["user"][new]),
        )

    def spans(self, numbers: np.ndarray, begin: float = -math.inf, end: float = math.inf) -> SpanRows:
        """The spans of lanes (their numbers, int array [n]) that touch a stretch of time; ``row`` indexes them."""
        row_of = RowIndex(numbers)
        spans = self._spans
        # They were appended in the order of their ends.
        first = int(np.searchsorted(spans["end"], begin)) if len(spans) else 0
        wanted = row_of.may_be(spans["lane"][first:])
        if end < self.end:
            wanted &= spans["begin"][first:] <= end
        old = first + np.flatnonzero(wanted)
        old_rows = row_of(spans["lane"][old])
        old, old_rows = old[old_rows >= 0], old_rows[old_rows >= 0]
        table = self._open.table
        new = np.flatnonzero((table["kind"] >= 0) & (table["end"] >= begin) & (table["begin"] <= end))
        new_rows = row_of(table["number"][new])
        new, new_rows = new[new_rows >= 0], new_rows[new_rows >= 0]
        names = ("kind", "begin", "end", "tokens", "drafts", "accepted")
        columns = (np.concatenate([spans[name][old], table[name][new]]) for name in names)
        return SpanRows(np.concatenate([old_rows, new_rows]), *columns)

    def marks(self, numbers: np.ndarray, begin: float, end: float) -> tuple[np.ndarray, np.ndarray]:
        """(rows [n], times [n]) of the preemptions of some lanes in a stretch of time."""
        times = self._marks["time"]
        seen = np.flatnonzero((times >= begin) & (times <= end))
        rows = RowIndex(numbers)(self._marks["lane"][seen])
        return rows[rows >= 0], times[seen][rows >= 0]

    def lane(self, request_id: int) -> Lane | None:
        """A request's lane with what is kept of it."""
        rows = self.between()
        found = np.flatnonzero(rows.request_id == request_id)
        return self._write_out(rows.take(found[-1:]))[0] if len(found) else None

    def open_spans(self) -> np.ndarray:
        """The newest span of each lane that has not ended: rows of :attr:`OpenLanes.table`."""
        table = self._open.table
        return table[(table["number"] >= 0) & (table["kind"] >= 0)]

    @property
    def lanes(self) -> dict[int, Lane]:
        """Every lane that is kept, in order of arrival. Written out: for what is done once, not for every frame."""
        return {lane.request_id: lane for lane in self._write_out(self.between())}

    def _write_out(self, rows: LaneRows) -> list[Lane]:
        numbers = rows.number
        lanes = [
            Lane(request_id, arrival, priority=priority, user=self.users[user])
            for request_id, arrival, priority, user in zip(
                rows.request_id.tolist(), rows.arrival.tolist(), rows.priority.tolist(), rows.user.tolist(), strict=True
            )
        ]
        spans = self.spans(numbers)
        order = np.lexsort((spans.end, spans.row))
        columns = [getattr(spans, name)[order].tolist() for name in SpanRows.__slots__]
        for row, kind, *rest in zip(*columns, strict=True):
            lanes[row].spans.append(Span(SpanKind(kind), *rest))
        for row, time in zip(*(column.tolist() for column in self.marks(numbers, -math.inf, math.inf)), strict=True):
            lanes[row].preempted_at.append(time)
        finished, reasons = self._ended["finished"], self._ended["reason"]
        places = RowIndex(self._ended["number"])(numbers)
        for row in np.flatnonzero(places >= 0).tolist():
            place = int(places[row])
            lanes[row].finished_at = float(finished[place])
            lanes[row].finish_reason = _REASONS[int(reasons[place])]
        return lanes

    # The fold ----------------------------------------------------------------------------------------------------

    def restore(self, keyframe: Keyframe) -> None:
        if self._is_another_run(keyframe):
            self._begin_run()
        self._step, self._totals = keyframe.step, keyframe.totals
        alive = {request.request_id for request in keyframe.requests}
        for request_id in self.open - alive:
            self._close(request_id, "")
        for request in keyframe.requests:
            self._restore_request(request, keyframe.time)
        if keyframe.requests:
            self.end = max(self.end, keyframe.time)
        self._take_spans()

    def _is_another_run(self, keyframe: Keyframe) -> bool:
        """Counts only rise within a run."""
        before, after = self._totals, keyframe.totals
        fallen = after.arrived < before.arrived or after.finished < before.finished or after.steps < before.steps
        return keyframe.step < self._step or fallen

    def _restore_request(self, request: RequestState, time: float) -> None:
        known = self._open.places.get(request.request_id)
        if known is not None and self._open.table["arrival"][known] != request.arrival_time:
            self._close(request.request_id, "")  # of another run, which went by unseen
        place = self._place(request.request_id, request.arrival_time, request.priority, request.user)
        lanes, table = self._open, self._open.table
        table["priority"][place] = fitting(request.priority)
        if request.status in IN_BATCH:
            if table["kind"][place] == NONE or table["waits"][place] != NONE:
                lanes.spend_one(place, SpanKind.WAITING, request.admitted_time or request.arrival_time)
            table["waits"][place] = NONE
            lanes.spend_one(place, SpanKind.DECODE if request.output_tokens else SpanKind.PREFILL, time)
        else:
            kind = SpanKind.SWAPPED if request.status == RequestStatus.SWAPPED else SpanKind.WAITING
            table["waits"][place] = kind
            lanes.spend_one(place, kind, time)

    def apply(self, record: StepRecord) -> None:
        self._step, self._totals = record.step, record.totals
        began = record.time if math.isfinite(record.time) else self.end
        took = record.timings.total
        ended = began + (took if math.isfinite(took) and took > 0 else 0.0)
        finished: list[Finished] = []
        for event in record.events:
            if isinstance(event, Finished):
                finished.append(event)
            elif (handler := _HANDLERS.get(type(event))) is not None:
                handler(self, event, began)
        if self._open.places:
            scheduled = self._apply_rows(record, began, ended)
            self._open.spend_idle(scheduled, ended)
        for event in finished:
            self._close(event.request_id, event.reason)
        self.end = max(self.end, ended)
        self._take_spans()

    def _apply_rows(self, record: StepRecord, began: float, ended: float) -> np.ndarray:
        """Spends the step's time in what its rows computed; returns their places."""
        find = self._open.places.get
        places = np.array([find(i, NONE) for i in record.request_ids], dtype=np.intp)
        kinds = np.array(record.kinds, dtype=np.int8)
        tokens = np.array(record.num_tokens, dtype=np.int64)
        known = places >= 0
        computed = known & (tokens > 0)
        ends: np.ndarray | float = ended
        padding = np.array(record.padding, dtype=np.int64) if record.padding else None
        if padding is not None:
            ends = (began + (ended - began) * tokens / np.maximum(tokens + padding, 1))[computed]
        drafts = accepted = None
        if record.drafts:
            drafts = np.array(record.drafts, dtype=np.int32)
            accepted = np.array(record.accepted_drafts(), dtype=np.int32)[computed]
            drafts = drafts[computed]
        self._see(kinds[computed])
        self._open.spend(places[computed], kinds[computed], ends, tokens[computed], drafts, accepted)
        if padding is not None and (padded := known & (padding > 0)).any():
            self.kinds_seen.add(SpanKind.PADDING)
            kinds = np.full(int(padded.sum()), SpanKind.PADDING, dtype=np.int8)
            self._open.spend(places[padded], kinds, ended, padding[padded])
        return places[known]

    def _see(self, kinds: np.ndarray) -> None:
        for kind in np.flatnonzero(np.bincount(kinds)).tolist():
            if kind not in self.kinds_seen:
                self.kinds_seen.add(SpanKind(kind))

    def _take_spans(self) -> None:
        spans = self._open.take_ended()
        if spans is not None:
            self.keep(spans)

    def keep(self, spans: np.ndarray) -> None:
        """Take spans that have ended, in the order of their ends: rows of :attr:`OpenLanes.table`."""
        most = np.iinfo(np.uint16).max
        self._spans.append(
            len(spans),
            lane=spans["number"],
            kind=spans["kind"],
            begin=spans["begin"],
            end=spans["end"],
            tokens=np.minimum(spans["tokens"], np.iinfo(np.int32).max),
            drafts=np.minimum(spans["drafts"], most),
            accepted=np.minimum(spans["accepted"], most),
        )

    # Events ------------------------------------------------------------------------------------------------------

    def _arrive(self, event: Arrived, time: float) -> None:
        arrival = event.arrival_time if math.isfinite(event.arrival_time) else time
        place = self._place(event.request_id, arrival, event.priority, event.user)
        self._open.table["waits"][place] = SpanKind.WAITING

    def _reprioritise(self, event: Reprioritised, time: float) -> None:
        place = self._open.places.get(event.request_id)
        if place is not None:
            self._open.table["priority"][place] = fitting(event.priority)

    def _admit(self, event: Admitted, time: float) -> None:
        place = self._open.places.get(event.request_id)
        if place is not None:
            waited = int(self._open.table["waits"][place])
            self._open.spend_one(place, waited if waited >= 0 else SpanKind.WAITING, time)
            self._open.table["waits"][place] = NONE

    def _preempt(self, event: Preempted, time: float) -> None:
        swapped = event.mode == "swap"
        if swapped:
            self.kinds_seen.add(SpanKind.SWAPPED)
        place = self._open.places.get(event.request_id)
        if place is not None:
            self._open.table["waits"][place] = SpanKind.SWAPPED if swapped else SpanKind.WAITING
            self._marks.append(1, lane=self._open.table["number"][place], time=time)

    def _drop_swap(self, event: SwapDropped, time: float) -> None:
        place = self._open.places.get(event.request_id)
        if place is not None:
            self._open.spend_one(place, SpanKind.SWAPPED, time)
            self._open.table["waits"][place] = SpanKind.WAITING

    def _reject(self, event: Rejected, time: float) -> None:
        place = self._open.places.get(event.request_id)
        if place is not None:
            self._open.spend_one(place, SpanKind.WAITING, time)
        self._close(event.request_id, FinishReason.ERROR)

    # Beginning and end of a lane ---------------------------------------------------------------------------------

    def _place(self, request_id: int, arrival: float, priority: int, user: str) -> int:
        place = self._open.places.get(request_id)
        if place is None:
            self.begin = min(self.begin, arrival) if self._next_number else arrival
            priority = fitting(priority)
            place = self._open.add(request_id, self._next_number, arrival, priority, self._user_code(user))
            self._next_number += 1
        return place

    def _user_code(self, user: str) -> int:
        code = self._user_codes.get(user)
        if code is None:
            code = len(self.users)
            if code > USERS_KEPT:
                return USERS_KEPT
            self._user_codes[user] = code
            self.users.append(user if code < USERS_KEPT else "others")
        return code

    def _close(self, request_id: int, reason: str) -> None:
        lane = self._open.remove(request_id)
        if lane is None:
            return
        self._ended.append(
            1,
            number=lane["number"],
            request_id=lane["request_id"],
            arrival=lane["arrival"],
            finished=lane["end"],
            priority=lane["priority"],
            user=lane["user"],
            reason=_REASONS.index(reason) if reason in _REASONS else 0,
        )


_HANDLERS: dict[type, Callable[[Lanes, Any, float], None]] = {
    Arrived: Lanes._arrive,
    Reprioritised: Lanes._reprioritise,
    Admitted: Lanes._admit,
    Preempted: Lanes._preempt,
    SwapDropped: Lanes._drop_swap,
    Rejected: Lanes._reject,
}
