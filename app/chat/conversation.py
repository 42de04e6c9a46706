"""Conversations and the answers under way: no Qt, no files, no clock that cannot be replaced.

A conversation is a list of *turns*, each a user message and at most one answer, so roles alternate whatever is stopped,
deleted or regenerated. Several conversations may generate at once, each one answer at a time.

::

    send ──▶ QUEUED ──handed over──▶ STREAMING ─┬─▶ COMPLETE      the model ended it
             (model loads)                      ├─▶ STOPPED       the user ended it; the text stays
                                                ├─▶ ERROR         refused, with a sentence
                                                └─▶ INCOMPLETE    the engine or the window died; the text stays

What a model is told is exactly what the transcript shows: an output that comes after a stop is dropped, never shown and
never sent.
"""

from __future__ import annotations

import enum
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import DEFAULT_CHAT_MAX_TOKENS
from engine.messages import ChatMessage, Output
from engine.request import FinishReason, SamplingParams

TITLE_CHARACTERS = 48
DEFAULT_CHAT_PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=DEFAULT_CHAT_MAX_TOKENS)
"""What a new conversation samples with."""


class ChatError(ValueError):
    """Something that cannot be done now; the message says why and what to do instead."""


class Role(enum.StrEnum):
    USER = "user"
    ASSISTANT = "assistant"


class MessageStatus(enum.StrEnum):
    QUEUED = "queued"
    """Waits in the window until a model is loaded."""
    STREAMING = "streaming"
    COMPLETE = "complete"
    STOPPED = "stopped"
    INCOMPLETE = "incomplete"
    ERROR = "error"

    @property
    def is_open(self) -> bool:
        return self in (MessageStatus.QUEUED, MessageStatus.STREAMING)


