"""What the tables share: headings, a hue dot beside a request's number, a state's swatch, rows of one height."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import (
    QAbstractTableModel,
    QModelIndex,
    QObject,
    QPersistentModelIndex,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QGuiApplication, QIcon, QPainter, QPaintEvent, QPixmap, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QSizePolicy,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from app.theme import SPACING, Theme, request_color
from app.widgets import Pattern, paint_swatch

ROW_HEIGHT = 24
ROW_MARGIN = 3
"""Pixels above and below the lines of a row."""
SWATCH = 10

STATE_SWATCHES: dict[str, tuple[str, Pattern]] = {
    "decode": ("decode", "solid"),
    "prefill": ("prefill", "solid"),
    "recompute": ("preempted", "hatch"),
    "ended": ("padding", "weave"),
    "stalled": ("muted", "line"),
    "waiting": ("muted", "inset"),
    "preempted": ("preempted", "triangle"),
    "swapped": ("swapped", "checker"),
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


class ColumnModel(QAbstractTableModel):
    """The columns of a table: their headings, a tip for each, and the swatches of its cells."""

    def __init__(
        self, theme: Theme, columns: Sequence[str], tips: Sequence[str], parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._swatches = Swatches(theme)
        self._headings: dict[int, Sequence[str]] = {
            Qt.ItemDataRole.DisplayRole: columns,
            Qt.ItemDataRole.ToolTipRole: tips,
        }

    def columnCount(self, parent: Index = ROOT) -> int:
        return 0 if parent.isValid() else len(self._headings[Qt.ItemDataRole.DisplayRole])

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        texts = self._headings.get(role) if orientation == Qt.Orientation.Horizontal else None
        return texts[section] if texts is not None else None


class Table(QTableView):
    """Ends with a whole row, or in a row of many lines with a whole line: what the lower edge would cut is left out."""

    resized = Signal()

    def whole_end(self) -> int:
        """The pixel below the last line that is seen whole; the view's height where nothing is cut."""
        height = self.viewport().height()
        cut = self.rowAt(height - 1)
        top = self.rowViewportPosition(cut)
        if cut < 0 or top + self.rowHeight(cut) <= height:
            return height
        line = self.fontMetrics().lineSpacing()
        lines = (height - top - ROW_MARGIN) // line if self.rowHeight(cut) > ROW_HEIGHT else 0
        return top + ROW_MARGIN + lines * line if lines > 0 else max(0, top)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.resized.emit()

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        end = self.whole_end()
        rest = QRect(0, end, self.viewport().width(), self.viewport().height() - end)
        QPainter(self.viewport()).fillRect(rest, self.palette().base())

    def scrollContentsBy(self, dx: int, dy: int) -> None:
        super().scrollContentsBy(dx, dy)
        self.viewport().update()  # Qt moves what is painted, and with it the gap


class TopDelegate(QStyledItemDelegate):
    """In a row of many lines the first line of every cell is on one height, whatever room is left below."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        if option.rect.height() > ROW_HEIGHT:
            whole = QStyleOptionViewItem(option)
            self.initStyleOption(whole, index)
            style = option.widget.style()
            style.drawPrimitive(QStyle.PrimitiveElement.PE_PanelItemViewItem, whole, painter, option.widget)
            room = whole.rect.adjusted(ROW_MARGIN, 0, -ROW_MARGIN, 0)
            lines = option.fontMetrics.boundingRect(room, Qt.TextFlag.TextWordWrap, whole.text)
            option.rect.setHeight(max(ROW_HEIGHT, lines.height() + 2 * ROW_MARGIN))
        super().paint(painter, option, index)


class WrappedRows:
    """Makes rows as high as the words of one column need. Of many rows only those that are seen: each is measured."""

    MOST = 64
    KEPT = 2000

    def __init__(self, table: Table, column: int) -> None:
        self._table = table
        self._column = column
        self._heights: dict[tuple[int, str], int] = {}

    def fit(self, texts: Sequence[str]) -> None:
        """texts: of each row; an empty one needs a line."""
        table = self._table
        header, bottom = table.verticalHeader(), table.viewport().height()
        width = table.columnWidth(self._column) - 8
        few = len(texts) <= self.MOST
        if len(self._heights) > self.KEPT:
            self._heights.clear()
        for place in range(0 if few else max(0, table.rowAt(0)), len(texts)):
            if not few and table.rowViewportPosition(place) > bottom:
                break
            height = self._height_of(texts[place], width) if texts[place] else ROW_HEIGHT
            if header.sectionSize(place) != height:
                header.resizeSection(place, height)

    def _height_of(self, text: str, width: int) -> int:
        height = self._heights.get((width, text))
        if height is None:
            box = self._table.fontMetrics().boundingRect(0, 0, max(40, width), 10_000, Qt.TextFlag.TextWordWrap, text)
            height = self._heights[(width, text)] = max(ROW_HEIGHT, box.height() + 2 * ROW_MARGIN)
        return height


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


class FootLine(QWidget):
    """A muted line of words that changes with every step: cut with dots where there is no room, whole in the tool tip.
    It never asks for another size, which would have the whole window laid out anew."""

    def __init__(self, theme: Theme, name: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._text = ""
        self.setAccessibleName(name)
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)

    @property
    def text(self) -> str:
        return self._text

    def say(self, text: str) -> None:
        if text != self._text:
            self._text = text
            self.setToolTip(text)
            self.setAccessibleDescription(text)
            self.update()

    def sizeHint(self) -> QSize:
        return QSize(40, self.fontMetrics().height() + 2)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(self._theme.muted)
        shown = self.fontMetrics().elidedText(self._text, Qt.TextElideMode.ElideRight, self.width())
        painter.drawText(self.rect(), Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, shown)


def stacked(main: QWidget, *below: QWidget) -> QWidget:
    """A column: ``main`` takes the room, lines of words come below it."""
    content = QWidget()
    column = QVBoxLayout(content)
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(SPACING // 2)
    column.addWidget(main, 1)
    for widget in below:
        column.addWidget(widget)
    return content
