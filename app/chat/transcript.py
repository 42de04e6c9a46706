"""The messages of one conversation, the newest at the bottom.

Of a long conversation only a window of messages is built; the buttons at its ends widen it. It is built a few messages
at a time, what the user looks at first, so that neither opening nor widening holds the window up.
"""

from __future__ import annotations

from PySide6.QtCore import Qt, QUrl, Signal
from PySide6.QtGui import QResizeEvent, QShowEvent
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.chat.answer_view import AnswerView
from app.chat.conversation import Conversation, Message, Role, ScrollPlace
from app.chat.draw_queue import DrawQueue
from app.chat.empty_page import EmptyPage
from app.chat.following_area import FollowingArea
from app.chat.markdown import warm_up
from app.chat.message_parts import ContextMarker, first_told
from app.chat.message_view import ViewMemory
from app.chat.message_window import MessageWindow
from app.chat.text_pane import ask_to_open
from app.chat.user_view import UserView
from app.selection import Selection
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import button
from engine.run_state import RunState

GROW_MS = 4
WARM_UP_MS = 800
"""So long after the window came up the first message's modules are imported, one in a turn of the event loop."""
COLUMN_PX = 860
"""Widest column of text that still reads well."""
FOUND_MS = 2_500
"""How long a message that was looked for is framed."""
FOUND_TOP_PX = 24


