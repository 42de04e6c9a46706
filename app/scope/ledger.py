"""The preemption ledger: who gave way, for whom, by which rule, what it cost; and who was rejected, and why."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QModelIndex, QObject, Qt, Signal
from PySide6.QtWidgets import QWidget

from app.scope.ledger_history import LedgerEntry
from app.scope.panel import ScopePanel, ScopeSource
from app.scope.reasons import ledger_sentence
from app.scope.tables import ROOT, ColumnModel, FootLine, Index, make_table, stacked
from app.selection import Selection
from app.theme import Theme
from app.translation import tr
from app.widgets import label
from app.words import bytes_label, count, seconds_label
from engine.events import Preempted
from engine.request import request_name

COLUMNS = (tr("step"), tr("request"), tr("for"), tr("cost"), tr("lost"), tr("rule"))
_WIDTHS = (48, 58, 58, 140, 54)
_BRIEF_WIDTHS = (48, 54, 54, 84, 54)
_STEP, _REQUEST, _FOR, _COST, _LOST, _RULE = range(len(COLUMNS))
RULE_PIXELS = 110
"""Where the rules would get less, the steps are left out; where that does not help, the rules and the blocks too: the
sentence below the table has all."""
_TIPS = (
    tr("The step in which it happened"),
    tr("Who gave way, or was rejected"),
    tr("For whom room was made"),
    tr("What it cost: computed tokens lost, to be computed again, or blocks moved to host memory"),
    tr(
        "Time lost: from the preemption until the request was again where it had been; … until then, – where it "
        "never was"
    ),
    tr("Why this one"),
)


class LedgerModel(ColumnModel):
    """The newest entry first."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(theme, COLUMNS, _TIPS, parent)
        self.entries: list[LedgerEntry] = []
        self.block_bytes = 0
        """Of one KV block; 0: not known."""
        self.last_step: int | None = None
        """The step as of which the entries are shown; None: the newest."""
        self._outcomes = 0
        self.brief = False
        """Whether costs leave out the blocks."""

    def show_entries(self, entries: list[LedgerEntry], last_step: int | None = None) -> None:
        """entries: oldest first, none later than ``last_step``; what followed from old ones may have become known."""
        outcomes = sum(1 for entry in entries if entry.outcome != "open" or entry.dropped)
        stale = outcomes != self._outcomes or last_step != self.last_step
        self._outcomes, self.last_step = outcomes, last_step
        if stale and self.entries:
            self.dataChanged.emit(self.index(0, _COST), self.index(len(self.entries) - 1, _LOST))
        newest = entries[::-1]
        if len(newest) == len(self.entries) and (not newest or newest[0] is self.entries[0]):
            return
        known = self.entries[0] if self.entries else None
        added = next((i for i, entry in enumerate(newest) if entry is known), None)
        if added and len(newest) == added + len(self.entries) and newest[-1] is self.entries[-1]:
            self.beginInsertRows(QModelIndex(), 0, added - 1)
            self.entries = newest
            self.endInsertRows()
        else:
            self.beginResetModel()
            self.entries = newest
            self.endResetModel()

    def rowCount(self, parent: Index = ROOT) -> int:
        return 0 if parent.isValid() else len(self.entries)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        entry, column = self.entries[index.row()].as_of(self.last_step), index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return cell_text(entry, column, self.block_bytes, brief=self.brief)
        if role in (Qt.ItemDataRole.ToolTipRole, Qt.ItemDataRole.AccessibleTextRole):
            name = request_name(entry.event.request_id)
            return tr(
                "Step {step:,}: request {name}. {ledger_sentence}",
                step=entry.step,
                name=name,
                ledger_sentence=ledger_sentence(entry, self.block_bytes),
            )
        if role == Qt.ItemDataRole.DecorationRole and column == _REQUEST:
            return self._swatches.request(entry.event.request_id)
        if role == Qt.ItemDataRole.DecorationRole and column == _FOR and isinstance(entry.event, Preempted):
            return self._swatches.request(entry.event.beneficiary)
        return None


_LOST_WORDS = {"open": "…", "recovered": "", "again": "again", "ended": "–", "unseen": "–"}


def cell_text(entry: LedgerEntry, column: int, block_bytes: int = 0, *, brief: bool = False) -> str:
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
        return _cost(event, block_bytes, brief)
    if column == _LOST:
        return _LOST_WORDS[entry.outcome] if entry.recovered is None else seconds_label(entry.recovered.seconds)
    return event.rule


def _cost(event: Preempted, block_bytes: int, brief: bool) -> str:
    if event.mode != "swap":
        tokens = count(event.tokens, "token")
        return tokens if brief else f"{tokens}, {count(event.blocks, 'block')}"
    moved = bytes_label(event.swapped_blocks * block_bytes) if block_bytes else count(event.swapped_blocks, "block")
    return tr("{moved} swapped", moved=moved)


