"""The queue: every request that is not finished, and in a sentence what it does or why it waits."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QModelIndex, QObject, Qt
from PySide6.QtWidgets import QAbstractItemView, QLabel, QVBoxLayout, QWidget

from app.scope.panel import START_SOMETHING, ScopePanel, ScopeSource
from app.scope.reasons import MOST_LISTED, WAITING_PHASES, QueueRow, queue_rows
from app.scope.tables import ROOT, ROW_HEIGHT, ROW_MARGIN, ColumnModel, Index, TopDelegate, make_table
from app.selection import Selection
from app.theme import SPACING, Theme
from app.widgets import label
from app.words import count
from engine.request import request_name

COLUMNS = ("request", "state", "tokens", "blocks", "prio", "user", "why")
_WIDTHS = (58, 100, 84, 48, 36, 64)
_TOKENS, _BLOCKS, _PRIORITY, _USER, _WHY = 2, 3, 4, 5, 6
WHY_PIXELS = 170
"""The reasons are what the table is for: where they would get less, other columns go."""
_FIRST_TO_GO = (_USER, _BLOCKS, _PRIORITY, _TOKENS)
_TIPS = (
    "Number of the request, in its hue",
    "What the last step did for it",
    "Tokens computed / prompt and output tokens so far",
    "KV blocks in its table",
    "Priority: lower runs first",
    "Who sent it",
    "What it does, or why it waits",
)
_STATE_NAMES = {"stalled": "running"}


class QueueModel(ColumnModel):
    """Rows keep their place while the requests stay the same; then only cells that differ are announced."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(theme, COLUMNS, _TIPS, parent)
        self.rows: list[QueueRow] = []

    def show_rows(self, rows: list[QueueRow]) -> None:
        wanted = {row.request_id for row in rows}
        known = {row.request_id for row in self.rows}
        staying = [row.request_id for row in self.rows if row.request_id in wanted]
        if staying != [row.request_id for row in rows if row.request_id in known]:
            self.beginResetModel()
            self.rows = list(rows)
            self.endResetModel()
            return
        for place in [i for i, row in enumerate(self.rows) if row.request_id not in wanted][::-1]:
            self.beginRemoveRows(QModelIndex(), place, place)
            del self.rows[place]
            self.endRemoveRows()
        for place, row in enumerate(rows):
            if row.request_id not in known:
                self.beginInsertRows(QModelIndex(), place, place)
                self.rows.insert(place, row)
                self.endInsertRows()
            elif self.rows[place] != row:
                self.rows[place] = row
                self.dataChanged.emit(self.index(place, 0), self.index(place, len(COLUMNS) - 1))

    def place_of(self, request_id: int | None) -> int | None:
        return next((i for i, row in enumerate(self.rows) if row.request_id == request_id), None)

    def rowCount(self, parent: Index = ROOT) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return cell_text(row, column)
        if role == Qt.ItemDataRole.ToolTipRole:
            return row_sentence(row)
        if role == Qt.ItemDataRole.DecorationRole and column < 2:
            return self._swatches.request(row.request_id) if column == 0 else self._swatches.state(row.phase)
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return f"{COLUMNS[column]} {cell_text(row, column)}"
        return None


def row_sentence(row: QueueRow) -> str:
    """All of a row, for those columns that the panel has no room for."""
    user = f", of {row.user}" if row.user else ""
    blocks = count(row.blocks, "block")
    return f"Request {request_name(row.request_id)}{user}, priority {row.priority}, {blocks}.\n{row.why}"


def cell_text(row: QueueRow, column: int) -> str:
    if column == 0:
        return request_name(row.request_id)
    if column == 1:
        return _STATE_NAMES.get(row.phase, row.phase)
    if column == 2:
        return f"{row.computed:,} / {row.tokens:,}"
    if column == 3:
        return f"{row.blocks:,}"
    if column == 4:
        return str(row.priority)
    return row.user if column == 5 else row.why


