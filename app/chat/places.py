"""What was being written in each chat and where one was reading in it: kept, also across restarts."""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer, Signal

from app.chat.composer import Composer
from app.chat.conversation import Conversation
from app.chat.session import ChatSession
from app.chat.transcript import Transcript

KEEP_MS = 400
"""A change is noted when there was none for so long, or this long after the first; saving takes a moment more."""


class Places(QObject):
    draft_kept = Signal()
    """The draft of the conversation that is shown is another."""

    def __init__(
        self, session: ChatSession, composer: Composer, transcript: Transcript, parent: QObject | None = None
    ) -> None:
        super().__init__(parent)
        self._session = session
        self._composer = composer
        self._transcript = transcript
        self._conversation: Conversation | None = None
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(KEEP_MS)
        self._timer.timeout.connect(self.keep)
        composer.text_changed.connect(self._changed)
        transcript.verticalScrollBar().valueChanged.connect(self._changed)

    def show(self, conversation: Conversation) -> None:
        """Notes what there is of the conversation that was shown, and brings back this one's."""
        self.keep()
        self._conversation = None  # what is set up for it is not what the user does
        self._transcript.show_conversation(conversation)
        self._composer.show_conversation(conversation)
        self._conversation = conversation
        self._timer.stop()

    def forget(self) -> None:
        """The conversation that was shown is gone."""
        self._timer.stop()
        self._conversation = None

    def sent(self) -> None:
        """What was written is a message."""
        self._composer.set_text("")
        self.keep()

    def keep(self) -> None:
        self._timer.stop()
        conversation = self._conversation
        if conversation is None:
            return
        if conversation.draft != self._composer.text:
            self._session.set_draft(conversation, self._composer.text)
            self.draft_kept.emit()
        place = self._transcript.place()
        if conversation.scroll != place:
            self._session.set_scroll(conversation, place)

    def _changed(self) -> None:
        if self._conversation is not None and not self._timer.isActive():
            self._timer.start()
