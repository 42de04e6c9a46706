"""The settings: sections one under the other, a list of them at the left, a search over all of it.

::

    ┌ Settings   search                              Reset all   About   ✕ ┐
    ├──────────┬────────────────────────────────────────────────────────────┤
    │ sections │ rows: name and what it means            field              │
    └──────────┴────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeyEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QApplication, QHBoxLayout, QLineEdit, QListWidget, QListWidgetItem, QVBoxLayout, QWidget

from app.scroll_column import ScrollColumn
from app.settings.rows import Section
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import EmptyState, button, label

WIDEST = 960
LIST_PX = 150


class SettingsPage(QWidget):
    """Lies over the docks while it is open."""

    closed = Signal()
    reset_wanted = Signal()
    about_wanted = Signal()

    def __init__(self, theme: Theme, sections: list[Section], parent: QWidget) -> None:
        super().__init__(parent)
        self.theme = theme
        self.sections = sections
        self._closing = False
        self.search = QLineEdit()
        self.search.setPlaceholderText(tr("Search settings"))
        self.search.setAccessibleName(tr("Search settings"))
        self.search.setClearButtonEnabled(True)
        self.search.setMaximumWidth(320)
        self.search.textChanged.connect(self._search)
        self.reset_button = button(tr("Reset all"), "flat", tr("Reset all settings"))
        self.reset_button.clicked.connect(self.reset_wanted)
        self.about_button = button(tr("About Batchscope"), "flat")
        self.about_button.clicked.connect(self.about_wanted)
        self.close_button = button("✕", "flat", tr("Close the settings"))
        self.close_button.clicked.connect(self.leave)
        self.list = QListWidget()
        self.list.setAccessibleName(tr("Sections of the settings"))
        self.list.setStyleSheet("QListWidget::item { padding: 6px 8px; border-radius: 6px; margin: 1px 0; }")
        for section in sections:
            self.list.addItem(QListWidgetItem(section.title))
        self.list.currentRowChanged.connect(self._go_to)
        self.list.itemClicked.connect(lambda item: self._go_to(self.list.row(item)))
        self.nothing = EmptyState(tr("No setting has these words."))
        self._lay_out()
        theme.changed.connect(self._resize_list)
        self._resize_list()
        self.hide()

    def _lay_out(self) -> None:
        top = QHBoxLayout()
        top.setSpacing(SPACING)
        top.addWidget(label(tr("Settings"), "heading"))
        top.addSpacing(SPACING)
        top.addWidget(self.search, 1)
        top.addStretch(1)
        for each in (self.reset_button, self.about_button, self.close_button):
            top.addWidget(each)
        content = QWidget()
        content.setMaximumWidth(WIDEST)
        inner = QVBoxLayout(content)
        inner.setContentsMargins(0, 0, SPACING, 0)
        inner.setSpacing(SPACING)
        for section in self.sections:
            inner.addWidget(section)
        inner.addWidget(self.nothing)
        self.nothing.hide()
        inner.addStretch(1)
        self.scroll = ScrollColumn(content)
        self.scroll.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        middle = QHBoxLayout()
        middle.setSpacing(SPACING)
        middle.addWidget(self.list)
        middle.addWidget(self.scroll, 1)
        column = QVBoxLayout(self)
        column.setContentsMargins(SPACING * 2, SPACING, SPACING * 2, SPACING * 2)
        column.setSpacing(SPACING)
        column.addLayout(top)
        column.addLayout(middle, 1)

    def _resize_list(self) -> None:
        self.list.setFixedWidth(self.theme.pixels(LIST_PX))
        self.update()

    # Coming and going ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        for section in self.sections:
            section.entered()
        self.raise_()
        self.show()
        self.search.setFocus()
        self.search.selectAll()

    def leave(self) -> None:
        self._closing = True  # Qt looks for another place for the focus
        self.hide()
        self._closing = False
        self.search.clear()
        self.closed.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Esc leaves; the arrows go through the sections also from the search field."""
        if event.key() == Qt.Key.Key_Escape:
            self.leave()
        elif event.key() in (Qt.Key.Key_Down, Qt.Key.Key_Up) and self.search.hasFocus():
            self.list.setFocus()
            self.list.keyPressEvent(event)
        else:
            super().keyPressEvent(event)

    def focusNextPrevChild(self, forward: bool) -> bool:
        """The Tab key stays on the page: what lies under it is not seen."""
        passed: list[QWidget] = []
        while super().focusNextPrevChild(forward):
            focused = QApplication.focusWidget()
            if focused is None or focused in passed or self._closing or self.isAncestorOf(focused):
                return True
            passed.append(focused)
        return False

    # Finding ---------------------------------------------------------------------------------------------------------

    def _search(self, text: str) -> None:
        words = text.casefold().split()
        found = 0
        for number, section in enumerate(self.sections):
            here = section.search(words)
            found += here
            self.list.item(number).setHidden(not here)
        self.nothing.setVisible(not found)
        self.scroll.verticalScrollBar().setValue(0)

    def _go_to(self, number: int) -> None:
        if 0 <= number < len(self.sections):
            self.scroll.show_from(self.sections[number])

    def paintEvent(self, event: QPaintEvent) -> None:
        QPainter(self).fillRect(self.rect(), self.theme.window)
