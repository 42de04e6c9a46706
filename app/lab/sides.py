"""Two widgets that stand beside each other where there is room, else one below the other."""

from __future__ import annotations

from PySide6.QtCore import QSize
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QWidget

from app.theme import SPACING

UNBOUNDED = 16_777_215
"""Qt's largest width."""


class Sides(QWidget):
    """``first`` has a width of its own beside ``second``. Its least width is that of both below each other, whatever
    it shows, so that it can be made narrow again."""

    def __init__(self, first: QWidget, second: QWidget, *, wide: int, first_width: int) -> None:
        super().__init__()
        self._first, self._second = first, second
        self._wide, self._first_width = wide, first_width
        self._box = QBoxLayout(QBoxLayout.Direction.TopToBottom, self)
        self._box.setContentsMargins(0, 0, SPACING // 2, 0)
        self._box.setSpacing(2 * SPACING)
        self._box.addWidget(first)
        self._box.addWidget(second, 1)

    @property
    def beside(self) -> bool:
        return self._box.direction() == QBoxLayout.Direction.LeftToRight

    def minimumSizeHint(self) -> QSize:
        widest = max(each.layout().minimumSize().width() for each in (self._first, self._second))
        return QSize(widest + SPACING // 2, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        beside = self.width() >= self._wide
        if beside == self.beside:
            return
        direction = QBoxLayout.Direction.LeftToRight if beside else QBoxLayout.Direction.TopToBottom
        self._box.setDirection(direction)
        self._first.setMinimumWidth(self._first_width if beside else 0)
        self._first.setMaximumWidth(self._first_width if beside else UNBOUNDED)
