"""What the window can be told to do: every command by a stable name, and the keys that call it.

Keys that two commands would have go to one of them, else neither would work: to that whose keys the user has chosen,
among equals to the one that was there first. The other goes without, and :attr:`Commands.conflicts` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import QKeyCombination, QObject, Qt, Signal
from PySide6.QtGui import QAction, QKeySequence

from app.settings.preferences import PreferenceStore
from app.translation import mark, tr

PORTABLE = QKeySequence.SequenceFormat.PortableText
NATIVE = QKeySequence.SequenceFormat.NativeText
_TYPING = Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.AltModifier | Qt.KeyboardModifier.MetaModifier
_EDITING = (
    QKeySequence.StandardKey.Copy,
    QKeySequence.StandardKey.Cut,
    QKeySequence.StandardKey.Paste,
    QKeySequence.StandardKey.Undo,
    QKeySequence.StandardKey.Redo,
    QKeySequence.StandardKey.SelectAll,
)


_TITLES = {
    "show.": mark("Show {title}"),
    "arrange.": mark("Arrangement: {title}"),
    "theme.": mark("Theme: {title}"),
}
"""What commands are called whose menu says what the one word in it is about."""
_BY_USE = ("chat.", "settings", "model.page", "arrange.", "engine.", "record.", "time.", "model.", "show.", "theme.")
"""Beginnings of names, the everyday commands first; the others follow."""


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    """``chat.new``: never changes, and never shown."""
    title: str
    default: str
    """The keys it ships with, as ``QKeySequence.PortableText`` writes them; empty for none."""
    action: QAction


class Commands(QObject):
    """The commands of one window. Keys follow the preferences at once."""

    changed = Signal()
    """Some command has other keys, or there are more commands."""

    def __init__(self, preferences: PreferenceStore, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._preferences = preferences
        self._commands: dict[str, Command] = {}
        self.conflicts: dict[str, str] = {}
        """Name of a command that goes without its keys -> name of the one that has them."""
        preferences.changed.connect(self._apply)

    def __getitem__(self, name: str) -> Command:
        return self._commands[name]

    def __contains__(self, name: str) -> bool:
        return name in self._commands

    def all(self) -> list[Command]:
        """Those that one uses most first."""
        return sorted(self._commands.values(), key=lambda command: _rank(command.name))

    def add(self, name: str, action: QAction, default: str = "") -> None:
        """Raises ValueError where the name is taken."""
        if name in self._commands:
            raise ValueError(f"there is a command {name} already")
        title = action.text().replace("&", "")
        for start, words in _TITLES.items():
            if name.startswith(start):
                title = tr(words, title=title)
        self._commands[name] = Command(name, title, QKeySequence(default).toString(PORTABLE), action)
        action.setObjectName(name)
        self._apply()

    def wanted(self, name: str) -> str:
        """The keys that a command would have if nobody else had them."""
        command = self._commands[name]
        chosen = self._preferences.values.shortcuts.get(name)
        return command.default if chosen is None or fault_of(chosen) else chosen

    def keys(self, name: str) -> str:
        """The keys that call a command, as the desktop writes them; empty for none."""
        return self._commands[name].action.shortcut().toString(NATIVE) if name in self._commands else ""

    def hint(self, text: str, name: str) -> str:
        """A tooltip: ``text`` with the keys behind it."""
        keys = self.keys(name)
        return f"{text} ({keys})" if keys else text

    def is_changed(self, name: str) -> bool:
        """Whether its keys are others than it ships with."""
        return self.wanted(name) != self._commands[name].default

    def bind(self, name: str, keys: str) -> None:
        """Other keys, written as ``QKeySequence.PortableText`` does; empty: none. Raises ValueError with a sentence."""
        keys = QKeySequence(keys).toString(PORTABLE)
        if fault := fault_of(keys):
            raise ValueError(fault)
        shortcuts = dict(self._preferences.values.shortcuts)
        if keys == self._commands[name].default:
            shortcuts.pop(name, None)
        else:
            shortcuts[name] = keys
        self._preferences.change(shortcuts=shortcuts)

    def reset(self, name: str) -> None:
        """The keys that it ships with."""
        self.bind(name, self._commands[name].default)

    def reset_all(self) -> None:
        kept = {name: keys for name, keys in self._preferences.values.shortcuts.items() if name not in self._commands}
        self._preferences.change(shortcuts=kept)

    def _apply(self) -> None:
        before = {name: command.action.shortcut() for name, command in self._commands.items()}
        conflicts: dict[str, str] = {}
        has: dict[str, str] = {}
        for name in sorted(self._commands, key=lambda name: not self.is_changed(name)):
            keys = self.wanted(name)
            if keys and keys in has:
                conflicts[name] = has[keys]
                keys = ""
            elif keys:
                has[keys] = name
            self._commands[name].action.setShortcut(QKeySequence(keys, PORTABLE))
        after = {name: command.action.shortcut() for name, command in self._commands.items()}
        if (before, self.conflicts) != (after, conflicts):
            self.conflicts = conflicts
            self.changed.emit()


def _rank(name: str) -> int:
    return next((place for place, start in enumerate(_BY_USE) if name.startswith(start)), len(_BY_USE))


def fault_of(keys: str) -> str:
    """Why a command cannot have these keys, as a sentence; empty where it can, and for no keys."""
    sequence = QKeySequence(keys, PORTABLE)
    if sequence.isEmpty():
        return tr("“{keys}” are no keys.", keys=keys) if keys else ""
    shown = sequence.toString(NATIVE)
    if sequence.count() > 1:
        return tr("{keys} are several keys one after the other; a command has one.", keys=shown)
    combination: QKeyCombination = sequence[0]
    is_function = Qt.Key.Key_F1 <= combination.key() <= Qt.Key.Key_F35
    if not is_function and not combination.keyboardModifiers() & _TYPING:
        return tr("{keys} is needed for typing and moving about: take Ctrl, Alt or a function key with it.", keys=shown)
    if any(sequence in QKeySequence.keyBindings(standard) for standard in _EDITING):
        return tr("{keys} is what text fields need for copying, pasting and undoing.", keys=shown)
    if combination.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Tab, Qt.Key.Key_Backtab):
        return tr("{keys} is needed for sending messages and moving about.", keys=shown)
    return ""
