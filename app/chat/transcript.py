"""The messages of one conversation, the newest at the bottom, and the page that a new conversation shows."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QScrollArea, QVBoxLayout, QWidget

from app.chat.conversation import Conversation, Message, Role
from app.chat.message_views import AnswerView, UserView
from app.chat.text_pane import ask_to_open
from app.selection import Selection
from app.theme import SPACING, Theme
from app.widgets import button, label
from engine.run_state import RunState

PAGE_TURNS = 12
"""Turns that are built at once; earlier ones on demand, so that a long history opens quickly."""
COLUMN_PX = 860
"""Widest column of text that still reads well."""
SETTLE_MS = 150
FIRST_SETTLE_MS = 2_000
"""Newly built messages have found their heights when none has changed for so long; the first may take its time."""
BOTTOM_PX = 24
"""Within this distance of the end the transcript follows what is being written."""

SUGGESTIONS = (
    "Explain to a bus driver what continuous batching is.",
    "Write a Python function that finds the longest common prefix of a list of strings.",
    "Write a short story about a queue that nobody wanted to leave.",
)


class EmptyPage(QWidget):
    """What a new conversation shows: one sentence and three things to try."""

    chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        column = QVBoxLayout(self)
        column.setSpacing(SPACING)
        column.addStretch(1)
        heading = label("What shall the model write?", "heading")
        heading.setAlignment(Qt.AlignmentFlag.AlignCenter)
        column.addWidget(heading)
        hint = label("It runs on this machine; nothing you write leaves it.", "muted")
        hint.setAlignment(Qt.AlignmentFlag.AlignCenter)
        hint.setWordWrap(True)
        column.addWidget(hint)
        column.addSpacing(SPACING)
        self.buttons = [_Suggestion(text) for text in SUGGESTIONS]
        middle = QVBoxLayout()
        middle.setSpacing(SPACING)
        for each in self.buttons:
            each.clicked.connect(lambda _checked=False, text=each.full_text: self.chosen.emit(text))
            middle.addWidget(each)
        row = QHBoxLayout()
        row.addStretch(1)
        row.addLayout(middle, 20)
        row.addStretch(1)
        column.addLayout(row)
        column.addStretch(2)


class _Suggestion(QPushButton):
    """A button whose text wraps, which a plain one's does not."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.full_text = text
        self.setAccessibleName(text)
        self._label = label(text, parent=self)
        self._label.setWordWrap(True)
        self._label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 8, 12, 8)
        column.addWidget(self._label)
        self.setMaximumWidth(520)
        policy = self.sizePolicy()
        policy.setHeightForWidth(True)
        policy.setHorizontalPolicy(policy.Policy.Expanding)
        self.setSizePolicy(policy)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        return self._label.heightForWidth(width - 24) + 18

    def sizeHint(self) -> QSize:
        hint = super().sizeHint()
        hint.setHeight(self.heightForWidth(min(520, max(self.width(), 160))))
        return hint


