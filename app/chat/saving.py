"""What is not on disk yet, and when it gets there: at once where asked, else within ``FLUSH_MS``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from PySide6.QtCore import QObject, QTimer, Signal

from app.chat.conversation import Conversation, Message
from app.chat.store import ChatStore, SavedMessage, StoreError

FLUSH_MS = 300
"""How long streamed text, or a draft, may be in memory only."""
RETRY_MS = 2_000
"""When a save that failed is tried again."""


class Saver(QObject):
    problem_changed = Signal()
    """``problem`` is another."""

    def __init__(self, store: ChatStore, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.store = store
        self.problem = ""
        """Why chats cannot be saved at the moment; empty when they can."""
        self._conversations: dict[str, Conversation] = {}
        self._messages: dict[str, SavedMessage] = {}
        self._doomed: dict[str, Message] = {}
        self._closed = False
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self.flush)

    def save_conversation(self, conversation: Conversation) -> None:
        """A new and empty one does not reach the disk before something is written in it."""
        if conversation.is_empty and not conversation.draft.strip() and not self.store.holds(conversation.id):
            self._conversations.pop(conversation.id, None)
            return
        self._conversations[conversation.id] = conversation
        self._schedule()

    def save_messages(self, conversation: Conversation, messages: Iterable[Message]) -> None:
        for message in messages:
            self._doomed.pop(message.id, None)
            self._messages[message.id] = SavedMessage(conversation, message)
        self._schedule()

    def forget_messages(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self._messages.pop(message.id, None)
            self._doomed[message.id] = message
        self._schedule()

    def drop(self, conversation: Conversation) -> None:
        """Nothing of this conversation is to be written any more."""
        self._conversations.pop(conversation.id, None)
        for saved in list(self._messages.values()):
            if saved.conversation is conversation:
                del self._messages[saved.message.id]

    def drop_all(self) -> None:
        for waiting in (self._conversations, self._messages, self._doomed):
            waiting.clear()

    def flush(self) -> bool:
        """Writes what is not on disk yet; on trouble says so and tries again later. Whether all is on disk."""
        if self._closed:
            return False  # answers that end after this are marked when the file is opened the next time
        self._timer.stop()
        if not self._write():
            self._timer.start(RETRY_MS)
            return False
        return True

    def attempt(self, action: Callable[[], object]) -> bool:
        """Does something to the store, or says why it could not be done."""
        try:
            action()
        except StoreError as error:
            self.say(str(error))
            return False
        return True

    def say(self, problem: str) -> None:
        """What the user should know about the file until the next save succeeds; empty: nothing."""
        if problem != self.problem:
            self.problem = problem
            self.problem_changed.emit()

    def close(self) -> None:
        """Writes what there is and lets go of the file."""
        if self._closed:
            return
        self._closed = True
        self._timer.stop()
        self._write()
        self.store.close()

    def _schedule(self) -> None:
        if not self._closed and not self._timer.isActive():
            self._timer.start(FLUSH_MS)

    def _write(self) -> bool:
        if not (self._conversations or self._messages or self._doomed):
            return True
        try:
            self.store.save(self._conversations.values(), self._messages.values(), self._doomed.values())
        except StoreError as error:
            self.say(str(error))
            return False
        self.drop_all()
        self.say("")
        return True
