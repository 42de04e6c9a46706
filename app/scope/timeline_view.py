"""Which stretch of time and which lanes the timeline shows. Qt-free: zoom, pan, following the run, groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from app.translation import tr
from app.words import count
from engine.lanes import WAITS, LaneRows, Lanes

FIRST_SECONDS = 4.0
"""The shortest window at first; it grows with the run to :data:`LIVE_SECONDS` and then scrolls."""
LIVE_SECONDS = 60.0
SHORTEST, LONGEST = 0.01, 36_000.0
REVEALED_AT = 0.7
"""Where in the window a moment comes to lie that was outside of it."""
Grouping = Literal["", "user", "priority"]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, engine clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class TimelineView:
    """The window of time."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self._seconds: float | None = None
        self._end: float | None = None

    @property
    def live(self) -> bool:
        """Whether it follows the run; from a moment before the run, of an engine that is gone, it does again."""
        return self._end is None or self._end < self.lanes.begin

    def follow(self) -> None:
        """Back to the newest, at the scale that shows the run or its last minute."""
        self._seconds = self._end = None

    def release(self) -> None:
        """Back to the newest, at the scale that is shown."""
        self._end = None

    def window(self) -> Window:
        newest = self.lanes.end
        end = newest if self.live or self._end is None else self._end
        fitting = min(LIVE_SECONDS, max(FIRST_SECONDS, newest - self.lanes.begin))
        return Window(end - (self._seconds or fitting), end)

    def show(self, begin: float, end: float) -> None:
        """Exactly this stretch, as far as so short or long a one can be shown."""
        middle, seconds = (begin + end) / 2, min(LONGEST, max(SHORTEST, end - begin))
        self._seconds, self._end = seconds, middle + seconds / 2

    def show_all(self) -> None:
        """Everything that is kept."""
        begin, end = self.lanes.oldest, self.lanes.end
        self._seconds, self._end = min(LONGEST, max(FIRST_SECONDS, end - begin)), None

    def reveal(self, time: float) -> None:
        """Holds still, moved so that the moment is seen."""
        window = self.window()
        if window.begin <= time <= window.end:
            self._seconds, self._end = window.seconds, window.end
        else:
            self._seconds, self._end = window.seconds, time + (1 - REVEALED_AT) * window.seconds

    def zoom(self, factor: float, at: float) -> None:
        """Makes the window ``factor`` times as long with the moment ``at`` where it is; live stays live."""
        window = self.window()
        seconds = min(LONGEST, max(SHORTEST, window.seconds * factor))
        if not self.live:
            share = (window.end - at) / window.seconds
            self._end = at + share * seconds
        self._seconds = seconds

    def pan(self, seconds: float) -> None:
        """Moves the window; at the newest end it follows again, before the first request it stops."""
        window = self.window()
        end = max(window.end + seconds, self.lanes.oldest + 0.1 * window.seconds)
        self._seconds = window.seconds
        self._end = None if end >= self.lanes.end else end


@dataclass(frozen=True, slots=True)
class Group:
    """The lanes of one user or priority."""

    key: int
    title: str
    lanes: np.ndarray
    """Which of the lanes that are shown."""
    running: int
    folded: bool

    @property
    def sentence(self) -> str:
        running = tr(", {running:,} running", running=self.running) if self.running else ""
        return f"{self.title}: {count(len(self.lanes), 'request')}{running}"


@dataclass(frozen=True, slots=True)
class RowList:
    """What is in each row from top to bottom."""

    lanes: np.ndarray
    """Which lane; of a heading -1 - its group: int [rows]."""
    groups: list[Group]

    def __len__(self) -> int:
        return len(self.lanes)

    def group_at(self, row: int) -> Group | None:
        """The group whose heading a row is."""
        lane = int(self.lanes[row]) if 0 <= row < len(self.lanes) else 0
        return self.groups[-1 - lane] if lane < 0 else None


def arrange_rows(lanes: LaneRows, users: list[str], grouping: Grouping, folded: set[int], heading: int = 1) -> RowList:
    """Lanes in order of arrival, or under the headings of their groups. ``folded``: keys of those without their lanes;
    ``heading``: rows that a heading takes."""
    if not grouping:
        return RowList(np.arange(len(lanes)), [])
    keys = lanes.user if grouping == "user" else lanes.priority
    found = np.unique(keys).tolist()
    if grouping == "user":
        found.sort(key=lambda code: (not users[code], users[code]))
    order = np.argsort(keys, kind="stable")
    starts = np.searchsorted(keys[order], np.array(found, dtype=keys.dtype), side="left")
    ends = np.searchsorted(keys[order], np.array(found, dtype=keys.dtype), side="right")
    groups, rows = [], []
    for number, (key, start, end) in enumerate(zip(found, starts.tolist(), ends.tolist(), strict=True)):
        title = (users[key] or tr("no user")) if grouping == "user" else tr("priority {key}", key=key)
        members = order[start:end]
        groups.append(Group(key, title, members, int(lanes.running[members].sum()), key in folded))
        rows.append(np.full(heading, -1 - number))
        if key not in folded:
            rows.append(members)
    return RowList(np.concatenate(rows) if rows else np.zeros(0, dtype=np.intp), groups)


def busy_place(lanes: LaneRows, model: Lanes, time: float | None) -> int | None:
    """The newest lane that ran: at a moment, or, None, that runs; None: there is none."""
    if time is None:
        places = np.flatnonzero(lanes.running)
    else:
        spans = model.spans(lanes.number, time, time)
        places = spans.row[~np.isin(spans.kind, list(WAITS))]
    return int(places.max()) if len(places) else None


def time_label(seconds: float, step: float, zero: str) -> str:
    """``−0.05 s``, ``+2 s``, ``−3 min``; ``zero`` where the difference is none."""
    if abs(seconds) < step / 2:
        return zero
    sign = "−" if seconds < 0 else "+"
    number, unit = (abs(seconds), "s") if step < 60 or not math.isfinite(seconds) else (abs(seconds) / 60, "min")
    return f"{sign}{number:.4g} {unit}"