class Transcript(QScrollArea):
    suggestion_chosen = Signal(str)
    regenerate_clicked = Signal()
    delete_clicked = Signal(str)
    """Id of a message whose turn shall go."""
    copied = Signal()

    def __init__(self, theme: Theme, selection: Selection, run_state: RunState, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._selection = selection
        self._run_state = run_state
        self._conversation: Conversation | None = None
        self._views: dict[str, UserView | AnswerView] = {}
        self._first = 0
        """Index of the first turn that is built."""
        self._follows = True
        self.setWidgetResizable(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self.setAccessibleName("Transcript")
        self.empty_page = EmptyPage()
        self.empty_page.chosen.connect(self.suggestion_chosen)
        self.earlier_button = button("Show earlier messages", "flat")
        self.earlier_button.clicked.connect(self._show_earlier)
        page = QWidget()
        self._column = QVBoxLayout(page)
        self._column.setContentsMargins(0, 0, SPACING, 0)
        self._column.setSpacing(SPACING)
        self._column.addWidget(self.earlier_button, 0, Qt.AlignmentFlag.AlignHCenter)
        self._messages = QVBoxLayout()
        self._messages.setSpacing(SPACING)
        self._column.addLayout(self._messages)
        self._column.addWidget(self.empty_page, 100)
        self._column.addStretch(1)
        self.setWidget(page)
        page.setAutoFillBackground(False)
        self.viewport().setAutoFillBackground(False)
        self._quieten_buttons()
        theme.changed.connect(self._quieten_buttons)
        self._anchor: QWidget | None = None
        """While earlier messages take their place: the message that stays where it is on the screen."""
        self._anchor_y = 0
        self._settle_timer = QTimer(self)
        self._settle_timer.setSingleShot(True)
        self._settle_timer.timeout.connect(self._settled)
        bar = self.verticalScrollBar()
        bar.rangeChanged.connect(self._range_changed)
        bar.valueChanged.connect(self._scrolled)

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
        return [self._messages.itemAt(i).widget() for i in range(self._messages.count())]

    def show_conversation(self, conversation: Conversation) -> None:
        self._anchor = None
        self._remove(set(self._views))
        self._conversation = conversation
        self._first = max(0, len(conversation.turns or ()) - PAGE_TURNS)
        self._follows = True
        self.sync()

    def sync(self) -> None:
        """Builds views for turns that came and takes away those of turns that went."""
        assert self._conversation is not None
        turns = self._conversation.turns or []
        self._first = min(self._first, max(0, len(turns) - 1))
        shown = [message for turn in turns[self._first :] for message in turn.messages]
        self._remove(set(self._views) - {message.id for message in shown})
        for index, message in enumerate(shown):
            if message.id not in self._views:
                self._views[message.id] = self._make_view(message)
                self._messages.insertWidget(index, self._views[message.id])
        for message in shown:
            view = self._views[message.id]
            if isinstance(view, AnswerView):
                view.set_last(message is turns[-1].answer)
        self.earlier_button.setVisible(self._first > 0)
        self.empty_page.setVisible(not turns and not self._conversation.damage)

    def refresh(self, message_id: str) -> None:
        """A message has new text or a new state."""
        view = self._views.get(message_id)
        if isinstance(view, AnswerView):
            view.refresh()

    def refresh_line(self, message_id: str) -> None:
        view = self._views.get(message_id)
        if isinstance(view, AnswerView):
            view.refresh_line()

    def _make_view(self, message: Message) -> UserView | AnswerView:
        view: UserView | AnswerView
        if message.role is Role.USER:
            view = UserView(message, self._theme)
            view.delete_clicked.connect(self.delete_clicked)
        else:
            view = AnswerView(message, self._theme, self._selection, self._run_state)
            view.regenerate_clicked.connect(self.regenerate_clicked)
            view.link_clicked.connect(self._ask_to_open)
        view.copied.connect(self.copied)
        return view

    def _remove(self, ids: set[str]) -> None:
        for message_id in ids:
            view = self._views.pop(message_id)
            self._messages.removeWidget(view)
            view.hide()
            view.deleteLater()

    def _show_earlier(self) -> None:
        self._anchor = self.views[0]
        self._anchor_y = self._anchor.mapTo(self.viewport(), QPoint(0, 0)).y()
        self._follows = False
        self._first = max(0, self._first - PAGE_TURNS)
        self.sync()
        self._settle_timer.start(FIRST_SETTLE_MS)

    def _ask_to_open(self, url: QUrl) -> None:
        ask_to_open(self, url)

    # Scrolling -------------------------------------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Whether the end stays in sight while text arrives: as long as the user has not scrolled away from it."""
        return self._follows

    def follow(self) -> None:
        self._follows = True
        self._range_changed()

    def _range_changed(self) -> None:
        bar = self.verticalScrollBar()
        if self._follows:
            bar.setValue(bar.maximum())
        elif self._anchor is not None:
            bar.setValue(self._anchor.mapTo(self.widget(), QPoint(0, 0)).y() - self._anchor_y)
            self._settle_timer.start(SETTLE_MS)

    def _settled(self) -> None:
        self._anchor = None

    def _scrolled(self, value: int) -> None:
        if self._anchor is not None:
            return
        self._follows = value >= self.verticalScrollBar().maximum() - BOTTOM_PX

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        side = max(0, (self.viewport().width() - COLUMN_PX) // 2)
        self._column.setContentsMargins(side, 0, side or SPACING, 0)
