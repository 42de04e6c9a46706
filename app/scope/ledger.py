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
from app.words import bytes_label, count, seconds_label
from engine.events import Preempted
from engine.request import request_name
from engine.run_state import LedgerEntry

COLUMNS = ("step", "request", "for", "cost", "lost", "rule")
_WIDTHS = (48, 58, 58, 140, 54)
_STEP, _REQUEST, _FOR, _COST, _LOST, _RULE = range(len(COLUMNS))
RULE_PIXELS = 110
"""Where the rules would get less, the steps are left out."""
_TIPS = (
    "The step in which it happened",
    "Who gave way, or was rejected",
    "For whom room was made",
    "What it cost: computed tokens lost, to be computed again, or blocks moved to host memory",
    "Time lost: from the preemption until the request was again where it had been; … until then",
    "Why this one",
)


class LedgerModel(ColumnModel):
    """The newest entry first."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(theme, COLUMNS, _TIPS, parent)
        self.entries: list[LedgerEntry] = []
        self.block_bytes = 0
        """Of one KV block; 0: not known."""
        self._completed = 0

    def show_entries(self, entries: list[LedgerEntry]) -> bool:
        """entries: oldest first. Returns whether there are others than before; old ones may have been completed."""
        completed = sum(1 for entry in entries if entry.recovered is not None or entry.dropped)
        if completed != self._completed and self.entries:
            self._completed = completed
            self.dataChanged.emit(self.index(0, _COST), self.index(len(self.entries) - 1, _LOST))
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
            return cell_text(entry, column, self.block_bytes)
        if role in (Qt.ItemDataRole.ToolTipRole, Qt.ItemDataRole.AccessibleTextRole):
            name = request_name(entry.event.request_id)
            return f"Step {entry.step:,}: request {name}. {ledger_sentence(entry, self.block_bytes)}"
        if role == Qt.ItemDataRole.DecorationRole and column == _REQUEST:
            return self._swatches.request(entry.event.request_id)
        if role == Qt.ItemDataRole.DecorationRole and column == _FOR and isinstance(entry.event, Preempted):
            return self._swatches.request(entry.event.beneficiary)
        return None


def cell_text(entry: LedgerEntry, column: int, block_bytes: int = 0) -> str:
    event = entry.event
    if column == _STEP:
        return f"{entry.step:,}"
    if column == _REQUEST:
        return request_name(event.request_id)
    if not isinstance(event, Preempted):
        return {_FOR: "–", _COST: "rejected", _LOST: "", _RULE: event.message}[column]
    if column == _FOR:
        return "itself" if event.beneficiary == event.request_id else request_name(event.beneficiary)
    if column == _COST:
        return _cost(event, block_bytes)
    if column == _LOST:
        return "…" if entry.recovered is None else seconds_label(entry.recovered.seconds)
    return event.rule


def _cost(event: Preempted, block_bytes: int) -> str:
    if event.mode != "swap":
        return f"{count(event.tokens, 'token')}, {count(event.blocks, 'block')}"
    moved = bytes_label(event.swapped_blocks * block_bytes) if block_bytes else count(event.swapped_blocks, "block")
    return f"{moved} swapped"


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
        self.table.resized.connect(self._fit)
        self.table.clicked.connect(self._clicked)
        self.table.activated.connect(self._clicked)
        self.table.selectionModel().currentRowChanged.connect(self._row_chosen)
        self._following = False
        self._summary = self.add_figure()

    def has_content(self) -> bool:
        return bool(self.source.state.ledger)

    def refresh(self) -> None:
        self._following = True  # the view moves its current row when rows come: that is no choice of the user's
        self.model.block_bytes = self.source.block_bytes
        self.model.show_entries(list(self.source.state.ledger))
        self._follow_selection()
        self._following = False
        totals = self.source.state.totals
        parts = [count(totals.preemptions, "preemption"), f"{count(totals.recomputed_tokens, 'token')} computed again"]
        if totals.swapped_out_blocks:
            parts.append(f"{count(totals.swapped_out_blocks, 'block')} swapped out")
        self._summary.say(" · ".join(parts))

    def _fit(self) -> None:
        room = self.table.viewport().width() - sum(_WIDTHS)
        self.table.setColumnHidden(_STEP, room < RULE_PIXELS)

    def _follow_selection(self) -> None:
        """The newest entry of the selected request, unless the current one is about it too."""
        chosen, current = self.selection.request_id, self.table.currentIndex()
        if current.isValid() and chosen in _involved(self.model.entries[current.row()]):
            return
        rows = (i for i, entry in enumerate(self.model.entries) if entry.event.request_id == chosen)
        place = next(rows, None)
        self.table.setCurrentIndex(QModelIndex() if place is None else self.model.index(place, _REQUEST))

    def _row_chosen(self, current: QModelIndex, _previous: QModelIndex) -> None:
        if not self._following and current.isValid():
            self.selection.select(self.model.entries[current.row()].event.request_id)

    def _clicked(self, index: QModelIndex) -> None:
        entry = self.model.entries[index.row()]
        other = index.column() == _FOR and isinstance(entry.event, Preempted)
        self.selection.select(entry.event.beneficiary if other else entry.event.request_id)


def _involved(entry: LedgerEntry) -> tuple[int, ...]:
    event = entry.event
    return (event.request_id, event.beneficiary) if isinstance(event, Preempted) else (event.request_id,)
