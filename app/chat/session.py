"""Joins the conversations, the engine and the chat file; the views listen to it and call it.

::

    views ──▶ ChatSession ──▶ Conversations (what is true)
                 │  ▲                            ┌─ at once where the user did something or an answer ends
                 │  └── bridge: outputs, death   │
                 └──▶ Saver ──▶ ChatStore, ──────┴─ every FLUSH_MS while answers stream
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal

from app.chat import backup
from app.chat.conversation import (
    ChatError,
    ContextPolicy,
    Conversation,
    Deleted,
    Message,
    Role,
    ScrollPlace,
    as_written,
    shortened,
    sound,
)
from app.chat.conversations import Conversations
from app.chat.exchange import with_free_ids
from app.chat.preset import BUILT_IN, Preset, PresetKind, check_own, own_preset
from app.chat.requests import Requests
from app.chat.saving import Saver
from app.chat.search import Found, Search, find
from app.chat.store import ChatStore, StoreError
from app.engine_bridge import EngineBridge
from engine.request import SamplingParams

INDEX_AFTER_MS = 1_500
INDEX_SECONDS, INDEX_REST_MS = 0.02, 40
"""The window is up before indexing goes on, and has two thirds of the time while it does."""


class ChatSession(QObject):
    listed = Signal()
    """Conversations came, went, were renamed or moved, or began or ended an answer."""
    reloaded = Signal()
    """All conversations are others: what was shown is no longer among them."""
    path_changed = Signal(str)
    """Id of a conversation that shows other messages, or has other versions of them."""
    message_changed = Signal(str, str)
    """Ids of a conversation and of a message of it that has new text or a new state."""
    refused = Signal(str, str)
    """Id of a conversation whose last answer could not go on and is as it was, and the reason, a sentence."""
    save_problem = Signal(str)
    """Why chats cannot be saved at the moment; empty when they can again."""

    def __init__(self, bridge: EngineBridge, store_path: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._bridge = bridge
        self.conversations = Conversations()
        self._saver = Saver(ChatStore.open(store_path), self)
        self._saver.problem_changed.connect(lambda: self.save_problem.emit(self.problem))
        self._index_timer = QTimer(self)
        self._index_timer.setSingleShot(True)
        self._index_timer.timeout.connect(lambda: self._index_more())
        self._read_all()
        self._requests = Requests(bridge, lambda: self.conversations, self)
        self._requests.begun.connect(self.listed)
        self._requests.changed.connect(self._changed)
        self._requests.ended.connect(self._ended)
        self._requests.refused.connect(self.refused)

    @property
    def store(self) -> ChatStore:
        return self._saver.store

    @property
    def problem(self) -> str:
        """Why chats are not saved, or something else about the file that the user should know."""
        return self._saver.problem or self.store.notice

    def close(self) -> None:
        """Saves what there is and lets go of the file. Open answers are on disk as far as they came."""
        self._requests.close()
        self._index_timer.stop()
        self._saver.close()

    # Messages: where it cannot be done, ChatError says why and nothing has changed -----------------------------------

    def send(self, conversation: Conversation, text: str) -> None:
        self._requests.check()
        self._begin(conversation, *self.conversations.send(conversation, text))

    def regenerate(self, conversation: Conversation, message_id: str | None = None) -> None:
        """Another version of an answer, by default the last; the path ends there."""
        self._requests.check()
        self._begin(conversation, self.conversations.regenerate(conversation, message_id))

    def resend(self, conversation: Conversation, message_id: str, text: str) -> None:
        """The user's message, edited, as another version with an answer of its own; unchanged it is regenerated."""
        self._requests.check()
        message = conversation.find(message_id)
        if message is not None and message.role is Role.USER and message.text == as_written(text):
            self._begin(conversation, self.conversations.regenerate(conversation, message_id))
        else:
            self._begin(conversation, *self.conversations.resend(conversation, message_id, text))

    def continue_answer(self, conversation: Conversation) -> None:
        """The last answer grows on where it was stopped or cut."""
        self._requests.check()
        answer = self.conversations.continue_answer(conversation)
        self._begin(conversation, answer)
        self.message_changed.emit(conversation.id, answer.id)

    def stop(self, conversation: Conversation) -> None:
        stopped = self.conversations.stop(conversation)
        if stopped is None:
            return
        answer, request_id = stopped
        if request_id is not None:
            self._bridge.abort(request_id)
        self._ended([(conversation, answer)])

    def show_version(self, conversation: Conversation, message_id: str) -> None:
        """Shows the branch of this message, below it as it was last seen."""
        self.conversations.show_version(conversation, message_id)
        self._saver.save_conversation(conversation)
        self.path_changed.emit(conversation.id)

    def delete_message(self, conversation: Conversation, message_id: str) -> Deleted:
        """See :meth:`Conversations.delete_message`; :meth:`undelete` takes what it returns."""
        deleted = self.conversations.delete_message(conversation, message_id)
        self._saver.forget_messages(deleted.messages)
        self._save_now(conversation, *deleted.moved)
        self.path_changed.emit(conversation.id)
        return deleted

    def undelete(self, conversation: Conversation, deleted: Deleted) -> None:
        self.conversations.undelete(conversation, deleted)
        # What was moved may have been deleted itself since.
        there = [each for each in (*deleted.messages, *deleted.moved) if conversation.find(each.id) is each]
        self._save_now(conversation, *there)
        self.path_changed.emit(conversation.id)

    # Conversations ---------------------------------------------------------------------------------------------------

    def new_conversation(self) -> Conversation:
        """An empty conversation; it reaches the disk when something is written in it."""
        conversation = self.conversations.add(Conversation())
        self.listed.emit()
        return conversation

    def open(self, conversation: Conversation) -> None:
        """Reads its messages, where they are still on disk."""
        try:
            self.store.load_messages(conversation)
        except StoreError as error:
            conversation.tree, conversation.damage = Conversation().tree, str(error)

    def rename(self, conversation: Conversation, title: str) -> None:
        title = shortened(sound(title))
        if title and title != conversation.title and not conversation.damage:
            conversation.title = title
            self._relisted(conversation)

    def set_pinned(self, conversation: Conversation, pinned: bool) -> None:
        if pinned != conversation.pinned:
            conversation.pinned = pinned
            self._relisted(conversation)

    def set_folder(self, conversation: Conversation, folder: str) -> None:
        """Puts it into the folder of that name; empty: into none."""
        folder = shortened(sound(folder))
        if folder != conversation.folder:
            conversation.folder = folder
            self._relisted(conversation)

    def rename_folder(self, old: str, new: str) -> None:
        """Another name for a folder; that of another folder joins the two, an empty one dissolves it."""
        new = shortened(sound(new))
        moved = [each for each in self.conversations if old and each.folder == old != new]
        for conversation in moved:
            conversation.folder = new
        self._relisted(*moved)

    def folders(self) -> list[str]:
        """The names of the folders that hold something, in alphabetical order."""
        return sorted({each.folder for each in self.conversations if each.folder}, key=str.casefold)

    def set_priority(self, conversation: Conversation, priority: int) -> None:
        """Of its requests from now on, and of the one that runs; the lower runs first."""
        if priority == conversation.priority:
            return
        conversation.priority = priority
        answer = conversation.open_answer
        if answer is not None and answer.request_id is not None:
            self._bridge.set_priority(answer.request_id, priority)
        self._relisted(conversation)

    def set_policy(self, conversation: Conversation, policy: ContextPolicy) -> None:
        conversation.policy = policy
        self._saver.save_conversation(conversation)

    def set_options(self, conversation: Conversation, system_prompt: str, params: SamplingParams) -> None:
        conversation.system_prompt = sound(system_prompt)
        conversation.params = replace(params, stop=tuple(map(sound, params.stop)))
        self._saver.save_conversation(conversation)

    def set_draft(self, conversation: Conversation, draft: str) -> None:
        draft = sound(draft)
        if draft != conversation.draft:
            conversation.draft = draft
            self._saver.save_conversation(conversation)

    def set_scroll(self, conversation: Conversation, scroll: ScrollPlace | None) -> None:
        if scroll != conversation.scroll:
            conversation.scroll = scroll
            self._saver.save_conversation(conversation)

    def delete(self, *conversations: Conversation) -> None:
        """Out of the list, all in one go; :meth:`restore` brings them back until :meth:`purge`."""
        for conversation in conversations:
            self.stop(conversation)
        self.flush()
        for conversation in conversations:
            self.conversations.remove(conversation)
        self._set_deleted(conversations, True)

    def restore(self, *conversations: Conversation) -> None:
        for conversation in conversations:
            self.conversations.add(conversation)
        self._set_deleted(conversations, False)

    def _set_deleted(self, conversations: Iterable[Conversation], deleted: bool) -> None:
        ids = [each.id for each in conversations]
        self._saver.attempt(lambda: self.store.set_deleted(ids, deleted))
        self.listed.emit()

    def purge(self, conversation: Conversation) -> None:
        """Takes a deleted conversation off the disk for good."""
        self._saver.drop(conversation)
        self._saver.attempt(lambda: self.store.purge(conversation.id))

    def begin_search(self, needle: str) -> Search:
        """Looks in all titles and texts; it goes on as it is told to, as long as the chats stay as they are."""
        self.flush()
        return Search(needle, self.conversations, self.store)

    def search(self, needle: str) -> list[Found]:
        """What a search finds, whole."""
        self.flush()
        try:
            return find(needle, self.conversations, self.store)
        except StoreError as error:
            self._saver.say(str(error))
            return []

    # Presets ---------------------------------------------------------------------------------------------------------

    def presets(self, kind: PresetKind) -> list[Preset]:
        """The built-in ones, then the user's own by name."""
        try:
            own = self.store.presets(kind)
        except StoreError:
            own = []
        return [each for each in BUILT_IN if each.kind == kind] + own

    def save_preset(self, preset: Preset) -> None:
        """Keeps a preset of the user's, in place of one of the same name. Raises :class:`ChatError`."""
        own = own_preset(preset)
        self._store_now(lambda: self.store.save_preset(own))

    def delete_preset(self, preset: Preset) -> None:
        check_own(preset)
        self._store_now(lambda: self.store.delete_preset(preset))

    # The whole file --------------------------------------------------------------------------------------------------

    def add_imported(self, imported: list[Conversation]) -> None:
        """Adds conversations of another file; where ids are in use here already they get others."""
        for conversation in with_free_ids(imported, self.store):
            self.conversations.add(conversation)
            self._saver.save_conversation(conversation)
            self._saver.save_messages(conversation, conversation.messages)
        self.flush()
        self.listed.emit()

    def backup(self, path: Path) -> None:
        """Writes all chats and presets to a file of its own. Raises :class:`ChatError`."""
        self.flush()
        self._store_now(lambda: backup.write(self.store, path))

    def restore_backup(self, path: Path) -> backup.BackupSummary:
        """Puts a backup in the place of the chats; those are kept in a file beside. Raises :class:`ChatError`."""
        self._stop_all()
        if not self.flush():
            raise ChatError(self.problem)
        return self._replace_store(lambda: backup.restore(self.store, path))

    def wipe(self) -> None:
        """Every chat off the disk for good, its text overwritten; presets stay. Raises :class:`ChatError`."""
        self._stop_all()
        self._saver.drop_all()
        self._replace_store(lambda: backup.wipe(self.store))

    # What the engine does --------------------------------------------------------------------------------------------

    def _begin(self, conversation: Conversation, *messages: Message) -> None:
        self._requests.begin(conversation)
        self._save_now(conversation, *messages)
        self.path_changed.emit(conversation.id)
        self.listed.emit()

    def _changed(self, changed: list[tuple[Conversation, Message]]) -> None:
        for conversation, answer in changed:
            self._saver.save_messages(conversation, [answer])
            self.message_changed.emit(conversation.id, answer.id)

    def _ended(self, ended: list[tuple[Conversation, Message]]) -> None:
        for conversation, answer in ended:
            self._saver.save_messages(conversation, [answer])
        self.flush()
        for conversation, answer in ended:
            self.message_changed.emit(conversation.id, answer.id)
        self.listed.emit()

    def _stop_all(self) -> None:
        for conversation in list(self.conversations):
            self.stop(conversation)

    # Saving ----------------------------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Writes what is not on disk yet; on trouble says so and tries again later. Whether all is on disk."""
        return self._saver.flush()

    def _save_now(self, conversation: Conversation, *messages: Message) -> None:
        self._saver.save_conversation(conversation)
        self._saver.save_messages(conversation, messages)
        self.flush()

    def _relisted(self, *conversations: Conversation) -> None:
        for conversation in conversations:
            self._saver.save_conversation(conversation)
        if conversations:
            self.listed.emit()

    def _read_all(self) -> None:
        self.conversations = Conversations()

        def read() -> None:
            for conversation in self.store.conversations():
                self.conversations.add(conversation)

        self._saver.attempt(read)
        self._index_more(then_after=INDEX_AFTER_MS)

    def _index_more(self, *, then_after: int = INDEX_REST_MS) -> None:
        """A slice of what is not indexed yet, of a file of an older version, say; until then it is found by reading."""
        with contextlib.suppress(StoreError):
            if not self.store.index_more(INDEX_SECONDS):
                self._index_timer.start(then_after)

    def _store_now(self, action) -> None:
        try:
            action()
        except StoreError as error:
            raise ChatError(str(error)) from None

    def _replace_store(self, action):
        """``action`` puts another file in the store's place and returns the opened store, and what else it likes."""
        try:
            return action()
        except StoreError as error:
            raise ChatError(str(error)) from None
        finally:
            self._read_all()
            self.reloaded.emit()
            self.listed.emit()
