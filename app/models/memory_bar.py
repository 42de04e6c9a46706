"""What a model would take of the memory there is, as a bar: weights, keys and values, working memory, the rest."""

from __future__ import annotations

from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPainterPath, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.models.figures import Need
from app.theme import Theme
from app.translation import tr
from app.widgets import LegendEntry, Pattern, paint_swatch
from app.words import bytes_label

_PATTERNS: tuple[Pattern, ...] = ("solid", "hatch", "stripe")


class MemoryBar(QWidget):
    HEIGHT = 18

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._need: Need | None = None
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(tr("Memory"))
        theme.changed.connect(self.update)

    def show_need(self, need: Need | None) -> None:
        self._need = need
        self.setVisible(need is not None)
        text = ", ".join(entry.text for entry in self.entries())
        self.setAccessibleDescription(text)
        self.setToolTip(text)
        self.update()

    def entries(self) -> list[LegendEntry]:
        """The parts, for a legend."""
        need = self._need
        if need is None:
            return []
        free = max(0, need.room - need.total)
        return [
            LegendEntry(tr("weights {size}", size=bytes_label(need.weights)), "prefill", "solid"),
            LegendEntry(tr("KV {size}", size=bytes_label(need.kv)), "decode", "hatch"),
            LegendEntry(tr("working {size}", size=bytes_label(need.working)), "padding", "stripe"),
            LegendEntry(tr("free {size}", size=bytes_label(free)), "line", "solid"),
        ]

    def sizeHint(self) -> QSize:
        return QSize(240, self.HEIGHT)

    def paintEvent(self, event: QPaintEvent) -> None:
        need = self._need
        if need is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        bar = QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5)
        clip = QPainterPath()
        clip.addRoundedRect(bar, 4, 4)
        painter.setClipPath(clip)
        painter.fillRect(bar, self._theme.line)
        whole = max(need.room, need.total, 1)
        x = bar.left()
        for size, token, pattern in zip(
            (need.weights, need.kv, need.working), ("prefill", "decode", "padding"), _PATTERNS, strict=True
        ):
            width = bar.width() * size / whole
            color: QColor = getattr(self._theme, token)
            if width >= 0.5:
                paint_swatch(painter, QRectF(x, bar.top(), width, bar.height()), color, pattern, self._theme.card)
            x += width
        if need.total > need.room:
            edge = bar.left() + bar.width() * need.room / whole
            painter.setPen(Qt.PenStyle.NoPen)
            painter.fillRect(QRectF(edge - 1, bar.top(), 3, bar.height()), self._theme.error)
