"""What the chat list shows, row by row, without Qt: sections, the chats in them, and how one list becomes another.

The pinned chats come first, then the folders by name, then the others by the day of their last use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Literal, NamedTuple

from app.chat.conversation import Conversation
from app.chat.search import Found

MOST_CHANGES = 64
"""From here on showing another list whole is cheaper than changing it row by row."""


class Section(NamedTuple):
    """A heading: ``name`` is the folder's, or the span of days (``today`` … ``month``), or ``2026-05``, or ``2024``."""

    kind: Literal["pinned", "folder", "date"]
    name: str = ""


Row = str | Section
"""A chat, by its id, or a heading."""


@dataclass(slots=True)
class Listing:
    rows: list[Row] = field(default_factory=list)
    counts: dict[Section, int] = field(default_factory=dict)
    """Chats in each section, shown or folded away."""
    hits: dict[str, Found] | None = None
    """While the list shows what a search found."""


def listing_of(
    conversations: Iterable[Conversation], folders: Iterable[str], collapsed: set[str], now: float
) -> Listing:
    """All chats in their sections, the last used first. ``collapsed``: folders that show their heading only."""
    days = _Days(now)
    sections: dict[Section, list[str]] = {Section("pinned"): []}
    for name in sorted(folders, key=str.casefold):
        sections[Section("folder", name)] = []
    for conversation in sorted(conversations, key=attrgetter("updated"), reverse=True):
        if conversation.pinned:
            section = Section("pinned")
        elif conversation.folder:
            section = Section("folder", conversation.folder)
        else:
            section = days.section(conversation.updated)
        sections.setdefault(section, []).append(conversation.id)
    listing = Listing()
    for section, ids in sections.items():
        if ids or section.kind == "folder":
            listing.counts[section] = len(ids)
            listing.rows.append(section)
            if section.kind != "folder" or section.name not in collapsed:
                listing.rows.extend(ids)
    return listing


class _Days:
    """Spans of days as people name them, from local midnight on; asked for one moment after the other, backwards."""

    def __init__(self, now: float) -> None:
        self._now = datetime.fromtimestamp(now)
        midnight = self._now.replace(hour=0, minute=0, second=0, microsecond=0)
        spans = (("today", 0), ("yesterday", 1), ("week", 7), ("month", 30))
        self._spans = [((midnight - timedelta(days=days)).timestamp(), Section("date", name)) for name, days in spans]

    def section(self, moment: float) -> Section:
        while moment < self._spans[0][0]:
            if len(self._spans) == 1:
                self._spans.append(self._span_of(moment))
            del self._spans[0]
        return self._spans[0][1]

    def _span_of(self, moment: float) -> tuple[float, Section]:
        """The calendar month, or year, and when it began."""
        try:
            day = datetime.fromtimestamp(moment)
            if day.year == self._now.year:
                return datetime(day.year, day.month, 1).timestamp(), Section("date", f"{day:%Y-%m}")
            return datetime(day.year, 1, 1).timestamp(), Section("date", str(day.year))
        except (ValueError, OverflowError, OSError):
            return float("-inf"), Section("date", "unknown")


class Change(NamedTuple):
    """Rows to take out (``rows`` empty) or to put in at ``place``."""

    place: int
    count: int
    rows: tuple[Row, ...] = ()


def changes(old: list[Row], new: list[Row]) -> list[Change] | None:
    """What makes ``new`` of ``old``, to be done in order; None where that is more than showing ``new`` whole.

    Rows are unique in a list. One that moved is taken out and put in again.
    """
    start = end = 0
    shorter = min(len(old), len(new))
    while start < shorter and old[start] == new[start]:
        start += 1
    while end < shorter - start and old[-1 - end] == new[-1 - end]:
        end += 1
    before, after = old[start : len(old) - end], new[start : len(new) - end]
    gone, come = _differences(before, after)
    removals, insertions = runs(gone), runs(come)
    if len(removals) + len(insertions) > MOST_CHANGES:
        return None
    result = [Change(start + first, count) for first, count in reversed(removals)]
    result += [Change(start + first, count, tuple(after[first : first + count])) for first, count in insertions]
    return result


def _differences(before: list[Row], after: list[Row]) -> tuple[list[int], list[int]]:
    """Places in ``before`` that go and in ``after`` that come; the others are the same rows in the same order."""
    stay = set(before) & set(after)
    moved: set[Row] = set()
    gone, come = [], []
    i = j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and (before[i] not in stay or before[i] in moved):
            gone.append(i)
            i += 1
        elif j < len(after) and (after[j] not in stay or after[j] in moved):
            come.append(j)
            j += 1
        elif before[i] == after[j]:
            i, j = i + 1, j + 1
        elif i + 1 < len(before) and before[i + 1] == after[j]:
            moved.add(before[i])  # down, to where it comes in again
        else:
            moved.add(after[j])  # up, out of its old place
    return gone, come


def runs(places: list[int]) -> list[tuple[int, int]]:
    """Neighbouring places as (first, count)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and sum(runs[-1]) == place:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((place, 1))
    return runs
