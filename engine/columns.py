"""A bounded table of numpy columns that grows at its end: what a run looked like, kept for the views. Light."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

FIRST_ROWS = 1024


class Columns:
    """Rows are appended; past ``most`` the oldest go. Every column is contiguous, so that parts of it are views.

    Room is taken as it is needed, by doubling, up to ``1.25 * most`` rows: dropping is amortised over a fifth of them.
    """

    def __init__(self, most: int, **types: DTypeLike) -> None:
        self.most = most
        self.dropped = 0
        """Rows that have gone."""
        self._room = most + max(1, most // 4)
        self._columns = {name: np.zeros(min(FIRST_ROWS, self._room), dtype=kind) for name, kind in types.items()}
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, name: str) -> np.ndarray:
        """A column, oldest row first. A view: right until the next row is appended."""
        return self._columns[name][self._begin : self._end]

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    @property
    def most_bytes(self) -> int:
        """What it takes when it is full."""
        return self._room * sum(column.itemsize for column in self._columns.values())

    def append(self, rows: int, **values: Any) -> None:
        """``rows`` rows; each value is an array of as many entries, or one for all. All columns are to be given."""
        if rows > self.most:
            values = {name: value[-self.most :] if np.ndim(value) else value for name, value in values.items()}
            self.dropped += rows - self.most
            rows = self.most
        self._make_room(rows)
        for name, column in self._columns.items():
            column[self._end : self._end + rows] = values[name]
        self._end += rows
        surplus = len(self) - self.most
        if surplus > 0:
            self._begin += surplus
            self.dropped += surplus

    def clear(self) -> None:
        self._begin = self._end = self.dropped = 0

    def _make_room(self, rows: int) -> None:
        room = len(next(iter(self._columns.values())))
        if self._end + rows <= room:
            return
        kept = min(len(self), self.most - rows)
        gone = len(self) - kept
        self._begin += gone
        self.dropped += gone
        grown = room
        while grown < self._room and kept + rows > grown // 2:
            grown = min(self._room, 2 * grown)
        for name, column in self._columns.items():
            target = column if grown == room else np.zeros(grown, dtype=column.dtype)
            target[:kept] = column[self._begin : self._end]
            self._columns[name] = target
        self._begin, self._end = 0, kept


def fitting(value: int) -> int:
    """What an int32 column holds in place of numbers beyond it: the last that it does hold."""
    return max(-(2**31), min(2**31 - 1, value))
