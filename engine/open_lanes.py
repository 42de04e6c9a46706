"""The lanes of requests that have not ended, in one table: a step's time is spent for all of them at once. Light."""

from __future__ import annotations

import numpy as np

from engine.spans import SpanKind

NONE = -1
_PREFILL, _RECOMPUTE, _STALLED = int(SpanKind.PREFILL), int(SpanKind.RECOMPUTE), int(SpanKind.STALLED)
DRAFTED_ROWS = 8
"""Rows with drafts that one span holds: how finely accepted and rejected drafts are kept over time."""
_OPEN = np.dtype(
    [
        ("number", np.int64),
        ("request_id", np.int64),
        ("arrival", np.float64),
        ("begin", np.float64),
        ("end", np.float64),
        ("tokens", np.int64),
        ("priority", np.int32),
        ("user", np.int32),
        ("drafts", np.int32),
        ("accepted", np.int32),
        ("rows", np.int32),
        ("kind", np.int8),
        ("waits", np.int8),
    ]
)
"""A lane that has not ended, and its newest span; ``number`` -1: a free place. ``rows``: of the span. ``waits``: the
kind of its wait, or -1."""


class OpenLanes:
    """A place for each open lane, found by its request."""

    def __init__(self) -> None:
        self.table = _free_places(64)
        self.places: dict[int, int] = {}
        """By request."""
        self._free = list(range(63, -1, -1))
        self._ended: list[np.ndarray] = []
        self.drafted = False
        """Whether a row had drafts."""

    def add(self, request_id: int, number: int, arrival: float, priority: int, user: int) -> int:
        """Returns its place."""
        if not self._free:
            taken = len(self.table)
            self.table = np.concatenate([self.table, _free_places(taken)])
            self._free = list(range(2 * taken - 1, taken - 1, -1))
        place = self.places[request_id] = self._free.pop()
        lane = self.table[place]
        lane["number"], lane["request_id"], lane["arrival"] = number, request_id, arrival
        lane["begin"] = lane["end"] = arrival
        lane["priority"], lane["user"] = priority, user
        lane["kind"] = lane["waits"] = NONE
        lane["tokens"] = lane["drafts"] = lane["accepted"] = lane["rows"] = 0
        return place

    def remove(self, request_id: int) -> np.ndarray | None:
        """Ends a lane and its newest span; returns its row, shape [1]; None: there is no such lane."""
        place = self.places.pop(request_id, None)
        if place is None:
            return None
        row = self.table[place : place + 1].copy()
        self._ended.append(row)
        self.table[place]["number"] = self.table[place]["kind"] = NONE
        self._free.append(place)
        return row

    def take_ended(self) -> np.ndarray | None:
        """The spans that have ended since this was asked last, in the order of their ends: rows of the table."""
        if not self._ended:
            return None
        spans = np.concatenate(self._ended, dtype=_OPEN)  # else it compares their fields
        self._ended.clear()
        spans = spans[(spans["kind"] >= 0) & ((spans["end"] > spans["begin"]) | (spans["tokens"] > 0))]
        return spans[np.argsort(spans["end"], kind="stable")]

    def spend(
        self,
        places: np.ndarray,
        kinds: np.ndarray,
        ends: np.ndarray | float,
        tokens: np.ndarray | int = 0,
        drafts: np.ndarray | None = None,
        accepted: np.ndarray | None = None,
    ) -> None:
        """Spends the time up to ``ends`` in a state each; going on in the same state makes its span longer."""
        table = self.table
        begins = table["kind"][places] != kinds
        begins |= (kinds == _PREFILL) | (kinds == _RECOMPUTE)  # each chunk
        if drafts is not None:
            self.drafted = self.drafted or bool(drafts.any())
        if self.drafted:
            drafted = table["drafts"][places] > 0
            begins |= drafted & (table["rows"][places] >= DRAFTED_ROWS)
            if drafts is not None:
                begins |= ~drafted & (drafts > 0)
        fresh = places[begins]
        if len(fresh):
            self._ended.append(table[fresh])
            table["begin"][fresh] = table["end"][fresh]
            table["kind"][fresh] = kinds[begins]
            for name in ("tokens", "drafts", "accepted", "rows"):
                table[name][fresh] = 0
        table["end"][places] = np.maximum(table["end"][places], ends)
        table["tokens"][places] += tokens
        table["rows"][places] += 1
        if drafts is not None and accepted is not None:
            table["drafts"][places] += drafts
            table["accepted"][places] += accepted

    def spend_idle(self, scheduled: np.ndarray, end: float) -> None:
        """Spends the time of those that were not ``scheduled`` (places): waiting, or running and left out."""
        idle = self.table["number"] >= 0
        idle[scheduled] = False
        places = np.flatnonzero(idle)
        if len(places):
            waits = self.table["waits"][places]
            self.spend(places, np.where(waits >= 0, waits, _STALLED).astype(np.int8), end)

    def spend_one(self, place: int, kind: int, end: float) -> None:
        self.spend(np.array([place]), np.array([kind], dtype=np.int8), end)


def _free_places(count: int) -> np.ndarray:
    places = np.zeros(count, dtype=_OPEN)
    places["number"] = places["kind"] = NONE
    return places
