"""The Models page: what is on this machine, what it would take, and what can be done with it.

::

    ┌ Models   search                ☐ loadable only     Download… Add folder… Open .gguf… ⟳  ✕ ┐
    │ download card, while it is open                                                            │
    ├───────────────────────────────────────────────────────┬────────────────────────────────────┤
    │ table: one row a model                                │ details: figures, memory, buttons  │
    ├───────────────────────────────────────────────────────┤                                    │
    │ how many, where, what could not be searched           │                                    │
    └───────────────────────────────────────────────────────┴────────────────────────────────────┘
"""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QCheckBox, QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app.models.catalogue import Catalogue
from app.models.details import ModelDetails
from app.models.download import Download
from app.models.table import ModelFilter, ModelList, ModelTable
from app.scroll_column import ScrollColumn
from app.theme import SPACING, Theme
from app.translation import ntr, tr
from app.widgets import Card, Emptiable, EmptyState, button, label
from engine.model_catalog import ModelEntry, hub_cache_folder

DETAILS_SHARE = 0.36
NARROWEST_DETAILS, WIDEST_DETAILS = 300, 460


class ModelsPage(QWidget):
    """Lies over the docks while it is open."""

    add_folder = Signal()
    open_gguf = Signal()
    search_again = Signal()
    closed = Signal()

    def __init__(self, theme: Theme, catalogue: Catalogue, parent: QWidget) -> None:
        super().__init__(parent)
        self.theme = theme
        self.catalogue = catalogue
        self.loaded = ""
        """What loads the model that the engine has."""
        self.is_busy = False
        """Whether a model is being loaded."""
        self._engine = ("", False)
        self.removable = lambda entry: False
        """Whether an entry may be removed from the disk: whether we put it there."""
        self.table = ModelTable(theme, self)
        self.filter = ModelFilter(self.table)
        self.list = ModelList(theme, self.table, self.filter)
        self.details = ModelDetails(theme)
        self.download = Download(theme)
        self.status = label("", "muted")
        self.status.setWordWrap(True)
        self.stop_search = button(tr("Stop searching"), "flat")
        self._build_top()
        self._lay_out()
        catalogue.changed.connect(self.refresh)
        self.list.chosen.connect(self._show_details)
        self.list.activated_entry.connect(self._activated)
        self.details.wanted_changed.connect(self._fill)
        self.stop_search.clicked.connect(catalogue.cancel)
        theme.changed.connect(self.update)
        self.hide()

    # Building --------------------------------------------------------------------------------------------------------

    def _build_top(self) -> None:
        self.search = QLineEdit()
        self.search.setPlaceholderText(tr("Search models"))
        self.search.setClearButtonEnabled(True)
        self.search.setAccessibleName(tr("Search models"))
        self.search.setMaximumWidth(280)
        self.only_loadable = QCheckBox(tr("Only those that can be loaded"))
        self.download_button = button(tr("Download…"))
        self.folder_button = button(tr("Add folder…"))
        self.gguf_button = button(tr("Open .gguf…"))
        self.again_button = button(tr("Search again"), "flat")
        self.close_button = button("✕", "flat", tr("Close the page"))
        self.search.textChanged.connect(lambda text: self.list.keep(lambda: self._look_for(text)))
        self.only_loadable.toggled.connect(lambda on: self.list.keep(lambda: self._only_loadable(on)))
        self.download_button.clicked.connect(lambda: self.download.open_for())
        self.folder_button.clicked.connect(self.add_folder)
        self.gguf_button.clicked.connect(self.open_gguf)
        self.again_button.clicked.connect(self.search_again)
        self.close_button.clicked.connect(self.leave)

    def _lay_out(self) -> None:
        top = QHBoxLayout()
        top.setSpacing(SPACING)
        top.addWidget(label(tr("Models"), "heading"))
        top.addSpacing(SPACING)
        top.addWidget(self.search, 1)
        top.addWidget(self.only_loadable)
        top.addStretch(1)
        for each in (self.download_button, self.folder_button, self.gguf_button, self.again_button, self.close_button):
            top.addWidget(each)
        self.empty = EmptyState("")
        self.pages = Emptiable(self.list, self.empty)
        card = Card(tr("On this machine"))
        card.body.addWidget(self.pages, 1)
        line = QHBoxLayout()
        line.addWidget(self.status, 1)
        line.addWidget(self.stop_search)
        card.body.addLayout(line)
        self._scroll = ScrollColumn(self.details)
        middle = QHBoxLayout()
        middle.setSpacing(SPACING)
        middle.addWidget(card, 1)
        middle.addWidget(self._scroll)
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACING * 2, SPACING, SPACING * 2, SPACING * 2)
        column.setSpacing(SPACING)
        column.addLayout(top)
        column.addWidget(self.download)
        column.addLayout(middle, 1)

    # Coming and going ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        self.raise_()
        self.show()
        self.refresh()
        self.search.setFocus()

    def leave(self) -> None:
        self.hide()
        self.closed.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Esc leaves; the arrows move in the list also from the search field."""
        if event.key() == Qt.Key.Key_Escape:
            self.leave()
        elif event.key() in (Qt.Key.Key_Down, Qt.Key.Key_Up) and self.search.hasFocus():
            self.list.setFocus()
            self.list.keyPressEvent(event)
        elif event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.search.hasFocus():
            self._activated(self.list.current())
        else:
            super().keyPressEvent(event)

    # Showing ---------------------------------------------------------------------------------------------------------

    def show_engine(self, model: str, *, busy: bool) -> None:
        """``model``: what loads the model that the engine has, empty for none. ``busy``: it is still being loaded."""
        self._engine = (model, busy)
        self.loaded, self.is_busy = "" if busy else model, busy
        if self.isVisible():
            self.refresh()

    def refresh(self) -> None:
        if not self.isVisible():
            return
        self._fill()
        entries = list(self.catalogue.entries.values())
        searching = self.catalogue.is_searching
        self.stop_search.setVisible(searching)
        self.again_button.setEnabled(not searching)
        self.status.setText(self._status(entries))
        self.status.setToolTip("\n".join(self.catalogue.problems))
        self._show_empty(bool(entries))
        self._show_details(self.list.current())

    def choose(self, key: str) -> bool:
        return self.list.choose(key)

    def _fill(self) -> None:
        entries = list(self.catalogue.entries.values())
        wanted, machine = self.details.wanted, self.catalogue.machine
        self.list.keep(lambda: self.table.show(entries, wanted, machine, self._engine))

    def _look_for(self, text: str) -> None:
        self.filter.look_for(text)
        self._show_empty(bool(self.catalogue.entries))

    def _only_loadable(self, wanted: bool) -> None:
        self.filter.show_only_loadable(wanted)
        self._show_empty(bool(self.catalogue.entries))

    def _show_empty(self, any_entries: bool) -> None:
        if self.catalogue.failure:
            self.empty.set_text(self.catalogue.failure)
        elif self.catalogue.is_searching and not any_entries:
            self.empty.set_text(tr("Searching for models …"))
        elif any_entries:
            self.empty.set_text(tr("No model here has these words. Clear the search, or download one."))
        else:
            self.empty.set_text(tr("No model is here yet. Download one, or add a folder that holds some."))
        self.pages.set_empty(self.filter.rowCount() == 0)

    def _status(self, entries: list[ModelEntry]) -> str:
        if self.catalogue.failure:
            return self.catalogue.failure
        parts = [ntr("{count:,} model", "{count:,} models", len(entries))]
        if self.catalogue.is_searching:
            parts.append(tr("searching …"))
        else:
            parts.append(tr("searched: {folder} and the chosen folders", folder=hub_cache_folder()))
        parts += self.catalogue.problems[:2]
        return " · ".join(parts)

    def _show_details(self, entry: ModelEntry | None) -> None:
        self.details.show_entry(
            entry,
            self.catalogue.machine,
            loaded=bool(self.loaded) and entry is not None and entry.model == self.loaded,
            busy=self.is_busy,
            removable=entry is not None and self.removable(entry),
        )

    def _activated(self, entry: ModelEntry | None) -> None:
        if entry is not None and entry.is_loadable and entry.model != self.loaded and not self.is_busy:
            self.details.load.emit(entry, self.details.dtype.currentData())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        share = round(self.width() * DETAILS_SHARE)
        self._scroll.setFixedWidth(max(NARROWEST_DETAILS, min(WIDEST_DETAILS, share)))
        self.only_loadable.setText(tr("Only those that can be loaded") if self.width() > 1180 else tr("Loadable"))

    def paintEvent(self, event: QPaintEvent) -> None:
        QPainter(self).fillRect(self.rect(), self.theme.window)
