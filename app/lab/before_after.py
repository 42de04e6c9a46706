"""What a changed knob did: the same figures over equally long stretches of time before and after the change. Qt-free.

::

        change before                      change                        next change, or now
    ────────┼──────────────┬─────────────────┼─────────────────┬──────────────┼──▶ engine clock
                           ├──── length ─────┤──── length ─────┤
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.scope.changes import KnobChange
from app.scope.samples import Percentiles, Samples
from app.translation import tr
from app.words import NOT_AVAILABLE, percent, seconds_label

if TYPE_CHECKING:
    from app.scope.panel import RunHistory

LONGEST = 60.0
"""Seconds of each stretch at most."""
FEWEST_STEPS = 5
FEWEST_FOR_P50 = 5
FEWEST_FOR_P99 = 100
"""Fewer samples than that say nothing of the slowest of a hundred."""
TOO_FEW = tr("too few")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of one stretch: None without a value; ``samples``: of how many steps or latencies."""

    value: float | None
    samples: int
    enough: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table. ``ratio``: after divided by before; None where there is no honest one."""

    name: str
    before: str
    after: str
    ratio: float | None
    tip: str

    @property
    def ratio_text(self) -> str:
        if self.ratio is None:
            return NOT_AVAILABLE
        return f"×{self.ratio:.2f}" if self.ratio < 9.995 else f"×{self.ratio:,.0f}"


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    change: KnobChange
    length: float
    """Seconds of each of the two stretches."""
    lines: tuple[Line, ...]


def before_after(history: RunHistory, now: float) -> BeforeAfter | None:
    """Around the last change up to ``now``, engine clock; None without one."""
    changes = history.changes.between(-math.inf, now)
    if not changes:
        return None
    change = changes[-1]
    since = max(history.rates.begin, changes[-2].time if len(changes) > 1 else -math.inf)
    now = min(now, history.rates.end)
    length = max(0.0, min(now - change.time, change.time - since, LONGEST))
    stretches = ((change.time - length, change.time), (change.time, change.time + length))
    return BeforeAfter(change, length, tuple(_line(figure, history, *stretches) for figure in _FIGURES))


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    tip: str
    measure: Callable[[RunHistory, float, float], Figure]
    text: Callable[[float], str]


def _line(kind: _Kind, history: RunHistory, before: tuple[float, float], after: tuple[float, float]) -> Line:
    first, second = (kind.measure(history, *stretch) for stretch in (before, after))
    ratio = None
    if first.enough and second.enough and first.value is not None and second.value is not None:
        # What is shown as 0 is not a base: it may be a single request for the time of one step.
        ratio = second.value / first.value if kind.text(first.value) != kind.text(0.0) else None
    cells = (_cell(figure, kind) for figure in (first, second))
    return Line(
        kind.name,
        *cells,
        ratio,
        tr(
            "{tip}; of {before:,} before and {after:,} after",
            tip=kind.tip,
            before=first.samples,
            after=second.samples,
        ),
    )


def _cell(figure: Figure, kind: _Kind) -> str:
    if figure.value is None:
        return NOT_AVAILABLE
    return kind.text(figure.value) if figure.enough else TOO_FEW


def _per_second(name: str, times: float = 1.0) -> Callable[[RunHistory, float, float], Figure]:
    def measure(history: RunHistory, begin: float, end: float) -> Figure:
        steps = round(history.rates.over("steps", begin, end))
        if not steps:
            return Figure(None, 0, False)
        return Figure(times * history.rates.over(name, begin, end) / (end - begin), steps, steps >= FEWEST_STEPS)

    return measure


def _mean(name: str, of: str) -> Callable[[RunHistory, float, float], Figure]:
    def measure(history: RunHistory, begin: float, end: float) -> Figure:
        steps = round(history.rates.over("steps", begin, end))
        return Figure(history.rates.ratio(name, of, begin, end) if steps else None, steps, steps >= FEWEST_STEPS)

    return measure


def _percentile(
    samples: Callable[[RunHistory], Samples], value: Callable[[Percentiles], float | None], fewest: int
) -> Callable[[RunHistory, float, float], Figure]:
    def measure(history: RunHistory, begin: float, end: float) -> Figure:
        found = samples(history).between(begin, end).percentiles()
        return Figure(value(found), found.count, found.count >= fewest)

    return measure


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}"


def _latency(name: str, samples: Callable[[RunHistory], Samples], meaning: str) -> tuple[_Kind, _Kind]:
    p50 = _percentile(samples, lambda found: found.p50, FEWEST_FOR_P50)
    p99 = _percentile(samples, lambda found: found.p99, FEWEST_FOR_P99)
    return (
        _Kind(f"{name} p50", tr("Median of {meaning}", meaning=meaning), p50, seconds_label),
        _Kind(
            f"{name} p99",
            tr(
                "99th percentile of {meaning}, at least {fewest_for_p99}",
                meaning=meaning,
                fewest_for_p99=FEWEST_FOR_P99,
            ),
            p99,
            seconds_label,
        ),
    )


_FIGURES: tuple[_Kind, ...] = (
    _Kind(tr("output tok/s"), tr("Output tokens per second, steps"), _per_second("output"), _number),
    _Kind(
        tr("prompt tok/s"),
        tr("Prompt tokens computed for the first time, a second, steps"),
        _per_second("prompt"),
        _number,
    ),
    *_latency("TTFT", lambda history: history.latency.ttft, tr("the time from arrival to the first token, requests")),
    *_latency("ITL", lambda history: history.latency.itl, tr("the time between two tokens, gaps")),
    _Kind("running", tr("Requests in the batch, mean over time, steps"), _mean("running", "seconds"), _number),
    _Kind("waiting", tr("Requests in the queue, mean over time, steps"), _mean("waiting", "seconds"), _number),
    _Kind("preempt/min", tr("Preemptions per minute, steps"), _per_second("preemptions", 60.0), _number),
    _Kind(
        tr("KV use"),
        tr("KV blocks in use, share of the pool, mean over time, steps"),
        _mean("kv", "seconds"),
        percent,
    ),
    _Kind(tr("step time"), tr("Mean time of a step, steps"), _mean("seconds", "steps"), seconds_label),
)
