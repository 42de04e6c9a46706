"""Plots with a labelled line where the scheduler's knobs were changed; most of them are over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QPoint
from PySide6.QtGui import QPainter
from PySide6.QtWidgets import QWidget

from app.scope.changes import KnobChange
from app.scope.plot import Plot, Tick
from app.theme import Theme
from app.translation import tr

SHORTEST_SECONDS = 5.0
"""What the time axis shows at least; it grows with the run up to the chosen window."""
MARK_REACH = 5
"""Pixels from a line within which the pointer is on it."""
LARGEST = 1e12
"""Beyond it a value is drawn at the upper edge."""
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21_600, 86_400)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where on the x axis, what happened there, and at which step."""

    x: float
    label: str
    step: int


def marks_of(changes: Sequence[KnobChange], now: float) -> list[Mark]:
    return [Mark(change.time - now, change.label, change.step) for change in changes]


def tamed(values: np.ndarray) -> np.ndarray:
    """What can be drawn: NaN where there is no number, nothing beyond :data:`LARGEST`."""
    return np.where(np.isfinite(values), np.minimum(values, LARGEST), np.nan)


def age_ticks(extent: float, most: int, end: str) -> list[Tick]:
    step = next((s for s in _STEPS if extent / s <= most), _STEPS[-1])
    unit, name = (60, "min") if step >= 60 else (1, "s")
    return [Tick(-i * step, f"−{i * step / unit:g} {name}" if i else end) for i in range(int(extent / step) + 1)]


class MarkedPlot(Plot):
    """Has a labelled line for each of its marks; subclasses paint them with :meth:`paint_marks`."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self.marks: list[Mark] = []

    def mark_at(self, x: float) -> Mark | None:
        """The one whose line is at a logical pixel."""
        near = min(self.marks, key=lambda mark: abs(self.x_pixel(mark.x) - x), default=None)
        return near if near is not None and abs(self.x_pixel(near.x) - x) <= MARK_REACH else None

    def paint_marks(self, painter: QPainter) -> None:
        """The lines, and the labels of as many as there is room for, the newest first."""
        self.paint_labelled_lines(painter, [(mark.x, mark.label) for mark in self.marks])

    def tip_at(self, position: QPoint) -> str:
        mark = self.mark_at(position.x())
        return tr("Step {step:,}: {label}", step=mark.step, label=mark.label) if mark is not None else ""


class AgePlot(MarkedPlot):
    """x: seconds before the right edge, 0 or less. Subclasses call :meth:`show_ages` before they lay out."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self._oldest = 0.0
        self._window = math.inf
        self._end = "now"

    def show_ages(self, oldest: float, window: float, marks: list[Mark], *, past: bool) -> None:
        """oldest: of what there is to see, in seconds. past: the right edge is not now."""
        self._oldest, self._window, self.marks = oldest, window, marks
        self._end = "then" if past else "now"

    def layout_axes(self) -> None:
        extent = min(self._window, max(SHORTEST_SECONDS, math.ceil(self._oldest / 5.0) * 5.0))
        self.x_range = (-extent, 0.0)
        super().layout_axes()
        self.x_ticks = age_ticks(extent, max(2, self.area.width() // 75), self._end)
