"""The figures of a comparison: a row each, a column for every variant, with the ratio to the baseline."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, QRect, QSize, Qt
from PySide6.QtGui import QFontMetrics, QKeyEvent, QKeySequence, QPainter, QResizeEvent
from PySide6.QtWidgets import (
    QAbstractItemView,
    QHeaderView,
    QSizePolicy,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QTableView,
    QWidget,
)

from app.lab.compare_result import Cell, Row
from app.theme import Theme, readable
from app.translation import tr

LINE = 18
"""Pixels of a line of text in a cell."""
GAP = 8
"""Pixels between a figure and its ratio, and beside both."""
Index = QModelIndex | QPersistentModelIndex
CELL_ROLE = Qt.ItemDataRole.UserRole


class CompareModel(QAbstractTableModel):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self.variants: list[str] = []
        self.baseline = ""

    def show_rows(self, rows: list[Row], variants: list[str], baseline: str) -> None:
        self.beginResetModel()
        self.rows, self.variants, self.baseline = rows, variants, baseline
        self.endResetModel()

    def rowCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self.rows)

    def columnCount(self, parent: Index | None = None) -> int:
        return 0 if parent is not None and parent.isValid() else len(self.variants)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        horizontal = orientation == Qt.Orientation.Horizontal
        if role == Qt.ItemDataRole.DisplayRole:
            return self.variants[section] if horizontal else self.rows[section].label
        if role == Qt.ItemDataRole.ToolTipRole:
            if not horizontal:
                return self.rows[section].meaning
            return tr("the baseline of the ratios") if self.variants[section] == self.baseline else None
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return (Qt.AlignmentFlag.AlignRight if horizontal else Qt.AlignmentFlag.AlignLeft) | (
                Qt.AlignmentFlag.AlignVCenter
            )
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if not index.isValid():
            return None
        row = self.rows[index.row()]
        cell = row.cells[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return f"{cell.text} {cell.ratio}".strip()
        if role == CELL_ROLE:
            return cell
        if role == Qt.ItemDataRole.ToolTipRole:
            return "\n".join(filter(None, (f"{self.variants[index.column()]}: {cell.text}", cell.spread, row.meaning)))
        if role == Qt.ItemDataRole.AccessibleTextRole:
            words = {1: "better", -1: "worse"}.get(cell.better, "")
            ratio = tr(", {ratio} the baseline's {words}", ratio=cell.ratio, words=words).rstrip() if cell.ratio else ""
            return f"{row.label}, {self.variants[index.column()]}: {cell.text}{ratio}"
        return None


class CellDelegate(QStyledItemDelegate):
    """The figure, and behind or below it its ratio: ▲ where that is better than the baseline, ▼ where it is worse."""

    def __init__(self, theme: Theme, table: CompareTable) -> None:
        super().__init__(table)
        self._theme = theme
        self._table = table

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        cell: Cell = index.data(CELL_ROLE)
        theme, table = self._theme, self._table
        style = table.style()
        style.drawPrimitive(QStyle.PrimitiveElement.PE_PanelItemViewItem, option, painter, table)
        room = option.rect.adjusted(GAP, 0, -GAP, 0)
        figure, ratio = QRect(room), QRect(room)
        if table.stacked:
            figure.setHeight(room.height() // 2)
            ratio.setTop(figure.bottom())
        elif table.has_ratio(index.column()):
            ratio.setLeft(room.right() - ratio_width(option.fontMetrics))
            figure.setRight(ratio.left() - GAP)
        if not cell.ratio and table.stacked:
            figure = room  # in the middle of both lines
        painter.save()
        painter.setFont(option.font)
        painter.setPen(theme.muted if cell.missing else theme.text)
        painter.drawText(figure, ALIGN, cell.text)
        color = {1: theme.decode, -1: theme.preempted}.get(cell.better, theme.muted)
        painter.setPen(readable(color, theme))
        painter.drawText(ratio, ALIGN, f"{cell.ratio} {MARKS[cell.better]}" if cell.ratio else "")
        painter.restore()


MARKS = {1: "▲", -1: "▼", 0: "·"}
ALIGN = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter


def ratio_width(metrics: QFontMetrics) -> int:
    return metrics.horizontalAdvance("00.00× ▲")


class CompareTable(QTableView):
    """As high as its rows. Where the variants have no room beside each other the ratios go below the figures, then it
    scrolls sideways; the names of the figures stay."""

    def __init__(self, name: str, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.stacked = False
        """Whether ratios are below their figures."""
        self.figures = CompareModel()
        self.figures.setParent(self)
        self.setModel(self.figures)
        self.setItemDelegate(CellDelegate(theme, self))
        self.setAccessibleName(name)
        self.setStyleSheet(
            "QTableCornerButton::section { background: transparent; border: none; }"
            f"QHeaderView::section:horizontal {{ padding-right: {GAP}px; }}"
        )
        self.setShowGrid(False)
        self.setCornerButtonEnabled(False)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setTabKeyNavigation(False)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        for header in (self.verticalHeader(), self.horizontalHeader()):
            header.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
            header.setHighlightSections(False)
            header.setSectionsClickable(False)
            header.setMinimumSectionSize(1)
        theme.changed.connect(self.viewport().update)

    def show_rows(self, rows: list[Row], variants: list[str], baseline: str) -> None:
        self.figures.show_rows(rows, variants, baseline)
        self._fit_columns()

    def has_ratio(self, column: int) -> bool:
        return any(row.cells[column].ratio for row in self.figures.rows)

    def sizeHint(self) -> QSize:
        height = self.horizontalHeader().sizeHint().height() + sum(map(self._height_of, self.figures.rows)) + 2
        if sum(self._needed(self.stacked)) > self._room():
            height += self.horizontalScrollBar().sizeHint().height()
        return QSize(super().sizeHint().width(), height)

    def minimumSizeHint(self) -> QSize:
        return QSize(200, self.sizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_columns()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            event.ignore()  # the view copies all of it
        else:
            super().keyPressEvent(event)

    def _height_of(self, row: Row) -> int:
        return 2 * LINE + 2 if self.stacked and any(cell.ratio for cell in row.cells) else LINE + 4

    def _room(self) -> int:
        return self.width() - self.verticalHeader().sizeHint().width()

    def _needed(self, stacked: bool) -> list[int]:
        """Widths of the columns that show all of their cells."""
        metrics = self.fontMetrics()
        widths = []
        for column, name in enumerate(self.figures.variants):
            figure = max((metrics.horizontalAdvance(row.cells[column].text) for row in self.figures.rows), default=0)
            ratio = ratio_width(metrics) if self.has_ratio(column) else 0
            cells = max(figure, ratio) if stacked else figure + (ratio + GAP if ratio else 0)
            widths.append(max(cells, metrics.horizontalAdvance(name)) + 2 * GAP + 2)
        return widths

    def _fit_columns(self) -> None:
        """A column takes what it needs, and no more than a little of the room that is left."""
        room = self._room()
        self.stacked = sum(self._needed(stacked=False)) > room and any(map(self.has_ratio, range(self._count())))
        needed = self._needed(self.stacked)
        spare = max(0, room - sum(needed)) // max(1, len(needed))
        for column, width in enumerate(needed):
            self.setColumnWidth(column, width + min(spare, width // 3))
        for number, row in enumerate(self.figures.rows):
            self.setRowHeight(number, self._height_of(row))
        self.updateGeometry()
        self.viewport().update()

    def _count(self) -> int:
        return len(self.figures.variants)