class QueuePanel(ScopePanel):
    """The table, and under it the whole sentence of the selected request, or of the head of the queue."""

    empty_text = f"No requests. {START_SOMETHING}, and see here why each one waits."
    refresh_seconds = 0.2

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.model = QueueModel(theme)
        self.table = make_table("Queue: requests and why they wait")
        self.sentence = label("", "muted")
        self.sentence.setWordWrap(True)
        self.sentence.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.sentence.setAccessibleName("Why the selected request waits")
        super().__init__("Queue", source, theme, selection, _column(self.table, self.sentence), parent)
        self.model.setParent(self)
        self.table.setModel(self.model)
        for column, width in enumerate(_WIDTHS):
            self.table.setColumnWidth(column, width)
        self.table.setWordWrap(True)
        self.table.setItemDelegate(TopDelegate(self.table))
        self.table.selectionModel().currentRowChanged.connect(self._row_chosen)
        # Whether the bar is there must not depend on the rows, whose heights depend on the room beside it.
        self.table.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOn)
        self.table.resized.connect(self._fit)
        self._heights: dict[tuple[int, str], int] = {}
        self._summary = self.add_figure()
        self._following = False

    def has_content(self) -> bool:
        return bool(self.source.state.requests)

    def refresh(self) -> None:
        state = self.source.state
        rows = queue_rows(state, self.source.scheduler, self.selection.request_id)
        self._following = True  # a row that goes moves the view's current row: that is no choice of the user's
        self.model.show_rows(rows)
        self._following = False
        self._fit()
        self._follow_selection()
        self._summary.say(self._counts(len(rows)))
        self.sentence.setText(self._sentence(rows))

    def _counts(self, listed: int) -> str:
        running, waiting = self.source.state.num_running, self.source.state.num_waiting
        when = "" if self.source.live else "when the engine ended: "
        swapped = f" ({self.source.state.num_swapped:,} swapped)" if self.source.state.num_swapped else ""
        part = f", the first {MOST_LISTED:,} listed" if listed < running + waiting else ""
        return f"{when}{running:,} running · {waiting:,} waiting{swapped}{part}"

    def _fit(self) -> None:
        self._fit_columns()
        self._fit_rows()

    def _fit_columns(self) -> None:
        """Columns that say nothing, or for which there is no room, leave it to the reasons."""
        rows = self.model.rows
        hidden = set()
        if not any(row.priority for row in rows):
            hidden.add(_PRIORITY)
        if not any(row.user for row in rows):
            hidden.add(_USER)
        room = self.table.viewport().width() - sum(w for i, w in enumerate(_WIDTHS) if i not in hidden)
        for column in _FIRST_TO_GO:
            if room < WHY_PIXELS and column not in hidden:
                hidden.add(column)
                room += _WIDTHS[column]
        for column in range(_TOKENS, _WHY):
            self.table.setColumnHidden(column, column in hidden)

    def _fit_rows(self) -> None:
        """A waiting request's row is as high as its whole reason needs; a running one's is a line."""
        header = self.table.verticalHeader()
        width = self.table.columnWidth(_WHY) - 8
        if len(self._heights) > 2000:
            self._heights.clear()
        for place, row in enumerate(self.model.rows):
            height = self._height_of(row.why, width) if row.phase in WAITING_PHASES else ROW_HEIGHT
            if header.sectionSize(place) != height:
                header.resizeSection(place, height)

    def _height_of(self, text: str, width: int) -> int:
        height = self._heights.get((width, text))
        if height is None:
            box = self.table.fontMetrics().boundingRect(0, 0, max(40, width), 10_000, Qt.TextFlag.TextWordWrap, text)
            height = self._heights[(width, text)] = max(ROW_HEIGHT, box.height() + 2 * ROW_MARGIN)
        return height

    def _sentence(self, rows: list[QueueRow]) -> str:
        chosen = next((row for row in rows if row.request_id == self.selection.request_id), None)
        if chosen is None:
            chosen = next((row for row in rows if row.phase in WAITING_PHASES), None)
        return f"Request {request_name(chosen.request_id)}: {chosen.why}" if chosen is not None else ""

    def _follow_selection(self) -> None:
        place = self.model.place_of(self.selection.request_id)
        current = self.table.currentIndex()
        if (current.row() if current.isValid() else None) == place:
            return
        self._following = True
        if place is None:
            self.table.setCurrentIndex(QModelIndex())
        else:
            self.table.setCurrentIndex(self.model.index(place, max(0, current.column())))
            self.table.scrollTo(self.model.index(place, 0), QAbstractItemView.ScrollHint.EnsureVisible)
        self._following = False

    def _row_chosen(self, current: QModelIndex, _previous: QModelIndex) -> None:
        if not self._following and current.isValid():
            self.selection.select(self.model.rows[current.row()].request_id)


def _column(table: QWidget, sentence: QLabel) -> QWidget:
    content = QWidget()
    column = QVBoxLayout(content)
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(SPACING // 2)
    column.addWidget(table, 1)
    column.addWidget(sentence)
    return content
