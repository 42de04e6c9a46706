"""The timelines of all variants under each other on one time axis, from the start of each run. Qt-free.

::

    static   1 ██▓▓▓▓╳╳╳╳╳╳╳╳                one row per request, the same rows in every band;
             2 ░░░░░░░░░░░░░░██▓▓▓▓▓▓▓▓|     zoom, pan and the rows that are shown are shared
    vllm     1 ██▓▓▓▓
             2 ░█▓▓▓▓▓▓▓▓|
             0 s        1 s         2 s
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.lanes import Lane, Span, SpanKind

SHORTEST = 0.02
"""Seconds: the closest zoom."""
PITCH_MIN, PITCH_MAX = 3, 14
"""Logical pixels of a request's row."""
BAND_MOST = 190
"""Logical pixels that the rows of one variant take at most; beyond it they scroll, all bands together."""
TITLE = 20
"""Logical pixels of a band's title line."""
GAP = 6


@dataclass(frozen=True, slots=True)
class Band:
    """One variant's run: a lane per request, seconds after the start of the run."""

    variant: str
    lanes: dict[int, Lane]
    """By the request's place in the workload."""
    end: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Where bands and rows are, logical pixels from the top of the plot."""

    pitch: int
    rows: int
    """That are shown at once in each band."""
    first: int
    band_height: int

    def top(self, band: int) -> int:
        """Of the title line of a band."""
        return band * (TITLE + self.band_height + GAP)

    def height(self, bands: int) -> int:
        return max(0, self.top(bands) - GAP)


def lanes_of(timeline: Sequence[Mapping[str, Any]]) -> dict[int, Lane]:
    """A run's ``timeline`` as the comparison saves it, as lanes by request."""
    lanes: dict[int, Lane] = {}
    for entry in timeline:
        spans = [Span(SpanKind(kind), begin, end, tokens) for kind, begin, end, tokens in entry["spans"]]
        lane = Lane(entry["request"], entry["arrival"], spans, list(entry["preempted_at"]))
        lane.finished_at, lane.finish_reason = entry["end"], entry["reason"] or ""
        lanes[entry["request"]] = lane
    return lanes


class CompareTimelines:
    """What is shown of which runs: the window of time, the rows, and what lies under a point."""

    def __init__(self) -> None:
        self.bands: list[Band] = []
        self.requests: list[int] = []
        """Of all bands, in order of the workload."""
        self.begin, self.end = 0.0, 1.0
        self.first = 0

    def show(self, runs: Sequence[Mapping[str, Any]]) -> None:
        """``runs``: one of each variant."""
        self.bands = []
        for run in runs:
            lanes = lanes_of(run.get("timeline") or ())
            end = max((lane.end for lane in lanes.values()), default=0.0)
            self.bands.append(Band(run["variant"], lanes, max(end, run.get("duration") or 0.0)))
        self.requests = sorted({request for band in self.bands for request in band.lanes})
        self.first = 0
        self.fit()

    @property
    def longest(self) -> float:
        """Seconds of the longest run."""
        return max((band.end for band in self.bands), default=0.0)

    @property
    def kinds(self) -> set[SpanKind]:
        return {span.kind for band in self.bands for lane in band.lanes.values() for span in lane.spans}

    # Time ----------------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """All of every run."""
        self.begin, self.end = 0.0, max(self.longest * 1.02, SHORTEST)

    @property
    def fitted(self) -> bool:
        return self.begin == 0.0 and self.end >= self.longest

    def zoom(self, factor: float, at: float) -> None:
        """Makes the window ``factor`` times as long with the moment ``at`` where it is; never longer than all."""
        length = self.end - self.begin
        wanted = max(SHORTEST, length * factor)
        if wanted >= self.longest * 1.02:
            return self.fit()
        begin = at - (at - self.begin) * wanted / length
        self._place(begin, wanted)

    def pan(self, seconds: float) -> None:
        self._place(self.begin + seconds, self.end - self.begin)

    def _place(self, begin: float, length: float) -> None:
        most = max(self.longest * 1.02 - length, 0.0)
        self.begin = min(max(begin, 0.0), most)
        self.end = self.begin + length

    # Rows ----------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        count = max(1, len(self.requests))
        pitch = min(PITCH_MAX, max(PITCH_MIN, BAND_MOST // count))
        rows = min(count, BAND_MOST // pitch)
        first = min(max(0, self.first), count - rows)
        return Layout(pitch, rows, first, rows * pitch)

    def lane_at(self, y: float) -> tuple[Band, Lane | None] | None:
        """The band at a height, and the lane where there is one; None between bands."""
        layout = self.layout()
        index, rest = divmod(int(y), TITLE + layout.band_height + GAP)
        if not 0 <= index < len(self.bands) or rest >= TITLE + layout.band_height:
            return None
        row = (rest - TITLE) // layout.pitch
        request = self.requests[layout.first + row] if rest >= TITLE and self.requests else None
        return self.bands[index], self.bands[index].lanes.get(request) if request is not None else None
