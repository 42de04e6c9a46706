"""What is done to chats as a whole, one or many at a time: from menus, keys, and by dragging."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from PySide6.QtCore import QObject, Signal

from app.chat.chat_files import ChatFiles
from app.chat.chat_list_model import chat_words, title_words
from app.chat.chat_list_rows import Section
from app.chat.conversation import Conversation
from app.chat.exchange import export_json, import_json
from app.chat.session import ChatSession
from app.chat.undo import UndoStack
from app.scope.priorities import MOST
from app.translation import ntr, tr


class ChatCommands(QObject):
    """Chats are named by their ids; an id that is gone is passed over, and so is a damaged chat."""

    said = Signal(str)
    to_open = Signal(str)
    """Id of a chat that was just made."""

    def __init__(self, session: ChatSession, undo: UndoStack, files: ChatFiles, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.undo = undo
        self.files = files
        self.hold: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Within it the list does not follow every single change."""

    # Finding ---------------------------------------------------------------------------------------------------------

    def chats(self, ids: Iterable[str]) -> list[Conversation]:
        found = (self._session.conversations.get(each) for each in ids)
        return [each for each in found if each is not None]

    def all_ids(self) -> list[str]:
        return [each.id for each in self._session.conversations if not each.is_empty]

    def in_folder(self, folder: str) -> list[str]:
        return [each.id for each in self._session.conversations if each.folder == folder]

    def folders(self) -> list[str]:
        return sorted(self._session.folders(), key=str.casefold)

    # Doing -----------------------------------------------------------------------------------------------------------

    def rename(self, conversation_id: str, title: str) -> None:
        for each in self._sound([conversation_id]):
            self._session.rename(each, title)

    def toggle_pinned(self, ids: list[str]) -> None:
        """Pins them, or unpins them where all are pinned."""
        chats = self._sound(ids)
        pinned = not all(each.pinned for each in chats)
        with self.hold():
            for each in chats:
                self._session.set_pinned(each, pinned)

    def set_priority(self, ids: list[str], priority: int) -> None:
        self._set_priorities({each.id: priority for each in self._sound(ids)})

    def change_priority(self, ids: list[str], by: int) -> None:
        self._set_priorities({each.id: each.priority + by for each in self._sound(ids)})

    def _set_priorities(self, priorities: dict[str, int]) -> None:
        with self.hold():
            for each in self._sound(priorities):
                self._session.set_priority(each, max(-MOST, min(MOST, priorities[each.id])))

    def move(self, ids: list[str], folder: str) -> None:
        self._place(ids, folder, pinned=None)

    def drop(self, ids: list[str], section: Section | None) -> None:
        """Dragged into a section: pinned there, or in the folder, or in none and among the others by date."""
        if section is None:
            return
        if section.kind == "pinned":
            self._place(ids, None, pinned=True)
        else:
            self._place(ids, section.name if section.kind == "folder" else "", pinned=False)

    def _place(self, ids: list[str], folder: str | None, *, pinned: bool | None) -> None:
        """``folder`` and ``pinned``: None to leave them."""
        session, chats = self._session, self._sound(ids)
        before = {each.id: (each.folder, each.pinned) for each in chats}
        with self.hold():
            for each in chats:
                if folder is not None and each.folder != folder:
                    session.set_folder(each, folder)
                if pinned is not None and each.pinned != pinned:
                    session.set_pinned(each, pinned)
        moved = [each for each in chats if (each.folder, each.pinned) != before[each.id]]
        if not moved:
            return

        def undo() -> None:
            with self.hold():
                for each in self._sound(each.id for each in moved):
                    session.set_folder(each, before[each.id][0])
                    session.set_pinned(each, before[each.id][1])

        what = _words(moved)
        if folder:
            self.undo.push(tr("Moved {what} to “{folder}”.", what=what, folder=folder), undo)
        elif folder is None:
            self.undo.push(tr("Pinned {what}.", what=what), undo)
        else:
            self.undo.push(tr("Moved {what} out of its folder.", what=what), undo)

    def rename_folder(self, old: str, new: str) -> None:
        new = " ".join(new.split())
        if not new or new == old:
            return
        inside, joins = self.in_folder(old), new in self._session.folders()
        with self.hold():
            self._session.rename_folder(old, new)
        if joins:  # one cannot tell them apart again by hand
            text = tr("“{old}” is part of “{new}” now.", old=old, new=new)
            self.undo.push(text, lambda: self._put_back(inside, old))

    def dissolve(self, folder: str) -> None:
        inside = self.in_folder(folder)
        with self.hold():
            self._session.rename_folder(folder, "")
        text = ntr(
            "Dissolved “{folder}”; its {count:,} chat is among the others.",
            "Dissolved “{folder}”; its {count:,} chats are among the others.",
            len(inside),
            folder=folder,
        )
        self.undo.push(text, lambda: self._put_back(inside, folder))

    def _put_back(self, ids: list[str], folder: str) -> None:
        with self.hold():
            for each in self._sound(ids):
                self._session.set_folder(each, folder)

    def duplicate(self, ids: list[str]) -> None:
        """All branches once more. An answer under way is copied as far as it is."""
        chats = self._sound(ids)
        for each in chats:
            self._session.open(each)
        chats = [each for each in chats if not each.damage]  # as reading them has shown
        # What is on disk is known there by its ids: the copies get others.
        if not self._session.flush():
            return
        copies = import_json(export_json(chats))
        now = time.time()
        for copy, each in zip(copies, chats, strict=True):
            copy.title = tr("{title} (copy)", title=title_words(each))
            copy.created = copy.updated = now
            copy.pinned, copy.draft = False, ""
        with self.hold():
            self._session.add_imported(copies)
        if len(copies) == 1:
            self.to_open.emit(copies[0].id)
        elif copies:
            self.said.emit(tr("Duplicated {what}.", what=_words(chats)))

    # -----------------------------------------------------------------------------------------------------------------

    def _sound(self, ids: Iterable[str]) -> list[Conversation]:
        return [each for each in self.chats(ids) if not each.damage]


def _words(chats: list[Conversation]) -> str:
    """``“Cats”``, ``3 chats``."""
    if len(chats) == 1:
        return tr("“{title}”", title=title_words(chats[0]))
    return chat_words(len(chats))
