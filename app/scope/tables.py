"""What the two tables share: a hue dot beside a request's number, a state's swatch, rows of one height."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QRectF, QSize, Qt
from PySide6.QtGui import QPainter, QPixmap
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QWidget,
)

from app.theme import Theme, request_color
from app.widgets import Pattern, paint_swatch

RequestRole = Qt.ItemDataRole.UserRole + 1
"""The id of the request that a cell is about: a dot in its hue is drawn before the text."""
StateRole = Qt.ItemDataRole.UserRole + 2
"""A name of :data:`STATE_SWATCHES`: its swatch is drawn before the text."""
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


class SwatchDelegate(QStyledItemDelegate):
    """Leaves room before the text and draws the dot or the swatch there."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._room = QPixmap(1, 1)
        self._room.fill(Qt.GlobalColor.transparent)

    def initStyleOption(self, option: QStyleOptionViewItem, index: Index) -> None:
        super().initStyleOption(option, index)
        option.features |= QStyleOptionViewItem.ViewItemFeature.HasDecoration
        option.icon = self._room
        option.decorationSize = QSize(SWATCH + 4, SWATCH)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        super().paint(painter, option, index)
        theme = self._theme
        box = QRectF(option.rect.left() + 4, option.rect.top() + (option.rect.height() - SWATCH) // 2, SWATCH, SWATCH)
        state = index.data(StateRole)
        if state is not None:
            token, pattern = STATE_SWATCHES[state]
            paint_swatch(painter, box, getattr(theme, token), pattern, theme.card)
            return
        request_id = index.data(RequestRole)
        if request_id is not None:
            paint_swatch(painter, box, request_color(request_id, theme), "dot", theme.card)


def make_table(name: str, parent: QWidget | None = None) -> QTableView:
    """A table of whole rows with nothing around it; its last column takes the room that is left."""
    table = QTableView(parent)
    table.setAccessibleName(name)
    table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
    table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
    table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
    table.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
    table.setShowGrid(False)
    table.setTabKeyNavigation(False)
    table.setWordWrap(False)
    table.verticalHeader().hide()
    table.verticalHeader().setDefaultSectionSize(ROW_HEIGHT)
    table.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
    header = table.horizontalHeader()
    header.setHighlightSections(False)
    header.setDefaultAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
    header.setStretchLastSection(True)
    header.setMinimumSectionSize(28)
    return table
