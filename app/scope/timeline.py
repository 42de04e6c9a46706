"""The timeline: a lane per request over time, live at the right edge. Wheel zooms, dragging moves, a click selects."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QEvent, QPoint, QRect, QRectF, Qt, Signal
from PySide6.QtGui import QBrush, QColor, QKeyEvent, QMouseEvent, QPainter, QPen, QResizeEvent, QWheelEvent
from PySide6.QtWidgets import QHBoxLayout, QScrollBar, QToolTip, QWidget

from app.scope.panel import ScopePanel, ScopeSource
from app.scope.plot import TICK_GAP, Plot, Tick, nice_step
from app.selection import Selection
from app.theme import Theme, request_color
from app.widgets import PATTERN_BRUSHES, Legend, LegendEntry, Pattern, button, paint_swatch
from app.words import seconds_label
from engine.lanes import Lane, Lanes, Span, SpanKind
from engine.request import request_name

FIRST_SECONDS = 4.0
"""The shortest window; it grows with the run to :data:`LIVE_SECONDS` and then scrolls."""
LIVE_SECONDS = 60.0
SHORTEST, LONGEST = 0.2, 3600.0
LANE_MIN, LANE_MAX = 8, 18
"""Logical pixels of a lane."""
_NAMES = {
    SpanKind.WAITING: "waiting",
    SpanKind.PREFILL: "prefill",
    SpanKind.DECODE: "decode",
    SpanKind.RECOMPUTE: "computing again",
    SpanKind.PADDING: "padding of its static batch",
    SpanKind.SWAPPED: "swapped to host memory",
    SpanKind.STALLED: "running, left out by the budget",
}
_LOOKS: dict[SpanKind, tuple[str, Pattern]] = {
    SpanKind.WAITING: ("waiting", "line"),
    SpanKind.STALLED: ("muted", "line"),
    SpanKind.SWAPPED: ("swapped", "checker"),
    SpanKind.PREFILL: ("prefill", "solid"),
    SpanKind.DECODE: ("decode", "solid"),
    SpanKind.RECOMPUTE: ("preempted", "hatch"),
    SpanKind.PADDING: ("padding", "weave"),
}
"""Colour of the theme and pattern."""
_LEGEND = {
    SpanKind.WAITING: "waiting",
    SpanKind.PREFILL: "prefill",
    SpanKind.DECODE: "decode",
    SpanKind.RECOMPUTE: "recomputed",
    SpanKind.PADDING: "padding",
    SpanKind.SWAPPED: "swapped",
}
_NAMED_WHEN_SEEN = frozenset({SpanKind.PADDING, SpanKind.SWAPPED})
"""They take room in the legend only in runs that have them."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, engine clock."""

    begin: float
    end: float


class TimelineView:
    """Which stretch of time and which lanes are shown. Qt-free: zoom, pan and following the run are decided here."""

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

    def window(self) -> Window:
        newest = self.lanes.end
        end = newest if self.live else self._end
        fitting = min(LIVE_SECONDS, max(FIRST_SECONDS, newest - self.lanes.begin))
        return Window(end - (self._seconds or fitting), end)

    def zoom(self, factor: float, at: float) -> None:
        """Makes the window ``factor`` times as long with the moment ``at`` where it is; live stays live."""
        window = self.window()
        seconds = min(LONGEST, max(SHORTEST, (window.end - window.begin) * factor))
        if not self.live:
            share = (window.end - at) / (window.end - window.begin)
            self._end = at + share * seconds
        self._seconds = seconds

    def pan(self, seconds: float) -> None:
        """Moves the window; at the newest end it follows again, before the first request it stops."""
        window = self.window()
        length = window.end - window.begin
        end = max(window.end + seconds, self.lanes.begin + 0.1 * length)
        self._seconds = length
        self._end = None if end >= self.lanes.end else end

    def visible(self) -> list[Lane]:
        window = self.window()
        return [
            lane
            for lane in self.lanes.lanes.values()
            if lane.arrival <= window.end and (lane.finished_at is None or lane.end >= window.begin)
        ]


