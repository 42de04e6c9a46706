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

from engine.config import SchedulerConfig
from engine.events import Admitted, BlocksAllocated, Deferred, Keyframe, RowKind, StepRecord
from engine.request import RequestStatus
from engine.run_state import RunState

RATE_SECONDS = 60.0
FEWEST = 3
"""Admissions from which on there is a rate."""
STEPS_KEPT = 32_768
_COLUMNS = ("end", "waiting", "steps", "admitted", "room")


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
    at_most: bool = False
    """A bound rather than an expectation."""


class LineHistory:
    """Running sums over the steps that somebody waited through: float64 columns of the newest :data:`STEPS_KEPT`."""

    def __init__(self) -> None:
        self._columns = np.zeros((len(_COLUMNS), 2 * STEPS_KEPT))
        self._clear()

    def _clear(self) -> None:
        self._written = 0
        self._sums = np.zeros(len(_COLUMNS) - 1)
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
        begin, end = record.time, record.time + record.timings.total
        takeable = record.free_blocks + record.cached_blocks
        if self._waiting:
            admitted = sum(1 for event in record.events if isinstance(event, Admitted))
            room = 0 if self._takeable is None else takeable - self._takeable + _taken_by_newcomers(record)
            since = begin if self._end is None else self._end
            self._sums += (max(0.0, end - since), 1, admitted, room)
            self._write(end)
        self._step, self._end, self._takeable = record.step, end, takeable
        self._waiting = record.num_waiting > 0

    def _write(self, end: float) -> None:
        if self._written == 2 * STEPS_KEPT:
            self._columns[:, :STEPS_KEPT] = self._columns[:, STEPS_KEPT:]
            self._written = STEPS_KEPT
        self._columns[0, self._written] = end
        self._columns[1:, self._written] = self._sums
        self._written += 1

    def rates(self, now: float) -> LineRates:
        """As measured up to a moment, engine clock."""
        ends = self._columns[0, : self._written]
        last = int(np.searchsorted(ends, now + 1e-9, side="right")) - 1
        if last < 1:
            return LineRates()
        waited = self._columns[1, : last + 1]
        first = min(int(np.searchsorted(waited, waited[last] - RATE_SECONDS)), last - 1)
        seconds, steps, admitted, room = self._columns[1:, last] - self._columns[1:, first]
        if seconds <= 0:
            return LineRates()
        enough = admitted >= FEWEST
        return LineRates(
            admissions=float(admitted / seconds) if enough else None,
            room=float(room / seconds) if enough and room > 0 else None,
            step_seconds=float(seconds / steps),
        )


_WAITING = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED})


def _taken_by_newcomers(record: StepRecord) -> int:
    """Blocks that went to prompts, and to what is computed again: what the line has got."""
    allocated = [event for event in record.events if isinstance(event, BlocksAllocated)]
    if not allocated:
        return 0
    decoding = {i for i, kind in zip(record.request_ids, record.kinds, strict=True) if kind == RowKind.DECODE}
    return sum(len(event.blocks) for event in allocated if event.request_id not in decoding)


def expected_waits(count: int, state: RunState, rates: LineRates, scheduler: SchedulerConfig) -> list[Wait | None]:
    """Of the first ``count`` requests of the line; None: not known yet."""
    if not count:
        return []
    each = 1 / rates.admissions if rates.admissions else None
    head = _head_wait(state, rates, scheduler)
    if head is None and each is not None:
        head = Wait(each)
    least = head.seconds if head is not None and not head.at_most else 0.0
    behind = [None if each is None else Wait(max(least, each * place)) for place in range(2, count + 1)]
    return [head, *behind]


def _head_wait(state: RunState, rates: LineRates, scheduler: SchedulerConfig) -> Wait | None:
    """From what binds the head of the line; None: that does not tell."""
    deferred = state.deferred
    if deferred is None:
        return None
    if deferred.reason in ("blocks", "watermark", "resume"):
        return None if rates.room is None else Wait(blocks_missing(deferred, state) / rates.room)
    if rates.step_seconds is None:
        return None
    if deferred.reason in ("batch", "draining"):
        left = (r.max_tokens - r.output_tokens for r in state.requests.values() if r.status == RequestStatus.RUNNING)
        return Wait(max(left, default=0) * rates.step_seconds, at_most=True)
    if deferred.reason == "joining":
        return Wait(scheduler.max_waiting_tokens * rates.step_seconds, at_most=True)
    return None


def blocks_missing(deferred: Deferred, state: RunState) -> int:
    """Blocks that the head still lacks. What was available was told when the reason changed; the state knows better."""
    return max(1, deferred.needed - (state.num_blocks - state.referenced_blocks))


def round_seconds(seconds: float) -> float:
    """As exact as an expectation is: whole seconds up to ten, then fives, then half minutes and minutes."""
    for below, unit in ((10, 1), (60, 5), (300, 30)):
        if seconds < below:
            return float(max(1, round(seconds / unit)) * unit)
    return float(round(seconds / 60) * 60)


def wait_words(wait: Wait | None) -> str:
    """``about 12 s``, ``at most 4 s``, ``not known yet``."""
    if wait is None:
        return "not known yet"
    if wait.seconds < 1:
        return "under 1 s"
    return f"{'at most' if wait.at_most else 'about'} {_rough(wait.seconds)}"


def wait_cell(wait: Wait | None) -> str:
    """The same for a narrow column: ``~ 12 s``, ``≤ 4 s``, ``?``."""
    if wait is None:
        return "?"
    if wait.seconds < 1:
        return "< 1 s"
    return f"{'≤' if wait.at_most else '~'} {_rough(wait.seconds)}"


def _rough(seconds: float) -> str:
    rounded = round_seconds(seconds)
    if rounded < 60:
        return f"{rounded:.0f} s"
    if rounded < 3600:
        return f"{rounded / 60:g} min"
    return f"{rounded / 3600:.0f} h" if rounded < 360_000 else "days"
