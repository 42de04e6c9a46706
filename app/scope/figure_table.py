"""A small table of figures, painted: names on the left, right-aligned columns. It changes several times a second, so it
asks for a repaint only where a text has changed, and never for a new layout unless rows come or go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PySide6.QtCore import QPoint, QRectF, QSize, Qt
from PySide6.QtGui import QFontMetrics, QPainter, QPaintEvent
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.theme import AXIS_PX, SPACING, TEXT_PX, Theme
from app.widgets import LegendEntry, TellingWidget, paint_swatch

ROW = 18
"""Height of a row in pixels."""
SWATCH = 10
MOST_GAP = 32
"""Pixels between two columns at most."""


@dataclass(frozen=True, slots=True)
class FigureRow:
    name: str
    cells: tuple[str, ...]
    """One text for each column."""
    swatch: LegendEntry | None = None
    tip: str = ""


class FigureTable(TellingWidget):
    def __init__(self, name: str, theme: Theme, columns: Sequence[str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._columns = tuple(columns)
        self._take_fonts()
        self._widths: list[int] = []
        self._names = 0
        """Pixels of the widest name."""
        self.rows: tuple[FigureRow, ...] = ()
        self.setAccessibleName(name)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        theme.changed.connect(self._restyle)

    def _take_fonts(self) -> None:
        self._small = self._theme.font(AXIS_PX)
        self._bold = self._theme.font(TEXT_PX)
        self._bold.setBold(True)

    def _restyle(self) -> None:
        self._take_fonts()
        rows, self.rows = self.rows, ()
        self.show_rows(rows)
        self.update()

    def show_rows(self, rows: Sequence[FigureRow], columns: Sequence[str] | None = None) -> None:
        """``columns``: other headings than those so far."""
        rows, columns = tuple(rows), self._columns if columns is None else tuple(columns)
        if rows == self.rows and columns == self._columns:
            return
        longer = len(rows) != len(self.rows)
        self.rows, self._columns = rows, columns
        bold, small = QFontMetrics(self._bold), QFontMetrics(self._small)
        self._widths = [
            max(small.horizontalAdvance(head), *(bold.horizontalAdvance(row.cells[i]) for row in rows), 0)
            for i, head in enumerate(columns)
        ]
        plain = self.fontMetrics()
        self._names = max((plain.horizontalAdvance(r.name) + (SWATCH + 5) * bool(r.swatch) for r in rows), default=0)
        self.setAccessibleDescription("; ".join(self._spoken(row) for row in rows if row.name))
        if longer:
            self.updateGeometry()
        self.update()

    def _spoken(self, row: FigureRow) -> str:
        return f"{row.name}: " + ", ".join(f"{h} {c}".strip() for h, c in zip(self._columns, row.cells, strict=True))

    @property
    def _first(self) -> int:
        """The line of the first row: without any heading there is none for them."""
        return int(any(self._columns))

    def sizeHint(self) -> QSize:
        return QSize(200, ROW * (len(self.rows) + self._first))

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self.sizeHint().height())

    def _rights(self) -> list[int]:
        """The right edge of each column: as far apart as there is room, but never far from the names."""
        if not self._widths:
            return []
        spare = self.width() - self._names - sum(self._widths)
        gap = max(SPACING // 2, min(MOST_GAP, spare // (len(self._widths) + 1)))
        rights, right = [], min(self.width(), self._names + sum(self._widths) + gap * (len(self._widths) + 1))
        for width in reversed(self._widths):
            rights.append(right)
            right -= width + gap
        return rights[::-1]

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        theme, rights = self._theme, self._rights()
        if not rights:
            return
        painter.setFont(self._small)
        painter.setPen(theme.muted)
        for head, right, width in zip(self._columns, rights, self._widths, strict=True):
            self._draw(painter, QRectF(right - width - SPACING, 0, width + SPACING, ROW), head, right=True)
        names_end = rights[0] - self._widths[0] - SPACING // 2
        for index, row in enumerate(self.rows, self._first):
            top, left = index * ROW, 0
            if row.swatch is not None:
                box = QRectF(0, top + (ROW - SWATCH) // 2, SWATCH, SWATCH)
                paint_swatch(painter, box, getattr(theme, row.swatch.token), row.swatch.pattern, theme.card)
                left = SWATCH + 5
            painter.setFont(self.font())
            painter.setPen(theme.muted)
            room = max(0, names_end - left)
            name = painter.fontMetrics().elidedText(row.name, Qt.TextElideMode.ElideRight, room)
            self._draw(painter, QRectF(left, top, room, ROW), name)
            painter.setFont(self._bold)
            painter.setPen(theme.text)
            for cell, right, width in zip(row.cells, rights, self._widths, strict=True):
                self._draw(painter, QRectF(right - width, top, width, ROW), cell, right=True)

    def _draw(self, painter: QPainter, box: QRectF, text: str, *, right: bool = False) -> None:
        side = Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
        painter.drawText(box, side | Qt.AlignmentFlag.AlignVCenter | Qt.TextFlag.TextDontClip, text)

    def tip_at(self, position: QPoint) -> str:
        index = position.y() // ROW - self._first
        row = self.rows[index] if 0 <= index < len(self.rows) else None
        return row.tip or self._spoken(row) if row is not None else ""
