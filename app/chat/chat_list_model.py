"""The chat list as Qt asks for it. Only rows that came, went or moved are told of; a table, since Qt lays out no rows
of a table before they are seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QAbstractTableModel, QByteArray, QLocale, QMimeData, QModelIndex, Qt, Signal

from app.chat.chat_list_rows import Listing, Row, Section, changes
from app.chat.conversation import Conversation, title_of
from app.chat.session import ChatSession
from app.chat.text_pane import plain_tip
from app.translation import ntr, tr
from engine.request import request_name

ROW = Qt.ItemDataRole.UserRole
"""The row itself: an id or a :class:`Section`."""
CHATS_MIME = "application/x-batchscope-chats"


def title_words(conversation: Conversation) -> str:
    """What a chat is called: its title, else what is being written in it."""
    return conversation.title or title_of(conversation.draft) or tr("New chat")


def chat_words(count: int) -> str:
    return ntr("{count:,} chat", "{count:,} chats", count)


def section_words(section: Section) -> str:
    if section.kind == "pinned":
        return tr("Pinned")
    if section.kind == "folder":
        return section.name
    named = {
        "today": tr("Today"),
        "yesterday": tr("Yesterday"),
        "week": tr("Previous 7 days"),
        "month": tr("Previous 30 days"),
        "unknown": tr("Long ago"),
    }
    if section.name in named:
        return named[section.name]
    _, _, month = section.name.partition("-")
    return QLocale().standaloneMonthName(int(month)) if month else section.name


def minus(number: int) -> str:
    """A whole number with the sign that is as wide as a figure."""
    return str(number).replace("-", "−")


def priority_words(priority: int) -> str:
    return tr("P{priority}", priority=minus(priority))


class ChatListModel(QAbstractTableModel):
    renamed = Signal(str, str)
    """Id of a chat, and the title that it shall have."""
    folder_renamed = Signal(str, str)
    chats_dropped = Signal(list, object)
    """Ids, and the section that they were dropped in."""
    files_dropped = Signal(list)
    """Paths of files that were dropped."""

    def __init__(self, session: ChatSession) -> None:
        super().__init__()
        self._session = session
        self.listing = Listing()
        self.collapsed: set[str] = set()
        self.open_id = ""

    @property
    def rows(self) -> list[Row]:
        return self.listing.rows

    # Showing ---------------------------------------------------------------------------------------------------------

    def show_listing(self, listing: Listing) -> None:
        old = self.listing
        steps = None if (old.hits is None) != (listing.hits is None) else changes(old.rows, listing.rows)
        if steps is None:
            self.beginResetModel()
            self.listing = listing
            self.endResetModel()
            return
        rows = list(old.rows)
        self.listing = Listing(rows, listing.counts, listing.hits)
        nowhere = QModelIndex()
        for step in steps:
            last = step.place + step.count - 1
            if step.rows:
                self.beginInsertRows(nowhere, step.place, last)
                rows[step.place : step.place] = step.rows
                self.endInsertRows()
            else:
                self.beginRemoveRows(nowhere, step.place, last)
                del rows[step.place : last + 1]
                self.endRemoveRows()
        self.touch()

    def touch(self) -> None:
        """Titles, marks or counts may be others."""
        if self.rows:
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, 0))

    def conversation(self, index: QModelIndex) -> Conversation | None:
        row = self.row(index)
        return self._session.conversations.get(row) if isinstance(row, str) else None

    def row(self, index: QModelIndex) -> Row | None:
        return self.rows[index.row()] if index.isValid() and index.row() < len(self.rows) else None

    def place_of(self, row: Row) -> QModelIndex:
        try:
            return self.index(self.rows.index(row), 0)
        except ValueError:
            return QModelIndex()

    def section_at(self, index: QModelIndex) -> Section | None:
        """The section that the row is, or is in."""
        for row in reversed(self.rows[: index.row() + 1]):
            if isinstance(row, Section):
                return row
        return None

    # What Qt asks ----------------------------------------------------------------------------------------------------

    def rowCount(self, parent: QModelIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else len(self.listing.rows)

    def columnCount(self, parent: QModelIndex = QModelIndex()) -> int:  # noqa: B008
        return 0 if parent.isValid() else 1

    def data(self, index: QModelIndex, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row = self.row(index)
        if row is None:
            return None
        if role == ROW:
            return row
        if isinstance(row, Section):
            return self._section_data(row, role)
        conversation = self._session.conversations.get(row)
        if conversation is None:
            return None
        if role == Qt.ItemDataRole.DisplayRole:
            return title_words(conversation)
        if role == Qt.ItemDataRole.EditRole:
            return conversation.title
        if role == Qt.ItemDataRole.ToolTipRole:
            return plain_tip("\n".join(self._sentences(conversation)))
        if role == Qt.ItemDataRole.AccessibleTextRole:
            return ", ".join(self._sentences(conversation))
        return None

    def _section_data(self, section: Section, role: int) -> Any:
        if role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.EditRole):
            return section_words(section)
        if role == Qt.ItemDataRole.ToolTipRole and section.kind == "folder":
            return plain_tip(section.name)
        if role == Qt.ItemDataRole.AccessibleTextRole:
            name, count = section_words(section), self.listing.counts.get(section, 0)
            words = ntr("{name}, {count:,} chat", "{name}, {count:,} chats", count, name=name)
            if section.kind != "folder":
                return words
            state = tr("folded away") if section.name in self.collapsed else tr("shown")
            return tr("Folder {words}, {state}", words=words, state=state)
        return None

    def _sentences(self, conversation: Conversation) -> list[str]:
        """The chat in words, for its tool tip and for who cannot see the list."""
        sentences = [title_words(conversation)]
        if conversation.damage:
            sentences.append(
                tr("Part of this chat could not be read: {damage} It is kept as it is.", damage=conversation.damage)
            )
        answer = conversation.open_answer
        if answer is not None and answer.request_id is None:
            sentences.append(tr("waits for the model"))
        elif answer is not None:
            sentences.append(tr("request {name} is answering", name=request_name(answer.request_id)))
        if answer is not None or conversation.priority:
            sentences.append(tr("priority {priority} (lower runs first)", priority=minus(conversation.priority)))
        if conversation.draft.strip() and (conversation.title or answer is not None):
            sentences.append(tr("holds a draft"))
        hit = (self.listing.hits or {}).get(conversation.id)
        if hit is not None and hit.messages:
            sentences.append(ntr("found in {count:,} message", "found in {count:,} messages", hit.messages))
        return sentences

    def flags(self, index: QModelIndex) -> Qt.ItemFlag:
        flag = Qt.ItemFlag
        row = self.row(index)
        if row is None:
            return flag.NoItemFlags
        if isinstance(row, Section):
            own = flag.ItemIsEnabled | flag.ItemIsEditable if row.kind == "folder" else flag.NoItemFlags
            return own | flag.ItemIsDropEnabled
        flags = flag.ItemIsEnabled | flag.ItemIsSelectable | flag.ItemIsDropEnabled
        conversation = self._session.conversations.get(row)
        if conversation is not None and not conversation.damage:
            flags |= flag.ItemIsEditable | flag.ItemIsDragEnabled
        return flags

    def setData(self, index: QModelIndex, value: Any, role: int = Qt.ItemDataRole.EditRole) -> bool:
        row, name = self.row(index), " ".join(value.split()) if isinstance(value, str) else ""
        if row is None or role != Qt.ItemDataRole.EditRole or not name:
            return False
        if isinstance(row, Section):
            self.folder_renamed.emit(row.name, name)
        else:
            self.renamed.emit(row, name)
        return True

    # Drag and drop ---------------------------------------------------------------------------------------------------

    def supportedDropActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction | Qt.DropAction.CopyAction

    def supportedDragActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction

    def mimeTypes(self) -> list[str]:
        return [CHATS_MIME, "text/uri-list"]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:
        data = QMimeData()
        ids = [row for row in map(self.row, indexes) if isinstance(row, str)]
        data.setData(CHATS_MIME, QByteArray(json.dumps(ids).encode()))
        return data

    def canDropMimeData(
        self, data: QMimeData, action: Qt.DropAction, row: int, column: int, parent: QModelIndex
    ) -> bool:
        if data.hasUrls():
            return all(url.isLocalFile() for url in data.urls())
        return data.hasFormat(CHATS_MIME) and self.listing.hits is None and parent.isValid()

    def dropMimeData(self, data: QMimeData, action: Qt.DropAction, row: int, column: int, parent: QModelIndex) -> bool:
        """Says what was dropped where; whoever listens moves it."""
        if not self.canDropMimeData(data, action, row, column, parent):
            return False
        if data.hasUrls():
            self.files_dropped.emit([url.toLocalFile() for url in data.urls()])
        else:
            ids = json.loads(bytes(data.data(CHATS_MIME).data()))
            self.chats_dropped.emit(ids, self.section_at(parent))
        return True
