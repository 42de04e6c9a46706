"""The list of models: one row each, searched by every word, sorted by any column, those that can be loaded first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QModelIndex, QPersistentModelIndex, QSortFilterProxyModel, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QAbstractItemView, QHeaderView, QTableView, QWidget

from app.models.catalogue import key_of
from app.models.figures import Need, Wanted, family_label, need_of, parameters_label
from app.theme import Theme
from app.translation import mark, tr
from app.words import bytes_label
from engine.model_catalog import Machine, ModelEntry

Index = QModelIndex | QPersistentModelIndex
_ROOT = QModelIndex()

NAME, FAMILY, PARAMETERS, TYPE, CONTEXT, DISK, MEMORY, STATE = range(8)
_TITLES = (
    mark("Model"),
    mark("Family"),
    mark("Parameters"),
    mark("Type"),
    mark("Context"),
    mark("On disk"),
    mark("Memory"),
    mark("State"),
)
_STATES = {
    "absent": mark("to be fetched"),
    "importable": mark("to be imported"),
    "incomplete": mark("not finished"),
    "damaged": mark("damaged"),
    "unsupported": mark("not supported"),
}
SORT_ROLE = Qt.ItemDataRole.UserRole
_NUMBERS = (PARAMETERS, CONTEXT, DISK, MEMORY)
GAP_PX = 12
"""Between a column and the next one."""


class ModelTable(QAbstractTableModel):
    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._rows: list[ModelEntry] = []
        self._keys: list[str] = []
        self._needs: list[Need | None] = []
        self.engine = ("", False)
        """What loads the model that the engine has, empty: it has none; and whether that is still being loaded."""

    def show(
        self, entries: list[ModelEntry], wanted: Wanted, machine: Machine | None, engine: tuple[str, bool]
    ) -> None:
        """Rows that are the same models as before stay where they are. ``engine``: see :attr:`engine`."""
        keys = [key_of(entry) for entry in entries]
        needs = [need_of(entry, wanted, machine) for entry in entries]
        if keys != self._keys:
            self.beginResetModel()
            self._rows, self._keys, self._needs, self.engine = entries, keys, needs, engine
            self.endResetModel()
        elif (entries, needs, engine) != (self._rows, self._needs, self.engine):
            self._rows, self._needs, self.engine = entries, needs, engine
            self.dataChanged.emit(self.index(0, 0), self.index(len(keys) - 1, len(_TITLES) - 1))

    def entry(self, row: int) -> ModelEntry:
        return self._rows[row]

    def row_of(self, key: str) -> int | None:
        return self._keys.index(key) if key in self._keys else None

    def rowCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(self._rows)

    def columnCount(self, parent: Index = _ROOT) -> int:
        return 0 if parent.isValid() else len(_TITLES)

    def headerData(self, section: int, orientation: Qt.Orientation, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if orientation == Qt.Orientation.Horizontal and role == Qt.ItemDataRole.DisplayRole:
            return tr(_TITLES[section])
        if role == Qt.ItemDataRole.TextAlignmentRole:
            side = Qt.AlignmentFlag.AlignRight if section in _NUMBERS else Qt.AlignmentFlag.AlignLeft
            return side | Qt.AlignmentFlag.AlignVCenter
        return None

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        entry, need, column = self._rows[index.row()], self._needs[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return self._text(entry, need, column)
        if role == SORT_ROLE:
            return self._order(entry, need, column)
        if role == Qt.ItemDataRole.TextAlignmentRole and column in _NUMBERS:
            return Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
        if role == Qt.ItemDataRole.ForegroundRole:
            if column == STATE and (entry.state == "damaged" or (need is not None and not need.loads)):
                return self._theme.error
            return self._theme.text if entry.is_loadable else self._theme.muted
        if role == Qt.ItemDataRole.ToolTipRole:
            return entry.reason or entry.path
        return None

    def _text(self, entry: ModelEntry, need: Need | None, column: int) -> str:
        if column == NAME:
            shown = f" @ {entry.revision}" if entry.revision and entry.revision != "main" else ""
            return entry.name + shown
        if column == FAMILY:
            return family_label(entry.architecture)
        if column == PARAMETERS:
            return parameters_label(entry.parameters)
        if column == TYPE:
            return entry.dtype
        if column == CONTEXT:
            return f"{entry.max_position:,}" if entry.max_position else ""
        if column == DISK:
            return bytes_label(entry.disk_bytes) if entry.disk_bytes and entry.state != "absent" else ""
        if column == MEMORY:
            return bytes_label(need.total) if need is not None else ""
        return self._state(entry, need)

    def _state(self, entry: ModelEntry, need: Need | None) -> str:
        model, is_loading = self.engine
        if model and entry.model == model and entry.is_loadable:
            return tr("loading …") if is_loading else tr("loaded")
        if entry.is_loadable and need is not None and not need.loads:
            return tr("does not fit")
        if entry.state in _STATES:
            return tr(_STATES[entry.state])
        if need is not None:
            return tr("fits") if need.fits else tr("fits, shorter")
        return tr("ready")

    def _order(self, entry: ModelEntry, need: Need | None, column: int) -> Any:
        if column in _NUMBERS:
            numbers = {PARAMETERS: entry.parameters, CONTEXT: entry.max_position, DISK: entry.disk_bytes}
            return float(numbers.get(column, need.total if need is not None else 0))
        return self._text(entry, need, column).casefold()


class ModelFilter(QSortFilterProxyModel):
    """Shows what has every word that is searched for; what cannot be loaded comes last, whichever way it is sorted."""

    def __init__(self, table: ModelTable) -> None:
        super().__init__(table)
        self._words: list[str] = []
        self._only_loadable = False
        self.setSourceModel(table)
        self.setSortRole(SORT_ROLE)
        self.setDynamicSortFilter(True)

    def look_for(self, text: str) -> None:
        self.beginFilterChange()
        self._words = text.casefold().split()
        self.endFilterChange()

    def show_only_loadable(self, wanted: bool) -> None:
        self.beginFilterChange()
        self._only_loadable = wanted
        self.endFilterChange()

    def filterAcceptsRow(self, row: int, parent: Index) -> bool:
        table: ModelTable = self.sourceModel()
        entry = table.entry(row)
        if self._only_loadable and not entry.is_loadable:
            return False
        text = f"{entry.name} {entry.revision} {entry.architecture} {entry.dtype} {entry.path}".casefold()
        return all(word in text for word in self._words)

    def lessThan(self, left: Index, right: Index) -> bool:
        table: ModelTable = self.sourceModel()
        first, second = (table.entry(index.row()).is_loadable for index in (left, right))
        if first != second:
            ascending = self.sortOrder() == Qt.SortOrder.AscendingOrder
            return first if ascending else second
        return bool(left.data(SORT_ROLE) < right.data(SORT_ROLE))


class ModelList(QTableView):
    """The table itself."""

    chosen = Signal(object)
    """:class:`ModelEntry` of the current row, or None."""
    activated_entry = Signal(object)
    """A row was double-clicked, or Enter was pressed on it."""

    def __init__(self, theme: Theme, table: ModelTable, shown: ModelFilter) -> None:
        super().__init__()
        self._theme = theme
        self._table = table
        self._shown = shown
        self.setModel(shown)
        self.setAccessibleName(tr("Models on this machine"))
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setTabKeyNavigation(False)
        self.setWordWrap(False)
        self.setShowGrid(False)
        self.setSortingEnabled(True)
        self.sortByColumn(NAME, Qt.SortOrder.AscendingOrder)
        self.verticalHeader().hide()
        # Numbers end where words begin: the space between them is the numbers'.
        self.setStyleSheet(f"QTableView::item, QHeaderView::section {{ padding: 2px {GAP_PX}px 2px 3px; }}")
        header = self.horizontalHeader()
        header.setHighlightSections(False)
        header.setMinimumSectionSize(40)
        header.setSectionResizeMode(QHeaderView.ResizeMode.Interactive)
        header.setSectionResizeMode(NAME, QHeaderView.ResizeMode.Stretch)
        self._fit()
        theme.changed.connect(self._fit)
        self.selectionModel().currentRowChanged.connect(lambda *_: self.chosen.emit(self.current()))
        self.activated.connect(lambda _index: self.activated_entry.emit(self.current()))
        shown.modelReset.connect(lambda: self.chosen.emit(self.current()))
        table.dataChanged.connect(lambda *_: self.chosen.emit(self.current()))

    def _fit(self) -> None:
        """Columns as wide as what they show at most: a table of thousands of rows is not measured for that."""
        self.verticalHeader().setDefaultSectionSize(self.fontMetrics().height() + 12)
        widest = {FAMILY: "SmolLM3 ", PARAMETERS: "Parameters", TYPE: "bfloat16", CONTEXT: "131,072", DISK: "999 MiB "}
        widest |= {MEMORY: "999 MiB ", STATE: "to be imported"}
        for column, text in widest.items():
            self.setColumnWidth(column, self.fontMetrics().horizontalAdvance(text) + GAP_PX + 12)
        self._choose_columns()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Home and End go to the first and the last model; a table's own go along the row."""
        ends = {Qt.Key.Key_Home: 0, Qt.Key.Key_End: self._shown.rowCount() - 1}
        if event.key() in ends and self._shown.rowCount():
            self.setCurrentIndex(self._shown.index(ends[event.key()], NAME))
        else:
            super().keyPressEvent(event)

    def resizeEvent(self, event: Any) -> None:
        super().resizeEvent(event)
        self._choose_columns()

    def _choose_columns(self) -> None:
        """A narrow table shows the name and the state before all else."""
        width = self.viewport().width()
        for column, needed in ((TYPE, 860), (CONTEXT, 780), (DISK, 690), (FAMILY, 600), (PARAMETERS, 480)):
            self.setColumnHidden(column, width < self._theme.pixels(needed))

    def current(self) -> ModelEntry | None:
        index = self.currentIndex()
        return self._table.entry(self._shown.mapToSource(index).row()) if index.isValid() else None

    def keep(self, change: Callable[[], None]) -> None:
        """Makes a change to the rows; the current model stays the current one, where it is still there."""
        before = self.current()
        change()
        if before is not None:
            self.choose(key_of(before))
        if self.current() is None and self._shown.rowCount():
            self.setCurrentIndex(self._shown.index(0, NAME))

    def choose(self, key: str) -> bool:
        """Whether the model is in the list."""
        row = self._table.row_of(key)
        index = self._shown.mapFromSource(self._table.index(row, NAME)) if row is not None else QModelIndex()
        if index.isValid() and index != self.currentIndex():
            self.setCurrentIndex(index)
        return index.isValid()
