"""The keys of every command: other ones, none, or those that ship."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QKeyEvent, QKeySequence
from PySide6.QtWidgets import QHBoxLayout, QKeySequenceEdit, QPushButton, QWidget

from app.settings.commands import PORTABLE, Commands
from app.settings.rows import Row, Section
from app.theme import SPACING
from app.translation import tr
from app.widgets import button


class KeyField(QKeySequenceEdit):
    """Takes the keys that are pressed in it. Backspace or Delete alone leaves the command without, Esc takes back
    what was pressed; Tab goes on."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setMaximumSequenceLength(1)
        self.setAccessibleName(name)
        self._shown = QKeySequence()

    def show_keys(self, keys: QKeySequence) -> None:
        self._shown = keys
        self.setKeySequence(keys)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        plain = event.modifiers() == Qt.KeyboardModifier.NoModifier
        if plain and event.key() == Qt.Key.Key_Escape:
            if self.keySequence() == self._shown:
                event.ignore()  # nothing to take back: whatever the field is in may close
            self.setKeySequence(self._shown)
        elif plain and event.key() in (Qt.Key.Key_Backspace, Qt.Key.Key_Delete):
            self.clear()
            self.editingFinished.emit()
        else:
            super().keyPressEvent(event)


class ShortcutRow(Row):
    def __init__(self, commands: Commands, name: str) -> None:
        self._commands = commands
        self.command = name
        command = commands[name]
        self.keys = KeyField(tr("Keys of {command}", command=command.title))
        self.reset_button = button(tr("Reset"), "flat", tr("Reset the keys of {command}", command=command.title))
        super().__init__(command.title, _pair(self.keys, self.reset_button))
        self.keys.editingFinished.connect(self._edited)
        self.reset_button.clicked.connect(lambda: commands.reset(name))
        self.show_command()

    def show_command(self) -> None:
        commands, name = self._commands, self.command
        self.keys.show_keys(QKeySequence(commands.wanted(name), PORTABLE))
        self.reset_button.setEnabled(commands.is_changed(name))
        default = QKeySequence(commands[name].default, PORTABLE).toString(QKeySequence.SequenceFormat.NativeText)
        self.reset_button.setToolTip(tr("Back to {keys}", keys=default) if default else tr("Back to no keys"))
        winner = commands.conflicts.get(name)
        losers = [commands[loser].title for loser, has in commands.conflicts.items() if has == name]
        if winner is not None:
            self.say(
                tr("“{other}” has these keys; “{title}” goes without.", other=commands[winner].title, title=self.title)
            )
        elif losers:
            self.say(
                tr("“{title}” has these keys; “{other}” goes without.", title=self.title, other="”, “".join(losers)),
                is_error=False,
            )
        else:
            self.say("")

    def _edited(self) -> None:
        keys = self.keys.keySequence().toString(PORTABLE)
        if keys == self._commands.wanted(self.command):
            return
        try:
            self._commands.bind(self.command, keys)
        except ValueError as error:
            self.show_command()
            self.say(str(error))

    def matches(self, words: list[str]) -> bool:
        keys = self.keys.keySequence().toString(QKeySequence.SequenceFormat.NativeText).casefold()
        text = f"{self.title.casefold()} {keys}"
        return all(word in text for word in words)


class ShortcutSection(Section):
    """Its rows are made when the page is first shown: there are many."""

    def __init__(self, commands: Commands) -> None:
        super().__init__(
            tr("Shortcuts"),
            about=tr("Click a field and press the keys. Backspace alone leaves a command without keys."),
        )
        self._commands = commands
        self.reset_all = button(tr("Reset all"), "flat", tr("Reset all shortcuts"))
        self.reset_all.clicked.connect(commands.reset_all)
        self.add_trailing(self.reset_all)
        commands.changed.connect(self._show)

    def entered(self) -> None:
        have = {row.command for row in self.rows}
        for command in self._commands.all():
            if command.name not in have:
                before = self.rows[-1].reset_button if self.rows else self.reset_all
                row = ShortcutRow(self._commands, command.name)
                self.add(row)
                self.setTabOrder(before, row.keys)  # made after the sections below, which the Tab key comes to later
                self.setTabOrder(row.keys, row.reset_button)
        self._show()

    def row_of(self, name: str) -> ShortcutRow:
        return next(row for row in self.rows if row.command == name)

    def _show(self) -> None:
        for row in self.rows:
            row.show_command()
        self.reset_all.setEnabled(any(self._commands.is_changed(each.name) for each in self._commands.all()))


def _pair(field: QWidget, push: QPushButton) -> QWidget:
    result = QWidget()
    row = QHBoxLayout(result)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(SPACING)
    row.addWidget(field, 1)
    row.addWidget(push)
    result.setAccessibleName(field.accessibleName())
    return result
