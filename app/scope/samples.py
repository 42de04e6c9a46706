"""Samples of a latency over time, with the priority of the request they are of; percentiles of them. Qt-free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MERGED_TICK = 2.0
"""Seconds within which old samples may become one."""
MERGED_SHARE = 0.02
"""By how much, of their size, samples that become one may differ."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; None without a sample. ``count``: of how many."""

    p50: float | None
    p90: float | None
    p99: float | None
    count: int


NO_SAMPLE = Percentiles(None, None, None, 0)


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Columns of one length, oldest first: engine clock, seconds, how many samples of that value, request."""

    times: np.ndarray
    values: np.ndarray
    weights: np.ndarray
    request_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.times)

    def percentiles(self) -> Percentiles:
        return percentiles(self.values, self.weights)


class Samples:
    """The newest samples, in preallocated columns of ``capacity`` rows of 32 bytes.

    Where they are full the oldest sixteenth goes. With ``merged``, the older half is first thinned out: samples of one
    priority, within two seconds and 2 % of each other, become one of their mean that counts as often.
    """

    def __init__(self, capacity: int, *, merged: bool = False) -> None:
        self._merged = merged
        self._count = 0
        self._times = np.zeros(capacity)
        self._values = np.zeros(capacity)
        self._weights = np.zeros(capacity, dtype=np.int32)
        self._priorities = np.zeros(capacity, dtype=np.int32)
        self._requests = np.zeros(capacity, dtype=np.int64)

    def __len__(self) -> int:
        return self._count

    def clear(self) -> None:
        self._count = 0

    @property
    def begin(self) -> float | None:
        """Engine clock of the oldest sample."""
        return float(self._times[0]) if self._count else None

    def add(
        self,
        time: float,
        values: np.ndarray,
        priorities: np.ndarray | int,
        weights: np.ndarray | int = 1,
        request_ids: np.ndarray | int = 0,
    ) -> None:
        """Samples [n] of one moment, not before those added last; n at most the capacity."""
        if self._count + len(values) > len(self._times):
            self._make_room(len(values))
        rows = slice(self._count, self._count + len(values))
        self._times[rows], self._values[rows], self._priorities[rows] = time, values, priorities
        self._weights[rows], self._requests[rows] = weights, request_ids
        self._count = rows.stop

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self._times, self._values, self._weights, self._priorities, self._requests

    def _make_room(self, wanted: int) -> None:
        if self._merged:
            self._merge_older_half()
        surplus = self._count + max(wanted, len(self._times) // 16) - len(self._times)
        if surplus > 0:
            for column in self._columns():
                column[: self._count - surplus] = column[surplus : self._count].copy()
            self._count -= surplus

    def _merge_older_half(self) -> None:
        half = self._count // 2
        times, values, weights, priorities, _ = (column[:half] for column in self._columns())
        ticks = np.floor(times / MERGED_TICK)
        sizes = np.floor(np.log(np.maximum(values, 1e-9)) / math.log1p(MERGED_SHARE))
        order = np.lexsort((sizes, priorities, ticks))
        keys = np.stack([ticks[order], priorities[order], sizes[order]])
        starts = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
        counts = np.add.reduceat(weights[order], starts)
        means = np.add.reduceat((values * weights)[order], starts) / counts
        last = np.maximum.reduceat(times[order], starts)  # with it, all of them were
        settled = np.argsort(last, kind="stable")
        merged = len(starts)
        self._times[:merged], self._values[:merged] = last[settled], means[settled]
        self._weights[:merged], self._priorities[:merged] = counts[settled], priorities[order][starts][settled]
        self._requests[:merged] = 0
        for column in self._columns():
            column[merged : merged + self._count - half] = column[half : self._count].copy()
        self._count = merged + self._count - half

    def between(self, begin: float, end: float, priority: int | None = None) -> SampleSet:
        """Those after ``begin`` and up to ``end``; priority None: of all."""
        first, last = np.searchsorted(self._times[: self._count], (begin, end), side="right")
        found = SampleSet(*(c[first:last] for c in (self._times, self._values, self._weights, self._requests)))
        if priority is None:
            return found
        mine = self._priorities[first:last] == priority
        return SampleSet(found.times[mine], found.values[mine], found.weights[mine], found.request_ids[mine])

    def priorities(self, begin: float, end: float) -> list[int]:
        """Those of which there are samples, rising."""
        first, last = np.searchsorted(self._times[: self._count], (begin, end), side="right")
        return np.unique(self._priorities[first:last]).tolist()


def percentiles(values: np.ndarray, weights: np.ndarray | None = None) -> Percentiles:
    """Of samples [n], each counting ``weights`` [n] times; what is not finite is left out."""
    if weights is None:
        weights = np.ones(len(values), dtype=np.int64)
    finite = np.isfinite(values)
    if not finite.all():
        values, weights = values[finite], weights[finite]
    if not len(values):
        return NO_SAMPLE
    found = grouped_quantiles(values, weights, np.zeros(len(values), dtype=np.int16), 1, (0.5, 0.9, 0.99))
    return Percentiles(*(float(value) for value in found[:, 0]), int(weights.sum(dtype=np.int64)))


def grouped_quantiles(
    values: np.ndarray, weights: np.ndarray, groups: np.ndarray, count: int, shares: Sequence[float]
) -> np.ndarray:
    """Quantiles of each of ``count`` groups of finite samples: values, weights, groups (int16, 0 to count - 1) [n] ->
    [len(shares), count], NaN where a group is empty. Between two samples linearly, as numpy's default does."""
    order = np.argsort(values)
    order = order[np.argsort(groups[order], kind="stable")]
    ordered = values[order]
    upto = np.cumsum(weights[order], dtype=np.int64)
    totals = np.bincount(groups, weights, minlength=count).astype(np.int64)
    filled = np.flatnonzero(totals)
    starts, lasts = (np.cumsum(totals) - totals)[filled], totals[filled] - 1
    found = np.full((len(shares), count), np.nan)
    for row, share in enumerate(shares):
        places = share * lasts
        low = places.astype(np.int64)
        first = ordered[np.searchsorted(upto, starts + low, side="right")]
        second = ordered[np.searchsorted(upto, starts + np.minimum(low + 1, lasts), side="right")]
        found[row, filled] = first + (second - first) * (places - low)
    return found
