"""The queue as a table's model: its cells, what changes between two steps, and dragging a row to another place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QMimeData, QModelIndex, QObject, Qt, Signal

from app.scope.reasons import WAITING_PHASES, QueueRow
from app.scope.tables import ROOT, ColumnModel, Index
from app.scope.waits import wait_cell, wait_words
from app.theme import Theme
from app.translation import tr
from app.words import count
from engine.request import request_name

COLUMNS = (tr("request"), tr("state"), tr("tokens"), tr("blocks"), tr("prio"), tr("user"), tr("wait"), tr("why"))
REQUEST, STATE, TOKENS, BLOCKS, PRIORITY, USER, WAIT, WHY = range(len(COLUMNS))
_TIPS = (
    tr("Number of the request, in its hue"),
    tr("What the last step did for it"),
    tr("Tokens computed / prompt and output tokens so far"),
    tr("KV blocks in its table"),
    tr("Priority: lower runs first, once the order is priority. Drag a row, or press − and +"),
    tr("Who sent it"),
    tr("How long it is expected to wait still, from the pace of the line in the last minute"),
    tr("What it does, or why it waits"),
)
_STATE_NAMES = {"stalled": tr("running")}
MOST_MOVES = 24
"""Of more rows that come and go in one step the table is filled anew."""
DRAGGED = "application/x-batchscope-request"


class QueueModel(ColumnModel):
    """Rows keep their place while the requests stay the same; then only cells that differ are announced."""

    dropped = Signal(int, int)
    """(request, row before which it was let go)."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(theme, COLUMNS, _TIPS, parent)
        self.rows: list[QueueRow] = []
        self.pending: dict[int, int] = {}
        """Priorities asked for, which count from the next step on."""
        self.brief = False
        """Whether states are shown by their swatches alone."""
        self.movable = False
        """Whether waiting requests can be dragged to another place."""

    def show_rows(self, rows: list[QueueRow]) -> None:
        wanted = {row.request_id for row in rows}
        known = {row.request_id for row in self.rows}
        staying = [row.request_id for row in self.rows if row.request_id in wanted]
        moves = len(rows) + len(self.rows) - 2 * len(staying)
        if moves > MOST_MOVES or staying != [row.request_id for row in rows if row.request_id in known]:
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
        changed = [place for place, row in enumerate(rows) if self.rows[place] != row]
        self.rows = list(rows)
        if changed:
            self.dataChanged.emit(self.index(changed[0], 0), self.index(changed[-1], len(COLUMNS) - 1))

    def place_of(self, request_id: int | None) -> int | None:
        return next((i for i, row in enumerate(self.rows) if row.request_id == request_id), None)

    def set_brief(self, brief: bool) -> None:
        if brief != self.brief:
            self.brief = brief
            self.headerDataChanged.emit(Qt.Orientation.Horizontal, STATE, STATE)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        hidden = self.brief and section == STATE and role == Qt.ItemDataRole.DisplayRole
        return "" if hidden else super().headerData(section, orientation, role)

    def rowCount(self, parent: Index = ROOT) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return "" if self.brief and column == STATE else self._text(row, column)
        if role == Qt.ItemDataRole.ToolTipRole:
            return row_sentence(row)
        if role == Qt.ItemDataRole.DecorationRole and column < TOKENS:
            return self._swatches.request(row.request_id) if column == REQUEST else self._swatches.state(row.phase)
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return f"{COLUMNS[column]} {self._text(row, column)}"
        return None

    def _text(self, row: QueueRow, column: int) -> str:
        if column == PRIORITY and row.request_id in self.pending:
            return f"→ {self.pending[row.request_id]}"
        return cell_text(row, column)

    # Dragging ----------------------------------------------------------------------------------------------------

    def flags(self, index: Index) -> Qt.ItemFlag:
        flags = super().flags(index)
        if not self.movable:
            return flags
        if not index.isValid():
            return flags | Qt.ItemFlag.ItemIsDropEnabled
        waits = self.rows[index.row()].phase in WAITING_PHASES
        return flags | Qt.ItemFlag.ItemIsDragEnabled if waits else flags

    def supportedDropActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction

    def mimeTypes(self) -> list[str]:
        return [DRAGGED]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:
        data = QMimeData()
        if indexes:
            data.setData(DRAGGED, str(self.rows[indexes[0].row()].request_id).encode())
        return data

    def dropMimeData(self, data: QMimeData, action: Qt.DropAction, row: int, column: int, parent: Index) -> bool:
        if not self.movable or not data.hasFormat(DRAGGED):
            return False
        place = row if row >= 0 else parent.row() if parent.isValid() else len(self.rows)
        self.dropped.emit(int(data.data(DRAGGED).data()), place)
        return False  # the row moves with the step that takes the priority: the view is to remove nothing


def row_sentence(row: QueueRow) -> str:
    """All of a row, for those columns that the panel has no room for."""
    user = f", of {row.user}" if row.user else ""
    blocks = count(row.blocks, "block")
    wait = tr("\nExpected wait: {wait_words}.", wait_words=wait_words(row.wait)) if row.phase in WAITING_PHASES else ""
    return tr(
        "Request {request_name}{user}, priority {priority}, {blocks}.{wait}\n{why}",
        request_name=request_name(row.request_id),
        user=user,
        priority=row.priority,
        blocks=blocks,
        wait=wait,
        why=row.why,
    )


def cell_text(row: QueueRow, column: int) -> str:
    if column == REQUEST:
        return request_name(row.request_id)
    if column == STATE:
        return _STATE_NAMES.get(row.phase, row.phase)
    if column == TOKENS:
        return f"{row.computed:,} / {row.tokens:,}"
    if column == BLOCKS:
        return f"{row.blocks:,}"
    if column == PRIORITY:
        return str(row.priority)
    if column == USER:
        return row.user
    if column == WAIT:
        return wait_cell(row.wait) if row.phase in WAITING_PHASES else ""
    return row.why
