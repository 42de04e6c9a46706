"""The timelines of all variants as one plot: Ctrl and the wheel zoom, dragging moves, hovering shows a request in every
variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QRect, QRectF, QSize, Qt, Signal
from PySide6.QtGui import (
    QFontMetrics,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QPixmap,
    QResizeEvent,
    QWheelEvent,
)
from PySide6.QtWidgets import QHBoxLayout, QScrollBar, QSizePolicy, QWidget

from app.lab.compare_timelines import TITLE, Band, CompareTimelines, Layout
from app.scope.lane_painter import LaneContent, paint_lanes
from app.scope.plot import TICK_GAP, Plot, Tick, linear_ticks
from app.scope.timeline_plot import lane_sentence
from app.theme import AXIS_PX, Theme, request_color
from app.translation import tr
from app.widgets import paint_swatch
from app.words import seconds_label

DOT_FROM = 6
"""Logical pixels of a row from which each has its dot."""
DRAG_FROM = 4
"""Pixels the mouse must move with its button held before that is a drag."""


class CompareTimelinePlot(Plot):
    """As high as its bands. It is painted once for what it shows; hovering draws only the line over it."""

    top_margin = 0
    hovered = Signal(object)
    """The request in every band, or None."""

    def __init__(self, theme: Theme, scroll: QScrollBar) -> None:
        super().__init__(theme)
        self.model = CompareTimelines()
        self.request: int | None = None
        """Hovered, or chosen with the keys."""
        self._contents: list[LaneContent] = []
        """Of the bands, their lanes in order."""
        self._scroll = scroll
        self._picture: QPixmap | None = None
        self._hover_x: int | None = None
        self._grabbed: QPoint | None = None
        self.setMouseTracking(True)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(tr("Timelines of the variants: a lane per request, one time axis"))
        scroll.valueChanged.connect(self._scrolled)
        theme.changed.connect(self._changed)

    def show_runs(self, runs: Sequence[Mapping[str, Any]]) -> None:
        self.model.show(runs)
        self._contents = [LaneContent.of(list(band.lanes.values())) for band in self.model.bands]
        self._choose(None)
        self.refresh()

    def sizeHint(self) -> QSize:
        height = self.model.layout().height(len(self.model.bands)) + self.metrics.height() + 3
        return QSize(super().sizeHint().width(), height)

    def minimumSizeHint(self) -> QSize:
        return QSize(super().minimumSizeHint().width(), self.sizeHint().height())

    # Layout ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        model, layout = self.model, self.model.layout()
        longest = max((f"{request}" for request in model.requests), key=len, default="0")
        self.y_ticks = [Tick(0, f"● {longest}")]  # makes room for the numbers of the requests
        self.layout_axes()
        self.x_range = (model.begin, model.end)
        ticks = linear_ticks(model.begin, model.end, max(2, self.area.width() // 90))
        self.x_ticks = [Tick(tick.value, f"{tick.label} s") for tick in ticks]
        blocked = self._scroll.blockSignals(True)
        self._scroll.setRange(0, max(0, len(model.requests) - layout.rows))
        self._scroll.setPageStep(layout.rows)
        self._scroll.setValue(layout.first)
        self._scroll.blockSignals(blocked)
        self._scroll.setVisible(self._scroll.maximum() > 0)
        self.updateGeometry()
        self._changed()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.refresh()

    def _scrolled(self, value: int) -> None:
        self.model.first = value
        self.refresh()

    def _changed(self) -> None:
        self._picture = None
        self.update()

    # Painting ----------------------------------------------------------------------------------------------------

    def paintEvent(self, event: QPaintEvent) -> None:
        ratio = self.devicePixelRatioF()
        if self._picture is None or self._picture.devicePixelRatioF() != ratio:
            self._picture = QPixmap(round(self.width() * ratio), round(self.height() * ratio))
            self._picture.setDevicePixelRatio(ratio)
            painter = QPainter(self._picture)
            painter.fillRect(self.rect(), self.theme.card)
            painter.setFont(self.axis_font)
            self.paint_axes(painter)
            painter.setClipRect(self.area)
            self.paint_data(painter)
            painter.end()
        painter = QPainter(self)
        painter.drawPixmap(0, 0, self._picture)
        painter.setFont(self.axis_font)
        self.paint_over(painter)

    def paint_axes(self, painter: QPainter) -> None:
        layout = self.model.layout()
        painter.setPen(QPen(self.theme.line, 1))
        for tick in self.x_ticks:
            x = round(self.x_pixel(tick.value))
            for index in range(len(self.model.bands)):
                top = layout.top(index) + TITLE
                painter.drawLine(x, top, x, top + layout.band_height)
        self.paint_x_labels(painter)
        for index, band in enumerate(self.model.bands):
            self._paint_title(painter, band, layout.top(index))
            self._paint_numbers(painter, layout, layout.top(index) + TITLE)

    def _paint_title(self, painter: QPainter, band: Band, top: int) -> None:
        bold_font = self.theme.font(AXIS_PX + 1, bold=True)
        bold = QFontMetrics(bold_font)
        baseline = top + (TITLE + bold.ascent() - bold.descent()) // 2
        painter.setFont(bold_font)
        painter.setPen(self.theme.text)
        painter.drawText(0, baseline, band.variant)
        painter.setFont(self.axis_font)
        painter.setPen(self.theme.muted)
        text = seconds_label(band.end) if band.lanes else tr("no timeline in this result")
        painter.drawText(bold.horizontalAdvance(band.variant) + 10, baseline, text)

    def _paint_numbers(self, painter: QPainter, layout: Layout, top: int) -> None:
        every = max(1, -(-self.metrics.height() // layout.pitch))
        size = min(8, layout.pitch - 1)
        right = self.area.left() - 2 * TICK_GAP - size
        for row, request in enumerate(self._shown(layout)):
            middle = top + (row + 0.5) * layout.pitch
            numbered = row % every == 0
            if numbered or layout.pitch >= DOT_FROM:
                dot = QRectF(self.area.left() - TICK_GAP - size, middle - size / 2, size, size)
                paint_swatch(painter, dot, request_color(request, self.theme), "dot", self.theme.card)
            if numbered:
                box = QRectF(0, middle - self.metrics.height() / 2, right + 2, self.metrics.height())
                painter.setPen(self.theme.muted)
                painter.drawText(box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, f"{request}")

    def _shown(self, layout: Layout) -> list[int]:
        return self.model.requests[layout.first : layout.first + layout.rows]

    def paint_data(self, painter: QPainter) -> None:
        layout = self.model.layout()
        shown = self._shown(layout)
        for index, (band, content) in enumerate(zip(self.model.bands, self._contents, strict=True)):
            places = {request: row for row, request in enumerate(band.lanes)}
            rows = np.array([places.get(request, -1) for request in shown], dtype=np.intp)
            area = QRect(self.area.left(), layout.top(index) + TITLE, self.area.width(), layout.band_height)
            paint_lanes(painter, self.theme, content.take(rows), len(rows), area, self.x_range, layout.pitch)
            if band.lanes and self.model.begin <= band.end <= self.model.end:
                painter.setPen(QPen(self.theme.text, 1))
                x, top = round(self.x_pixel(band.end)), layout.top(index) + TITLE
                painter.drawLine(x, top, x, top + layout.band_height)

    def paint_over(self, painter: QPainter) -> None:
        layout, theme = self.model.layout(), self.theme
        if self.request in self._shown(layout):
            row = self._shown(layout).index(self.request)
            painter.setPen(QPen(theme.accent, 1))
            painter.setBrush(Qt.BrushStyle.NoBrush)
            for index in range(len(self.model.bands)):
                top = layout.top(index) + TITLE + row * layout.pitch
                painter.drawRect(QRect(self.area.left(), top - 1, self.area.width() - 1, layout.pitch + 1))
        if self._hover_x is not None and self.area.left() <= self._hover_x <= self.area.right():
            painter.setPen(QPen(theme.muted, 1))
            bottom = layout.height(len(self.model.bands))
            painter.drawLine(self._hover_x, TITLE, self._hover_x, bottom)
        self.paint_focus(painter)

    # Hands -------------------------------------------------------------------------------------------------------

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Without Ctrl the wheel is the panel's, which scrolls."""
        if not event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            return event.ignore()
        self.model.zoom(0.8 ** (event.angleDelta().y() / 120), self.x_value(event.position().x()))
        self.refresh()
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._grabbed = event.position().toPoint()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        position = event.position().toPoint()
        if event.buttons() & Qt.MouseButton.LeftButton and self._grabbed is not None:
            moved = position.x() - self._grabbed.x()
            if abs(moved) >= DRAG_FROM:
                self.model.pan(-moved * (self.x_range[1] - self.x_range[0]) / max(1, self.area.width()))
                self._grabbed = position
                self.refresh()
            return
        self._hover_x = position.x()
        found = self.model.lane_at(position.y())
        self._choose(found[1].request_id if found is not None and found[1] is not None else None)
        self.update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        self._grabbed = None

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self.fit()

    def leaveEvent(self, event: QEvent) -> None:
        self._hover_x = None
        self._choose(None)
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key, model = event.key(), self.model
        length = model.end - model.begin
        if key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            model.pan(length * (0.1 if key == Qt.Key.Key_Right else -0.1))
        elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal, Qt.Key.Key_Minus):
            model.zoom(1.25 if key == Qt.Key.Key_Minus else 0.8, (model.begin + model.end) / 2)
        elif key in (Qt.Key.Key_Home, Qt.Key.Key_0):
            model.fit()
        elif key in (Qt.Key.Key_Up, Qt.Key.Key_Down):
            self._choose_beside(-1 if key == Qt.Key.Key_Up else 1)
        else:
            return super().keyPressEvent(event)
        self.refresh()

    def fit(self) -> None:
        """Show all of every run."""
        self.model.fit()
        self.refresh()

    def _choose_beside(self, offset: int) -> None:
        requests = self.model.requests
        if not requests:
            return
        place = requests.index(self.request) + offset if self.request in requests else 0
        place = min(len(requests) - 1, max(0, place))
        layout = self.model.layout()
        self.model.first = min(place, max(layout.first, place - layout.rows + 1))
        self._choose(requests[place])

    def _choose(self, request: int | None) -> None:
        if request != self.request:
            self.request = request
            self.hovered.emit(request)
            self.update()

    def tip_at(self, position: QPoint) -> str:
        found = self.model.lane_at(position.y())
        if found is None or found[1] is None:
            return ""
        return f"{found[0].variant}\n{lane_sentence(found[1], self.x_value(position.x()))}"


class CompareTimelineView(QWidget):
    """The plot, and beside it the bar that scrolls the rows of all bands together."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        scroll = QScrollBar(Qt.Orientation.Vertical)
        scroll.setAccessibleName(tr("Rows of the timelines"))
        scroll.hide()
        self.plot = CompareTimelinePlot(theme, scroll)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        row.addWidget(self.plot, 1)
        row.addWidget(scroll)