@dataclass(slots=True)
class AnswerTimings:
    """How long an answer took. The definitions that every place in the window uses:

    * TTFT: seconds from handing the request to the engine to the end of the step that gave its first token.
    * tokens per second: (tokens - 1) / (last - first), over the times of its first and last token: the pace while it
      streams, queueing and prefill not counted. None for fewer than two tokens.
    """

    sent: float | None = None
    """``time.perf_counter``, which engine and window share; not kept on disk, nor are ``first`` and ``last``."""
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    ttft: float | None = None
    tokens_per_second: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved."""
    preemptions: int = 0

    def count(self, tokens: int, now: float) -> None:
        if tokens <= 0:
            return
        if self.first is None:
            self.first = now
            if self.sent is not None:
                self.ttft = max(0.0, now - self.sent)
        self.last = now
        self.tokens += tokens
        if self.tokens > 1 and self.last > self.first:
            self.tokens_per_second = (self.tokens - 1) / (self.last - self.first)


@dataclass(slots=True)
class Message:
    role: Role
    text: str = ""
    status: MessageStatus = MessageStatus.COMPLETE
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = 0.0
    """Seconds since 1970."""
    request_id: int | None = None
    """Its number in the engine that runs now; None for answers of an earlier one."""
    error: str = ""
    """A sentence for the user: why there is no answer, or why it ends where it does."""
    finish_reason: str = ""
    timings: AnswerTimings = field(default_factory=AnswerTimings)
    params: SamplingParams | None = None
    """An answer: what it was sampled with."""
    damage: str = ""
    """Why its row on disk could not be read; such a message is shown, kept, never written and never sent."""


@dataclass(slots=True)
class Turn:
    number: int
    """Rises within a conversation; gaps are where turns were deleted."""
    user: Message
    answer: Message | None = None

    @property
    def messages(self) -> list[Message]:
        return [self.user] if self.answer is None else [self.user, self.answer]


@dataclass(slots=True)
class Conversation:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    title: str = ""
    created: float = 0.0
    updated: float = 0.0
    system_prompt: str = ""
    params: SamplingParams = DEFAULT_CHAT_PARAMS
    turns: list[Turn] | None = field(default_factory=list)
    """None: still on disk."""
    next_turn: int = 0
    """Number of the next turn; never given twice while the window is open, so that a deleted turn can come back."""
    damage: str = ""
    """Why its row on disk could not be read; such a conversation can be looked at, not continued."""

    @property
    def open_answer(self) -> Message | None:
        """The answer that is being written or waits for the model."""
        if not self.turns or self.turns[-1].answer is None or not self.turns[-1].answer.status.is_open:
            return None
        return self.turns[-1].answer

    @property
    def messages(self) -> list[Message]:
        return [message for turn in self.turns or () for message in turn.messages]

    def find(self, message_id: str) -> Message | None:
        return next((message for message in self.messages if message.id == message_id), None)

    def context(self) -> list[ChatMessage]:
        """What the model is told: the system prompt and every text of the transcript, without the open answer.

        A turn whose answer holds no text joins the user message after it, with an empty line between, so roles
        alternate and no text that is on the screen is left out.
        """
        messages: list[ChatMessage] = []
        for turn in self.turns or ():
            if turn.user.damage:
                continue
            text = turn.user.text
            if messages and messages[-1].role == Role.USER:
                text = f"{messages.pop().content}\n\n{text}"
            messages.append(ChatMessage(Role.USER.value, text))
            answer = turn.answer
            if answer is not None and not answer.status.is_open and not answer.damage and answer.text:
                messages.append(ChatMessage(Role.ASSISTANT.value, answer.text))
        if self.system_prompt.strip():
            messages.insert(0, ChatMessage("system", self.system_prompt))
        return messages


def title_of(text: str) -> str:
    """A title from the first message: its first line, cut between words."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if len(line) <= TITLE_CHARACTERS:
        return line
    cut = line.rfind(" ", TITLE_CHARACTERS // 2, TITLE_CHARACTERS)
    return line[: cut if cut > 0 else TITLE_CHARACTERS].rstrip() + "…"


class Conversations:
    """All conversations of a window, and which request writes which answer."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._conversations: dict[str, Conversation] = {}
        self._by_request: dict[int, tuple[Conversation, Message]] = {}

    def __iter__(self):
        return iter(self._conversations.values())

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

    # What the user does ----------------------------------------------------------------------------------------------

    def send(self, conversation: Conversation, text: str) -> Turn:
        """A new turn with a queued answer. Raises :class:`ChatError`."""
        self._check_free(conversation)
        if not text.strip():
            raise ChatError("The message is empty; write something first.")
        assert conversation.turns is not None
        user = Message(Role.USER, text.rstrip().lstrip("\r\n"), created=self._wall_clock())
        turn = Turn(conversation.next_turn, user, self._new_answer(conversation))
        conversation.next_turn += 1
        conversation.turns.append(turn)
        conversation.title = conversation.title or title_of(text)
        conversation.updated = turn.user.created
        return turn

    def regenerate(self, conversation: Conversation) -> tuple[Turn, Message | None]:
        """Replaces the last answer by a queued one: its turn, and what was replaced. Raises :class:`ChatError`."""
        self._check_free(conversation)
        if not conversation.turns:
            raise ChatError("There is nothing to answer yet; send a message first.")
        turn = conversation.turns[-1]
        if any(message.damage for message in turn.messages):
            raise ChatError(
                "Part of the last exchange could not be read and is kept as it is; send a new message instead."
            )
        replaced = turn.answer
        turn.answer = self._new_answer(conversation)
        conversation.updated = turn.answer.created
        return turn, replaced

    def stop(self, conversation: Conversation) -> tuple[Message, int | None] | None:
        """Ends the open answer where it stands: the answer, and the request to abort if it had one already."""
        answer = conversation.open_answer
        if answer is None:
            return None
        request_id = answer.request_id
        self._close(answer, MessageStatus.STOPPED)
        answer.finish_reason = FinishReason.ABORT.value
        return answer, request_id

    def delete_turn(self, conversation: Conversation, message_id: str) -> Turn:
        """Takes the turn of that message out of the conversation. Raises :class:`ChatError`."""
        turn = self._turn_of(conversation, message_id)
        if turn.answer is not None and turn.answer.status.is_open:
            raise ChatError("This answer is still being written; stop it first.")
        conversation.turns.remove(turn)
        return turn

    def restore_turn(self, conversation: Conversation, turn: Turn) -> None:
        """Puts a deleted turn back in its place."""
        assert conversation.turns is not None
        conversation.turns.append(turn)
        conversation.turns.sort(key=lambda each: each.number)

    # What the engine does --------------------------------------------------------------------------------------------

    def queued(self) -> list[tuple[Conversation, Message]]:
        """Answers that wait for a model, the longest waiting first."""
        waiting = [
            (conversation, conversation.open_answer)
            for conversation in self
            if conversation.open_answer is not None and conversation.open_answer.status is MessageStatus.QUEUED
        ]
        return sorted(waiting, key=lambda pair: pair[1].created)

    def handed_over(self, conversation: Conversation, answer: Message, request_id: int, sent: float) -> None:
        """The engine has the request for this queued answer since ``sent``, on the shared clock."""
        answer.request_id = request_id
        answer.status = MessageStatus.STREAMING
        answer.timings.sent = sent
        self._by_request[request_id] = (conversation, answer)

    def apply(self, output: Output) -> tuple[Conversation, Message] | None:
        """Takes new tokens; None where they belong to no open answer (another client's, or of a stopped request)."""
        found = self._by_request.get(output.request_id)
        if found is None:
            return None
        _, answer = found
        answer.text += output.text
        answer.timings.count(len(output.token_ids), output.time)
        if output.finish_reason is not None:
            answer.timings.prompt_tokens = output.prompt_tokens
            answer.timings.cached_tokens = output.cached_tokens
            answer.timings.preemptions = output.preemptions
            answer.finish_reason = output.finish_reason
            answer.error = output.error
            self._close(answer, _STATUS_OF_FINISH.get(output.finish_reason, MessageStatus.COMPLETE))
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

    def _check_free(self, conversation: Conversation) -> None:
        if conversation.damage:
            raise ChatError("This chat could not be read whole, so it cannot be continued; start a new one.")
        if conversation.open_answer is not None:
            raise ChatError("This chat is still answering; stop it first.")

    def _new_answer(self, conversation: Conversation) -> Message:
        return Message(
            Role.ASSISTANT, status=MessageStatus.QUEUED, created=self._wall_clock(), params=conversation.params
        )

    def _close(self, answer: Message, status: MessageStatus) -> None:
        answer.status = status
        if answer.request_id is not None:
            self._by_request.pop(answer.request_id, None)

    def _turn_of(self, conversation: Conversation, message_id: str) -> Turn:
        for turn in conversation.turns or ():
            if any(message.id == message_id for message in turn.messages):
                return turn
        raise ChatError("This message is no longer part of the chat.")


_STATUS_OF_FINISH = {
    FinishReason.STOP.value: MessageStatus.COMPLETE,
    FinishReason.LENGTH.value: MessageStatus.COMPLETE,
    FinishReason.ABORT.value: MessageStatus.STOPPED,
    FinishReason.ERROR.value: MessageStatus.ERROR,
}