class Transcript(FollowingArea):
    suggestion_chosen = Signal(str)
    regenerate_clicked = Signal(str)
    """Id of the answer of which another version is wanted."""
    continue_clicked = Signal()
    """The last answer shall go on."""
    edited = Signal(str, str)
    """Id of a user message, and the text that shall be sent in its place; whoever sends it does so at once."""
    version_chosen = Signal(str)
    """Id of the version of a message that shall be shown."""
    delete_clicked = Signal(str)
    """Id of the message that shall go."""
    copied = Signal()

    def __init__(self, theme: Theme, selection: Selection, run_state: RunState, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._selection = selection
        self._run_state = run_state
        self._conversation: Conversation | None = None
        self.memory = ViewMemory()
        self._queue = DrawQueue(self)
        self._views: dict[str, UserView | AnswerView] = {}
        """From top to bottom."""
        self._window = MessageWindow()
        self._stale: set[str] = set()
        """Answers that grew while the transcript was hidden."""
        self._stepped: tuple[str, int] | None = None
        """The version that is being switched to, and the direction."""
        self._build()
        self._found_timer = self._timer(self._unmark)
        self._grow_timer = self._timer(self._grow)
        self._warm_up = warm_up()
        self._warm_up_timer = self._timer(self._warm_up_more)
        self._quieten_buttons()
        theme.changed.connect(self._quieten_buttons)

    def _build(self) -> None:
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setAccessibleName(tr("Transcript"))
        self.empty_page = EmptyPage()
        self.empty_page.chosen.connect(self.suggestion_chosen)
        self.earlier_button = button(tr("Show earlier messages"), "flat")
        self.earlier_button.clicked.connect(self.show_earlier)
        self.later_button = button(tr("Show later messages"), "flat")
        self.later_button.clicked.connect(self.show_later)
        self.marker = ContextMarker(self._theme)
        self.marker.hide()
        page = QWidget()
        self._column = QVBoxLayout(page)
        self._column.setContentsMargins(0, 0, SPACING, 0)
        self._column.setSpacing(SPACING)
        self._column.addWidget(self.earlier_button, 0, Qt.AlignmentFlag.AlignHCenter)
        self._messages = QVBoxLayout()
        self._messages.setSpacing(SPACING)
        self._column.addLayout(self._messages)
        self._column.addWidget(self.later_button, 0, Qt.AlignmentFlag.AlignHCenter)
        self._column.addWidget(self.empty_page, 100)
        self._column.addStretch(1)
        self.marker.setParent(page)
        self.setWidget(page)
        page.setAutoFillBackground(False)
        self.viewport().setAutoFillBackground(False)

    def _quieten_buttons(self) -> None:
        """Buttons at messages are many: small and muted, so that the text stands out."""
        muted = self._theme.muted.name()
        self.widget().setStyleSheet(
            f'QToolButton[role="flat"] {{ padding: 0 6px; border-radius: 4px; color: {muted}; }}'
            f'QToolButton[role="flat"]:hover {{ color: {self._theme.text.name()}; }}'
        )

    # Content ---------------------------------------------------------------------------------------------------------

    @property
    def conversation(self) -> Conversation | None:
        return self._conversation

    def view(self, message_id: str) -> UserView | AnswerView | None:
        return self._views.get(message_id)

    @property
    def views(self) -> list[UserView | AnswerView]:
        """From top to bottom."""
        return list(self._views.values())

    def show_conversation(self, conversation: Conversation) -> None:
        """Shows it where it was left: at ``conversation.scroll``, or at its end."""
        self._anchor = None
        self._remove(set(self._views))
        self._conversation = conversation
        place = conversation.scroll
        index = None if place is None else self._index_of(place.message_id)
        self._follows = index is None
        self._window.open_at(index, len(self._conversation.path))
        self.sync()
        if place is not None and index is not None:
            self._hold(self._views[place.message_id], -place.offset)

    def sync(self) -> None:
        """Builds views for messages that came and takes away those of messages that went."""
        conversation = self._conversation
        assert conversation is not None
        path = conversation.path
        self._window.fit(len(path))
        shown = self._window.of(path)
        kept_y = self._place_of_version()
        self._remove(set(self._views) - {message.id for message in shown})
        views = {message.id: self._views.get(message.id) or self._make_view(message) for message in shown}
        self._views = views
        self._mark_context(path)
        for message in shown:
            view = views[message.id]
            view.set_versions(conversation.versions(message.id))
            if isinstance(view, AnswerView):
                view.set_last(message is path[-1])
        self.earlier_button.setVisible(self._window.goal_first > 0)
        self.later_button.setVisible(self._window.goal_end is not None)
        self.empty_page.setVisible(not path and not conversation.damage)
        if kept_y is not None:
            self._focus_version(kept_y)
        if not self._window.is_grown:
            self._grow_timer.start(GROW_MS)

    def refresh(self, message_id: str) -> None:
        """A message has new text or a new state; one that nobody sees is drawn once somebody does."""
        view = self._views.get(message_id)
        if isinstance(view, AnswerView):
            if self.isVisible() or not view.message.status.is_open:
                view.refresh()
            else:
                self._stale.add(message_id)

    def refresh_line(self, message_id: str) -> None:
        view = self._views.get(message_id)
        if isinstance(view, AnswerView):
            view.refresh_line()

    def edit_last(self) -> bool:
        """Opens the user's last message for editing; False where there is none."""
        users = [view for view in self._views.values() if isinstance(view, UserView) and not view.message.damage]
        if self._window.end is not None or not users:
            return False
        view = users[-1]
        view.begin_edit()
        if not 0 <= self._y_of(view) < self.viewport().height() // 2:  # its answer may be longer than the screen
            self._hold(view, FOUND_TOP_PX)
        return True

    def _make_view(self, message: Message) -> UserView | AnswerView:
        view: UserView | AnswerView
        if message.role is Role.USER:
            view = UserView(message, self._theme, self.memory)
            view.edited.connect(self._edited)
        else:
            view = AnswerView(message, self._theme, self.memory, self._queue, self._selection, self._run_state)
            view.regenerate_clicked.connect(self.regenerate_clicked)
            view.continue_clicked.connect(self.continue_clicked)
            view.link_clicked.connect(self._ask_to_open)
        view.delete_clicked.connect(self.delete_clicked)
        view.version_chosen.connect(self._version_chosen)
        view.copied.connect(self.copied)
        return view

    def _remove(self, ids: set[str]) -> None:
        for message_id in ids:
            view = self._views.pop(message_id)
            if view is self._anchor:
                self._anchor = None
            if isinstance(view, AnswerView):
                self._queue.discard(view)
            self._messages.removeWidget(view)
            view.hide()
            view.deleteLater()

    def _mark_context(self, path: list[Message]) -> None:
        """Puts views and marker into the column: the marker above the first message that the last answer, of those
        that were not told all, was told."""
        cut = next((message for message in reversed(path) if message.dropped), None)
        told = None if cut is None else first_told(path[: path.index(cut)], cut.dropped)
        wanted: list[QWidget] = []
        for message_id, view in self._views.items():
            if cut is not None and told is not None and message_id == told.id:
                self.marker.set_count(cut.dropped)
                wanted.append(self.marker)
            wanted.append(view)
        if self.marker not in wanted:
            self._messages.removeWidget(self.marker)
        self.marker.setVisible(self.marker in wanted)
        for index, widget in enumerate(wanted):
            item = self._messages.itemAt(index)
            if item is None or item.widget() is not widget:
                self._messages.insertWidget(index, widget)

    def _ask_to_open(self, url: QUrl) -> None:
        ask_to_open(self, url)

    def _edited(self, message_id: str, text: str) -> None:
        conversation = self._conversation
        assert conversation is not None
        was_open = conversation.open_answer
        self.edited.emit(message_id, text)
        if conversation.open_answer is not was_open:  # sent: the field has done its duty
            self.memory.edits.pop(message_id, None)
            view = self._views.get(message_id)
            if isinstance(view, UserView):
                view.end_edit()

    # Versions --------------------------------------------------------------------------------------------------------

    def _version_chosen(self, message_id: str, step: int) -> None:
        self._stepped = (message_id, step)
        self.version_chosen.emit(message_id)
        self._stepped = None

    def _place_of_version(self) -> int | None:
        """Where on the screen the version stands that is being switched from."""
        if self._stepped is None or self._conversation is None:
            return None
        versions = [each.id for each in self._conversation.versions(self._stepped[0])]
        view = next((self._views[each] for each in versions if each in self._views), None)
        if view is None:
            return None
        return self._anchor_y if view is self._anchor else self._y_of(view)

    def _focus_version(self, y: int) -> None:
        """The other version stands in the same place, and the key that showed it works once more."""
        assert self._stepped is not None
        view = self._views.get(self._stepped[0])
        if view is not None:
            self._hold(view, y)
            if view.switch is not None:
                view.switch.set_focus(self._stepped[1])

    # The window ------------------------------------------------------------------------------------------------------

    def _index_of(self, message_id: str) -> int | None:
        assert self._conversation is not None
        return next((i for i, message in enumerate(self._conversation.path) if message.id == message_id), None)

    def _grow(self) -> None:
        assert self._conversation is not None
        if self._anchor is None and not self._follows and self._views:
            view = self._top_view()
            self._hold(view, self._y_of(view))
        self._window.grow(len(self._conversation.path))
        self.sync()

    def show_earlier(self) -> None:
        self._hold(self.views[0], self._y_of(self.views[0]))
        self._window.widen_up()
        self._grow()

    def show_later(self) -> None:
        self._hold(self.views[-1], self._y_of(self.views[-1]))
        self._window.widen_down()
        self._grow()

    def show_message(self, message_id: str) -> bool:
        """Goes to a message of the path, builds what is around it, and frames it for a while; False where it is not
        there."""
        index = self._index_of(message_id) if self._conversation is not None else None
        if index is None:
            return False
        self._unmark()
        if message_id not in self._views:
            self._anchor = None
            self._remove(set(self._views))
            self._window.open_at(index, len(self._conversation.path))
            self.sync()
        view = self._views[message_id]
        view.set_found(True)
        self._hold(view, FOUND_TOP_PX)
        self._found_timer.start(FOUND_MS)
        return True

    def _unmark(self) -> None:
        for view in self._views.values():
            view.set_found(False)

    # Scrolling -------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """To the end, and on with it."""
        self._anchor = None
        self._follows = True
        if self._window.end is not None:
            self._remove(set(self._views))
            self._window.open_at(None, len(self._conversation.path))
            self.sync()
        self._range_changed()

    def place(self) -> ScrollPlace | None:
        """Where the user reads; None: at the end."""
        if self._follows or not self._views:
            return None
        if isinstance(self._anchor, UserView | AnswerView):  # not there yet
            return ScrollPlace(self._anchor.message.id, -self._anchor_y)
        view = self._top_view()
        return ScrollPlace(view.message.id, -self._y_of(view))

    def _top_view(self) -> UserView | AnswerView:
        """The first message that is in sight."""
        return next((each for each in self.views if self._y_of(each) + each.height() > 0), self.views[-1])

    def _holds_the_end(self) -> bool:
        return self._window.end is None

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        stale, self._stale = self._stale, set()
        for message_id in stale:
            self.refresh(message_id)
        self._warm_up_timer.start(WARM_UP_MS)

    def _warm_up_more(self) -> None:
        if next(self._warm_up, False):
            self._warm_up_timer.start(GROW_MS)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        side = max(0, (self.viewport().width() - COLUMN_PX) // 2)
        self._column.setContentsMargins(side, 0, side or SPACING, 0)
