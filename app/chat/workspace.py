"""The chat as the window docks it: the list of conversations and the conversation that is open.

Create it with the engine's bridge, put ``list_panel`` and ``chat_panel`` into docks, call
:meth:`ChatWorkspace.shutdown` before the window closes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QEvent, QObject, QSettings, Qt, QTimer
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QApplication, QToolButton

from app.chat.chat_commands import ChatCommands
from app.chat.chat_files import ChatFiles
from app.chat.chat_list import ChatList
from app.chat.chat_list_model import title_words
from app.chat.chat_notices import ChatNotices
from app.chat.composer import Composer
from app.chat.conversation import ChatError, Conversation, Role
from app.chat.elided import ElidedLabel
from app.chat.notice import NoticeBar
from app.chat.options import OptionsDrawer
from app.chat.places import Places
from app.chat.session import ChatSession
from app.chat.store import default_store_path
from app.chat.transcript import Transcript
from app.chat.undo import UNDO_SECONDS, UndoStack
from app.engine_bridge import EngineBridge
from app.selection import Selection
from app.theme import Theme
from app.translation import ntr, tr
from app.widgets import Card

BRIEF_SECONDS = 2.0
PURGE_SECONDS = 0.03
OPEN_KEY, FOLDED_KEY = "chat/open", "chat/folded"


class ChatWorkspace(QObject):
    def __init__(
        self,
        bridge: EngineBridge,
        theme: Theme,
        selection: Selection,
        store_path: Path | None = None,
        parent: QObject | None = None,
        *,
        settings: QSettings | None = None,
    ) -> None:
        """``store_path``: the chat file; None: the one in the user's data folder. ``settings``: which chat was open and
        which folders are folded away; None: not kept."""
        super().__init__(parent)
        self._bridge = bridge
        self._settings = settings
        self._held = 0
        self._is_open = True
        self.session = ChatSession(bridge, store_path or default_store_path(), self)
        self._current = self._last_open() or self._newest()
        self.undo_notice = NoticeBar(theme)
        self.notice = NoticeBar(theme)
        self.undo = UndoStack(self.undo_notice, self)
        self.files = ChatFiles(self.session, theme, self)
        self.commands = ChatCommands(self.session, self.undo, self.files, self)
        self.list_panel = ChatList(self.session, self.commands, theme)
        self.transcript = Transcript(theme, selection, bridge.run_state)
        self.composer = Composer(self.session, bridge, theme)
        self.places = Places(self.session, self.composer, self.transcript, self)
        self.options = OptionsDrawer(self.session, bridge)
        self.options.hide()
        self.notices = ChatNotices(
            bridge, self.session, theme, new_chat=self.new_conversation, export_all=self.files.export, parent=self
        )
        self.engine_notice, self.store_notice = self.notices.engine, self.notices.store
        self._build_panel()
        self._connect()
        self._add_shortcut()
        self._restore_folded()
        self.chat_panel.installEventFilter(self)
        self.open_conversation(self._current)
        self._show_engine()

    def _build_panel(self) -> None:
        self.options_button = QToolButton()
        self.options_button.setText(tr("Options"))
        self.options_button.setCheckable(True)
        self.options_button.setToolTip(tr("System prompt, sampling, context and priority of this chat"))
        self.title = ElidedLabel("title")
        self.chat_panel = Card("", self.options_button)
        self.chat_panel.setAccessibleName(tr("Chat"))
        # Titles are long: this one gives way where the card's own would hold the dock open.
        self.chat_panel.header.layout().insertWidget(0, self.title, 100)
        self.chat_panel.setMinimumWidth(300)
        body = self.chat_panel.body
        for widget in (self.options, self.store_notice):
            body.addWidget(widget)
        body.addWidget(self.transcript, 1)
        for widget in (self.undo_notice, self.files.notice, self.notice, self.engine_notice, self.composer):
            body.addWidget(widget)

    def _connect(self) -> None:
        session, bridge, panel = self.session, self._bridge, self.list_panel
        session.path_changed.connect(self._path_changed)
        session.message_changed.connect(self._message_changed)
        session.listed.connect(self._update)
        session.reloaded.connect(self._reloaded)
        session.save_problem.connect(self._show_store)
        session.refused.connect(lambda chat, why: chat == self._current.id and self._refuse(ChatError(why)))
        bridge.stepped.connect(self._stepped)
        bridge.state_changed.connect(self._show_engine)
        bridge.paced.connect(lambda _paused: self._show_engine())
        bridge.compare_progress.connect(lambda _progress: self.notices.show_engine())
        bridge.compare_done.connect(lambda _done: self._show_engine())
        panel.opened.connect(self._opened)
        panel.new_clicked.connect(self.new_conversation)
        panel.delete_wanted.connect(self.delete_conversations)
        panel.folded.connect(self._keep_folded)
        self.commands.hold = self.files.hold = self.hold
        self.commands.to_open.connect(lambda conversation_id: self._opened(conversation_id, "", False))
        self.commands.said.connect(lambda text: self.notice.say(text, seconds=UNDO_SECONDS))
        self.files.imported.connect(self._imported)
        self._connect_transcript()
        self.places.draft_kept.connect(self._draft_kept)
        self.composer.sent.connect(self._submit)
        self.composer.stopped.connect(self.stop)
        self.composer.new_chat_wanted.connect(self._take_to_new)
        self.composer.policy_chosen.connect(lambda: self.options.show_conversation(self._current))
        self.composer.edit_last_wanted.connect(self.transcript.edit_last)
        self.options.changed.connect(self.composer.context_changed)
        self.options_button.toggled.connect(self.options.setVisible)
        QCoreApplication.instance().aboutToQuit.connect(self.shutdown)

    def _connect_transcript(self) -> None:
        transcript, session = self.transcript, self.session
        transcript.suggestion_chosen.connect(self.send)
        transcript.regenerate_clicked.connect(self.regenerate)
        transcript.edited.connect(self._resend)
        transcript.continue_clicked.connect(lambda: self._answer(lambda: session.continue_answer(self._current)))
        transcript.version_chosen.connect(lambda message_id: session.show_version(self._current, message_id))
        transcript.delete_clicked.connect(self.delete_message)
        transcript.copied.connect(lambda: self.notice.say(tr("Copied."), seconds=BRIEF_SECONDS))

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
        self._is_open = False
        self.files.cancel()
        for notice in (self.undo_notice, self.notice):
            notice.expire()
        self.places.keep()
        self.places.forget()
        self.list_panel.rest()
        self.transcript.rest()
        self.session.close()

    # What a user, or a demo, does ------------------------------------------------------------------------------------

    @property
    def current(self) -> Conversation:
        return self._current

    def new_conversation(self) -> Conversation:
        """Shows an empty conversation: a new one, or the one in which nothing was written yet."""
        self.places.keep()
        self.open_conversation(self._unused() or self.session.new_conversation())
        self.composer.setFocus()
        return self._current

    def open_conversation(self, conversation: Conversation) -> None:
        self._current = conversation
        self.session.open(conversation)
        self.places.show(conversation)
        self.options.show_conversation(conversation)
        if self._settings is not None:
            self._settings.setValue(OPEN_KEY, conversation.id)
        self._update()

    def send(self, text: str) -> bool:
        """Sends a message in the conversation that is open; False, with a sentence on the screen, where it cannot."""
        return self._answer(lambda: self.session.send(self._current, text))

    def stop(self) -> None:
        self.session.stop(self._current)

    def regenerate(self, message_id: str = "") -> None:
        """Another version of an answer, by default of the last one."""
        self._answer(lambda: self.session.regenerate(self._current, message_id or None))

    def delete_message(self, message_id: str) -> None:
        conversation = self._current
        try:
            deleted = self.session.delete_message(conversation, message_id)
        except ChatError as error:
            self._refuse(error)
            return

        def undo() -> None:
            if self._current is not conversation:
                self.open_conversation(conversation)
            try:
                self.session.undelete(conversation, deleted)
            except ChatError as error:
                self._refuse(error)

        is_question = deleted.messages[0].role is Role.USER
        text = tr("Deleted the message and its answer.") if is_question else tr("Deleted this version of the answer.")
        self.undo.push(text, undo)

    def delete_conversations(self, ids: list[str]) -> None:
        """Deletes conversations; those that hold something can be brought back for a while."""
        session, chats = self.session, self.commands.chats(ids)
        self.places.keep()
        beside = self.list_panel.neighbour(ids)
        lost = [each for each in chats if not each.is_empty or each.draft.strip()]
        words = tr("Deleted “{title}”.", title=title_words(lost[0])) if lost else ""
        if len(lost) > 1:
            words = ntr("Deleted {count:,} chat.", "Deleted {count:,} chats.", len(lost))
        shown = self._current
        with self.hold():
            session.delete(*chats)
            if self._is_gone(shown):
                self.places.forget()
                self.open_conversation(session.conversations.get(beside) or self._newest())

        def undo() -> None:
            with self.hold():
                session.restore(*lost)
            self.open_conversation(shown if shown in lost else lost[0])

        if lost:
            self.undo.push(words, undo, lambda: self._purge(lost))

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Much changes at once: the screen follows when it is over."""
        self._held += 1
        try:
            with self.list_panel.hold():
                yield
        finally:
            self._held -= 1
            self._update()

    # -----------------------------------------------------------------------------------------------------------------

    def _last_open(self) -> Conversation | None:
        """The one that was open when the window closed; an empty one where nothing had been written in it."""
        last = self._settings.value(OPEN_KEY) if self._settings is not None else None
        if not isinstance(last, str) or not last:
            return None
        return self.session.conversations.get(last) or self._unused() or self.session.new_conversation()

    def _newest(self) -> Conversation:
        sound = [each for each in self.session.conversations if not each.damage]
        return max(sound, key=lambda each: each.updated) if sound else self.session.new_conversation()

    def _unused(self) -> Conversation | None:
        plain = (each for each in self.session.conversations if each.is_empty and not each.draft.strip())
        return next((each for each in plain if not each.folder and not each.pinned), None)

    def _purge(self, conversations: list[Conversation]) -> None:
        """Takes deleted conversations off the disk, which overwrites them and takes its time: bit by bit. What the end
        of the window cuts off goes when the file is closed."""
        begun = time.perf_counter()
        while conversations and time.perf_counter() - begun < PURGE_SECONDS:
            self.session.purge(conversations.pop())
        if conversations:
            QTimer.singleShot(0, self, lambda: self._is_open and self._purge(conversations))

    def _draft_kept(self) -> None:
        """A chat without a title is called after what is written in it."""
        if not self._current.title:
            self.title.setText(title_words(self._current))
            self.list_panel.model.touch()

    def _is_gone(self, conversation: Conversation) -> bool:
        return self.session.conversations.get(conversation.id) is not conversation

    def _opened(self, conversation_id: str, message_id: str, go_on: bool) -> None:
        conversation = self.session.conversations.get(conversation_id)
        if conversation is None:
            return
        if conversation is not self._current:
            self.open_conversation(conversation)
        if message_id and conversation.find(message_id) is not None:
            if all(each.id != message_id for each in conversation.path):
                self.session.show_version(conversation, message_id)
            self.transcript.show_message(message_id)
        if go_on:
            self.composer.setFocus()

    def _answer(self, begin: Callable[[], None]) -> bool:
        """Has an answer written, or says why that cannot be."""
        in_transcript = self.transcript.isAncestorOf(QApplication.focusWidget())
        try:
            begin()
        except ChatError as error:
            self._refuse(error)
            return False
        self.transcript.follow()
        if in_transcript:  # what had the focus, a button or the field of an edited message, has gone with its duty
            self.composer.setFocus()
        return True

    def _refuse(self, error: ChatError) -> None:
        self.notice.say(str(error), is_error=True, seconds=UNDO_SECONDS)

    def _submit(self, text: str) -> None:
        if self.send(text):
            self.places.sent()

    def _take_to_new(self) -> None:
        """What is written goes along into a new chat."""
        text = self.composer.text
        self.composer.set_text("")
        self.new_conversation()
        self.composer.set_text(text)

    def _resend(self, message_id: str, text: str) -> None:
        self._answer(lambda: self.session.resend(self._current, message_id, text))

    def _imported(self, ids: list[str], text: str) -> None:
        if len(ids) == 1:
            self._opened(ids[0], "", False)
        self.undo.push(text, lambda: self.delete_conversations(ids))

    def _reloaded(self) -> None:
        """All conversations are others: a backup was restored, or everything was wiped."""
        self.undo.forget()
        self.places.forget()
        self.list_panel.search.clear()  # it may hold words of a chat that was wiped
        self.open_conversation(self._newest())

    def _restore_folded(self) -> None:
        kept = self._settings.value(FOLDED_KEY) if self._settings is not None else None
        names = [kept] if isinstance(kept, str) else kept or []
        self.list_panel.model.collapsed.update(name for name in names if name)

    def _keep_folded(self) -> None:
        if self._settings is not None:
            self._settings.setValue(FOLDED_KEY, sorted(self.list_panel.model.collapsed))

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
        """Title and buttons for the conversation that is open."""
        if self._held:
            return
        conversation = self._current
        self.title.setText(title_words(conversation))
        self.list_panel.set_current(conversation.id)
        self.composer.set_state(generating=conversation.open_answer is not None, blocked=self._blocked())
        self._show_store()

    def _blocked(self) -> str:
        if self._current.damage:
            return tr("This chat could not be read whole; start a new one to go on.")
        if self._bridge.state in ("stopped", "failed", "dead"):
            return tr("No model is running.")
        return ""

    def _show_store(self, _problem: str = "") -> None:
        self.notices.show_store(self._current)

    def _show_engine(self, _state: str = "") -> None:
        self.notices.show_engine()
        self._update()
