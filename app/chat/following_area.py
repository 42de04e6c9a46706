"""A scroll area that follows what grows at its end, or keeps a place in sight while what is above it changes."""

from __future__ import annotations

from PySide6.QtCore import QPoint, Qt, QTimer
from PySide6.QtGui import QKeyEvent, QWheelEvent
from PySide6.QtWidgets import QWidget

from app.chat.pane_area import PaneArea

SETTLE_MS = 150
FIRST_SETTLE_MS = 2_000
"""Newly built parts have found their heights when none has changed for so long; the first may take its time."""
BOTTOM_PX = 24
"""Within this distance of the end it follows what is being written."""


class FollowingArea(PaneArea):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._follows = True
        self._anchor: QWidget | None = None
        """While others take their place: the one that stays where it is on the screen."""
        self._anchor_y = 0
        self._settle_timer = self._timer(self._settled)
        bar = self.verticalScrollBar()
        bar.rangeChanged.connect(self._range_changed)
        bar.valueChanged.connect(self._scrolled)

    @property
    def follows(self) -> bool:
        """Whether the end stays in sight while text arrives: as long as the user has not scrolled away from it."""
        return self._follows

    def rest(self) -> None:
        """Nothing happens by itself any more: the window closes."""
        for timer in self.findChildren(QTimer):
            timer.stop()

    def _holds_the_end(self) -> bool:
        """Whether its lower end is the end of all that could be shown."""
        return True

    def _timer(self, slot) -> QTimer:
        timer = QTimer(self)
        timer.setSingleShot(True)
        timer.timeout.connect(slot)
        return timer

    def _y_of(self, view: QWidget) -> int:
        """Of its top, below the top of what is in sight."""
        return view.mapTo(self.viewport(), QPoint(0, 0)).y()

    def _hold(self, view: QWidget, y: int) -> None:
        """Keeps a part at a height of the screen until all have found theirs."""
        self._follows = False
        self._anchor, self._anchor_y = view, y
        self._settle_timer.start(FIRST_SETTLE_MS)
        QTimer.singleShot(0, self, self._range_changed)  # the total height may stay as it is

    def _range_changed(self) -> None:
        if self._follows or self._anchor is not None:
            self._align()
        if self._anchor is not None:
            self._settle_timer.start(SETTLE_MS)

    def _align(self) -> None:
        bar = self.verticalScrollBar()
        if self._follows:
            bar.setValue(bar.maximum())
        elif self._anchor is not None:
            bar.setValue(self._anchor.mapTo(self.widget(), QPoint(0, 0)).y() - self._anchor_y)

    def _settled(self) -> None:
        self._align()
        self._anchor = None
        self._scrolled(self.verticalScrollBar().value())

    def _scrolled(self, value: int) -> None:
        if self._anchor is not None:
            return
        self._follows = self._holds_the_end() and value >= self.verticalScrollBar().maximum() - BOTTOM_PX

    def wheelEvent(self, event: QWheelEvent) -> None:
        self._anchor = None  # the user knows better
        super().wheelEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        self._anchor = None
        bar = self.verticalScrollBar()
        ends = {Qt.Key.Key_Home: bar.minimum(), Qt.Key.Key_End: bar.maximum()}
        if event.key() in ends:
            bar.setValue(ends[event.key()])
        else:
            super().keyPressEvent(event)
