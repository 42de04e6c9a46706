"""The figures of a comparison: a row each, a column for every variant, with the ratio to the baseline."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, QRect, QSize, Qt
from PySide6.QtGui import QFontMetrics, QKeyEvent, QKeySequence, QPainter
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

ROW_HEIGHT = 22
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
            return "the baseline of the ratios" if self.variants[section] == self.baseline else None
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
            ratio = f", {cell.ratio} the baseline's {words}".rstrip() if cell.ratio else ""
            return f"{row.label}, {self.variants[index.column()]}: {cell.text}{ratio}"
        return None


class CellDelegate(QStyledItemDelegate):
    """The figure, and behind it its ratio: ▲ where that is better than the baseline, ▼ where it is worse."""

    def __init__(self, theme: Theme, parent: QWidget) -> None:
        super().__init__(parent)
        self._theme = theme

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        cell: Cell = index.data(CELL_ROLE)
        style = option.widget.style()
        style.drawPrimitive(QStyle.PrimitiveElement.PE_PanelItemViewItem, option, painter, option.widget)
        theme, metrics = self._theme, option.fontMetrics
        right = option.rect.right() - GAP
        painter.save()
        painter.setFont(option.font)
        if self.parent().with_ratios:
            width = ratio_width(metrics)
            color = {1: theme.decode, -1: theme.preempted}.get(cell.better, theme.muted)
            painter.setPen(readable(color, theme))
            mark = {1: " ▲", -1: " ▼"}.get(cell.better, "   " if cell.ratio else "")
            box = QRect(right - width, option.rect.top(), width, option.rect.height())
            painter.drawText(box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, cell.ratio + mark)
            right -= width + GAP
        painter.setPen(theme.muted if cell.missing else theme.text)
        box = QRect(option.rect.left(), option.rect.top(), right - option.rect.left(), option.rect.height())
        painter.drawText(box, Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter, cell.text)
        painter.restore()


def ratio_width(metrics: QFontMetrics) -> int:
    return metrics.horizontalAdvance("00.00× ▲")


class CompareTable(QTableView):
    """As high as its rows; wider than the panel it scrolls sideways, the names of the figures stay. Ctrl+C copies all
    of it."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.figures = CompareModel()
        self.figures.setParent(self)
        self.with_ratios = True
        self.setModel(self.figures)
        self.setItemDelegate(CellDelegate(theme, self))
        self.setAccessibleName("Figures of the variants")
        self.setShowGrid(False)
        self.setCornerButtonEnabled(False)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setHorizontalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setTabKeyNavigation(False)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.verticalHeader().setDefaultSectionSize(ROW_HEIGHT)
        for header in (self.verticalHeader(), self.horizontalHeader()):
            header.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
            header.setHighlightSections(False)
            header.setSectionsClickable(False)
        self.horizontalHeader().setMinimumSectionSize(1)
        theme.changed.connect(self.viewport().update)

    def show_rows(self, rows: list[Row], variants: list[str], baseline: str) -> None:
        self.with_ratios = any(cell.ratio for row in rows for cell in row.cells)
        self.figures.show_rows(rows, variants, baseline)
        self._fit_columns()
        self.updateGeometry()

    def sizeHint(self) -> QSize:
        height = self.horizontalHeader().sizeHint().height() + ROW_HEIGHT * self.figures.rowCount() + 2
        if self._too_wide():
            height += self.horizontalScrollBar().sizeHint().height()
        return QSize(super().sizeHint().width(), height)

    def minimumSizeHint(self) -> QSize:
        return QSize(200, self.sizeHint().height())

    def resizeEvent(self, event: Any) -> None:
        super().resizeEvent(event)
        self._fit_columns()
        self.updateGeometry()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            return event.ignore()  # the view copies all of it
        super().keyPressEvent(event)

    def _needed(self) -> int:
        """Width of a column that shows all of its cells."""
        metrics = self.fontMetrics()
        rows = self.figures.rows
        figures = max((metrics.horizontalAdvance(cell.text) for row in rows for cell in row.cells), default=0)
        ratio = ratio_width(metrics) + GAP if self.with_ratios else 0
        names = max((metrics.horizontalAdvance(name) for name in self.figures.variants), default=0)
        return max(figures + ratio, names) + 2 * GAP

    def _too_wide(self) -> bool:
        room = self.width() - self.verticalHeader().width()
        return self._needed() * len(self.figures.variants) > room

    def _fit_columns(self) -> None:
        """A column takes what it needs, and no more than a little of the room that is left."""
        count = len(self.figures.variants)
        if not count:
            return
        room = self.width() - self.verticalHeader().width()
        needed = self._needed()
        width = max(needed, min(room // count, round(needed * 1.5)))
        for column in range(count):
            self.setColumnWidth(column, width)
