"""All conversations of a window and the answers under way: no Qt, no files, no clock that cannot be replaced.

::

    send, regenerate, ──▶ QUEUED ──handed over──▶ STREAMING ─┬─▶ COMPLETE      the model ended it
    resend, continue   (model loads)                         ├─▶ STOPPED       the user ended it; the text stays
                          ▲                                  ├─▶ ERROR         refused, with a sentence
                          │                                  └─▶ INCOMPLETE    the engine or the window died; it stays
                          └────────── continue ◀─────────────── (all four, where more can come)

An answer that was to continue and got no further word is again what it was. An output that comes after a stop is
dropped, never shown and never sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from app.chat.conversation import (
    ChatError,
    Conversation,
    Deleted,
    Message,
    MessageStatus,
    Role,
    as_written,
    context_ended,
    title_of,
)
from app.chat.tree import MessageTree
from app.translation import tr
from engine.config import DEFAULT_CHAT_MAX_TOKENS
from engine.messages import ContextCut, Output
from engine.request import FinishReason, SamplingParams


class Conversations:
    """All conversations of a window, and which request writes which answer."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._conversations: dict[str, Conversation] = {}
        self._by_request: dict[int, tuple[Conversation, Message]] = {}
        self._ended_as: dict[str, _Ending] = {}
        """Id of an answer that is being continued -> how it had ended."""

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._conversations.values())

    def __len__(self) -> int:
        return len(self._conversations)

    def get(self, conversation_id: str) -> Conversation | None:
        return self._conversations.get(conversation_id)

    def add(self, conversation: Conversation) -> Conversation:
        if not conversation.created:
            conversation.created = conversation.updated = self._wall_clock()
        self._conversations[conversation.id] = conversation
        return conversation

    def remove(self, conversation: Conversation) -> None:
        """Takes it out; its answer must have been stopped."""
        self._conversations.pop(conversation.id, None)

    # What the user does: each raises ChatError where it cannot be done, and has changed nothing then ------------------

    def send(self, conversation: Conversation, text: str) -> tuple[Message, Message]:
        """A new question at the end of the path, and its queued answer."""
        tree = self._free_tree(conversation)
        path = tree.path
        question, answer = self._ask(conversation, text, path[-1].id if path else None)
        conversation.title = conversation.title or title_of(text)
        return question, answer

    def regenerate(self, conversation: Conversation, message_id: str | None = None) -> Message:
        """Another, queued, version of an answer, by default the path's last; the path ends there."""
        tree = self._free_tree(conversation)
        path = tree.path
        if not path:
            raise ChatError(tr("There is nothing to answer yet; send a message first."))
        answer = path[-1] if message_id is None else self._message(conversation, message_id)
        question = answer if answer.role is Role.USER else tree.get(answer.parent)
        assert question is not None
        if question.damage:
            raise ChatError(tr("The question of this answer could not be read; send a new message instead."))
        return self._new_answer(conversation, question)

    def resend(self, conversation: Conversation, message_id: str, text: str) -> tuple[Message, Message]:
        """An edited question as a new version of it, and its queued answer."""
        self._free_tree(conversation)
        old = self._message(conversation, message_id)
        if old.role is not Role.USER:
            raise ChatError(tr("Only your own messages can be edited."))
        return self._ask(conversation, text, old.parent)

    def continue_answer(self, conversation: Conversation) -> Message:
        """Queues the path's last answer again: it grows on where it ends."""
        path = self._free_tree(conversation).path
        if not path or not path[-1].can_continue:
            raise ChatError(tr("The last answer is complete; send a message, or regenerate it."))
        if path[-2].damage:
            raise ChatError(tr("The question of this answer could not be read; send a new message instead."))
        answer = path[-1]
        self._ended_as[answer.id] = _Ending.of(answer)
        answer.timings.begin_part()
        answer.continued = len(answer.text)
        answer.status, answer.request_id = MessageStatus.QUEUED, None
        answer.error = answer.finish_reason = ""
        answer.params = conversation.params
        conversation.last_begun = answer
        conversation.updated = self._wall_clock()
        return answer

    def stop(self, conversation: Conversation) -> tuple[Message, int | None] | None:
        """Ends the open answer where it stands: the answer, and the request to abort if it had one already."""
        answer = conversation.open_answer
        if answer is None:
            return None
        request_id = answer.request_id
        self._close(answer, MessageStatus.STOPPED)
        answer.finish_reason = FinishReason.ABORT.value
        return answer, request_id

    def show_version(self, conversation: Conversation, message_id: str) -> None:
        """Has the path lead through this message, below it as it was last seen."""
        self._loaded(conversation).show(self._message(conversation, message_id))

    def delete_message(self, conversation: Conversation, message_id: str) -> Deleted:
        """Takes a question with its answers out, and what followed the shown one moves up in its place; of an answer
        that has other versions, it and what follows; an only answer goes with its question."""
        tree = self._loaded(conversation)
        message = self._message(conversation, message_id)
        moved: list[Message] = []
        below = None
        if message.role is Role.ASSISTANT and len(tree.children(message.parent)) == 1:
            message = tree.get(message.parent) or message
        if message.role is Role.USER and (shown := tree.shown_below(message.id)) is not None:
            below, moved = shown.id, tree.children(shown.id)
        kept = {each.id for top in moved for each in tree.branch(top)}
        gone = [each for each in tree.branch(message) if each.id not in kept]
        if any(each.status.is_open for each in gone):
            raise ChatError(tr("This answer is still being written; stop it first."))
        above = tuple(each.id for each in tree.ancestors(message)[-2::-1] if each.role is Role.ASSISTANT)
        ids = {each.id for each in gone}
        choices = {parent: child for parent, child in tree.choices.items() if parent in ids}
        shown_here = tree.shown_below(message.parent)
        if shown_here is message:
            shown_here = None if below is None else tree.shown_below(below)
        for each in moved:
            tree.move(each, message.parent)
        for each in reversed(gone):
            tree.remove(each)
        if shown_here is not None:
            tree.choose(shown_here)
        return Deleted(tuple(gone), above, tuple(moved), below, choices)

    def undelete(self, conversation: Conversation, deleted: Deleted) -> None:
        """Puts it back in its place and shows it; where what was above it is gone too, as high as there is."""
        tree = self._loaded(conversation)
        top = deleted.messages[0]
        if tree.get(top.id) is not None:
            return
        old_parent = top.parent
        if top.role is Role.USER:
            top.parent = next((each for each in deleted.above if tree.get(each) is not None), None)
        elif tree.get(top.parent) is None:
            raise ChatError(tr("What this answer belonged to was deleted; bring that back first."))
        for each in deleted.messages:
            tree.add(each)
        for each in deleted.moved:
            if tree.get(each.id) is each and each.parent == old_parent:
                tree.move(each, deleted.below)
        for parent, child in deleted.choices.items():
            chosen = tree.get(child)
            if chosen is not None and chosen.parent == parent:
                tree.choose(chosen)
        tree.show(top if deleted.below is None else tree.get(deleted.below) or top)

    # What the engine does --------------------------------------------------------------------------------------------

    def queued(self) -> list[tuple[Conversation, Message]]:
        """Answers that wait for a model, the longest waiting first."""
        waiting = [
            (conversation, conversation.open_answer)
            for conversation in self
            if conversation.open_answer is not None and conversation.open_answer.status is MessageStatus.QUEUED
        ]
        return sorted(waiting, key=lambda pair: pair[0].updated)

    def handed_over(
        self, conversation: Conversation, answer: Message, request_id: int, sent: float, model: str = ""
    ) -> None:
        """The engine has the request for this queued answer since ``sent``, on the shared clock."""
        answer.request_id = request_id
        answer.status = MessageStatus.STREAMING
        answer.timings.sent = sent
        answer.model = model
        self._by_request[request_id] = (conversation, answer)

    def apply(self, output: Output) -> tuple[Conversation, Message] | None:
        """Takes new tokens; None where they belong to no open answer (another client's, or of a stopped request)."""
        found = self._by_request.get(output.request_id)
        if found is None:
            return None
        _, answer = found
        answer.text += output.text.replace("\0", "\ufffd")
        timings = answer.timings
        timings.count(len(output.token_ids), output.time)
        if output.finish_reason == FinishReason.ERROR and self._take_back(answer):
            return found
        if output.finish_reason is not None:
            timings.prompt_tokens = max(0, output.prompt_tokens - timings.earlier_tokens)
            timings.cached_tokens = min(output.cached_tokens, timings.prompt_tokens)
            timings.preemptions += output.preemptions
            answer.finish_reason = output.finish_reason
            answer.error = output.error or ("" if _is_whole_part(answer) else context_ended())
            self._close(answer, _STATUS_OF_FINISH.get(output.finish_reason, MessageStatus.COMPLETE))
        return found

    def cut(self, cut: ContextCut) -> tuple[Conversation, Message] | None:
        """Notes that the model was not told the oldest messages; None where that belongs to no open answer."""
        found = self._by_request.get(cut.request_id)
        if found is not None:
            found[1].dropped = max(found[1].dropped, cut.dropped_messages)  # of every part of a continued answer
        return found

    def engine_gone(self, sentence: str, *, queued: bool) -> list[tuple[Conversation, Message]]:
        """Marks every answer under way, with ``queued`` those too that wait for a model; their text stays."""
        lost = list(self._by_request.values())
        if queued:
            lost += [(conversation, answer) for conversation, answer in self.queued()]
        for _, answer in lost:
            answer.error = sentence
            self._close(answer, MessageStatus.INCOMPLETE)
        return lost

    # -----------------------------------------------------------------------------------------------------------------

    def _ask(self, conversation: Conversation, text: str, parent: str | None) -> tuple[Message, Message]:
        if not text.strip():
            raise ChatError(tr("The message is empty; write something first."))
        tree = self._loaded(conversation)
        question = Message(
            Role.USER,
            as_written(text),
            parent=parent,
            number=tree.next_number,
            created=self._wall_clock(),
        )
        tree.add(question)
        return question, self._new_answer(conversation, question)

    def _new_answer(self, conversation: Conversation, question: Message) -> Message:
        tree = self._loaded(conversation)
        answer = Message(
            Role.ASSISTANT,
            status=MessageStatus.QUEUED,
            parent=question.id,
            number=tree.next_number,
            created=self._wall_clock(),
            params=conversation.params,
        )
        tree.add(answer)
        tree.show(answer)
        conversation.last_begun = answer
        conversation.updated = answer.created
        return answer

    def _free_tree(self, conversation: Conversation) -> MessageTree:
        if conversation.damage:
            raise ChatError(tr("This chat could not be read whole, so it cannot be continued; start a new one."))
        if conversation.open_answer is not None:
            raise ChatError(tr("This chat is still answering; stop it first."))
        return self._loaded(conversation)

    def _loaded(self, conversation: Conversation) -> MessageTree:
        assert conversation.tree is not None
        return conversation.tree

    def _message(self, conversation: Conversation, message_id: str) -> Message:
        message = conversation.find(message_id)
        if message is None:
            raise ChatError(tr("This message is no longer part of the chat."))
        return message

    def _close(self, answer: Message, status: MessageStatus) -> None:
        answer.status = status
        answer.continued = 0
        self._ended_as.pop(answer.id, None)
        if answer.request_id is not None:
            self._by_request.pop(answer.request_id, None)

    def _take_back(self, answer: Message) -> bool:
        """An answer of which no further word came is again as it was before it was to go on."""
        ending = self._ended_as.get(answer.id)
        if ending is None or answer.timings.part_tokens:
            return False
        self._close(answer, ending.status)
        answer.request_id, answer.params = ending.request_id, ending.params
        answer.finish_reason, answer.error, answer.model = ending.finish_reason, ending.error, ending.model
        return True


@dataclass(frozen=True, slots=True)
class _Ending:
    """How an answer ended."""

    status: MessageStatus
    request_id: int | None
    params: SamplingParams | None
    finish_reason: str
    error: str
    model: str

    @classmethod
    def of(cls, answer: Message) -> _Ending:
        return cls(answer.status, answer.request_id, answer.params, answer.finish_reason, answer.error, answer.model)


def _is_whole_part(answer: Message) -> bool:
    """Whether it was not cut before the tokens that were asked for: what a continued answer asks for, it asks anew."""
    limit = (answer.params.max_tokens if answer.params is not None else None) or DEFAULT_CHAT_MAX_TOKENS
    return answer.finish_reason != FinishReason.LENGTH or answer.timings.part_tokens >= limit


_STATUS_OF_FINISH = {
    FinishReason.STOP.value: MessageStatus.COMPLETE,
    FinishReason.LENGTH.value: MessageStatus.COMPLETE,
    FinishReason.ABORT.value: MessageStatus.STOPPED,
    FinishReason.ERROR.value: MessageStatus.ERROR,
}