class TimelinePlot(Plot):
    top_margin = 0
    moved = Signal()
    """The window was zoomed or moved by hand."""

    def __init__(self, lanes: Lanes, theme: Theme, selection: Selection, scroll: QScrollBar) -> None:
        super().__init__(theme)
        self.view = TimelineView(lanes)
        self._selection = selection
        self._scroll = scroll
        self._rows: list[Lane] = []
        self._pitch = LANE_MAX
        self._grabbed: QPoint | None = None
        self._dragged = False
        self.follows_lanes = True
        scroll.valueChanged.connect(self._scrolled)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName("Timeline: a lane per request")

    # Layout ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        lanes = self.view.visible()
        self._set_axes(lanes)
        room = self.area.height()
        self._pitch = min(LANE_MAX, max(LANE_MIN, room // max(1, len(lanes))))
        fitting = max(1, room // self._pitch)
        self._set_scroll(lanes, fitting)
        first = self._scroll.value()
        self._rows = lanes[first : first + fitting]
        self.update()

    def _set_axes(self, lanes: list[Lane]) -> None:
        window = self.view.window()
        newest = self.view.lanes.end
        self.y_ticks = [Tick(0, "● " + max((request_name(lane.request_id) for lane in lanes), key=len, default="0"))]
        self.layout_axes()
        self.x_range = (window.begin, window.end)
        step = nice_step(window.end - window.begin, max(2, self.area.width() // 110))
        first = int((newest - window.end) / step)
        last = int((newest - window.begin) / step + 1e-6)
        self.x_ticks = [Tick(newest - i * step, f"−{i * step:g} s" if i else "now") for i in range(first, last + 1)]

    def _set_scroll(self, lanes: list[Lane], fitting: int) -> None:
        """Where not all lanes fit the bar shows, and follows the newest that runs until it is moved by hand."""
        surplus = max(0, len(lanes) - fitting)
        scroll = self._scroll
        blocked = scroll.blockSignals(True)
        scroll.setRange(0, surplus)
        scroll.setPageStep(fitting)
        if self.follows_lanes:
            running = [i for i, lane in enumerate(lanes) if lane.running]
            scroll.setValue((running[-1] if running else len(lanes)) - round(0.75 * fitting))
        scroll.blockSignals(blocked)
        scroll.setVisible(surplus > 0)

    def _scrolled(self) -> None:
        self.follows_lanes = False
        self._moved_by_hand()

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
        ticks, self.y_ticks = self.y_ticks, []
        super().paint_axes(painter)
        self.y_ticks = ticks
        self._paint_labels(painter)

    def _paint_labels(self, painter: QPainter) -> None:
        theme, height = self.theme, self.metrics.height()
        every = max(1, -(-height // self._pitch))
        for row, lane in enumerate(self._rows):
            chosen = lane.request_id == self._selection.request_id
            middle = self._top(row) + self._pitch / 2
            if chosen:
                stripe = QRect(0, self._top(row), self.area.right() + 1, self._pitch)
                painter.fillRect(stripe, theme.selection)
            size = min(8, self._pitch - 2)
            dot = QRectF(self.area.left() - TICK_GAP - size, middle - size / 2, size, size)
            paint_swatch(painter, dot, request_color(lane.request_id, theme), "dot", theme.card)
            if row % every == 0 or chosen:
                painter.setPen(theme.text if chosen else theme.muted)
                right = self.area.left() - 2 * TICK_GAP - size
                box = QRectF(0, middle - height / 2, right + 2, height)
                name = request_name(lane.request_id)
                painter.drawText(box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, name)

    def _top(self, row: int) -> int:
        return self.area.top() + row * self._pitch

    def paint_data(self, painter: QPainter) -> None:
        theme = self.theme
        window = self.view.window()
        boxes: dict[SpanKind, list[QRect]] = {kind: [] for kind in SpanKind}
        marks: list[QRectF] = []
        ends: list[tuple[QRect, QColor]] = []
        for row, lane in enumerate(self._rows):
            top, height = self._top(row) + 1, self._pitch - 2
            for span in lane.spans:
                if span.end >= window.begin and span.begin <= window.end:
                    boxes[span.kind].append(self._box(span, top, height))
            for time in lane.preempted_at:
                if window.begin <= time <= window.end:
                    size = min(9, height + 1)
                    marks.append(QRectF(self.x_pixel(time) - size / 2, top + (height - size) / 2, size, size))
            if lane.finish_reason in ("abort", "error") and lane.finished_at is not None:
                x = round(self.x_pixel(lane.finished_at))
                ends.append((QRect(x - 1, top, 3, height), theme.error))
        painter.setPen(Qt.PenStyle.NoPen)
        for kind, (token, pattern) in _LOOKS.items():
            painter.setBrush(getattr(theme, token))
            painter.drawRects(boxes[kind])
            if pattern in PATTERN_BRUSHES:
                painter.setBrush(QBrush(theme.card, PATTERN_BRUSHES[pattern]))
                painter.drawRects(boxes[kind])
        for box, color in ends:
            painter.fillRect(box, color)
        for mark in marks:
            paint_swatch(painter, mark.adjusted(-1, -1, 1, 1), theme.card, "triangle", theme.card)
            paint_swatch(painter, mark, theme.preempted, "triangle", theme.card)

    def _box(self, span: Span, top: int, height: int) -> QRect:
        """Whole pixels. Waiting is a line in the middle of the lane, a thick one where swapped; a stall a thin one."""
        left = round(self.x_pixel(span.begin))
        width = max(1, round(self.x_pixel(span.end)) - left)
        thickness = height
        if span.kind == SpanKind.SWAPPED:
            thickness = max(3, height // 2)
        elif span.kind == SpanKind.WAITING:
            thickness = 3 if height >= 8 else 2
        elif span.kind == SpanKind.STALLED:
            thickness = 1
        return QRect(left, top + (height - thickness) // 2, width, thickness)

    # Hands -------------------------------------------------------------------------------------------------------

    def lane_at(self, position: QPoint) -> Lane | None:
        row = (position.y() - self.area.top()) // self._pitch
        return self._rows[row] if 0 <= row < len(self._rows) else None

    def wheelEvent(self, event: QWheelEvent) -> None:
        notches = event.angleDelta().y() / 120
        if self._scroll.isVisible() and not event.modifiers() & Qt.KeyboardModifier.ControlModifier:
            self._scroll.setValue(self._scroll.value() - round(3 * notches))
        else:
            self.view.zoom(0.8**notches, self.x_value(event.position().x()))
            self._moved_by_hand()
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._grabbed, self._dragged = event.position().toPoint(), False

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        if self._grabbed is None:
            return
        position = event.position().toPoint()
        moved = position.x() - self._grabbed.x()
        if self._dragged or abs(moved) > 4:
            self._dragged = True
            self.view.pan(-moved * (self.x_range[1] - self.x_range[0]) / max(1, self.area.width()))
            self._grabbed = position
            self._moved_by_hand()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        if self._grabbed is not None and not self._dragged:
            lane = self.lane_at(event.position().toPoint())
            self._selection.select(lane.request_id if lane is not None else None)
        self._grabbed = None

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self.follow()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        seconds = self.x_range[1] - self.x_range[0]
        key = event.key()
        if key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            self.view.pan(seconds * (0.1 if key == Qt.Key.Key_Right else -0.1))
        elif key in (Qt.Key.Key_Plus, Qt.Key.Key_Minus):
            self.view.zoom(0.8 if key == Qt.Key.Key_Plus else 1.25, sum(self.x_range) / 2)
        elif key == Qt.Key.Key_End:
            return self.follow()
        elif key in (Qt.Key.Key_Up, Qt.Key.Key_Down):
            self._select_beside(-1 if key == Qt.Key.Key_Up else 1)
        else:
            return super().keyPressEvent(event)
        self._moved_by_hand()

    def _select_beside(self, offset: int) -> None:
        ids = [lane.request_id for lane in self._rows]
        if not ids:
            return
        chosen = self._selection.request_id
        place = ids.index(chosen) + offset if chosen in ids else len(ids) - 1
        self._selection.select(ids[min(len(ids) - 1, max(0, place))])

    def follow(self) -> None:
        self.view.follow()
        self.follows_lanes = True
        self._moved_by_hand()

    def _moved_by_hand(self) -> None:
        self.refresh()
        self.moved.emit()

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip:
            lane = self.lane_at(event.pos())
            if lane is not None:
                QToolTip.showText(event.globalPos(), lane_sentence(lane, self.x_value(event.pos().x())), self)
                return True
            QToolTip.hideText()
        return super().event(event)


def lane_sentence(lane: Lane, time: float) -> str:
    """A request, what it was doing at a moment, and what became of it."""
    lines = [f"Request {request_name(lane.request_id)}"]
    span = lane.at(time)
    if span is not None:
        tokens = f", {span.tokens:,} tokens" if span.tokens else ""
        since = f"from {seconds_label(span.begin - lane.arrival)} after its arrival"
        lines.append(f"{_NAMES[span.kind]} for {seconds_label(span.end - span.begin)}{tokens}, {since}")
    if lane.preempted_at:
        times = len(lane.preempted_at)
        lines.append("preempted once" if times == 1 else f"preempted {times} times")
    if lane.finished_at is not None:
        reason = f" ({lane.finish_reason})" if lane.finish_reason else ""
        lines.append(f"finished{reason} {seconds_label(lane.finished_at - lane.arrival)} after its arrival")
    return "\n".join(lines)


class TimelinePanel(ScopePanel):
    refresh_seconds = 0.12
    empty_text = "Each request becomes a lane here: waiting, prefill, decode, and where it was preempted."

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        content = QWidget()
        scroll = QScrollBar(Qt.Orientation.Vertical)
        scroll.hide()
        self.plot = TimelinePlot(source.history.lanes, theme, selection, scroll)
        row = QHBoxLayout(content)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        row.addWidget(self.plot, 1)
        row.addWidget(scroll)
        super().__init__("Timeline", source, theme, selection, content, parent)
        self._legend = Legend(theme, self._entries(set()))
        self.add_trailing(self._legend)
        self._step = self.add_figure()
        self.live_button = button("Live", "flat", "Follow the newest step")
        self.live_button.setToolTip("Follow the newest step (End)")
        self.live_button.clicked.connect(self.plot.follow)
        self.live_button.hide()
        self.add_trailing(self.live_button)
        self.plot.moved.connect(self._moved)

    @staticmethod
    def _entries(seen: set[SpanKind]) -> list[LegendEntry]:
        named = [kind for kind in _LEGEND if kind not in _NAMED_WHEN_SEEN or kind in seen]
        mark = LegendEntry("preempted", "preempted", "triangle")
        return [*(LegendEntry(_LEGEND[kind], *_LOOKS[kind]) for kind in named), mark]

    def has_content(self) -> bool:
        return bool(self.source.history.lanes.lanes)

    def refresh(self) -> None:
        self._legend.set_entries(self._entries(self.source.history.lanes.kinds_seen))
        self._step.say(f"step {self.source.state.step:,}")
        self.plot.refresh()
        self._moved()

    def _moved(self) -> None:
        self.live_button.setVisible(not (self.plot.view.live and self.plot.follows_lanes))
