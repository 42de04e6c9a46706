"""Paints the tree of the prefix cache as an icicle. A click selects who refers to a box, a tooltip tells all of it."""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QPoint, QPointF, QRect, QSize, Qt
from PySide6.QtGui import QColor, QKeyEvent, QMouseEvent, QPainter, QPaintEvent, QPolygonF, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.scope.block_grid import BlockLook
from app.scope.block_words import referents
from app.scope.panel import ScopeSource
from app.scope.prefix_tree import Boxes, PrefixTree, lay_out, prefix_tree, run_sentence
from app.selection import Selection
from app.theme import AXIS_PX, Theme, mix, readable, request_color
from app.translation import tr
from app.widgets import TellingWidget
from app.words import count

ROW_MOST, ROW_LEAST = 26, 8
"""Pixels of a level of the tree: all levels fit where they can."""
TEXT_LEAST = 16
"""Pixels of a row from which boxes have words."""
NOTCH = 7
MOST_INKS = 1000


class PrefixTreeView(TellingWidget):
    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._source = source
        self._theme = theme
        self._selection = selection
        self.tree: PrefixTree | None = None
        self.boxes: Boxes | None = None
        self.cursor: int | None = None
        """The box that the keys are at."""
        self._pitch = ROW_MOST
        self._selected = np.zeros(0, dtype=np.bool_)
        self._inks: dict[tuple[int, bool], QColor] = {}
        take_font = lambda: self.setFont(theme.font(AXIS_PX))  # noqa: E731
        theme.changed.connect(take_font)
        take_font()
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(tr("Prefix cache: which blocks follow which"))

    def minimumSizeHint(self) -> QSize:
        return QSize(100, 60)

    def sizeHint(self) -> QSize:
        return QSize(300, 180)

    def refresh(self) -> None:
        self.tree = prefix_tree(self._source.state)
        self._selected = self._selected_runs(self.tree)
        self._lay_out()

    def _lay_out(self) -> None:
        if self.tree is None:
            return
        levels = max(1, self.tree.levels)
        self._pitch = max(ROW_LEAST, min(ROW_MOST, self.height() // levels))
        self.boxes = lay_out(self.tree, self.width(), max(1, self.height() // self._pitch))
        if self.cursor is not None and self.cursor >= len(self.boxes):
            self.cursor = None
        self.update()

    def box_at(self, position: QPoint) -> int | None:
        return self.boxes.at(position.x(), position.y() // self._pitch) if self.boxes is not None else None

    def box_rect(self, box: int) -> QRect:
        """Without the gaps to its neighbours."""
        boxes = self.boxes
        width = int(boxes.width[box])
        return QRect(int(boxes.x[box]), int(boxes.row[box]) * self._pitch, max(1, width - (width > 3)), self._pitch - 1)

    # Painting ----------------------------------------------------------------------------------------------------

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(event.rect(), self._theme.card)
        if self.boxes is None or self.tree is None:
            return
        for box in range(len(self.boxes)):
            self._paint_box(painter, box)
        if self.cursor is not None and self.hasFocus():
            painter.setPen(self._theme.accent)
            painter.drawRect(self.box_rect(self.cursor).adjusted(0, 0, -1, -1))

    def _selected_runs(self, tree: PrefixTree) -> np.ndarray:
        """bool [runs]: in the table of the selected request."""
        selected = np.zeros(len(tree), dtype=np.bool_)
        chosen = self._source.state.requests.get(self._selection.request_id or 0)
        if chosen is not None:
            runs = tree.run_of[chosen.blocks]
            selected[runs[runs >= 0]] = True
        return selected

    def _paint_box(self, painter: QPainter, box: int) -> None:
        theme, tree, boxes = self._theme, self.tree, self.boxes
        rect = self.box_rect(box)
        run, several = int(boxes.run[box]), boxes.runs[box] > 1
        look = int(tree.looks[run])
        color = theme.padding if several else request_color(int(tree.owners[run]), theme)
        if look == BlockLook.CACHED and not several:
            color = mix(theme.card, color, 0.38)
            rect = rect.adjusted(1, 3, -1, -3) if rect.width() > 6 and rect.height() > 10 else rect
        painter.fillRect(rect, color)
        if look == BlockLook.SHARED and not several and rect.width() > 2 * NOTCH:
            corner = QPointF(rect.right() + 1, rect.top())
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(theme.text)
            painter.drawPolygon(QPolygonF([corner, corner - QPointF(NOTCH, 0), corner + QPointF(0, NOTCH)]))
            painter.setBrush(Qt.BrushStyle.NoBrush)
        if self._selected[run] and not several:
            painter.setPen(theme.text)
            painter.drawRect(self.box_rect(box).adjusted(0, 0, -1, -1))
        if self._pitch >= TEXT_LEAST and rect.width() > 24:
            blocks = int(boxes.blocks[box])
            self._write(painter, rect.adjusted(4, 0, -4, 0), (count(blocks, "block"), f"{blocks:,}"), color)

    def _write(self, painter: QPainter, room: QRect, texts: tuple[str, ...], surface: QColor) -> None:
        """The first of the texts that fits."""
        for text in texts:
            if painter.fontMetrics().horizontalAdvance(text) <= room.width():
                painter.setPen(self._ink(surface))
                painter.drawText(room, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, text)
                return

    def _ink(self, surface: QColor) -> QColor:
        key = (surface.rgb(), self._theme.dark)
        if key not in self._inks:
            if len(self._inks) > MOST_INKS:
                self._inks.clear()
            self._inks[key] = readable(self._theme.card, self._theme, surface)
        return self._inks[key]

    # Selecting ---------------------------------------------------------------------------------------------------

    def sentence(self, box: int) -> str:
        several = int(self.boxes.runs[box])
        if several > 1:
            blocks = count(int(self.boxes.blocks[box]), "block")
            return tr(
                "{several:,} chains side by side, {blocks}: too narrow here to be drawn apart",
                several=several,
                blocks=blocks,
            )
        return run_sentence(self._source.state, self.tree, int(self.boxes.run[box]))

    def select(self, box: int) -> None:
        """Who refers to the box, one after the other; where nobody does, who used it last."""
        run = int(self.boxes.run[box])
        users = referents(self._source.state, int(self.tree.first[run]))
        chosen = self._selection.request_id
        if chosen in users:
            self._selection.select(users[(users.index(chosen) + 1) % len(users)])
        else:
            self._selection.select(users[0] if users else int(self.tree.owners[run]) or None)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() != Qt.MouseButton.LeftButton:
            return
        box = self.box_at(event.position().toPoint())
        self.cursor = box
        if box is None:
            self._selection.select(None)
        else:
            self.select(box)
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if self.boxes is None or not len(self.boxes):
            super().keyPressEvent(event)
            return
        key = event.key()
        if key in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space) and self.cursor is not None:
            self.select(self.cursor)
        elif key in _MOVES:
            self._move(*_MOVES[key])
        else:
            super().keyPressEvent(event)

    def _move(self, across: int, down: int) -> None:
        """Along the row, or to the box above or below the middle of this one."""
        boxes, at = self.boxes, self.cursor
        if at is None:
            wanted: int | None = 0
        elif across:
            wanted = at + across
            inside = 0 <= wanted < len(boxes) and boxes.row[wanted] == boxes.row[at]
            wanted = wanted if inside else None
        else:
            row = int(boxes.row[at]) + down
            wanted = boxes.at(int(boxes.x[at] + boxes.width[at] // 2), row)
            if wanted is None and down > 0:  # its children may end before its middle
                wanted = boxes.at(int(boxes.x[at]), row)
        if wanted is not None:
            self.cursor = wanted
            self.setAccessibleDescription(self.sentence(wanted))
            self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def tip_at(self, position: QPoint) -> str:
        box = self.box_at(position)
        return self.sentence(box) if box is not None else ""


_MOVES = {
    Qt.Key.Key_Left: (-1, 0),
    Qt.Key.Key_Right: (1, 0),
    Qt.Key.Key_Up: (0, -1),
    Qt.Key.Key_Down: (0, 1),
}
