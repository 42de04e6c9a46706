"""Latencies as a fold over step records: TTFT, ITL and E2EL, each sample with its moment and priority. Qt-free.

TTFT is the end of the step that gave a request its first token, less its arrival. ITL is the time between the ends of
two steps that gave it tokens, divided by the tokens of the second; where records are missing no gap is taken. E2EL is
the end of the step with which its answer was handed out, less its arrival: in a static batch that is the batch's end,
unless each row is handed out as it is made. What was aborted or refused has none. A step that stays in flight gives its
tokens, and ends answers, when they arrive (:mod:`engine.handout`).
"""

from __future__ import annotations

import math

import numpy as np

from app.scope.samples import Percentiles, Samples
from engine.columns import fitting
from engine.events import (
    AnyEvent,
    Arrived,
    Ended,
    Finished,
    Keyframe,
    Reconfigured,
    Rejected,
    Reprioritised,
    StepRecord,
)
from engine.handout import Handout, Handouts
from engine.request import FinishReason

GAPS_KEPT = 65_536
"""Entries; gaps of one step that are equal are one."""
ANSWERS_KEPT = 8192
RECENT_SECONDS = 60.0
_ANSWERED = frozenset({FinishReason.STOP, FinishReason.LENGTH})


class Latency:
    """2.6 MB of samples, and a row for each request that has not ended."""

    def __init__(self) -> None:
        self.ttft = Samples(ANSWERS_KEPT)
        self.itl = Samples(GAPS_KEPT, merged=True)
        self.e2el = Samples(ANSWERS_KEPT)
        self.end = 0.0
        """Engine clock at the end of the last step."""
        self._step = 0
        self._rows_as_made = False
        self._handouts = Handouts()
        self._forget_requests()

    def _forget_requests(self) -> None:
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        # A row for each request that has not ended.
        self._arrival = np.zeros(0)
        self._last_token = np.zeros(0)
        """NaN: none yet, or not known when."""
        self._priority = np.zeros(0, dtype=np.int32)
        self._begun = np.zeros(0, dtype=np.bool_)
        """Whether it has had its first token."""
        self._batch: list[int] = []
        self._batch_rows = np.zeros(0, dtype=np.int64)
        """The last step's requests and their rows: in most steps they are those of the step before."""

    # The fold ----------------------------------------------------------------------------------------------------

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self._step:
            for samples in (self.ttft, self.itl, self.e2el):
                samples.clear()
            self.end = 0.0
        self._step = keyframe.step
        self._forget_requests()
        self._handouts.restore(keyframe)
        for request in keyframe.requests:
            row = self._open(request.request_id, request.arrival_time, request.priority)
            self._begun[row] = request.first_token_time is not None
        if keyframe.scheduler is not None:
            self._rows_as_made = keyframe.scheduler.static_delivery == "row"

    def apply(self, record: StepRecord) -> None:
        self._step = record.step
        for event in record.events:
            if not isinstance(event, Ended | Finished):  # its tokens of this step come first
                self._event(event)
        for given in self._handouts.apply(record):
            if math.isfinite(given.time):
                self.end = max(self.end, given.time)
                self._take_tokens(given, self.end)
            for event in given.ends:
                self._close(event)
        if math.isfinite(record.end):
            self.end = max(self.end, record.end)

    def _event(self, event: AnyEvent) -> None:
        if isinstance(event, Arrived):
            self._open(event.request_id, event.arrival_time, event.priority)
        elif isinstance(event, Rejected):
            self._close(event)
        elif isinstance(event, Reprioritised):
            row = self._row_of.get(event.request_id)
            if row is not None:
                self._priority[row] = fitting(event.priority)
        elif isinstance(event, Reconfigured) and event.scheduler is not None:
            self._rows_as_made = event.scheduler.static_delivery == "row"

    def _open(self, request_id: int, arrival: float, priority: int) -> int:
        row = self._row_of.get(request_id)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row_of[request_id] = self._free.pop()
            self._batch = []
        self._arrival[row], self._last_token[row] = arrival, np.nan
        self._priority[row], self._begun[row] = fitting(priority), False
        return row

    def _grow(self) -> None:
        before = len(self._arrival)
        more = max(64, before)
        self._arrival = np.append(self._arrival, np.zeros(more))
        self._last_token = np.append(self._last_token, np.full(more, np.nan))
        self._priority = np.append(self._priority, np.zeros(more, dtype=np.int32))
        self._begun = np.append(self._begun, np.zeros(more, dtype=np.bool_))
        self._free = list(range(before + more - 1, before - 1, -1))

    def _rows(self, request_ids: list[int]) -> np.ndarray:
        if request_ids != self._batch:
            rows = [self._row_of.get(i, -1) for i in request_ids]
            if -1 in rows:  # the fold began in the middle of it
                rows = [self._open(i, math.nan, 0) if i not in self._row_of else self._row_of[i] for i in request_ids]
            self._batch, self._batch_rows = list(request_ids), np.array(rows, dtype=np.int64)
        return self._batch_rows

    def _take_tokens(self, given: Handout, ended: float) -> None:
        tokens = np.array(given.new_tokens, dtype=np.int64)
        got = np.flatnonzero(tokens)
        if not len(got):
            return
        rows = self._rows(given.request_ids)[got]
        fresh = np.flatnonzero(~self._begun[rows])
        if len(fresh):
            new = rows[fresh]
            ids = np.array(given.request_ids, dtype=np.int64)[got][fresh]
            self._add(self.ttft, ended, ended - self._arrival[new], self._priority[new], ids)
            self._begun[new] = True
        self._add_gaps(ended, (ended - self._last_token[rows]) / tokens[got], self._priority[rows])
        self._last_token[rows] = ended

    def _add_gaps(self, ended: float, gaps: np.ndarray, priorities: np.ndarray) -> None:
        """Those that decode together have one gap: they become one entry."""
        known = np.isfinite(gaps)
        if not known.all():
            gaps, priorities = gaps[known], priorities[known]
        if not len(gaps):
            return
        if (gaps == gaps[0]).all() and (priorities == priorities[0]).all():
            self.itl.add(ended, gaps[:1], priorities[:1], len(gaps))
            return
        order = np.lexsort((gaps, priorities))
        gaps, priorities = gaps[order], priorities[order]
        changes = (gaps[1:] != gaps[:-1]) | (priorities[1:] != priorities[:-1])
        starts = np.append(0, np.flatnonzero(changes) + 1)
        weights = np.diff(np.append(starts, len(gaps)))
        self.itl.add(ended, gaps[starts], priorities[starts], weights)

    def _add(self, to: Samples, time: float, values: np.ndarray, priorities: np.ndarray, ids: np.ndarray) -> None:
        known = np.isfinite(values)
        to.add(time, values[known], priorities[known], 1, ids[known])

    def _close(self, event: Ended | Finished | Rejected) -> None:
        if isinstance(event, Ended) and not self._rows_as_made:
            return  # handed out when its batch ends
        row = self._row_of.get(event.request_id)
        if row is None:
            return
        if not isinstance(event, Rejected) and event.reason in _ANSWERED:
            one = np.array([row])
            took = self.end - self._arrival[one]
            self._add(self.e2el, self.end, took, self._priority[one], np.array([event.request_id]))
        del self._row_of[event.request_id]
        self._free.append(row)
        self._batch = []

    # What is read ------------------------------------------------------------------------------------------------

    @property
    def begin(self) -> float | None:
        """Engine clock of the oldest sample that is kept; None without one."""
        return min((s.begin for s in (self.ttft, self.itl, self.e2el) if s.begin is not None), default=None)

    def recent_ttft(self, now: float | None = None) -> Percentiles:
        """Of the first tokens of the last minute; where there were none, of those before. now: a moment of the past."""
        end = self.end if now is None else now
        recent = self.ttft.between(end - RECENT_SECONDS, end)
        return (recent if len(recent) else self.ttft.between(-math.inf, end)).percentiles()
