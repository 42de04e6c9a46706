"""The menu of the chats that are selected, of a folder, and of the list as a whole."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import QInputDialog, QLineEdit, QMenu, QWidget

from app.chat.chat_commands import ChatCommands
from app.chat.chat_files import FORMATS
from app.chat.chat_list_model import minus
from app.chat.chat_list_rows import Section
from app.scope.priorities import MOST
from app.translation import ntr, tr


class ChatMenu(QMenu):
    """Chats are held by their ids: the rows may be others by the time that something is chosen."""

    new_wanted = Signal()
    delete_wanted = Signal(list)
    rename_wanted = Signal(object)
    """Id of a chat, or the :class:`Section` of a folder."""

    def __init__(
        self,
        parent: QWidget,
        commands: ChatCommands,
        ids: list[str],
        *,
        folder: str = "",
        with_list: bool = False,
        new_keys: str = "",
    ) -> None:
        """``folder``: its own entries; ``with_list``: those about all chats too, with the keys for a new one."""
        super().__init__(parent)
        self._commands = commands
        self._ids = ids
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        if ids:
            self._add_chats()
        if folder:
            self._add_folder(folder)
        if with_list:
            self._add_list(new_keys)

    # Chats -----------------------------------------------------------------------------------------------------------

    def _add_chats(self) -> None:
        ids, commands = self._ids, self._commands
        chats = commands.chats(ids)
        sound = bool(chats) and not any(each.damage for each in chats)
        rename = self.addAction(_keyed(tr("Rename"), "F2"), lambda: self.rename_wanted.emit(ids[0]))
        rename.setEnabled(sound and len(ids) == 1)
        pinned = bool(chats) and all(each.pinned for each in chats)
        words = tr("Unpin") if pinned else tr("Pin")
        self.addAction(_keyed(words, "Ctrl+P"), lambda: commands.toggle_pinned(ids)).setEnabled(sound)
        self._add_folders().setEnabled(sound)
        self._add_priorities().setEnabled(sound)
        self.addSeparator()
        self.addAction(_keyed(tr("Duplicate"), "Ctrl+D"), lambda: commands.duplicate(ids)).setEnabled(sound)
        count = len(ids)
        self._add_export(
            tr("Export") if count == 1 else ntr("Export {count:,} chat", "Export {count:,} chats", count), ids
        )
        delete = tr("Delete") if count == 1 else ntr("Delete {count:,} chat", "Delete {count:,} chats", count)
        self.addAction(_keyed(delete, "Del"), lambda: self.delete_wanted.emit(ids))

    def _add_folders(self) -> QMenu:
        ids, commands = self._ids, self._commands
        menu = self.addMenu(tr("Move to folder"))
        now = {each.folder for each in commands.chats(ids)}
        for name in ["", *commands.folders()]:
            # An ampersand in a name is a letter, not the mark of a key.
            words = name.replace("&", "&&") or tr("No folder")
            action = menu.addAction(words, lambda _=False, name=name: commands.move(ids, name))
            action.setCheckable(True)
            action.setChecked(now == {name})
        menu.addSeparator()
        menu.addAction(tr("New folder…"), lambda: self._ask_for_folder())
        return menu

    def _ask_for_folder(self) -> None:
        ids, commands = self._ids, self._commands
        dialog = QInputDialog(self.parentWidget())
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.setWindowTitle(tr("New folder"))
        dialog.setLabelText(tr("Name of the folder"))
        dialog.setTextEchoMode(QLineEdit.EchoMode.Normal)
        dialog.textValueSelected.connect(lambda name: name.split() and commands.move(ids, " ".join(name.split())))
        dialog.open()

    def _add_priorities(self) -> QMenu:
        ids, commands = self._ids, self._commands
        menu = self.addMenu(tr("Priority"))
        menu.setToolTipsVisible(True)
        now = {each.priority for each in commands.chats(ids)}
        for priority, words in ((-1, tr("Before others")), (0, tr("As others")), (1, tr("After others"))):
            text = tr("{words} ({priority})", words=words, priority=minus(priority))
            action = menu.addAction(text, lambda _=False, priority=priority: commands.set_priority(ids, priority))
            action.setCheckable(True)
            action.setChecked(now == {priority})
            action.setToolTip(tr("Lower runs first, where the scheduler's order is priority"))
        menu.addSeparator()
        menu.addAction(tr("Other…"), lambda: self._ask_for_priority(min(now, default=0)))
        menu.addAction(_keyed(tr("Run earlier"), "-"), lambda: commands.change_priority(ids, -1))
        menu.addAction(_keyed(tr("Run later"), "+"), lambda: commands.change_priority(ids, 1))
        return menu

    def _ask_for_priority(self, now: int) -> None:
        ids, commands = self._ids, self._commands
        dialog = QInputDialog(self.parentWidget())
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.setWindowTitle(tr("Priority"))
        dialog.setLabelText(tr("Priority of these chats; lower runs first"))
        dialog.setInputMode(QInputDialog.InputMode.IntInput)
        dialog.setIntRange(-MOST, MOST)
        dialog.setIntValue(now)
        dialog.intValueSelected.connect(lambda priority: commands.set_priority(ids, priority))
        dialog.open()

    def _add_export(self, title: str, ids: list[str] | None) -> None:
        """``ids``: None for all chats."""
        menu = self.addMenu(title)
        for name, words in ((name, tr(each.title)) for name, each in FORMATS.items()):
            text = tr("As {format}…", format=words)
            menu.addAction(
                _keyed(text, "Ctrl+E") if name == "json" and ids and ids == self._ids else text,
                lambda _=False, name=name: self._commands.files.export(ids, name),
            )

    # A folder, and all chats -----------------------------------------------------------------------------------------

    def _add_folder(self, folder: str) -> None:
        commands = self._commands
        self.addAction(_keyed(tr("Rename folder"), "F2"), lambda: self.rename_wanted.emit(Section("folder", folder)))
        self.addAction(tr("Dissolve folder, keep its chats"), lambda: commands.dissolve(folder))
        ids = commands.in_folder(folder)
        self.addSeparator()
        count = len(ids)
        self._add_export(ntr("Export its {count:,} chat", "Export its {count:,} chats", count), ids)
        delete = ntr("Delete its {count:,} chat", "Delete its {count:,} chats", count)
        self.addAction(delete, lambda: self.delete_wanted.emit(ids))

    def _add_list(self, new_keys: str) -> None:
        if self._ids:
            self.addSeparator()
        words = tr("New chat")
        self.addAction(f"{words}\t{new_keys}" if new_keys else words, lambda: self.new_wanted.emit())
        self.addAction(tr("Import chats…"), lambda: self._commands.files.choose_to_read())
        count = len(self._commands.all_ids())
        self._add_export(ntr("Export all {count:,} chat", "Export all {count:,} chats", count), None)


def _keyed(words: str, keys: str) -> str:
    """An entry and the keys that do the same while the list has the focus."""
    return f"{words}\t{QKeySequence(keys).toString(QKeySequence.SequenceFormat.NativeText)}"
