"""Joins the conversations, the engine and the chat file; the views listen to it and call it.

::

    views ──▶ ChatSession ──▶ Conversations (what is true)
                 │  ▲                            ┌─ at once where the user did something or an answer ends
                 │  └── bridge: outputs, death   │
                 └──▶ ChatStore, ────────────────┴─ every FLUSH_MS while answers stream
"""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal

from app.chat.conversation import ChatError, Conversation, Conversations, Message, Turn
from app.chat.store import ChatStore, SavedMessage, StoreError
from app.engine_bridge import EngineBridge
from engine.client import EngineDied
from engine.messages import LoadFailed, Output
from engine.request import SamplingParams

FLUSH_MS = 300
"""How long streamed text may be in memory only."""
RETRY_MS = 2_000
"""When a save that failed is tried again."""

_ENDED = "The engine was stopped before this answer was complete."


class ChatSession(QObject):
    listed = Signal()
    """Conversations came, went, were renamed, or began or ended an answer."""
    turns_changed = Signal(str)
    """Id of a conversation whose turns are others now."""
    message_changed = Signal(str, str)
    """Ids of a conversation and of a message of it that has new text or a new state."""
    save_problem = Signal(str)
    """Why chats cannot be saved at the moment; empty when they can again."""

    def __init__(self, bridge: EngineBridge, store_path: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._bridge = bridge
        self.store = ChatStore.open(store_path)
        self.conversations = Conversations()
        self._unsaved_conversations: dict[str, Conversation] = {}
        self._unsaved_messages: dict[str, SavedMessage] = {}
        self._doomed_messages: set[str] = set()
        self._problem = ""
        self._closed = False
        self._flush_timer = QTimer(self)
        self._flush_timer.setSingleShot(True)
        self._flush_timer.timeout.connect(self.flush)
        try:
            for conversation in self.store.conversations():
                self.conversations.add(conversation)
        except StoreError as error:
            self._problem = str(error)
        bridge.outputs.connect(self._take_outputs)
        bridge.ready.connect(self._engine_ready)
        bridge.died.connect(self._engine_died)
        bridge.load_failed.connect(self._load_failed)
        bridge.state_changed.connect(self._state_changed)

    def close(self) -> None:
        """Saves what there is and lets go of the file. Open answers are on disk as far as they came."""
        if self._closed:
            return
        self._closed = True
        self._flush_timer.stop()
        self._write()
        self.store.close()

    # What the user does ----------------------------------------------------------------------------------------------

    def new_conversation(self) -> Conversation:
        """An empty conversation; it reaches the disk with its first message."""
        conversation = self.conversations.add(Conversation())
        self.listed.emit()
        return conversation

    def open(self, conversation: Conversation) -> None:
        """Reads its turns, where they are still on disk."""
        try:
            self.store.load_turns(conversation)
        except StoreError as error:
            conversation.turns, conversation.damage = [], str(error)

    def send(self, conversation: Conversation, text: str) -> None:
        """Raises :class:`ChatError` where it cannot be sent; nothing has changed then."""
        self._check_engine()
        turn = self.conversations.send(conversation, text)
        self._begin(conversation, turn, turn.messages)

    def regenerate(self, conversation: Conversation) -> None:
        """Raises :class:`ChatError` where there is nothing to answer or no engine."""
        self._check_engine()
        turn, replaced = self.conversations.regenerate(conversation)
        if replaced is not None:
            self._forget([replaced])
        assert turn.answer is not None
        self._begin(conversation, turn, [turn.answer])

    def stop(self, conversation: Conversation) -> None:
        stopped = self.conversations.stop(conversation)
        if stopped is None:
            return
        answer, request_id = stopped
        if request_id is not None:
            self._bridge.abort(request_id)
        self._ended([(conversation, answer)])

    def rename(self, conversation: Conversation, title: str) -> None:
        title = " ".join(title.split())
        if title and title != conversation.title and not conversation.damage:
            conversation.title = title
            self._save_conversation(conversation)
            self.listed.emit()

    def set_options(self, conversation: Conversation, system_prompt: str, params: SamplingParams) -> None:
        conversation.system_prompt, conversation.params = system_prompt, params
        self._save_conversation(conversation)

    def delete_turn(self, conversation: Conversation, message_id: str) -> Turn:
        """Raises :class:`ChatError` while it is being answered."""
        turn = self.conversations.delete_turn(conversation, message_id)
        self._forget(turn.messages)
        self.flush()
        self.turns_changed.emit(conversation.id)
        return turn

    def restore_turn(self, conversation: Conversation, turn: Turn) -> None:
        self.conversations.restore_turn(conversation, turn)
        for message in turn.messages:
            self._doomed_messages.discard(message.id)
            self._note(conversation, turn, message)
        self.flush()
        self.turns_changed.emit(conversation.id)

    def delete(self, conversation: Conversation) -> None:
        """Out of the list; :meth:`restore` brings it back until :meth:`purge`."""
        self.stop(conversation)
        self.flush()
        self.conversations.remove(conversation)
        self._try(lambda: self.store.set_deleted(conversation.id, True))
        self.listed.emit()

    def restore(self, conversation: Conversation) -> None:
        self.conversations.add(conversation)
        self._try(lambda: self.store.set_deleted(conversation.id, False))
        self.listed.emit()

    def purge(self, conversation: Conversation) -> None:
        """Takes a deleted conversation off the disk for good."""
        self._unsaved_conversations.pop(conversation.id, None)
        for saved in list(self._unsaved_messages.values()):
            if saved.conversation is conversation:
                del self._unsaved_messages[saved.message.id]
        self._try(lambda: self.store.purge(conversation.id))

    def search(self, needle: str) -> list[Conversation]:
        """Conversations with ``needle`` in title or text, the last used first; all of them for an empty one."""
        ordered = sorted(self.conversations, key=lambda each: each.updated, reverse=True)
        if not needle.strip():
            return ordered
        self.flush()
        try:
            found = self.store.search(needle.strip())
        except StoreError as error:
            self._tell(str(error))
            return ordered
        return [each for each in ordered if each.id in found]

    @property
    def problem(self) -> str:
        """Why chats are not saved, or something else about the file that the user should know."""
        return self._problem or self.store.notice

    # What the engine does --------------------------------------------------------------------------------------------

    def _check_engine(self) -> None:
        if self._bridge.state not in ("ready", "starting", "loading"):
            raise ChatError("No model is running; start the engine, then send again.")

    def _begin(self, conversation: Conversation, turn: Turn, messages: list[Message]) -> None:
        self._save_conversation(conversation)
        for message in messages:
            self._note(conversation, turn, message)
        if self._bridge.state == "ready":
            self._hand_over(conversation)
        self.flush()
        self.turns_changed.emit(conversation.id)
        self.listed.emit()

    def _hand_over(self, conversation: Conversation) -> None:
        answer = conversation.open_answer
        assert answer is not None
        assert answer.params is not None
        sent = time.perf_counter()
        request_id = self._bridge.add_request(
            messages=conversation.context(), params=answer.params, user="chat", arrival_time=sent
        )
        self.conversations.handed_over(conversation, answer, request_id, sent)

    def _engine_ready(self, _info: object) -> None:
        for conversation, answer in self.conversations.queued():
            self._hand_over(conversation)
            self.message_changed.emit(conversation.id, answer.id)
        self.listed.emit()

    def _take_outputs(self, outputs: list[Output]) -> None:
        ended = []
        touched: dict[str, tuple[Conversation, Message]] = {}
        for output in outputs:
            found = self.conversations.apply(output)
            if found is None:
                continue
            conversation, answer = found
            touched[answer.id] = found
            if not answer.status.is_open:
                ended.append(found)
        for conversation, answer in touched.values():
            self._note(conversation, _turn_of(conversation, answer), answer)
            self.message_changed.emit(conversation.id, answer.id)
        if ended:
            self._ended(ended)

    def _engine_died(self, death: EngineDied) -> None:
        self._lose(f"This answer is incomplete. {death.reason}", queued=True)

    def _load_failed(self, failure: LoadFailed) -> None:
        self._lose(failure.message, queued=True)

    def _state_changed(self, state: str) -> None:
        if state in ("stopped", "starting"):
            self._lose(_ENDED, queued=False)

    def _lose(self, sentence: str, *, queued: bool) -> None:
        lost = self.conversations.engine_gone(sentence, queued=queued)
        if lost:
            self._ended(lost)

    def _ended(self, ended: list[tuple[Conversation, Message]]) -> None:
        for conversation, answer in ended:
            self._note(conversation, _turn_of(conversation, answer), answer)
        self.flush()
        for conversation, answer in ended:
            self.message_changed.emit(conversation.id, answer.id)
        self.listed.emit()

    # Saving ----------------------------------------------------------------------------------------------------------

    def _note(self, conversation: Conversation, turn: Turn, message: Message) -> None:
        self._unsaved_messages[message.id] = SavedMessage(conversation, turn.number, message)
        self._schedule()

    def _save_conversation(self, conversation: Conversation) -> None:
        if conversation.turns or conversation.turns is None:
            self._unsaved_conversations[conversation.id] = conversation
            self._schedule()

    def _forget(self, messages: list[Message]) -> None:
        for message in messages:
            self._unsaved_messages.pop(message.id, None)
            self._doomed_messages.add(message.id)
        self._schedule()

    def _schedule(self) -> None:
        if not self._closed and not self._flush_timer.isActive():
            self._flush_timer.start(FLUSH_MS)

    def flush(self) -> None:
        """Writes what is not on disk yet; on trouble says so and tries again later."""
        if self._closed:
            return  # answers that end after this are marked when the file is opened the next time
        self._flush_timer.stop()
        if not self._write():
            self._flush_timer.start(RETRY_MS)

    def _write(self) -> bool:
        if not (self._unsaved_conversations or self._unsaved_messages or self._doomed_messages):
            return True
        try:
            self.store.save(
                self._unsaved_conversations.values(), self._unsaved_messages.values(), self._doomed_messages
            )
        except StoreError as error:
            self._tell(str(error))
            return False
        self._unsaved_conversations.clear()
        self._unsaved_messages.clear()
        self._doomed_messages.clear()
        self._tell("")
        return True

    def _try(self, action) -> None:
        try:
            action()
        except StoreError as error:
            self._tell(str(error))

    def _tell(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            self.save_problem.emit(self.problem)


def _turn_of(conversation: Conversation, answer: Message) -> Turn:
    return next(turn for turn in reversed(conversation.turns or ()) if turn.answer is answer)
