"""A small plot surface painted with QPainter: margins, thin grid lines, tick labels, no antialiasing where edges are
straight. It draws what it is given and asks for a repaint only when that has changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QPointF, QRect, QSize, Qt
from PySide6.QtGui import QBrush, QFontMetrics, QPaintEngine, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import AXIS_PX, Theme, readable
from app.widgets import PATTERN_BRUSHES, LegendEntry, TellingWidget
from engine.compare_svg import nice_step

TICK_GAP = 5
"""Pixels between a tick label and the plot."""
FARTHEST = 1e5
"""Pixels from the area beyond which nothing is drawn: Qt's rasteriser counts them in whole numbers of limited size."""
MOST_TICKS = 100
SHORTEST_LABEL = 8
"""Characters that are left of a label at least."""


@dataclass(frozen=True, slots=True)
class Tick:
    value: float
    label: str


def linear_ticks(low: float, high: float, most: int) -> list[Tick]:
    """Round values within a range; of one without a finite extent its lower end, where that is a number."""
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return [Tick(low, tick_label(low))] if math.isfinite(low) else []
    step = nice_step(high - low, min(most, MOST_TICKS))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [Tick(i * step, tick_label(i * step)) for i in range(first, last + 1)]


def tick_label(value: float) -> str:
    if abs(value) >= 1e9:
        return f"{value:.3g}".replace("-", "−")
    if abs(value) >= 10_000:
        return f"{value / 1000:,g}k"
    return (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}").replace("-", "−")


