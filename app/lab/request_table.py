"""The requests of a load, a row each: what was asked, how long it took, why it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, QSize, Qt
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QWidget

from app.lab.load_model import milliseconds
from app.scope.tables import Table
from app.theme import Theme, readable, request_color
from app.translation import tr
from app.words import NOT_AVAILABLE

if TYPE_CHECKING:
    from app.lab.load_run import LoadRun
    from app.selection import Selection

COLUMNS = (tr("request"), tr("priority"), tr("tokens"), "TTFT", "E2EL", tr("goals"), tr("ended"))
FIGURES = (1, 2, 3, 4)
WIDTHS = (58, 54, 74, 58, 58, 58, 54)
"""Of the columns, in pixels at least; what room there is more is shared out alike."""
GIVE_WAY = (tr("ended"), tr("priority"))
"""Columns that are left out where there is no room for all, in this order."""
LEAST_ROWS, USUAL_ROWS = 3, 8
"""Rows that are seen at once, where there are so many."""
Index = QModelIndex | QPersistentModelIndex


def _alignment(column: int) -> Qt.AlignmentFlag:
    """Figures to the right, words to the left."""
    side = Qt.AlignmentFlag.AlignRight if column in FIGURES else Qt.AlignmentFlag.AlignLeft
    return side | Qt.AlignmentFlag.AlignVCenter


class RequestModel(QAbstractTableModel):
    """Rows in order of the workload."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._run: LoadRun | None = None

    def show_run(self, run: LoadRun) -> None:
        self.beginResetModel()
        self._run = run
        self.endResetModel()

    def refresh(self) -> None:
        if self._run is not None and self.rowCount():
            self.dataChanged.emit(self.index(0, 0), self.index(self.rowCount() - 1, len(COLUMNS) - 1))

    def request_id(self, row: int) -> int | None:
        """The engine's number of a row's request; None where it has not been sent."""
        return None if self._run is None else self._run.request_ids[row]

    def row_of(self, request_id: int | None) -> int | None:
        if self._run is None or request_id not in self._run.request_ids:
            return None
        return self._run.request_ids.index(request_id)

    def rowCount(self, parent: Index | None = None) -> int:
        if self._run is None or (parent is not None and parent.isValid()):
            return 0
        return len(self._run.recorder.timelines)

    def columnCount(self, parent: Index | None = None) -> int:
        return len(COLUMNS)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation is Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return COLUMNS[section]
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _alignment(section)
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if self._run is None or not index.isValid():
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(index.row(), COLUMNS[index.column()])
        if role == Qt.ItemDataRole.ToolTipRole:
            return self._run.recorder.timelines[index.row()].error or None
        if role == Qt.ItemDataRole.ForegroundRole and index.column() == 0:
            number = self.request_id(index.row())
            return None if number is None else readable(request_color(number, self._theme), self._theme)
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _alignment(index.column())
        return None

    def _text(self, row: int, column: str) -> str:
        assert self._run is not None
        timeline = self._run.recorder.timelines[row]
        number = self.request_id(row)
        origin = timeline.scheduled if self._run.workload.open_loop else timeline.sent
        if column == "request":
            return "–" if number is None else f"{number}"
        if column == "priority":
            return f"{timeline.priority}"
        if column == "tokens":
            prompt = f"{timeline.prompt_tokens:,}" if timeline.prompt_tokens else "…"
            return f"{prompt} + {len(timeline.token_ids):,}"
        if column == "goals":
            met = self._run.meets_objectives(row)
            return "" if met is None else "met" if met else "missed"
        if column == "ended":
            return timeline.finish_reason or ("" if self._run.active else tr("not finished"))
        value = timeline.ttft(origin) if column == "TTFT" else timeline.e2el(origin) if timeline.completed else None
        if value is None:
            return "" if timeline.finish_reason is None and self._run.active else NOT_AVAILABLE
        return milliseconds(value * 1e3)


class RequestTable(Table):
    """Selecting a row selects the request everywhere, and the other way round."""

    def __init__(self, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._selection = selection
        self._pointless: set[str] = set()
        """Columns that say nothing of this run."""
        self.requests = RequestModel(theme)
        self.requests.setParent(self)
        self.setModel(self.requests)
        self.setAccessibleName(tr("Requests of the load"))
        self.setShowGrid(False)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.verticalHeader().hide()
        self.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.verticalHeader().setDefaultSectionSize(self.fontMetrics().height() + 6)
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.horizontalHeader().setMinimumSectionSize(1)
        self.horizontalHeader().setHighlightSections(False)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.resized.connect(self._fit_columns)
        self.selectionModel().currentRowChanged.connect(self._row_chosen)
        selection.changed.connect(self._request_selected)
        theme.changed.connect(self.viewport().update)

    def show_run(self, run: LoadRun) -> None:
        self.requests.show_run(run)
        alike = len({request.priority for request in run.workload.requests}) == 1
        self._pointless = {"priority"} if alike else set()
        if not run.objectives:
            self._pointless.add("goals")
        self._fit_columns()
        self.setMaximumHeight(self._height(self.requests.rowCount()))
        self.updateGeometry()

    def refresh(self) -> None:
        self.requests.refresh()

    def minimumSizeHint(self) -> QSize:
        return QSize(super().minimumSizeHint().width(), self._height(min(LEAST_ROWS, self.requests.rowCount())))

    def sizeHint(self) -> QSize:
        return QSize(super().sizeHint().width(), self._height(min(USUAL_ROWS, self.requests.rowCount())))

    def _height(self, rows: int) -> int:
        height = self.horizontalHeader().sizeHint().height() + rows * self.verticalHeader().defaultSectionSize()
        return height + 2 * self.frameWidth()

    def _fit_columns(self) -> None:
        """The columns that there is room for, as wide as the table."""
        room = self.viewport().width()
        shown = [column for column, name in enumerate(COLUMNS) if name not in self._pointless]
        for name in GIVE_WAY:
            if sum(WIDTHS[column] for column in shown) > room and COLUMNS.index(name) in shown:
                shown.remove(COLUMNS.index(name))
        parts = sum(WIDTHS[column] for column in shown)
        for column in range(len(COLUMNS)):
            self.setColumnHidden(column, column not in shown)
            if column in shown:
                self.setColumnWidth(column, room * WIDTHS[column] // parts)

    def _row_chosen(self, current: QModelIndex, _previous: QModelIndex) -> None:
        number = self.requests.request_id(current.row()) if current.isValid() else None
        if number is not None:
            self._selection.select(number)

    def _request_selected(self, request_id: int | None) -> None:
        row = self.requests.row_of(request_id)
        if row is None:
            self.setCurrentIndex(QModelIndex())  # so that the same row can be chosen again
        elif self.currentIndex().row() != row:
            self.selectRow(row)
