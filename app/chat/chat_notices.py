"""What the engine's state and the chat file's mean for the chat, said above the composer, each with a way out."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject

from app.chat.conversation import Conversation
from app.chat.notice import NoticeBar
from app.chat.session import ChatSession
from app.engine_bridge import EngineBridge
from app.theme import Theme
from app.translation import tr


class ChatNotices(QObject):
    def __init__(
        self,
        bridge: EngineBridge,
        session: ChatSession,
        theme: Theme,
        *,
        new_chat: Callable[[], object],
        export_all: Callable[[], object],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._bridge = bridge
        self._session = session
        self._new_chat = new_chat
        self._export_all = export_all
        self._closed = ""
        """What the user has read and closed."""
        self.engine = NoticeBar(theme)
        self.store = NoticeBar(theme)

    def show_engine(self) -> None:
        """What the engine's state means for the chat; the window itself says how far loading is, or why it died."""
        bridge = self._bridge
        if bridge.state in ("starting", "loading"):
            self.engine.say(tr("The model is loading; what you send now waits for it."))
        elif bridge.state == "dead":
            again = (tr("Restart"), bridge.restart)
            self.engine.say(tr("The engine is gone. Answers keep the text they have."), action=again)
        elif bridge.state in ("failed", "stopped"):
            self.engine.say(tr("No model is running."), action=(tr("Start"), bridge.restart))
        elif bridge.comparing:
            self._say_once(tr("A comparison has the engine; what you send now waits until it is over."))
        elif bridge.paused:
            self._say_once(tr("The engine pauses; what you send now waits until it runs on."))
        else:
            self.engine.expire()

    def _say_once(self, text: str) -> None:
        """Progress comes several times a second."""
        if text != self.engine.text:
            self.engine.say(text)

    def show_store(self, conversation: Conversation) -> None:
        """What keeps this conversation, or all, from being read or saved."""
        session, stays = self._session, True
        if conversation.damage:
            text = tr(
                "Part of this chat could not be read: {damage} What can be read is shown; the file is kept as it is.",
                damage=conversation.damage,
            )
            action = (tr("New chat"), self._new_chat)
        elif not session.problem:
            self.store.expire()
            return
        elif not session.store.is_kept:
            text, action = session.problem, (tr("Export all…"), self._export_all)
        elif session.problem != session.store.notice:
            text, action = session.problem, (tr("Try again"), session.flush)
        else:
            text, stays = session.problem, False
            action = (tr("Close"), lambda: self._close(text))
        if text not in (self._closed, self.store.text):
            self.store.say(text, is_error=True, action=action, stays=stays)

    def _close(self, text: str) -> None:
        self._closed = text
