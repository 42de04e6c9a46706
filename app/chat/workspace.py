"""The chat as the window docks it: the list of conversations and the conversation that is open.

Create it with the engine's bridge, put ``list_panel`` and ``chat_panel`` into docks, call
:meth:`ChatWorkspace.shutdown` before the window closes.
"""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QCoreApplication, QEvent, QObject, Qt
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QToolButton

from app.chat.chat_list import UNTITLED, ChatList
from app.chat.composer import Composer
from app.chat.conversation import ChatError, Conversation
from app.chat.elided import ElidedLabel
from app.chat.notice import NoticeBar
from app.chat.options import OptionsDrawer
from app.chat.session import ChatSession
from app.chat.store import default_store_path
from app.chat.transcript import Transcript
from app.engine_bridge import EngineBridge
from app.selection import Selection
from app.theme import Theme
from app.widgets import Card, label
from engine.request import SamplingParams

UNDO_SECONDS = 10.0
BRIEF_SECONDS = 2.0


class ChatWorkspace(QObject):
    def __init__(
        self,
        bridge: EngineBridge,
        theme: Theme,
        selection: Selection,
        store_path: Path | None = None,
        parent: QObject | None = None,
    ) -> None:
        """``store_path``: the chat file; None: the one in the user's data folder."""
        super().__init__(parent)
        self._bridge = bridge
        self._drafts: dict[str, str] = {}
        self.session = ChatSession(bridge, store_path or default_store_path(), self)
        self._current = self._first_conversation()
        self.list_panel = ChatList(self.session, theme)
        self.transcript = Transcript(theme, selection, bridge.run_state)
        self.composer = Composer()
        self.options = OptionsDrawer()
        self.options.hide()
        self.engine_notice = NoticeBar(theme)
        self.store_notice = NoticeBar(theme)
        self.undo_notice = NoticeBar(theme)
        self.notice = NoticeBar(theme)
        self._context = label("", "muted")
        self._context.setToolTip("Tokens of the model's context that this chat took up with its last answer")
        self.options_button = QToolButton()
        self.options_button.setText("Options")
        self.options_button.setCheckable(True)
        self.options_button.setToolTip("System prompt and sampling of this chat")
        self.title = ElidedLabel("title")
        self.chat_panel = Card("", self._context, self.options_button)
        self.chat_panel.setAccessibleName("Chat")
        # Titles are long: this one gives way where the card's own would hold the dock open.
        self.chat_panel.header.layout().insertWidget(0, self.title, 100)
        self.chat_panel.setMinimumWidth(300)
        for widget in (self.options, self.store_notice):
            self.chat_panel.body.addWidget(widget)
        self.chat_panel.body.addWidget(self.transcript, 1)
        for widget in (self.undo_notice, self.notice, self.engine_notice, self.composer):
            self.chat_panel.body.addWidget(widget)
        self._connect()
        self._add_shortcut()
        self.chat_panel.installEventFilter(self)
        self.open_conversation(self._current)
        self._show_engine()
        self._show_store(self.session.problem)

    def _connect(self) -> None:
        session, bridge = self.session, self._bridge
        session.path_changed.connect(self._path_changed)
        session.reloaded.connect(lambda: self.open_conversation(self._first_conversation()))
        session.message_changed.connect(self._message_changed)
        session.listed.connect(self._update)
        session.save_problem.connect(self._show_store)
        bridge.stepped.connect(self._stepped)
        bridge.state_changed.connect(self._show_engine)
        bridge.paced.connect(lambda _paused: self._show_engine())
        bridge.compare_progress.connect(self._comparing)
        bridge.compare_done.connect(lambda _done: self._show_engine())
        self.list_panel.chosen.connect(self._chosen)
        self.list_panel.new_clicked.connect(self.new_conversation)
        self.list_panel.delete_clicked.connect(self._delete_conversation)
        self.transcript.suggestion_chosen.connect(self.send)
        self.transcript.regenerate_clicked.connect(self.regenerate)
        self.transcript.delete_clicked.connect(self._delete_message)
        self.transcript.copied.connect(lambda: self.notice.say("Copied.", seconds=BRIEF_SECONDS))
        self.composer.sent.connect(self._submit)
        self.composer.stopped.connect(self.stop)
        self.options.changed.connect(self._options_changed)
        self.options_button.toggled.connect(self.options.setVisible)
        QCoreApplication.instance().aboutToQuit.connect(self.shutdown)

    def _add_shortcut(self) -> None:
        """Esc in the chat; what it means elsewhere, and all other keys, are the window's."""
        shortcut = QShortcut(QKeySequence("Esc"), self.chat_panel)
        shortcut.setContext(Qt.ShortcutContext.WidgetWithChildrenShortcut)
        shortcut.activated.connect(self.stop)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Once the chat is on the screen one can type."""
        if watched is self.chat_panel and event.type() == QEvent.Type.Show:
            self.chat_panel.removeEventFilter(self)
            self.composer.setFocus()
        return False

    def shutdown(self) -> None:
        """Saves everything and lets go of the chat file; may be called twice."""
        for notice in (self.undo_notice, self.notice):
            notice.expire()
        self.session.close()

    # What a user, or a demo, does ------------------------------------------------------------------------------------

    @property
    def current(self) -> Conversation:
        return self._current

    def new_conversation(self) -> Conversation:
        """Shows an empty conversation: a new one, or the one that is still empty."""
        unused = (each for each in self.session.conversations if each.is_empty)
        empty = next(unused, None)
        self.open_conversation(empty or self.session.new_conversation())
        self.composer.setFocus()
        return self._current

    def open_conversation(self, conversation: Conversation) -> None:
        self._drafts[self._current.id] = self.composer.text
        self._current = conversation
        self.session.open(conversation)
        self.transcript.show_conversation(conversation)
        self.options.show_conversation(conversation)
        self.composer.set_text(self._drafts.pop(conversation.id, ""))
        self._update()

    def send(self, text: str) -> bool:
        """Sends a message in the conversation that is open; False, with a sentence on the screen, where it cannot."""
        try:
            self.session.send(self._current, text)
        except ChatError as error:
            self.notice.say(str(error), is_error=True, seconds=UNDO_SECONDS)
            return False
        self.transcript.follow()
        return True

    def stop(self) -> None:
        self.session.stop(self._current)

    def regenerate(self) -> None:
        try:
            self.session.regenerate(self._current)
        except ChatError as error:
            self.notice.say(str(error), is_error=True, seconds=UNDO_SECONDS)

    # -----------------------------------------------------------------------------------------------------------------

    def _first_conversation(self) -> Conversation:
        known = [found.conversation for found in self.session.search("") if not found.conversation.damage]
        return known[0] if known else self.session.new_conversation()

    def _chosen(self, conversation_id: str) -> None:
        conversation = self.session.conversations.get(conversation_id)
        if conversation is not None and conversation is not self._current:
            self.open_conversation(conversation)

    def _submit(self, text: str) -> None:
        if self.send(text):
            self.composer.set_text("")

    def _options_changed(self, system_prompt: str, params: SamplingParams) -> None:
        self.session.set_options(self._current, system_prompt, params)

    def _delete_conversation(self, conversation_id: str) -> None:
        conversation = self.session.conversations.get(conversation_id)
        if conversation is None:
            return
        self.session.delete(conversation)
        if conversation is self._current:
            self.open_conversation(self._first_conversation())
        if conversation.is_loaded and not conversation.num_messages:
            return  # nothing was lost

        def undo() -> None:
            self.session.restore(conversation)
            self.open_conversation(conversation)

        self.undo_notice.say(
            f"Deleted “{conversation.title or UNTITLED}”.",
            action=("Undo", undo),
            seconds=UNDO_SECONDS,
            expired=lambda: self.session.purge(conversation),
        )

    def _delete_message(self, message_id: str) -> None:
        conversation = self._current
        try:
            deleted = self.session.delete_message(conversation, message_id)
        except ChatError as error:
            self.notice.say(str(error), is_error=True, seconds=UNDO_SECONDS)
            return

        def undo() -> None:
            if self.session.conversations.get(conversation.id) is None:  # emptied, it was deleted too
                self.session.restore(conversation)
            self.session.undelete(conversation, deleted)
            self.open_conversation(conversation)

        self.undo_notice.say("Deleted the message and its answer.", action=("Undo", undo), seconds=UNDO_SECONDS)

    # What changes on the screen --------------------------------------------------------------------------------------

    def _path_changed(self, conversation_id: str) -> None:
        if conversation_id == self._current.id:
            self.transcript.sync()
            self._update()

    def _message_changed(self, conversation_id: str, message_id: str) -> None:
        if conversation_id == self._current.id:
            self.transcript.refresh(message_id)

    def _stepped(self) -> None:
        answer = self._current.open_answer
        if answer is not None and self.transcript.isVisible():
            self.transcript.refresh_line(answer.id)

    def _update(self) -> None:
        """Title, context and buttons for the conversation that is open."""
        conversation = self._current
        self.title.setText(conversation.title or UNTITLED)
        self.list_panel.set_current(conversation.id)
        self.composer.set_state(generating=conversation.open_answer is not None, blocked=self._blocked())
        self._context.setText(self._context_text())
        self._show_store(self.session.problem)

    def _blocked(self) -> str:
        if self._current.damage:
            return "This chat could not be read whole; start a new one to go on."
        if self._bridge.state in ("stopped", "failed", "dead"):
            return "No model is running."
        return ""

    def _context_text(self) -> str:
        info = self._bridge.info
        counted = [each.timings for each in self._current.path if each.timings.prompt_tokens]
        used = counted[-1].prompt_tokens + counted[-1].tokens if counted else 0
        if info is None or not used:
            return ""
        return f"{used:,} / {info.max_model_len:,} tokens"

    def _show_store(self, problem: str) -> None:
        damage = self._current.damage and f"Part of this chat could not be read: {self._current.damage} It is kept."
        text = damage or problem
        if text and text != self.store_notice.text:
            self.store_notice.say(text, is_error=True)
        elif not text:
            self.store_notice.expire()

    def _comparing(self, _progress: object) -> None:
        if "comparison" not in self.engine_notice.text:  # several times a second: said once
            self._show_engine()

    def _show_engine(self, _state: str = "") -> None:
        """What the engine's state means for the chat; the window itself says how far loading is, or why it died."""
        state = self._bridge.state
        if state in ("starting", "loading"):
            self.engine_notice.say("The model is loading; what you send now waits for it.")
        elif state == "dead":
            again = ("Restart", self._bridge.restart)
            self.engine_notice.say("The engine is gone. Answers keep the text they have.", action=again)
        elif state in ("failed", "stopped"):
            again = ("Start", self._bridge.restart)
            self.engine_notice.say("No model is running.", action=again)
        elif self._bridge.comparing:
            self.engine_notice.say("A comparison has the engine; what you send now waits until it is over.")
        elif self._bridge.paused:
            self.engine_notice.say("The engine pauses; what you send now waits until it runs on (F8).")
        else:
            self.engine_notice.expire()
        self._update()
