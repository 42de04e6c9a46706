"""The list of conversations: search, sections, and a dot in the request's hue on each that is answering."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime, timedelta

from PySide6.QtCore import QModelIndex, QPoint, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QKeyEvent, QShowEvent
from PySide6.QtWidgets import QLineEdit, QWidget

from app.chat.chat_commands import ChatCommands
from app.chat.chat_list_model import ChatListModel
from app.chat.chat_list_rows import Listing, Section, listing_of
from app.chat.chat_list_view import ChatView
from app.chat.chat_menu import ChatMenu
from app.chat.message_parts import LineButton
from app.chat.search import Search
from app.chat.session import ChatSession
from app.chat.store import StoreError
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import Card, button, label, set_role

NARROWEST = 150
SEARCH_MS = 150
SLICE_REST_MS = 2
"""Between two slices of a search, so that the window has its turn."""
REST_MS = 150
"""How long the keys rest on a chat before it is opened."""


class ChatList(Card):
    opened = Signal(str, str, bool)
    """Id of a conversation to show, id of a message in it to show or empty, and whether to go on writing there."""
    new_clicked = Signal()
    delete_wanted = Signal(list)
    """Ids of conversations."""
    folded = Signal()
    """Other folders are folded away."""

    def __init__(
        self, session: ChatSession, commands: ChatCommands, theme: Theme, parent: QWidget | None = None
    ) -> None:
        super().__init__(tr("Chats"), parent=parent)
        self._session = session
        self._commands = commands
        self._held = 0
        self._stale = True
        self._shown_open = ""
        self._trouble = ""
        self.model = ChatListModel(session)
        self.menu_button = LineButton("⋯", tr("What can be done with the selected chats, and with all"), spare_px=8)
        self.add_trailing(self.menu_button)
        self.search = QLineEdit()
        self.search.setAccessibleName(tr("Search chats"))
        self.search.setClearButtonEnabled(True)
        self.view = ChatView(self.model, theme)
        self.view.setAccessibleName(tr("Chats"))
        self.nothing = label("", "muted")
        self.nothing.setWordWrap(True)
        self.new_button = button(tr("+   New chat"), accessible=tr("New chat"))
        self.body.setSpacing(SPACING)
        for widget in (self.search, self.nothing):
            self.body.addWidget(widget)
        self.body.addWidget(self.view, 1)
        self.body.addWidget(self.new_button)
        self.nothing.hide()
        self._new_keys = ""
        self.show_keys(search="", new="")
        self._search_timer = self._timer(SEARCH_MS, self.refresh)
        self._search: Search | None = None
        """What is being looked for, and is not found whole yet."""
        self._shown_needle = ""
        self._opens_first = False
        """Whether the first chat that it finds is to be opened."""
        self._slice_timer = self._timer(SLICE_REST_MS, self._search_on)
        self._rest_timer = self._timer(REST_MS, self._open_rested)
        self._midnight_timer = self._timer(0, self.refresh)
        self._connect(theme)

    def minimumSizeHint(self) -> QSize:
        """The button is whole in every font size; all else can be cut."""
        sides = self.body.contentsMargins()
        least = self.new_button.sizeHint().width() + sides.left() + sides.right()
        return QSize(max(NARROWEST, least), super().minimumSizeHint().height())

    def _connect(self, theme: Theme) -> None:
        self.menu_button.clicked.connect(self._menu_of_chosen)
        self.search.textChanged.connect(self._search_timer.start)
        self.search.returnPressed.connect(self._open_first)
        self.new_button.clicked.connect(self.new_clicked)
        view, model, commands = self.view, self.model, self._commands
        view.opened.connect(self._open)
        view.walked.connect(self._rest_timer.start)
        view.toggled.connect(self._fold)
        view.key_pressed.connect(self._key)
        view.menu_wanted.connect(self._open_menu)
        model.renamed.connect(commands.rename)
        model.folder_renamed.connect(self._rename_folder)
        model.chats_dropped.connect(commands.drop)
        model.files_dropped.connect(commands.files.read)
        self._session.listed.connect(self.refresh)
        theme.changed.connect(view.viewport().update)

    def _timer(self, milliseconds: int, slot: object) -> QTimer:
        timer = QTimer(self)
        timer.setSingleShot(True)
        timer.setInterval(milliseconds)
        timer.timeout.connect(slot)
        return timer

    # Content ---------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Shows what the session holds, or what the search finds in it; later, while it is not seen."""
        self._search_timer.stop()
        self._stale = True
        if not self._held and self.isVisible():
            self._fill()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Much changes at once: shown when it is over."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self.refresh()

    def _fill(self) -> None:
        self._stale = self._opens_first = False
        self._slice_timer.stop()
        self._search = None
        self._trouble = ""
        needle = self.search.text().strip()
        if needle:
            self._search = self._session.begin_search(needle)
            self._search_on()
        else:
            session = self._session
            everything = listing_of(session.conversations, session.folders(), self.model.collapsed, time.time())
            self._show(needle, everything)

    def _search_on(self) -> None:
        """The next slice of the search. What it has found is shown after the first, unless this needle's was shown
        before, and when all is found."""
        search, needle = self._search, self.search.text().strip()
        if search is None:
            return
        try:
            is_whole = search.more()
        except StoreError as error:
            self._search, self._trouble = None, str(error)
            self._show(needle, Listing([], {}, {}))
            return
        if is_whole:
            self._search = None
        if is_whole or self._shown_needle != needle:
            hits = {each.conversation.id: each for each in search.found}
            self._show(needle, Listing(list(hits), {}, hits))
        if not is_whole:
            self._slice_timer.start()
        elif self._opens_first:
            self._open_found()

    def _show(self, needle: str, listing: Listing) -> None:
        was_found = self.model.listing.hits is not None
        chosen = self.view.chosen_ids()
        current = self.model.row(self.view.currentIndex())
        self._shown_needle = needle
        self.model.show_listing(listing)
        self.view.fit_rows()
        kept = set(listing.rows).intersection(chosen)
        place = self.model.place_of(current) if current is not None else QModelIndex()
        self.view.select([each for each in chosen if each in kept], place)
        if not kept or self._shown_open != self.model.open_id or (was_found and not needle):
            self._show_open()
        self._show_nothing(needle, listing)
        self._wait_for_midnight()

    def _show_nothing(self, needle: str, listing: Listing) -> None:
        """Says why there is nothing to see."""
        found_none = needle and not listing.rows and self._search is None
        text = tr("No chat holds “{needle}”.", needle=needle) if found_none else ""
        self.nothing.setText(self._trouble or text)
        set_role(self.nothing, "error" if self._trouble else "muted")
        self.nothing.setVisible(bool(self.nothing.text()))

    def _wait_for_midnight(self) -> None:
        """Then today's chats are yesterday's."""
        now = datetime.now()
        midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=1, microsecond=0)
        self._midnight_timer.start(round((midnight - now).total_seconds() * 1000))

    def set_current(self, conversation_id: str) -> None:
        """The conversation that is open; it is the selected one, unless several are."""
        if conversation_id == self.model.open_id:
            return
        self.model.open_id = conversation_id
        if not self._stale:
            self.model.touch()
            self._show_open()

    def _show_open(self) -> None:
        self._shown_open = self.model.open_id
        place = self.model.place_of(self.model.open_id)
        if len(self.view.chosen_ids()) < 2:
            self.view.select([self.model.open_id], place)
        if place.isValid():
            self.view.scrollTo(place)

    def neighbour(self, ids: list[str]) -> str:
        """The chat to go to when these go: the next one in the list, else the one before; empty: there is none."""
        rows = self.model.rows
        going = set(ids)
        places = [place for place, row in enumerate(rows) if row in going]
        if not places:
            return ""
        around = rows[places[-1] + 1 :] + rows[: places[0]][::-1]
        return next((row for row in around if isinstance(row, str)), "")

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self._stale:
            self._fill()

    def rest(self) -> None:
        """Nothing happens by itself any more: the window closes."""
        for timer in (self._search_timer, self._slice_timer, self._rest_timer, self._midnight_timer):
            timer.stop()
        self._held += 1

    # What the user does ----------------------------------------------------------------------------------------------

    def show_keys(self, *, search: str, new: str) -> None:
        """The keys of the window's commands that are told here; empty: there are none."""
        self.search.setPlaceholderText(tr("Search   {keys}", keys=search).rstrip())
        self._new_keys = new
        self.new_button.setToolTip(new)

    def open_beside(self, step: int) -> None:
        """Goes to the next chat of the list, -1: to the one before; to the first or last where the open one is not
        listed. At the ends nothing happens."""
        self.refresh()
        chats = [row for row in self.model.rows if isinstance(row, str)]
        if self.model.open_id in chats:
            place = chats.index(self.model.open_id) + step
        else:
            place = 0 if step > 0 else len(chats) - 1
        if 0 <= place < len(chats):
            self._open(self.model.place_of(chats[place]), True)

    def focus_search(self) -> None:
        self.search.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.search.selectAll()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape and self.search.text():
            self.search.clear()
            self.refresh()
        elif event.key() == Qt.Key.Key_Down and self.search.hasFocus():
            self.view.setFocus(Qt.FocusReason.ShortcutFocusReason)
        else:
            super().keyPressEvent(event)

    def _key(self, event: QKeyEvent) -> None:
        """The keys of the chats' menu, while the list has the focus."""
        ids, commands = self.view.chosen_ids(), self._commands
        control = event.modifiers() == Qt.KeyboardModifier.ControlModifier
        event.accept()
        if control and event.key() == Qt.Key.Key_Z:
            commands.undo.undo()
        elif not ids:
            event.ignore()
        elif event.key() == Qt.Key.Key_Delete:
            self.delete_wanted.emit(ids)
        elif control and event.key() == Qt.Key.Key_D:
            commands.duplicate(ids)
        elif control and event.key() == Qt.Key.Key_P:
            commands.toggle_pinned(ids)
        elif control and event.key() == Qt.Key.Key_E:
            commands.files.export(ids, "json")
        elif event.text() in ("+", "-", "="):
            commands.change_priority(ids, -1 if event.text() == "-" else 1)
        else:
            event.ignore()

    def _open(self, index: QModelIndex, go_on: bool) -> None:
        self._rest_timer.stop()
        conversation = self.model.conversation(index)
        if conversation is not None:
            hit = (self.model.listing.hits or {}).get(conversation.id)
            self.opened.emit(conversation.id, (hit and hit.message_id) or "", go_on)

    def _open_rested(self) -> None:
        if len(self.view.chosen_ids()) == 1:
            self._open(self.view.currentIndex(), False)

    def _open_first(self) -> None:
        """Enter in the search opens the first chat that it finds."""
        self.refresh()
        self._opens_first = self._search is not None
        if not self._opens_first:
            self._open_found()

    def _open_found(self) -> None:
        if self.search.text().strip() and self.model.rows:
            first = self.model.index(0, 0)
            self.view.select([self.model.rows[0]], first)
            self._open(first, False)

    def _fold(self, section: Section, folded: bool) -> None:
        if section.kind != "folder":
            return
        (self.model.collapsed.add if folded else self.model.collapsed.discard)(section.name)
        self.refresh()
        self.folded.emit()

    def _rename_folder(self, old: str, new: str) -> None:
        if old in self.model.collapsed:
            self.model.collapsed.add(new)
            self.folded.emit()
        self._commands.rename_folder(old, new)

    def _menu_of_chosen(self) -> None:
        place = self.menu_button.mapToGlobal(QPoint(0, self.menu_button.height()))
        self._popup(self._list_menu(self.view.chosen_ids()), place)

    def _open_menu(self, index: QModelIndex, place: QPoint) -> None:
        row = self.model.row(index)
        if isinstance(row, str):
            chosen = self.view.chosen_ids()
            self._popup(ChatMenu(self, self._commands, chosen if row in chosen else [row]), place)
        elif row is not None and row.kind == "folder":
            self._popup(ChatMenu(self, self._commands, [], folder=row.name), place)
        else:
            self._popup(self._list_menu([]), place)

    def _list_menu(self, ids: list[str]) -> ChatMenu:
        return ChatMenu(self, self._commands, ids, with_list=True, new_keys=self._new_keys)

    def _popup(self, menu: ChatMenu, place: QPoint) -> None:
        menu.delete_wanted.connect(self.delete_wanted)
        menu.rename_wanted.connect(self.rename)
        menu.new_wanted.connect(self.new_clicked)
        menu.popup(place)

    def rename(self, row: str | Section) -> None:
        """Lets the user write another name for a chat, or a folder, in its place in the list."""
        place = self.model.place_of(row)
        if place.isValid():
            self.view.setFocus(Qt.FocusReason.OtherFocusReason)
            self.view.scrollTo(place)
            self.view.edit(place)
