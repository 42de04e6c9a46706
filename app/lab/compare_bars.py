"""A small chart for each figure: a bar for each variant, from 0, and a whisker from the least to the most over the
seeds.

::

    mean TTFT   lower is better
    static  ███████████████|──┤  812 ms
    vllm    ████├|┤  203 ms
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPoint, QRect, QSize, Qt
from PySide6.QtGui import QBrush, QFontMetrics, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.lab.compare_result import Cell
from app.theme import AXIS_PX, SPACING, TEXT_PX, Theme
from app.translation import tr
from app.widgets import PATTERN_BRUSHES, TellingWidget

ROW = 20
CAPTION = 22
LEAST_WIDTH = 250
"""Of a chart; as many stand side by side as there is room for."""
GAP, GAP_BELOW = 3 * SPACING, 2 * SPACING
NAME_SHARE = 0.34
"""Most of a chart's width that the names take."""


@dataclass(frozen=True, slots=True)
class Bar:
    cell: Cell
    baseline: bool = False

    @property
    def sentence(self) -> str:
        spread = f" ({self.cell.spread})" if self.cell.spread else ""
        return f"{self.cell.variant}{', the baseline' if self.baseline else ''}: {self.cell.text}{spread}"


@dataclass(frozen=True, slots=True)
class BarChart:
    title: str
    note: str
    """Which direction is better."""
    meaning: str
    bars: list[Bar]

    @property
    def height(self) -> int:
        return CAPTION + ROW * len(self.bars)

    @property
    def largest(self) -> float:
        """The value that a bar of full length has; 0: there is none."""
        return max((v for bar in self.bars for v in (bar.cell.value, bar.cell.high) if usable(v)), default=0.0)

    def tip(self, y: int) -> str:
        """What is to be said at a height: of a bar, or of the figure itself."""
        row = (y - CAPTION) // ROW
        return self.bars[row].sentence if y >= CAPTION and row < len(self.bars) else self.meaning


def usable(value: float | None) -> bool:
    """Whether there is a number that can be drawn."""
    return value is not None and math.isfinite(value) and value >= 0


class BarGrid(TellingWidget):
    """Charts side by side as far as there is room, painted as one."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self.charts: list[BarChart] = []
        self._take_fonts()
        policy = QSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.setAccessibleName(tr("Bars of the figures"))
        theme.changed.connect(self._restyle)

    def _take_fonts(self) -> None:
        self._small = self._theme.font(AXIS_PX)
        self._bold = self._theme.font(TEXT_PX - 1, bold=True)

    def _restyle(self) -> None:
        self._take_fonts()
        self.updateGeometry()
        self.update()

    def show_charts(self, charts: Sequence[BarChart]) -> None:
        self.charts = list(charts)
        told = (f"{chart.title}: " + "; ".join(bar.sentence for bar in chart.bars) for chart in self.charts)
        self.setAccessibleDescription("\n".join(told))
        self.updateGeometry()
        self.update()

    @property
    def columns(self) -> int:
        return self._columns(self.width())

    @staticmethod
    def _columns(width: int) -> int:
        return max(1, (width + GAP) // (LEAST_WIDTH + GAP))

    def heightForWidth(self, width: int) -> int:
        lines = -(-len(self.charts) // self._columns(width))
        pitch = self._pitch()
        return max(0, lines * pitch - GAP_BELOW)

    def sizeHint(self) -> QSize:
        return QSize(LEAST_WIDTH, self.heightForWidth(max(self.width(), LEAST_WIDTH)))

    def minimumSizeHint(self) -> QSize:
        return QSize(160, self.sizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.updateGeometry()

    def _pitch(self) -> int:
        """From the top of one line of charts to that of the next."""
        return max((chart.height for chart in self.charts), default=0) + GAP_BELOW

    def place(self, index: int) -> QRect:
        """Where a chart is."""
        line, column = divmod(index, self.columns)
        width = (self.width() + GAP) // self.columns - GAP
        return QRect(column * (width + GAP), line * self._pitch(), width, self.charts[index].height)

    # Painting ----------------------------------------------------------------------------------------------------

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        for index, chart in enumerate(self.charts):
            place = self.place(index)
            if place.intersects(event.rect()):
                self._paint_chart(painter, chart, place)

    def _paint_chart(self, painter: QPainter, chart: BarChart, place: QRect) -> None:
        theme, bold, small = self._theme, QFontMetrics(self._bold), QFontMetrics(self._small)
        baseline = place.top() + (CAPTION + bold.ascent() - bold.descent()) // 2
        painter.setFont(self._bold)
        painter.setPen(theme.text)
        painter.drawText(place.left(), baseline, chart.title)
        painter.setFont(self._small)
        painter.setPen(theme.muted)
        at = bold.horizontalAdvance(chart.title) + 8
        if at + small.horizontalAdvance(chart.note) <= place.width():
            painter.drawText(place.left() + at, baseline, chart.note)
        widest = max((small.horizontalAdvance(bar.cell.variant) + 2 for bar in chart.bars), default=0)
        names = min(widest, round(place.width() * NAME_SHARE))
        figures = max((small.horizontalAdvance(bar.cell.text) for bar in chart.bars), default=0) + 6
        room, largest = max(8, place.width() - names - 6 - figures), chart.largest
        for row, bar in enumerate(chart.bars):
            line = QRect(place.left(), place.top() + CAPTION + row * ROW, names, ROW)
            area = QRect(place.left() + names + 6, line.top(), room, ROW)
            self._paint_bar(painter, bar, line, area, largest)

    def _paint_bar(self, painter: QPainter, bar: Bar, name: QRect, area: QRect, largest: float) -> None:
        theme, small, cell = self._theme, QFontMetrics(self._small), bar.cell
        baseline = area.top() + (ROW + small.ascent() - small.descent()) // 2
        painter.setPen(theme.text)
        elided = small.elidedText(cell.variant, Qt.TextElideMode.ElideRight, name.width())
        painter.drawText(name.left(), baseline, elided)
        end = area.left()
        if usable(cell.value) and largest > 0:
            length = max(1, round(area.width() * (cell.value / largest)))
            box = QRect(area.left(), area.top() + 4, length, ROW - 8)
            painter.fillRect(box, theme.padding if bar.baseline else theme.accent)
            if bar.baseline:  # apart from the others in more than colour
                painter.fillRect(box, QBrush(theme.card, PATTERN_BRUSHES["hatch"]))
            end = box.right() + 1
            if usable(cell.low) and usable(cell.high) and cell.high > cell.low:
                end = max(end, self._paint_whisker(painter, cell, area, largest))
        painter.setPen(theme.text if usable(cell.value) else theme.muted)
        painter.drawText(end + 5, baseline, cell.text)

    def _paint_whisker(self, painter: QPainter, cell: Cell, area: QRect, largest: float) -> int:
        left = area.left() + round(area.width() * (cell.low / largest))
        right = area.left() + round(area.width() * (cell.high / largest))
        middle = area.center().y()
        painter.setPen(QPen(self._theme.text, 1))
        painter.drawLine(left, middle, right, middle)
        for x in (left, right):
            painter.drawLine(x, middle - 4, x, middle + 4)
        return right + 1

    # Pointing ----------------------------------------------------------------------------------------------------

    def tip_at(self, position: QPoint) -> str:
        for index, chart in enumerate(self.charts):
            place = self.place(index)
            if place.contains(position):
                return chart.tip(position.y() - place.top())
        return ""