class LedgerPanel(ScopePanel):
    empty_text = tr(
        "No preemption and no rejection so far. When KV memory runs out, who gives way, for whom and at what cost is "
        "written here; the scenario kv-crunch in the Load panel (View ▸ Load, or Ctrl+3) makes it happen."
    )
    refresh_seconds = 0.2
    moment_wanted = Signal(float)
    """An entry was clicked, or Enter pressed on it: the end of its step, engine clock."""

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.model = LedgerModel(theme)
        self.table = make_table(tr("Preemption ledger"))
        self.table.setAccessibleDescription(tr("Enter shows the moment of an entry on the timeline"))
        self.sentence = label("", "muted")
        self.sentence.setWordWrap(True)
        self.sentence.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.sentence.setAccessibleName(tr("What the selected entry is about"))
        self.sentence.hide()
        self.totals = FootLine(theme, tr("What preemptions have cost"))
        super().__init__(
            tr("Preemptions"), source, theme, selection, stacked(self.table, self.sentence, self.totals), parent
        )
        self.model.setParent(self)
        self.table.setModel(self.model)
        for column, width in enumerate(_WIDTHS):
            self.table.setColumnWidth(column, width)
        self.table.resized.connect(self._fit)
        self.table.clicked.connect(self._clicked)
        self.table.activated.connect(self._show_moment)
        self.table.selectionModel().currentRowChanged.connect(self._row_chosen)
        self._following = False
        self._summary = self.add_figure()

    def has_content(self) -> bool:
        return self.source.history.ledger.any_until(self.source.last_step)

    def refresh(self) -> None:
        self._following = True  # the view moves its current row when rows come: that is no choice of the user's
        self.model.block_bytes = self.source.block_bytes
        last_step = self.source.last_step
        self.model.show_entries(self.source.history.ledger.until(last_step), last_step)
        self._follow_selection()
        self._following = False
        self._say_entry()
        self._summary.say(f"{self.source.state.totals.preemptions:,}")
        self._summary.setToolTip(tr("Preemptions since the engine started"))
        self.totals.say(self._costs())

    def _costs(self) -> str:
        """What all of them have cost by now."""
        totals, block_bytes = self.source.state.totals, self.source.block_bytes
        parts = [
            count(totals.preemptions, "preemption"),
            tr("{tokens} computed again", tokens=count(totals.recomputed_tokens, "token")),
        ]
        moved = totals.swapped_out_blocks + totals.swapped_in_blocks
        if moved:
            parts.append(
                tr("{moved} moved", moved=bytes_label(moved * block_bytes) if block_bytes else count(moved, "block"))
            )
        lost = self.source.history.ledger.seconds_lost(self.source.last_step)
        if lost:
            parts.append(tr("{lost} lost", lost=seconds_label(lost)))
        if totals.rejected:
            parts.append(tr("{rejected:,} rejected", rejected=totals.rejected))
        return " · ".join(parts)

    def _fit(self) -> None:
        room = self.table.viewport().width() - sum(_WIDTHS)
        narrow = room + _WIDTHS[_STEP] < RULE_PIXELS
        self.model.brief = narrow
        for column, width in enumerate(_BRIEF_WIDTHS if narrow else _WIDTHS):
            self.table.setColumnWidth(column, width)
        self.table.setColumnHidden(_STEP, room < RULE_PIXELS)
        self.table.setColumnHidden(_RULE, narrow)

    def _say_entry(self) -> None:
        """Below the table, all of the current entry."""
        current = self.table.currentIndex()
        if current.isValid():
            entry = self.model.entries[current.row()].as_of(self.source.last_step)
            name = request_name(entry.event.request_id)
            self.sentence.setText(
                tr(
                    "Request {name}: {ledger_sentence}",
                    name=name,
                    ledger_sentence=ledger_sentence(entry, self.source.block_bytes),
                )
            )
        self.sentence.setVisible(current.isValid())

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
            self._say_entry()

    def _clicked(self, index: QModelIndex) -> None:
        """What is in a cell is selected: under "for" the one for whom room was made. Then the moment is shown."""
        event = self.model.entries[index.row()].event
        other = index.column() == _FOR and isinstance(event, Preempted)
        self.selection.select(event.beneficiary if other else event.request_id)
        self._show_moment(index)

    def _show_moment(self, index: QModelIndex) -> None:
        self.moment_wanted.emit(self.model.entries[index.row()].time)


def _involved(entry: LedgerEntry) -> tuple[int, ...]:
    event = entry.event
    return (event.request_id, event.beneficiary) if isinstance(event, Preempted) else (event.request_id,)
