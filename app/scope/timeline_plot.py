"""What hands do with the timeline: zoom, pan, scrub, select, group; and what the pointer is told."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QPoint, Qt, Signal
from PySide6.QtGui import QContextMenuEvent, QKeyEvent, QMouseEvent, QWheelEvent
from PySide6.QtWidgets import QMenu, QScrollBar

from app.scope.lane_painter import NAMES
from app.scope.panel import ScopeSource
from app.scope.steps import StepRow
from app.scope.timeline_surface import TimelineSurface
from app.scope.timeline_view import Grouping
from app.selection import Selection
from app.theme import Theme
from app.translation import tr
from app.words import count, seconds_label
from engine.lanes import Lane, SpanKind
from engine.request import request_name

LANE_HEIGHTS = (2, 3, 4, 6, 8, 10, 14, 18, 24)
"""Logical pixels of a lane that can be chosen."""
CLICK = 4
"""Pixels that the pointer may move in a click."""
GROUPINGS: tuple[tuple[str, Grouping], ...] = (
    (tr("all lanes"), ""),
    (tr("by user"), "user"),
    (tr("by priority"), "priority"),
)


class TimelinePlot(TimelineSurface):
    moved = Signal()
    """The window was zoomed or moved by hand."""
    grouped = Signal()
    """Lanes are grouped otherwise."""
    moment_wanted = Signal(float)
    """A moment that is to be shown everywhere, engine clock."""

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, scroll: QScrollBar) -> None:
        super().__init__(source, theme, selection, scroll)
        self._grabbed: QPoint | None = None
        self._gesture = ""
        scroll.valueChanged.connect(self._scrolled)
        self.setMouseTracking(True)

    def _scrolled(self) -> None:
        self.follows_lanes = False
        self._moved_by_hand()

    def tip_at(self, position: QPoint) -> str:
        time = self.x_value(position.x())
        if self._on_axis(position):
            return tr("Click or drag to look back at a moment")
        if position.y() < self.area.top():
            near = [label for at, label in self.marks if abs(self.x_pixel(at) - position.x()) <= CLICK]
            return near[-1] if near else "\n".join(label for _, label in self.marks)
        group = self._list.group_at(self._row_at(position))
        if group is not None:
            click = tr("Click to unfold") if group.folded else tr("Click to fold")
            return f"{group.sentence}\n{click}"
        request_id = self.request_at(position)
        lane = self.view.lanes.lane(request_id) if request_id is not None else None
        return lane_sentence(lane, time, self.source.history.steps.at(time)) if lane is not None else ""

    # Hands -------------------------------------------------------------------------------------------------------

    def wheelEvent(self, event: QWheelEvent) -> None:
        notches, across = event.angleDelta().y() / 120, event.angleDelta().x() / 120
        modifiers = event.modifiers()
        position = event.position().toPoint()
        if modifiers & Qt.KeyboardModifier.AltModifier:  # with it Qt turns the wheel's axis
            self._change_height(1 if notches + across > 0 else -1)
        elif across:
            self._pan(-0.1 * across)
        elif (
            self._scroll.isVisible()
            and not modifiers & Qt.KeyboardModifier.ControlModifier
            and not self._on_axis(position)
        ):
            self._scroll.setValue(self._scroll.value() - round(3 * notches))
        else:
            self.view.zoom(0.8**notches, self.x_value(position.x()))
            self._moved_by_hand()
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() != Qt.MouseButton.LeftButton:
            return
        position = event.position().toPoint()
        self._grabbed = position
        self._gesture = "click"
        if self._on_axis(position):
            self._gesture = "scrub"
            self.moment_wanted.emit(self.x_value(position.x()))
        elif event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self._gesture = "band"
            self._band = (position.x(), position.x())

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        position = event.position().toPoint()
        if self._grabbed is None:
            on_axis = self._on_axis(position)
            self.setCursor(Qt.CursorShape.SplitHCursor if on_axis else Qt.CursorShape.ArrowCursor)
            return
        moved = position.x() - self._grabbed.x()
        if self._gesture == "scrub":
            x = min(max(position.x(), self.area.left()), self.area.right())
            self.moment_wanted.emit(self.x_value(x))
        elif self._gesture == "band":
            self._band = (self._grabbed.x(), position.x())
            self.update()
        elif self._gesture == "pan" or abs(moved) > CLICK:
            self._gesture = "pan"
            self._grabbed = position
            self._pan(-moved / max(1, self.area.width()))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        position = event.position().toPoint()
        gesture, self._gesture, self._grabbed = self._gesture, "", None
        band, self._band = self._band, None
        if gesture == "band" and band is not None:
            left, right = sorted(self.x_value(min(max(x, self.area.left()), self.area.right())) for x in band)
            if abs(band[1] - band[0]) > CLICK:
                self.view.show(left, right)
            self._moved_by_hand()
        elif gesture == "click":
            group = self._list.group_at(self._row_at(position))
            if group is not None:
                self._fold({group.key} ^ self._folded)
            else:
                self._selection.select(self.request_at(position))

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        position = event.position().toPoint()
        if not self._on_axis(position) and self._list.group_at(self._row_at(position)) is None:
            self.follow()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key = event.key()
        keys = Qt.Key
        if event.modifiers() & Qt.KeyboardModifier.ControlModifier and key in (keys.Key_Up, keys.Key_Down):
            self._change_height(1 if key == keys.Key_Up else -1)
        elif key in (keys.Key_Left, keys.Key_Right):
            self._pan(0.1 if key == keys.Key_Right else -0.1)
        elif key in (keys.Key_Plus, keys.Key_Equal, keys.Key_Minus):
            at = self._moment if self._moment is not None else sum(self.x_range) / 2
            self.view.zoom(1.25 if key == keys.Key_Minus else 0.8, at)
            self._moved_by_hand()
        elif key == keys.Key_End:
            self.follow()
        elif key == keys.Key_Home:
            self.show_all()
        elif key in (keys.Key_Up, keys.Key_Down):
            self._select_beside(-1 if key == keys.Key_Up else 1)
        elif key in (keys.Key_PageUp, keys.Key_PageDown):
            self._scroll.setValue(self._scroll.value() + (self._count if key == keys.Key_PageDown else -self._count))
        elif key == keys.Key_G:
            values = [value for _, value in GROUPINGS]
            self.group(values[(values.index(self.grouping) + 1) % len(values)])
        elif key == keys.Key_F:
            self._fold_by_key(everything=bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier))
        else:
            super().keyPressEvent(event)

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        menu = QMenu(self)
        time = self.x_value(event.pos().x())
        if self.area.contains(event.pos()):
            menu.addAction(tr("Look back at this moment"), lambda: self.moment_wanted.emit(time))
        menu.addAction(tr("Show the whole run\tHome"), self.show_all)
        menu.addAction(tr("Follow the newest step\tEnd"), self.follow)
        menu.addSeparator()
        for text, value in GROUPINGS:
            action = menu.addAction(tr("Lanes {text}", text=text), lambda value=value: self.group(value))
            action.setCheckable(True)
            action.setChecked(value == self.grouping)
        if self.grouping:
            menu.addAction(tr("Fold all groups"), lambda: self._fold({group.key for group in self._list.groups}))
            menu.addAction(tr("Unfold all groups"), lambda: self._fold(set()))
        menu.exec(event.globalPos())
        menu.deleteLater()

    # What is done ------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """The newest step, or the shown moment where that is another."""
        self.view.follow()
        if self._moment is not None:
            self.view.reveal(self._moment)
        self.follows_lanes = True
        self._moved_by_hand()

    def show_all(self) -> None:
        self.view.show_all()
        self._moved_by_hand()

    def show_time(self, time: float) -> None:
        """Moves so that the moment, engine clock, is seen."""
        self.view.reveal(time)
        self._moved_by_hand()

    def group(self, grouping: Grouping) -> None:
        if grouping != self.grouping:
            self.grouping = grouping
            self._folded = set()
            self._moved_by_hand()
            self.grouped.emit()

    def _fold(self, folded: set[int]) -> None:
        self._folded = folded
        self._moved_by_hand()

    def _fold_by_key(self, *, everything: bool) -> None:
        """The group of the selected lane, or all of them."""
        groups = self._list.groups
        if everything:
            self._fold(set() if self._folded else {group.key for group in groups})
            return
        for group in groups:
            if np.any(self._lanes.request_id[group.lanes] == self._selection.request_id):
                self._fold({group.key} ^ self._folded)

    def _pan(self, share: float) -> None:
        self.view.pan(share * (self.x_range[1] - self.x_range[0]))
        self._moved_by_hand()

    def _change_height(self, steps: int) -> None:
        place = min(range(len(LANE_HEIGHTS)), key=lambda i: abs(LANE_HEIGHTS[i] - self._pitch))
        self._height_chosen = LANE_HEIGHTS[min(len(LANE_HEIGHTS) - 1, max(0, place + steps))]
        self._moved_by_hand()

    def _select_beside(self, offset: int) -> None:
        """The lane above or below the selected one, which comes into sight."""
        rows = np.flatnonzero(self._list.lanes >= 0)
        if not len(rows):
            return
        ids = self._lanes.request_id[self._list.lanes[rows]]
        found = np.flatnonzero(ids == self._selection.request_id)
        seen = int(np.searchsorted(rows, self._first + self._count)) - 1
        place = min(len(rows) - 1, max(0, int(found[0]) + offset if len(found) else seen))
        row = int(rows[place])
        if not self._first <= row < self._first + self._count:
            self._scroll.setValue(row - (0 if row < self._first else self._count - 1))
        self._selection.select(int(ids[place]))

    def _moved_by_hand(self) -> None:
        self.refresh()
        self.moved.emit()


def lane_sentence(lane: Lane, time: float, step: StepRow | None = None) -> str:
    """A request, what it was doing at a moment and in which step, and what became of it."""
    user = f" of {lane.user}" if lane.user else ""
    priority = tr(", priority {priority}", priority=lane.priority) if lane.priority else ""
    lines = [
        tr(
            "Request {request_name}{user}{priority}",
            request_name=request_name(lane.request_id),
            user=user,
            priority=priority,
        )
    ]
    span = lane.at(time)
    if span is not None:
        tokens = f", {count(span.tokens, 'token')}" if span.tokens else ""
        since = tr("from {begin} after its arrival", begin=seconds_label(span.begin - lane.arrival))
        chunk = ""
        if span.kind in (SpanKind.PREFILL, SpanKind.RECOMPUTE):
            earlier = sum(each.kind == span.kind and each.end <= span.begin for each in lane.spans)
            chunk = tr(", chunk {earlier}", earlier=earlier + 1)
        lines.append(
            tr(
                "{names}{chunk} for {end}{tokens}, {since}",
                names=NAMES[span.kind],
                chunk=chunk,
                end=seconds_label(span.end - span.begin),
                tokens=tokens,
                since=since,
            )
        )
        if span.drafts:
            lines.append(
                tr(
                    "{accepted:,} of {tokens} accepted",
                    accepted=span.accepted,
                    tokens=count(span.drafts, "drafted token"),
                )
            )
    if step is not None:
        lines.append(
            tr(
                "step {step:,}: {tokens}, {running:,} running",
                step=step.step,
                tokens=count(step.tokens, "token"),
                running=step.running,
            )
        )
    if lane.preempted_at:
        times = len(lane.preempted_at)
        lines.append(tr("preempted once") if times == 1 else tr("preempted {times} times", times=times))
    if lane.finished_at is not None:
        reason = f" ({lane.finish_reason})" if lane.finish_reason else ""
        lines.append(
            tr(
                "finished{reason} {finished_at} after its arrival",
                reason=reason,
                finished_at=seconds_label(lane.finished_at - lane.arrival),
            )
        )
    return "\n".join(lines)
