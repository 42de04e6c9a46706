"""What the two tables share: a hue dot beside a request's number, a state's swatch, rows of one height."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QColor, QGuiApplication, QIcon, QPainter, QPixmap, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QTableView,
    QWidget,
)

from app.theme import Theme, request_color
from app.widgets import Pattern, paint_swatch

ROW_HEIGHT = 24
SWATCH = 10

STATE_SWATCHES: dict[str, tuple[str, Pattern]] = {
    "decode": ("decode", "solid"),
    "prefill": ("prefill", "solid"),
    "recompute": ("preempted", "hatch"),
    "stalled": ("muted", "line"),
    "waiting": ("muted", "inset"),
    "preempted": ("preempted", "triangle"),
}
"""State -> colour of the theme and pattern; no two states differ in colour alone."""

Index = QModelIndex | QPersistentModelIndex
ROOT = QModelIndex()
"""The parent of every row of a flat table."""


class Swatches:
    """Small pictures for a table's cells, painted once each: a dot in a request's hue, a state's swatch."""

    KEPT = 2000

    def __init__(self, theme: Theme) -> None:
        self._theme = theme
        self._made: dict[int | str, QIcon] = {}
        theme.changed.connect(self._made.clear)

    def request(self, request_id: int) -> QIcon:
        return self._picture(request_id, request_color(request_id, self._theme), "dot")

    def state(self, state: str) -> QIcon:
        token, pattern = STATE_SWATCHES[state]
        return self._picture(state, getattr(self._theme, token), pattern)

    def _picture(self, key: int | str, color: QColor, pattern: Pattern) -> QIcon:
        icon = self._made.get(key)
        if icon is None:
            if len(self._made) > self.KEPT:
                self._made.clear()
            scale = QGuiApplication.primaryScreen().devicePixelRatio()
            picture = QPixmap(round(SWATCH * scale), round(SWATCH * scale))
            picture.setDevicePixelRatio(scale)
            picture.fill(Qt.GlobalColor.transparent)
            painter = QPainter(picture)
            paint_swatch(painter, QRectF(0, 0, SWATCH, SWATCH), color, pattern, self._theme.card)
            painter.end()
            icon = self._made[key] = QIcon(picture)
            icon.addPixmap(picture, QIcon.Mode.Selected)  # else a selected row would tint it
        return icon


class Table(QTableView):
    resized = Signal()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.resized.emit()


def make_table(name: str, parent: QWidget | None = None) -> Table:
    """A table of whole rows with nothing around it; its last column takes the room that is left."""
    table = Table(parent)
    table.setAccessibleName(name)
    table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
    table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
    table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
    table.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    table.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
    table.setShowGrid(False)
    table.setTabKeyNavigation(False)
    table.setWordWrap(False)
    table.setIconSize(QSize(SWATCH, SWATCH))
    table.verticalHeader().hide()
    table.verticalHeader().setDefaultSectionSize(ROW_HEIGHT)
    table.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
    header = table.horizontalHeader()
    header.setHighlightSections(False)
    header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
    header.setStretchLastSection(True)
    header.setMinimumSectionSize(28)
    return table
