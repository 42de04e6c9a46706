"""Answers that are not drawn to their end yet, one slice of one answer in every turn of the event loop."""

from __future__ import annotations

import time
from typing import Protocol

from PySide6.QtCore import QObject, QTimer
from PySide6.QtGui import QRegion

SOON_MS = 1
REST = 3.0
"""What is not in sight is drawn more calmly: after each slice comes a rest of so many times as long."""


class Drawable(Protocol):
    is_behind: bool

    def draw(self) -> None: ...

    def visibleRegion(self) -> QRegion: ...


class DrawQueue(QObject):
    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._waiting: list[Drawable] = []
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._draw_one)

    def add(self, view: Drawable) -> None:
        if view not in self._waiting:
            self._waiting.append(view)
        if not self._timer.isActive():
            self._timer.start(SOON_MS)

    def discard(self, view: Drawable) -> None:
        """It is going away."""
        if view in self._waiting:
            self._waiting.remove(view)

    def _draw_one(self) -> None:
        """What is in sight first; of the rest the newest, which is nearest to it as a rule."""
        if not self._waiting:
            return
        seen = [view for view in self._waiting if not view.visibleRegion().isEmpty()]
        view = (seen or self._waiting)[-1]
        self._waiting.remove(view)
        begun = time.perf_counter()
        view.draw()  # comes back if there is more
        cost = time.perf_counter() - begun
        if self._waiting:
            self._timer.start(SOON_MS if seen else round(1000 * REST * cost))
