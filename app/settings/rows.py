"""What the settings page is made of: sections of rows, each a name, a field and what it means, found by their words."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QCheckBox, QHBoxLayout, QLineEdit, QSizePolicy, QVBoxLayout, QWidget

from app.lab.choice import Choice
from app.settings.preferences import PreferenceStore
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import Card, label, set_role
from engine.config import ConfigError

FIELD_PX = 250


class Row(QWidget):
    """The name and, muted under it, what it means; the field at the right; a line under both for what is the matter."""

    def __init__(self, title: str, field: QWidget | None = None, hint: str = "", *, wide: bool = False) -> None:
        """wide: the field stands under the name, as wide as there is room."""
        super().__init__()
        self.title = title
        self.field = field
        self._words = f"{title} {hint}"
        self.name = label(title)
        self.hint = label(hint, "muted")
        self.problem = label("", "error")
        words = QVBoxLayout()
        words.setSpacing(1)
        for each in (self.name, self.hint, self.problem):
            each.setWordWrap(True)
            words.addWidget(each)
        self.hint.setVisible(bool(hint))
        self.problem.hide()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 4, 0, 4)
        column.setSpacing(SPACING // 2)
        line = QHBoxLayout()
        line.setSpacing(SPACING * 2)
        line.addLayout(words, 1)
        column.addLayout(line)
        if field is None:
            return
        if wide:
            column.addWidget(field)
        else:
            field.setMinimumWidth(FIELD_PX)
            field.setSizePolicy(QSizePolicy.Policy.Fixed, field.sizePolicy().verticalPolicy())
            line.addWidget(field, 0, Qt.AlignmentFlag.AlignTop)
        if not field.accessibleName():
            field.setAccessibleName(title)
        field.setAccessibleDescription(hint)

    def say(self, text: str, *, is_error: bool = True) -> None:
        """What is the matter with what is set; empty: nothing."""
        self.problem.setText(text)
        set_role(self.problem, "error" if is_error else "muted")
        self.problem.setVisible(bool(text))

    def explain(self, hint: str) -> None:
        self.hint.setText(hint)
        self.hint.setVisible(bool(hint))

    def matches(self, words: list[str]) -> bool:
        text = f"{self._words} {self.hint.text()}".casefold()
        return all(word in text for word in words)


class Section(Card):
    """Rows under one heading."""

    def __init__(self, title: str, *, about: str = "") -> None:
        super().__init__(title)
        self.rows: list[Row] = []
        self.body.setSpacing(SPACING // 2)
        self._about = label(about, "muted")
        self._about.setWordWrap(True)
        self._about.setVisible(bool(about))
        self.body.addWidget(self._about)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        self.body.addWidget(row)
        return row

    def search(self, words: list[str]) -> int:
        """Shows the rows that have all the words, or all rows where the heading has; returns how many."""
        if all(word in self.title.casefold() for word in words):
            words = []
        found = 0
        for row in self.rows:
            matches = row.matches(words)
            row.setVisible(matches)
            found += matches
        self.setVisible(found > 0)
        return found

    def entered(self) -> None:
        """The page is on the screen."""


class Fields:
    """Joins fields to preferences: what is set in a field is in force at once, and what others set is shown in it."""

    def __init__(self, store: PreferenceStore, theme: Theme) -> None:
        self.store = store
        self.theme = theme
        self._shows: list[Callable[[], None]] = []
        store.changed.connect(self.show)

    def show(self) -> None:
        for each in self._shows:
            each()

    def follow(self, show: Callable[[], None]) -> None:
        """``show`` is called now and after every change."""
        self._shows.append(show)
        show()

    def set(self, row: Row, **fields: object) -> None:
        values = self.store.values
        if all(getattr(values, name) == value for name, value in fields.items()):
            row.say("")  # a field that only shows what is in force: nothing was chosen, and nothing is written
            return
        row.say("")
        try:
            self.store.change(**fields)
        except ConfigError as error:
            row.say(str(error))

    def choice(self, title: str, name: str, entries: list[tuple[str, object]], hint: str = "") -> Row:
        """A row with one of several values, each with what it is called."""
        box = Choice(title, self.theme)
        for text, value in entries:
            box.addItem(text, value)
        row = Row(title, box, hint)
        box.activated.connect(lambda _: self.set(row, **{name: box.currentData()}))
        self.follow(lambda: box.setCurrentIndex(max(0, box.findData(getattr(self.store.values, name)))))
        return row

    def check(self, title: str, name: str, text: str, hint: str = "") -> Row:
        box = QCheckBox(text)
        row = Row(title, box, hint)
        box.toggled.connect(lambda on: self.set(row, **{name: on}))
        self.follow(lambda: box.setChecked(getattr(self.store.values, name)))
        return row


def path_field(path: object) -> QLineEdit:
    """A path that can be selected, whole where there is room."""
    result = QLineEdit(str(path))
    result.setReadOnly(True)
    result.setAccessibleName(tr("Path: {path}", path=path))
    result.setCursorPosition(0)
    result.setToolTip(str(path))
    result.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
    return result