class Plot(TellingWidget):
    """Axes and their mapping. Subclasses set the ranges and paint into :attr:`area` in :meth:`paint_data`."""

    top_margin = 4
    """Pixels above the area: half the height of the topmost label."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.theme = theme
        self._advances: dict[str, int] = {}
        self._take_fonts()
        self.x_range = (0.0, 1.0)
        self.y_range = (0.0, 1.0)
        self.log_y = False
        self.x_ticks: list[Tick] = []
        self.y_ticks: list[Tick] = []
        self.area = QRect()
        """Where data is painted, logical pixels."""
        self.foot = 0
        """Pixels between the area and the labels of the x axis that a subclass paints itself."""
        # It paints all of itself, so that nothing under it is painted again with every step.
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        theme.changed.connect(self._take_fonts)
        theme.changed.connect(self.update)

    def _take_fonts(self) -> None:
        self.axis_font = self.theme.font(AXIS_PX)
        self.metrics = QFontMetrics(self.axis_font)
        self._advances.clear()

    def minimumSizeHint(self) -> QSize:
        return QSize(120, 70)

    def sizeHint(self) -> QSize:
        return QSize(320, 180)

    # Mapping -----------------------------------------------------------------------------------------------------

    def layout_axes(self) -> None:
        """Fits :attr:`area` between the tick labels; call after changing ticks or size."""
        widest = max((self.advance(tick.label) for tick in self.y_ticks), default=0)
        left = max(widest, self.advance("000")) + TICK_GAP + 1
        bottom = self.metrics.height() + 3 + self.foot
        width, height = self.width() - left - 2, self.height() - self.top_margin - bottom
        self.area = QRect(left, self.top_margin, max(1, width), max(1, height))

    def advance(self, text: str) -> int:
        """Width of a label; the same few are asked for again and again."""
        width = self._advances.get(text)
        if width is None:
            if len(self._advances) > 500:
                self._advances.clear()
            width = self._advances[text] = self.metrics.horizontalAdvance(text)
        return width

    def x_pixel(self, value: float) -> float:
        """Not beyond :data:`FARTHEST`, whatever the value; what is no number lies at the left edge."""
        low, high = self.x_range
        return self.area.left() + _pixels(value - low, high - low, self.area.width())

    def x_value(self, pixel: float) -> float:
        low, high = self.x_range
        return low + (pixel - self.area.left()) / max(1, self.area.width()) * (high - low)

    def y_pixel(self, value: float) -> float:
        low, high = self.y_range
        if self.log_y:
            value, low, high = (math.log10(max(each, 1e-12)) for each in (value, low, high))
        return self.area.bottom() + 1 - _pixels(value - low, high - low, self.area.height())

    # Painting ----------------------------------------------------------------------------------------------------

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(event.rect(), self.theme.card)
        painter.setFont(self.axis_font)
        self.paint_axes(painter)
        painter.save()
        painter.setClipRect(self.area)
        self.paint_data(painter)
        painter.restore()
        self.paint_over(painter)

    def paint_axes(self, painter: QPainter) -> None:
        self.paint_y_axis(painter)
        self.paint_x_labels(painter)

    def paint_y_axis(self, painter: QPainter) -> None:
        area, theme = self.area, self.theme
        painter.setPen(QPen(theme.line, 1))
        for tick in self.y_ticks:
            y = round(self.y_pixel(tick.value))
            painter.drawLine(area.left(), y, area.right(), y)
        painter.setPen(theme.muted)
        shift = self.metrics.ascent() // 2 - 1
        for tick in self.y_ticks:
            x = area.left() - TICK_GAP - self.advance(tick.label)
            painter.drawText(x, round(self.y_pixel(tick.value)) + shift, tick.label)

    def paint_x_labels(self, painter: QPainter) -> None:
        """As many as there is room for, the first of them first."""
        area = self.area
        painter.setPen(self.theme.muted)
        baseline = area.bottom() + self.foot + 3 + self.metrics.ascent()
        taken: list[tuple[int, int]] = []
        for tick in self.x_ticks:
            width = self.advance(tick.label)
            x = round(self.x_pixel(tick.value) - width / 2)
            x = min(max(x, area.left()), area.right() - width)
            if all(x > right + TICK_GAP or x + width < left - TICK_GAP for left, right in taken):
                painter.drawText(x, baseline, tick.label)
                taken.append((x, x + width))

    def paint_data(self, painter: QPainter) -> None:
        raise NotImplementedError

    def paint_over(self, painter: QPainter) -> None:
        """What may lie outside the plot's area: notes, hover marks."""

    def paint_labelled_lines(self, painter: QPainter, marks: Sequence[tuple[float, str]]) -> None:
        """Vertical lines at values of x, with words for as many as there is room for, the last first."""
        area, theme = self.area, self.theme
        painter.setPen(QPen(theme.accent, 1, Qt.PenStyle.DashLine))
        xs = [round(self.x_pixel(value)) for value, _ in marks]
        for x in xs:
            painter.drawLine(x, area.top(), x, area.bottom())
        height = self.metrics.height()
        top = area.top() - self.top_margin if self.top_margin >= height else area.top()
        free = area.right() + 1
        for (_, label), x in zip(reversed(marks), reversed(xs), strict=True):
            before, behind = x - area.left() if x <= free else 0, free - x - 1
            text = self.metrics.elidedText(label, Qt.TextElideMode.ElideRight, max(before, behind) - 6)
            width = self.advance(text) + 6
            if len(text) < min(len(label), SHORTEST_LABEL):
                continue
            left = x + 1 if width <= behind else x - width
            painter.fillRect(left, top, width, height, theme.card)
            painter.setPen(readable(theme.accent, theme))
            painter.drawText(left + 3, top + self.metrics.ascent(), text)
            free = min(left, x)

    def paint_boxes(
        self, painter: QPainter, boxes: Mapping[str, Sequence[QRect]], looks: Mapping[str, LegendEntry]
    ) -> None:
        """Layers of filled boxes, each in its colour and pattern; device pixels from the lower right corner."""
        scale = self.devicePixelRatioF()
        painter.save()
        painter.translate(self.area.right() + 1, self.area.bottom() + 1)
        painter.scale(1 / scale, 1 / scale)
        painter.setPen(Qt.PenStyle.NoPen)
        for layer, places in boxes.items():
            look = looks[layer]
            painter.setBrush(getattr(self.theme, look.token))
            painter.drawRects(places)
            if look.pattern in PATTERN_BRUSHES:
                painter.setBrush(QBrush(self.theme.card, PATTERN_BRUSHES[look.pattern]))
                painter.drawRects(places)
        painter.restore()

    def paint_focus(self, painter: QPainter) -> None:
        """A line under the area, where the keys are the plot's."""
        if self.hasFocus():
            painter.setPen(QPen(self.theme.accent, 1))
            painter.drawLine(self.area.left(), self.area.bottom() + 1, self.area.right(), self.area.bottom() + 1)

    def paint_curve(self, painter: QPainter, xs: np.ndarray, ys: np.ndarray, pen: QPen) -> None:
        """A line through the finite points; where one is missing the line breaks."""
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        run: list[QPointF] = []
        for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
            if math.isfinite(x) and math.isfinite(y):
                run.append(QPointF(self.x_pixel(x), self.y_pixel(y)))
                continue
            _draw_run(painter, run, pen)
            run = []
        _draw_run(painter, run, pen)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)


def _pixels(value: float, extent: float, length: int) -> float:
    """``length`` pixels show ``extent``: how many are ``value``?"""
    share = value / extent if extent > 0 else 0.0
    return min(FARTHEST, max(-FARTHEST, share * length)) if not math.isnan(share) else 0.0


def _draw_run(painter: QPainter, run: list[QPointF], pen: QPen) -> None:
    """A smooth line of more than one pixel costs Qt a hundred times one of one pixel: on a screen it is several of
    those, below each other."""
    if len(run) == 1:
        painter.setPen(pen)
        painter.drawPoint(run[0])
    elif run and painter.paintEngine().type() == QPaintEngine.Type.SVG:
        painter.setPen(pen)
        painter.drawPolyline(QPolygonF(run))
    elif run:
        thin = QPen(pen)
        thin.setWidth(1)
        thin.setCosmetic(True)
        scale = painter.device().devicePixelRatioF()
        if pen.style() != Qt.PenStyle.SolidLine:
            thin.setDashPattern([part * pen.widthF() * scale for part in pen.dashPattern()])
        painter.setPen(thin)
        lines = max(1, round(pen.widthF() * scale))
        line = QPolygonF(run)
        line.translate(0.0, -(lines - 1) / (2 * scale))
        for _ in range(lines):
            painter.drawPolyline(line)
            line.translate(0.0, 1 / scale)
