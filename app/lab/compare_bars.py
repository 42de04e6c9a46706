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

from PySide6.QtCore import QEvent, QRect, QSize, Qt
from PySide6.QtGui import QBrush, QFont, QFontMetrics, QHelpEvent, QPainter, QPaintEvent, QPen, QResizeEvent
from PySide6.QtWidgets import QGridLayout, QSizePolicy, QToolTip, QWidget

from app.lab.compare_result import Cell
from app.theme import AXIS_PX, SPACING, TEXT_PX, Theme
from app.widgets import PATTERN_BRUSHES

ROW = 20
CAPTION = 22
LEAST_WIDTH = 250
"""Of a chart; as many stand side by side as there is room for."""
NAME_SHARE = 0.34
"""Most of a chart's width that the names take."""


@dataclass(frozen=True, slots=True)
class Bar:
    cell: Cell
    baseline: bool = False


class BarChart(QWidget):
    def __init__(self, theme: Theme, title: str, note: str, meaning: str, bars: Sequence[Bar]) -> None:
        super().__init__()
        self.title, self.note, self.meaning = title, note, meaning
        self.bars = list(bars)
        self._theme = theme
        self._small = QFont(self.font())
        self._small.setPixelSize(AXIS_PX)
        self._bold = QFont(self.font())
        self._bold.setPixelSize(TEXT_PX - 1)
        self._bold.setWeight(QFont.Weight.DemiBold)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(title)
        self.setAccessibleDescription("; ".join(self._sentence(bar) for bar in self.bars))
        theme.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return QSize(LEAST_WIDTH, CAPTION + ROW * len(self.bars))

    def minimumSizeHint(self) -> QSize:
        return QSize(160, self.sizeHint().height())

    def _sentence(self, bar: Bar) -> str:
        spread = f" ({bar.cell.spread})" if bar.cell.spread else ""
        return f"{bar.cell.variant}{', the baseline' if bar.baseline else ''}: {bar.cell.text}{spread}"

    def paintEvent(self, event: QPaintEvent) -> None:
        painter, theme = QPainter(self), self._theme
        bold, small = QFontMetrics(self._bold), QFontMetrics(self._small)
        painter.setFont(self._bold)
        painter.setPen(theme.text)
        baseline = (CAPTION + bold.ascent() - bold.descent()) // 2
        painter.drawText(0, baseline, self.title)
        painter.setFont(self._small)
        painter.setPen(theme.muted)
        at = bold.horizontalAdvance(self.title) + 8
        if at + small.horizontalAdvance(self.note) <= self.width():
            painter.drawText(at, baseline, self.note)
        widest = max((small.horizontalAdvance(bar.cell.variant) + 2 for bar in self.bars), default=0)
        names = min(widest, round(self.width() * NAME_SHARE))
        figures = max((small.horizontalAdvance(bar.cell.text) for bar in self.bars), default=0) + 6
        area = QRect(names + 6, CAPTION, max(8, self.width() - names - 6 - figures), ROW * len(self.bars))
        largest = max((v for bar in self.bars for v in (bar.cell.value, bar.cell.high) if usable(v)), default=0.0)
        for row, bar in enumerate(self.bars):
            self._paint_bar(painter, bar, area, CAPTION + row * ROW, largest, names)

    def _paint_bar(self, painter: QPainter, bar: Bar, area: QRect, top: int, largest: float, names: int) -> None:
        theme, small = self._theme, QFontMetrics(self._small)
        baseline = top + (ROW + small.ascent() - small.descent()) // 2
        painter.setPen(theme.text)
        painter.drawText(0, baseline, small.elidedText(bar.cell.variant, Qt.TextElideMode.ElideRight, names))
        end = area.left()
        if usable(bar.cell.value) and largest > 0:
            box = QRect(area.left(), top + 4, max(1, round(area.width() * bar.cell.value / largest)), ROW - 8)
            painter.fillRect(box, theme.padding if bar.baseline else theme.accent)
            if bar.baseline:  # apart from the others in more than colour
                painter.fillRect(box, QBrush(theme.card, PATTERN_BRUSHES["hatch"]))
            end = box.right() + 1
            if usable(bar.cell.low) and usable(bar.cell.high) and bar.cell.high > bar.cell.low:
                end = max(end, self._paint_whisker(painter, bar, area, top, largest))
        painter.setPen(theme.text if usable(bar.cell.value) else theme.muted)
        painter.drawText(end + 5, baseline, bar.cell.text)

    def _paint_whisker(self, painter: QPainter, bar: Bar, area: QRect, top: int, largest: float) -> int:
        left = area.left() + round(area.width() * bar.cell.low / largest)
        right = area.left() + round(area.width() * bar.cell.high / largest)
        middle = top + ROW // 2
        painter.setPen(QPen(self._theme.text, 1))
        painter.drawLine(left, middle, right, middle)
        for x in (left, right):
            painter.drawLine(x, middle - 4, x, middle + 4)
        return right + 1

    def event(self, event: QEvent) -> bool:
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            row = (event.pos().y() - CAPTION) // ROW
            inside = event.pos().y() >= CAPTION and row < len(self.bars)
            QToolTip.showText(event.globalPos(), self._sentence(self.bars[row]) if inside else self.meaning, self)
            return True
        return super().event(event)


def usable(value: float | None) -> bool:
    """Whether there is a number that can be drawn."""
    return value is not None and math.isfinite(value) and value >= 0


class BarGrid(QWidget):
    """Charts side by side as far as there is room."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self.charts: list[BarChart] = []
        self.columns = 0
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(3 * SPACING)
        self._grid.setVerticalSpacing(2 * SPACING)

    def show_charts(self, charts: Sequence[BarChart]) -> None:
        for chart in self.charts:
            self._grid.removeWidget(chart)
            chart.hide()
            chart.deleteLater()
        self.charts = list(charts)
        self._lay_out(force=True)

    def minimumSizeHint(self) -> QSize:
        """That of one column: more must not force the panel wide."""
        return QSize(160, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def _lay_out(self, force: bool = False) -> None:
        gap = self._grid.horizontalSpacing()
        columns = max(1, (self.width() + gap) // (LEAST_WIDTH + gap))
        if columns == self.columns and not force:
            return
        for column in range(self.columns):
            self._grid.setColumnStretch(column, 0)
        self.columns = columns
        for index, chart in enumerate(self.charts):
            self._grid.addWidget(chart, index // columns, index % columns)
        for column in range(columns):
            self._grid.setColumnStretch(column, 1)
