"""How long waiting requests will still wait, from what the run has done while others waited. Qt-free.

Only time in which somebody was waiting is measured, from the end of a step that left requests waiting to the end of the
next: places that were empty anyway say nothing about how fast a line moves. Over the last :data:`RATE_SECONDS` of it::

    admissions/s = requests that joined the batch / seconds
    room/s       = KV blocks that became free to take, less those that answers in progress took / seconds

Request k of the line (the head is 1) joins after about k / (admissions/s). A head that waits for blocks joins after
about (blocks missing) / (room/s).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.translation import tr
from engine.columns import Columns
from engine.config import SchedulerConfig
from engine.events import Admitted, BlocksAllocated, Deferred, Keyframe, RowKind, StepRecord
from engine.request import RequestStatus
from engine.run_state import RunState

RATE_SECONDS = 60.0
FEWEST = 3
"""Admissions from which on there is a rate."""
STEPS_KEPT = 32_768
_SUMS = ("waiting", "steps", "admitted", "room")
_COLUMNS = ("end", *_SUMS)


@dataclass(frozen=True, slots=True)
class LineRates:
    """How fast the line has been moving; None where too little has been seen."""

    admissions: float | None = None
    """Requests that joined, per second."""
    room: float | None = None
    """KV blocks left for those who wait, per second."""
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float
    """No more exact than an expectation is: see :func:`round_seconds`."""
    at_most: bool = False
    """A bound rather than an expectation."""


class LineHistory:
    """Running sums over the steps that somebody waited through: float64 columns of the newest :data:`STEPS_KEPT`."""

    def __init__(self) -> None:
        self._rows = Columns(STEPS_KEPT, **dict.fromkeys(_COLUMNS, np.float64))
        self._clear()

    def _clear(self) -> None:
        self._rows.clear()
        self._sums = np.zeros(len(_SUMS))
        self._step = 0
        self._end: float | None = None
        self._waiting = False
        self._takeable: int | None = None

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self._step:
            self._clear()
        self._step = keyframe.step
        self._end = self._takeable = None
        self._waiting = any(r.status in _WAITING for r in keyframe.requests)

    def apply(self, record: StepRecord) -> None:
        begin, end = record.time, record.end
        takeable = record.takeable_blocks
        if self._waiting:
            admitted = sum(1 for event in record.events if isinstance(event, Admitted))
            room = 0 if self._takeable is None else takeable - self._takeable + _taken_by_newcomers(record)
            since = begin if self._end is None else self._end
            self._sums += (max(0.0, end - since), 1, admitted, room)
            self._rows.append(1, end=end, **dict(zip(_SUMS, self._sums, strict=True)))
        self._step, self._end, self._takeable = record.step, end, takeable
        self._waiting = record.num_waiting > 0

    def rates(self, now: float) -> LineRates:
        """As measured up to a moment, engine clock."""
        ends = self._rows["end"]
        last = int(np.searchsorted(ends, now + 1e-9, side="right")) - 1
        if last < 1:
            return LineRates()
        waited = self._rows["waiting"][: last + 1]
        first = min(int(np.searchsorted(waited, waited[last] - RATE_SECONDS)), last - 1)
        seconds, steps, admitted, room = (float(self._rows[name][last] - self._rows[name][first]) for name in _SUMS)
        if seconds <= 0:
            return LineRates()
        enough = admitted >= FEWEST
        return LineRates(
            admissions=admitted / seconds if enough else None,
            room=room / seconds if enough and room > 0 else None,
            step_seconds=seconds / steps,
        )


_WAITING = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED})


def _taken_by_newcomers(record: StepRecord) -> int:
    """Blocks that went to prompts, and to what is computed again: what the line has got."""
    allocated = [event for event in record.events if isinstance(event, BlocksAllocated)]
    if not allocated:
        return 0
    decoding = {i for i, kind in zip(record.request_ids, record.kinds, strict=True) if kind == RowKind.DECODE}
    return sum(len(event.blocks) for event in allocated if event.request_id not in decoding)


def head_wait(state: RunState, rates: LineRates, scheduler: SchedulerConfig) -> Wait | None:
    """Of the head of the line, from what binds it; None: not known yet."""
    deferred = state.deferred
    reason = deferred.reason if deferred is not None else ""
    if deferred is not None and reason in ("blocks", "watermark", "resume") and rates.room:
        return Wait(round_seconds(blocks_missing(deferred, state) / rates.room))
    if reason in ("batch", "draining") and rates.step_seconds:
        left = (r.max_tokens - r.output_tokens for r in state.requests.values() if r.status == RequestStatus.RUNNING)
        return Wait(round_seconds(max(left, default=0) * rates.step_seconds), at_most=True)
    if reason == "joining" and rates.step_seconds:
        return Wait(round_seconds(scheduler.max_waiting_tokens * rates.step_seconds), at_most=True)
    return Wait(round_seconds(1 / rates.admissions)) if rates.admissions else None


def wait_at(place: int, head: Wait | None, rates: LineRates) -> Wait | None:
    """Of a request further down the line, the head being place 0 and expected to wait ``head``."""
    if place == 0:
        return head
    if not rates.admissions:
        return None
    least = head.seconds if head is not None and not head.at_most else 0.0
    return Wait(max(least, round_seconds((place + 1) / rates.admissions)))


def blocks_missing(deferred: Deferred, state: RunState) -> int:
    """Blocks that the head still lacks. What was available was told when the reason changed; the state knows better."""
    return max(1, deferred.needed - (state.num_blocks - state.referenced_blocks))


_UNITS = ((10, 1), (60, 5), (300, 30), (3600, 60))


def round_seconds(seconds: float) -> float:
    """Whole seconds up to ten, then fives, half minutes, minutes and hours; 0: less than one."""
    if seconds < 1:
        return 0.0
    unit = next((unit for below, unit in _UNITS if seconds < below), 3600)
    return float(round(seconds / unit) * unit)


def wait_words(wait: Wait | None) -> str:
    """``about 12 s``, ``at most 4 s``, ``not known yet``."""
    if wait is None:
        return tr("not known yet")
    return f"{'at most' if wait.at_most else 'about'} {_words(wait.seconds)}" if wait.seconds else tr("under 1 s")


def wait_cell(wait: Wait | None) -> str:
    """The same for a narrow column: ``~ 12 s``, ``≤ 4 s``, ``?``."""
    if wait is None:
        return "?"
    return f"{'≤' if wait.at_most else '~'} {_words(wait.seconds)}" if wait.seconds else "< 1 s"


def _words(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:g} min"
    return f"{seconds / 3600:,.0f} h"
