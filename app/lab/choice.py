"""A combo box that shows it is one: under a style sheet Qt draws no arrow."""

from __future__ import annotations

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPaintEvent, QPolygonF
from PySide6.QtWidgets import QComboBox, QSizePolicy, QWidget

from app.theme import Theme

ARROW = QSize(8, 5)
MARGIN = 10
"""Pixels between the arrow and the right edge."""


class Choice(QComboBox):
    """Gives way to the room there is: a combo box as wide as its longest entry would force the dock wide."""

    def __init__(self, name: str, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self.setAccessibleName(name)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.setMinimumContentsLength(10)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(self._theme.muted if self.isEnabled() else self._theme.line)
        left, top = self.width() - MARGIN - ARROW.width(), (self.height() - ARROW.height()) / 2
        box = QRectF(left, top, ARROW.width(), ARROW.height())
        painter.drawPolygon(QPolygonF([box.topLeft(), box.topRight(), QPointF(box.center().x(), box.bottom())]))
