"""A scroll area of text panes in which a selection may begin in one pane and end in another."""

from __future__ import annotations

from PySide6.QtCore import QPoint
from PySide6.QtGui import QTextCursor
from PySide6.QtWidgets import QScrollArea, QTextEdit

NEAR_PX = 12
"""So much of what lies beyond the pointer is scrolled into sight."""


class PaneArea(QScrollArea):
    """Panes call :meth:`begin_selection` and :meth:`extend_selection` for themselves."""

    _selected: tuple[QTextEdit, ...] = ()
    """The panes of a selection over several, from top to bottom."""

    def begin_selection(self) -> None:
        """A press of the mouse: what was selected is not any more."""
        for pane in self._panes():
            _select(pane, 0, 0)
        self._selected = ()

    def extend_selection(self, pane: QTextEdit, position: QPoint) -> bool:
        """From where the selection began in ``pane`` to the place under ``position``, on the screen; False: that is in
        ``pane`` itself, which sees to it."""
        panes = self._panes()
        if pane not in panes:
            return False
        begin, end = panes.index(pane), self._nearest(panes, position)
        for each in self._selected:
            if each is not pane and each in panes:
                _select(each, 0, 0)
        place = self.widget().mapFromGlobal(position)
        self.ensureVisible(0, place.y(), 0, NEAR_PX)
        if begin == end:
            self._selected = ()
            return False
        down = end > begin
        last = panes[end]
        at = last.cursorForPosition(last.viewport().mapFromGlobal(position)).position()
        _select(pane, pane.textCursor().anchor(), _length(pane) if down else 0)
        _select(last, 0 if down else _length(last), at)
        for between in panes[min(begin, end) + 1 : max(begin, end)]:
            _select(between, 0, _length(between))
        self._selected = tuple(panes[min(begin, end) : max(begin, end) + 1])
        return True

    def selected_text(self) -> str:
        """Of a selection over several panes; empty where there is none."""
        panes = [pane for pane in self._panes() if pane in self._selected] if self._selected else []
        return "\n".join(pane.textCursor().selection().toPlainText() for pane in panes)

    def _panes(self) -> list[QTextEdit]:
        page = self.widget()
        panes = [pane for pane in page.findChildren(QTextEdit) if pane.isVisible() and pane.isReadOnly()]
        return sorted(panes, key=lambda pane: pane.mapTo(page, QPoint(0, 0)).y())

    def _nearest(self, panes: list[QTextEdit], position: QPoint) -> int:
        y = self.widget().mapFromGlobal(position).y()
        tops = [pane.mapTo(self.widget(), QPoint(0, 0)).y() for pane in panes]
        return max((number for number, top in enumerate(tops) if top <= y), default=0)


def _length(pane: QTextEdit) -> int:
    return pane.document().characterCount() - 1


def _select(pane: QTextEdit, anchor: int, position: int) -> None:
    cursor = pane.textCursor()
    if (cursor.anchor(), cursor.position()) != (anchor, position):
        cursor.setPosition(anchor)
        cursor.setPosition(position, QTextCursor.MoveMode.KeepAnchor)
        pane.setTextCursor(cursor)
