"""What a run has done so far, as sums over time: a fold over step records from which any rate or mean comes. Qt-free.

::

    sum                                      ●━━━━  knot: the sum at the end of a step
     │                        ●━━━━━━━━━━━━━━┘
     │              ●━━━━━━━━━╱   steps are straight lines: what a step did is spread evenly over the time it took
     │   ●━━━━━━━━━━╯ idle
     └───┴──────────┴─────────┴──────────────┴────▶ engine clock

The rate of anything over any stretch of time is the difference of two points of its line, divided by the time between
them; so it is right whatever the length of the steps, and for any moment of the past. Counts come from the running
totals, so records that were replaced by a keyframe are counted too; their times are not known, and not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from app.scope.steps import PARTS
from engine.events import Keyframe, RunTotals, StepRecord, pool_after

KNOTS_KEPT = 16_384
GRAIN = 0.05
"""Seconds: knots are at least this far apart, so that :data:`KNOTS_KEPT` of them last 13 minutes of work at least."""
GAUGE_SECONDS = 2.0
"""The gauge is the mean over this last while."""
POINTS = 120
"""A curve has about so many."""
FINEST = 0.25
"""Seconds between two points of a curve at least."""

_COUNTS = {
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "preemptions": "preemptions",
    "prefix_queries": "prefix_query_tokens",
    "prefix_hits": "prefix_hit_tokens",
    "drafts": "draft_tokens",
    "accepted": "accepted_tokens",
}
"""Sum -> field of :class:`RunTotals`."""
SUMS: tuple[str, ...] = (*_COUNTS, "steps", "seconds", *PARTS, "running", "waiting", "kv")
"""``steps`` and ``seconds``: steps seen and what they took; ``running``, ``waiting`` (requests) and ``kv`` (share of
the pool): gauges after each step, times its seconds."""
_COLUMN = {name: column for column, name in enumerate(SUMS)}


@dataclass(frozen=True, slots=True)
class RateSeries:
    """``ages``: seconds before the end of the series of each point, rising to 0; tokens per second around each."""

    ages: np.ndarray
    prompt: np.ndarray
    output: np.ndarray


class Rates:
    """At most :data:`KNOTS_KEPT` knots of all sums: 2.4 MB."""

    def __init__(self, capacity: int = KNOTS_KEPT) -> None:
        self._times = np.zeros(capacity)
        self._sums = np.zeros((capacity, len(SUMS)))
        self._clear()

    def _clear(self) -> None:
        self._count = 0
        self._now = [0.0] * len(SUMS)
        self._totals: RunTotals | None = None
        self._num_blocks = 0
        self._segment = 0.0
        """When the line that ends with the last knot began."""
        self._idle = True

    def __len__(self) -> int:
        return self._count

    @property
    def begin(self) -> float:
        """Engine clock from which on sums are kept."""
        return float(self._times[0]) if self._count else 0.0

    @property
    def end(self) -> float:
        """Engine clock when the last step ended."""
        return float(self._times[self._count - 1]) if self._count else 0.0

    # The fold ----------------------------------------------------------------------------------------------------

    def restore(self, keyframe: Keyframe) -> None:
        if self._totals is None or keyframe.totals.steps < self._totals.steps:
            self._clear()
            self._totals = keyframe.totals
        elif self._count and math.isfinite(keyframe.time):
            self._add_counts(keyframe.totals)
            self._knot(self.end, keyframe.time)
        self._num_blocks = keyframe.num_blocks
        self._idle = not keyframe.requests

    def apply(self, record: StepRecord) -> None:
        self._idle = record.num_running == 0 and record.num_waiting == 0
        self._num_blocks = pool_after(record, self._num_blocks)
        seconds, ended = record.timings.total, record.end
        if not math.isfinite(ended):
            return  # the counts come with the next one
        self._add_counts(record.totals)
        now = self._now
        gauges = (record.num_running, record.num_waiting, self._kv_usage(record))
        parts = (getattr(record.timings, part) for part in PARTS)
        mine = (1.0, seconds, *parts, *(gauge * seconds for gauge in gauges))
        for column, value in enumerate(mine, len(_COUNTS)):
            now[column] += value
        self._knot(record.time, ended)

    def _kv_usage(self, record: StepRecord) -> float:
        return 1.0 - record.takeable_blocks / self._num_blocks if self._num_blocks else 0.0

    def _add_counts(self, totals: RunTotals) -> None:
        before = self._totals or RunTotals()
        for column, field in enumerate(_COUNTS.values()):
            self._now[column] += getattr(totals, field) - getattr(before, field)
        self._totals = totals

    def _knot(self, begun: float, ended: float) -> None:
        """The sums have come to what they are between two moments."""
        if not self._count:
            self._append(begun, [0.0] * len(SUMS))
        elif begun - self.end > GRAIN:
            self._append(begun, self._sums[self._count - 1])
        elif self._times[self._count - 1] > self._segment and ended - self._segment <= GRAIN:
            self._count -= 1  # the line goes on
        self._append(max(ended, self.end), self._now)

    def _append(self, time: float, sums: list[float] | np.ndarray) -> None:
        if self._count == len(self._times):
            keep = 3 * self._count // 4
            self._times[:keep] = self._times[self._count - keep : self._count].copy()
            self._sums[:keep] = self._sums[self._count - keep : self._count].copy()
            self._count = keep
        self._segment = self.end if self._count else time
        self._times[self._count] = time
        self._sums[self._count] = sums
        self._count += 1

    # What is read ------------------------------------------------------------------------------------------------

    def at(self, name: str, times: np.ndarray) -> np.ndarray:
        """A sum of :data:`SUMS` at moments of the engine clock [n]; before what is kept and after the end it rests."""
        if not self._count:
            return np.zeros(len(times))
        return np.interp(times, self._times[: self._count], self._sums[: self._count, _COLUMN[name]])

    def over(self, name: str, begin: float, end: float) -> float:
        """By how much a sum grew between two moments."""
        low, high = self.at(name, np.array([begin, end]))
        return float(high - low)

    def ratio(self, name: str, of: str, begin: float, end: float) -> float | None:
        """Growth of one sum over that of another, such as ``forward`` of ``steps``; None: that did not grow."""
        whole = self.over(of, begin, end)
        return self.over(name, begin, end) / whole if whole > 0 else None

    def rate(self, name: str, now: float | None = None) -> float:
        """Growth a second over the last :data:`GAUGE_SECONDS`; 0 exactly when nothing runs or waits.

        now: a moment of the past at which something did."""
        if not self._count or (now is None and self._idle):
            return 0.0
        end = self.end if now is None else now
        begin = max(self.begin, end - GAUGE_SECONDS)
        return self.over(name, begin, end) / (end - begin) if end > begin else 0.0

    def series(self, window: float, now: float | None = None) -> RateSeries | None:
        """Rates over the ``window`` seconds up to ``now``, or less where less is kept; None before the first step.

        A point is the mean over the stretch from one neighbour to the other.
        """
        now = self.end if now is None else min(now, self.end)
        if not self._count or now <= self.begin:
            return None
        begin = max(self.begin, now - window)
        apart = max(FINEST, (now - begin) / POINTS)
        # Whole multiples, so that the points of a moving curve stay where they are.
        times = np.append(np.arange(math.ceil(begin / apart), math.ceil(now / apart)) * apart, now)
        low, high = np.maximum(times - apart, self.begin), np.minimum(times + apart, now)
        prompt, output = ((self.at(name, high) - self.at(name, low)) / (high - low) for name in ("prompt", "output"))
        return RateSeries(times - now, prompt, output)
