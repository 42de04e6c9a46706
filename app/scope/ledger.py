"""The preemption ledger: who gave way, for whom, by which rule, what it cost; and who was rejected, and why."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QModelIndex, QObject, Qt
from PySide6.QtWidgets import QWidget

from app.scope.panel import ScopePanel, ScopeSource
from app.scope.reasons import ledger_sentence
from app.scope.tables import ROOT, ColumnModel, Index, make_table
from app.selection import Selection
from app.theme import Theme
from app.words import count
from engine.events import Preempted
from engine.run_state import LedgerEntry

COLUMNS = ("step", "request", "for", "cost", "rule")
_WIDTHS = (48, 58, 58, 140)
_TIPS = (
    "The step in which it happened",
    "Who gave way, or was rejected",
    "For whom room was made",
    "What it cost: computed tokens lost, to be computed again, and blocks given back",
    "Why this one",
)


class LedgerModel(ColumnModel):
    """The newest entry first."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(theme, COLUMNS, _TIPS, parent)
        self.entries: list[LedgerEntry] = []

    def show_entries(self, entries: list[LedgerEntry]) -> bool:
        """entries: oldest first. Returns whether anything changed."""
        newest = entries[::-1]
        if len(newest) == len(self.entries) and (not newest or newest[0] is self.entries[0]):
            return False
        known = self.entries[0] if self.entries else None
        added = next((i for i, entry in enumerate(newest) if entry is known), None)
        if added is not None and newest[added:] == self.entries:
            self.beginInsertRows(QModelIndex(), 0, added - 1)
            self.entries = newest
            self.endInsertRows()
        else:
            self.beginResetModel()
            self.entries = newest
            self.endResetModel()
        return True

    def rowCount(self, parent: Index = ROOT) -> int:
        return 0 if parent.isValid() else len(self.entries)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        entry, column = self.entries[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return cell_text(entry, column)
        if role in (Qt.ItemDataRole.ToolTipRole, Qt.ItemDataRole.AccessibleTextRole):
            return f"Step {entry.step:,}: request {entry.event.request_id}. {ledger_sentence(entry)}"
        if role == Qt.ItemDataRole.DecorationRole and column == 1:
            return self._swatches.request(entry.event.request_id)
        if role == Qt.ItemDataRole.DecorationRole and column == 2 and isinstance(entry.event, Preempted):
            return self._swatches.request(entry.event.beneficiary)
        return None


def cell_text(entry: LedgerEntry, column: int) -> str:
    event = entry.event
    if column == 0:
        return f"{entry.step:,}"
    if column == 1:
        return str(event.request_id)
    if not isinstance(event, Preempted):
        return ("–", "rejected", event.message)[column - 2]
    if column == 2:
        return "itself" if event.beneficiary == event.request_id else str(event.beneficiary)
    if column == 3:
        return f"{count(event.tokens, 'token')}, {count(event.blocks, 'block')}"
    return event.rule


class LedgerPanel(ScopePanel):
    empty_text = (
        "No preemption and no rejection so far. When KV memory runs out, who gives way, for whom and at what cost is "
        "written here; the scenario kv-crunch in the Load panel (View ▸ Load, or Ctrl+3) makes it happen."
    )
    refresh_seconds = 0.2

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.model = LedgerModel(theme)
        self.table = make_table("Preemption ledger")
        super().__init__("Preemptions", source, theme, selection, self.table, parent)
        self.model.setParent(self)
        self.table.setModel(self.model)
        for column, width in enumerate(_WIDTHS):
            self.table.setColumnWidth(column, width)
        self.table.clicked.connect(self._clicked)
        self.table.activated.connect(self._clicked)
        self.table.selectionModel().currentRowChanged.connect(self._row_chosen)
        self._following = False
        self._summary = self.add_figure()

    def has_content(self) -> bool:
        return bool(self.source.state.ledger)

    def refresh(self) -> None:
        self._following = True  # the view moves its current row when rows come: that is no choice of the user's
        self.model.show_entries(list(self.source.state.ledger))
        self._follow_selection()
        self._following = False
        totals = self.source.state.totals
        self._summary.say(
            f"{count(totals.preemptions, 'preemption')} · {count(totals.recomputed_tokens, 'token')} computed again"
        )

    def _follow_selection(self) -> None:
        """The newest entry of the selected request, unless the current one is about it too."""
        chosen, current = self.selection.request_id, self.table.currentIndex()
        if current.isValid() and chosen in _involved(self.model.entries[current.row()]):
            return
        rows = (i for i, entry in enumerate(self.model.entries) if entry.event.request_id == chosen)
        place = next(rows, None)
        self.table.setCurrentIndex(QModelIndex() if place is None else self.model.index(place, 1))

    def _row_chosen(self, current: QModelIndex, _previous: QModelIndex) -> None:
        if not self._following and current.isValid():
            self.selection.select(self.model.entries[current.row()].event.request_id)

    def _clicked(self, index: QModelIndex) -> None:
        entry = self.model.entries[index.row()]
        other = index.column() == 2 and isinstance(entry.event, Preempted)
        self.selection.select(entry.event.beneficiary if other else entry.event.request_id)


def _involved(entry: LedgerEntry) -> tuple[int, ...]:
    event = entry.event
    return (event.request_id, event.beneficiary) if isinstance(event, Preempted) else (event.request_id,)
