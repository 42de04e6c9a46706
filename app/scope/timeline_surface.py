"""The timeline's surface: lanes under each other, their names, the time axis, and what lies where."""

from __future__ import annotations

import math

import numpy as np
from PySide6.QtCore import QPoint, QRect, QRectF, Qt
from PySide6.QtGui import QColor, QImage, QPainter, QPen, QPixmap, QResizeEvent
from PySide6.QtWidgets import QScrollBar

from app.scope.lane_painter import LaneContent, lane_image, paint_preemptions
from app.scope.panel import ScopeSource
from app.scope.plot import TICK_GAP, Plot, Tick
from app.scope.timeline_view import Group, Grouping, RowList, TimelineView, arrange_rows, busy_place, time_label
from app.selection import Selection
from app.theme import Theme, request_color
from app.translation import tr
from app.widgets import paint_swatch
from engine.compare_svg import nice_step
from engine.request import request_name

LANE_MIN, LANE_MAX = 8, 18
"""Logical pixels of a lane, unless its height is chosen by hand."""
NAMED_FROM = 5
"""Logical pixels of a lane from which its hue is shown beside it."""
FADED = 160
"""Opacity, of 255, of what lies over the time after the shown step."""


class TimelineSurface(Plot):
    top_margin = 0

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, scroll: QScrollBar) -> None:
        super().__init__(theme)
        self.source = source
        self.view = TimelineView(source.history.lanes)
        self.follows_lanes = True
        self.grouping: Grouping = ""
        self._folded: set[int] = set()
        self._selection = selection
        self._scroll = scroll
        self._lanes = source.history.lanes.between()
        self._list = RowList(np.zeros(0, dtype=np.intp), [])
        self._first = 0
        self._count = 0
        self._pitch: float = LANE_MAX
        self._height_chosen: int | None = None
        self.marks: list[tuple[float, str]] = []
        """When knobs were changed, engine clock, and what."""
        self._content = LaneContent.of([])
        self._image: QImage | None = None
        self._names = QPixmap()
        self._names_of: tuple[object, ...] = ()
        """What the picture of the names shows: they change far less often than the lanes."""
        self._moment: float | None = None
        """The shown one, where it is not the newest."""
        self._band: tuple[int, int] | None = None
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(tr("Timeline: a lane per request"))

    # Layout ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        self._follow_moment()
        window, lanes = self.view.window(), self.view.lanes
        self.marks = [(c.time, c.label) for c in self.source.history.changes.between(window.begin, window.end)]
        self.top_margin = self.metrics.height() if self.marks else 0
        self._lanes = lanes.between(window.begin, window.end)
        self.layout_axes()
        room, scale = self.area.height(), self.devicePixelRatioF()
        pitch = self._height_chosen or min(LANE_MAX, max(LANE_MIN, room // max(1, len(self._lanes))))
        self._pitch = round(pitch * scale) / scale
        heading = math.ceil(self.metrics.height() / self._pitch)
        self._list = arrange_rows(self._lanes, lanes.users, self.grouping, self._folded, heading)
        fitting = max(1, int(room / self._pitch))
        self._set_scroll(fitting)
        self._first = self._scroll.value()
        self._count = min(fitting, len(self._list) - self._first)
        self._set_axes()
        self._content = self._collect()
        self._image = lane_image(
            self.theme, self._content, self._count, self.area.width(), self.x_range, self._pitch, scale
        )
        self.update()

    def _follow_moment(self) -> None:
        """Another moment is shown: it is brought into the window, which holds still until the newest is shown again."""
        moment = self.source.moment.time if self.source.moment is not None else None
        if moment == self._moment:
            return
        self._moment = moment
        if moment is None:
            self.view.release()
        else:
            self.view.reveal(moment)

    def _set_axes(self) -> None:
        window, now = self.view.window(), self.source.now
        names = [request_name(i) for i in self.shown_requests()]
        self.y_ticks = [Tick(0, "● " + max(names, key=len, default="0"))]
        self.layout_axes()
        self.x_range = (window.begin, window.end)
        step = nice_step(window.seconds, max(2, self.area.width() // 110))
        zero = "now" if self._moment is None else tr("step {step:,}", step=self.source.state.step)
        first, last = (window.begin - now) / step, (window.end - now) / step + 1e-6
        numbers = range(math.ceil(first), math.floor(last) + 1) if last - first < 1000 else range(0)
        ages = sorted((i * step for i in numbers), key=abs)  # where room is short the shown moment is named
        self.x_ticks = [Tick(now + age, time_label(age, step, zero)) for age in ages]

    def _set_scroll(self, fitting: int) -> None:
        """Where not all lanes fit the bar shows, and follows the newest that runs until it is moved by hand."""
        scroll, rows = self._scroll, self._list.lanes
        surplus = max(0, len(rows) - fitting)
        blocked = scroll.blockSignals(True)
        scroll.setRange(0, surplus)
        scroll.setPageStep(fitting)
        if self.follows_lanes:
            busy = busy_place(self._lanes, self.view.lanes, self._moment)
            place = np.flatnonzero(rows == busy) if busy is not None else ()
            scroll.setValue((int(place[0]) if len(place) else len(rows)) - round(0.75 * fitting))
        scroll.blockSignals(blocked)
        scroll.setVisible(surplus > 0)

    def _shown_rows(self) -> np.ndarray:
        """The lane in each row that is seen; of a heading a number below 0."""
        return self._list.lanes[self._first : self._first + self._count]

    def _collect(self) -> LaneContent:
        window, model = self.view.window(), self.view.lanes
        shown = self._shown_rows()
        place = np.flatnonzero(shown >= 0)
        lanes = self._lanes.take(shown[place])
        spans = model.spans(lanes.number, window.begin, window.end)
        rows, times = model.marks(lanes.number, window.begin, window.end)
        failed = np.flatnonzero(lanes.failed)
        spans.row[:] = place[spans.row]
        return LaneContent(spans, place[rows], times, place[failed], lanes.finished[failed])

    def shown_requests(self) -> list[int]:
        """Whose lanes are seen, from top to bottom."""
        shown = self._shown_rows()
        return self._lanes.request_id[shown[shown >= 0]].tolist()

    def row_of(self, request_id: int | None) -> QRect | None:
        """Where a request's lane is seen."""
        if request_id is None:
            return None
        shown = self._shown_rows()
        rows = np.flatnonzero((shown >= 0) & (self._lanes.request_id[np.maximum(shown, 0)] == request_id))
        if not len(rows):
            return None
        return QRect(self.area.left(), round(self._top(int(rows[0]))), self.area.width(), max(1, int(self._pitch)))

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.refresh()

    # Painting ----------------------------------------------------------------------------------------------------

    def paint_axes(self, painter: QPainter) -> None:
        area, theme = self.area, self.theme
        painter.setPen(QPen(theme.line, 1))
        for tick in self.x_ticks:
            x = round(self.x_pixel(tick.value))
            painter.drawLine(x, area.top(), x, area.bottom())
        self.paint_x_labels(painter)
        self._paint_labels(painter)

    def _paint_labels(self, painter: QPainter) -> None:
        shown = self._shown_rows()
        selected = self.row_of(self._selection.request_id)
        if selected is not None:
            painter.fillRect(selected.adjusted(-self.area.left(), 0, 0, 0), self.theme.selection)
        for row in np.flatnonzero((shown < 0) & (np.diff(shown, prepend=0) != 0)).tolist():
            rows = int((shown == shown[row]).sum())
            self._paint_heading(painter, row, rows, self._list.groups[-1 - int(shown[row])])
        lanes = np.maximum(shown, 0)
        ids = np.where(shown >= 0, self._lanes.request_id[lanes], -1) if len(self._lanes) else shown
        late = self._lanes.arrival[lanes] > self.source.now if len(self._lanes) else shown > 0
        scale = self.devicePixelRatioF()
        key = (
            ids.tobytes(),
            late.tobytes(),
            self._selection.request_id,
            self._pitch,
            self.area,
            self.theme.dark,
            scale,
        )
        if key != self._names_of:
            self._names_of = key
            self._names = QPixmap(round(self.area.left() * scale), round(self.height() * scale))
            self._names.setDevicePixelRatio(scale)
            self._names.fill(Qt.GlobalColor.transparent)
            brush = QPainter(self._names)
            brush.setFont(self.axis_font)
            self._paint_names(brush, ids.tolist(), late.tolist(), selected)
            brush.end()
        painter.drawPixmap(0, 0, self._names)

    def _paint_names(self, painter: QPainter, ids: list[int], late: list[bool], selected: QRect | None) -> None:
        """Hues and numbers of the lanes, as many as there is room for; ``ids``: -1 in a heading."""
        every = max(1, math.ceil(self.metrics.height() / self._pitch))
        next_named = 0
        for row, request_id in enumerate(ids):
            if request_id < 0:
                next_named = row + 1
                continue
            chosen = request_id == self._selection.request_id
            if self._pitch >= NAMED_FROM:
                size = min(8.0, self._pitch - 2)
                middle = self._top(row) + self._pitch / 2
                dot = QRectF(self.area.left() - TICK_GAP - size, middle - size / 2, size, size)
                paint_swatch(painter, dot, request_color(request_id, self.theme), "dot", self.theme.card)
            crowded = selected is not None and abs(self._top(row) - selected.top()) < every * self._pitch
            if chosen or (row >= next_named and not crowded):
                color = self.theme.text if chosen else self.theme.waiting if late[row] else self.theme.muted
                self._paint_name(painter, row, request_name(request_id), color)
                next_named = row + every

    def _paint_name(self, painter: QPainter, row: int, name: str, color: QColor) -> None:
        height = self.metrics.height()
        middle = self._top(row) + self._pitch / 2
        right = self.area.left() - 2 * TICK_GAP - min(8.0, max(0.0, self._pitch - 2))
        painter.setPen(color)
        box = QRectF(0, middle - height / 2, right + 2, height)
        painter.drawText(box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, name)

    def _paint_heading(self, painter: QPainter, row: int, rows: int, group: Group) -> None:
        box = QRectF(0, self._top(row), self.area.right() + 1, rows * self._pitch)
        painter.fillRect(box, self.theme.raised)
        box.adjust(4, 0, -4, 0)
        text = f"{'▸' if group.folded else '▾'} {group.sentence}"
        text = self.metrics.elidedText(text, Qt.TextElideMode.ElideRight, int(box.width()))
        painter.setPen(self.theme.text)
        painter.drawText(box, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, text)

    def _top(self, row: int) -> float:
        return self.area.top() + row * self._pitch

    def paint_data(self, painter: QPainter) -> None:
        if self._image is not None:
            painter.drawImage(self.area.topLeft(), self._image)
        paint_preemptions(painter, self.theme, self._content, self.area, self.x_range, self._pitch)
        if self._moment is not None:
            faded = QColor(self.theme.card)
            faded.setAlpha(FADED)
            x = round(self.x_pixel(self._moment))
            painter.fillRect(QRect(QPoint(x, self.area.top()), self.area.bottomRight()), faded)

    def paint_over(self, painter: QPainter) -> None:
        area, theme = self.area, self.theme
        if self.marks:
            self.paint_labelled_lines(painter, self.marks)
        if self._moment is not None and self.x_range[0] <= self._moment <= self.x_range[1]:
            x = round(self.x_pixel(self._moment))
            painter.fillRect(x - 1, area.top(), 2, area.height() + 4, theme.accent)
        if self._band is not None:
            left, right = sorted(min(max(x, area.left()), area.right()) for x in self._band)
            band = QRect(left, area.top(), right - left, area.height())
            shade = QColor(theme.accent)
            shade.setAlpha(50)
            painter.fillRect(band, shade)
            painter.setPen(theme.accent)
            painter.drawRect(band.adjusted(0, 0, -1, -1))
        self.paint_focus(painter)

    # What lies where ---------------------------------------------------------------------------------------------

    def _row_at(self, position: QPoint) -> int:
        """Place in the list; -1: no row."""
        row = int((position.y() - self.area.top()) // self._pitch)
        return self._first + row if 0 <= row < self._count and position.y() <= self.area.bottom() else -1

    def request_at(self, position: QPoint) -> int | None:
        row = self._row_at(position)
        lane = int(self._list.lanes[row]) if row >= 0 else -1
        return int(self._lanes.request_id[lane]) if lane >= 0 else None

    def _on_axis(self, position: QPoint) -> bool:
        return position.y() > self.area.bottom() and position.x() >= self.area.left()
