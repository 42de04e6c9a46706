"""What a conversation is: no Qt, no files, no clock.

A conversation is a tree of messages (:mod:`app.chat.tree`): another answer to a question, or a question that was
edited, is another branch. One path through it is shown. Along every path questions and answers alternate, and every
question has an answer, whatever is stopped, edited, deleted or regenerated. At most one answer is open at a time,
wherever in the tree; several conversations may generate at once.

What a model is told is exactly what the transcript shows on the way to the answer.
"""

from __future__ import annotations

import enum
import uuid
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from app.chat.tree import MessageTree
from app.translation import tr
from engine.config import DEFAULT_CHAT_MAX_TOKENS
from engine.messages import ChatMessage
from engine.request import SamplingParams

TITLE_CHARACTERS = 48
NAME_CHARACTERS = 500
LARGEST_NUMBER = 2**53
"""Of any count or order that is kept: what a file says beyond it is damage."""
LATEST = 32_503_680_000.0
"""The year 3000, in seconds since 1970."""
ScrollOffset = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]
"""As many pixels as Qt can count."""
DEFAULT_CHAT_PARAMS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=DEFAULT_CHAT_MAX_TOKENS)
"""What a new conversation samples with."""


class ChatError(ValueError):
    """Something that cannot be done now; the message says why and what to do instead."""


class Role(enum.StrEnum):
    USER = "user"
    ASSISTANT = "assistant"

    @property
    def other(self) -> Role:
        return Role.ASSISTANT if self is Role.USER else Role.USER


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


class ContextPolicy(enum.StrEnum):
    """What happens when a conversation does not fit into the model's context any more."""

    REFUSE = "refuse"
    DROP_OLDEST = "drop-oldest"


@dataclass(slots=True)
class AnswerTimings:
    """How long an answer took. The definitions that every place in the window uses:

    * TTFT: seconds from handing the request to the engine to the end of the step that gave its first token.
    * tokens per second: (tokens - 1) / (last - first), over the times of its first and last token: the pace while it
      streams, queueing and prefill not counted. None for fewer than two tokens.

    Of an answer that was continued: TTFT is its first part's; the gaps between tokens, and the seconds they took, are
    summed over the parts, the pause between two parts not counted.
    """

    sent: float | None = None
    """``time.perf_counter``, which engine and window share; not kept on disk, nor are ``first`` and ``last``."""
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    ttft: float | None = None
    tokens_per_second: float | None = None
    prompt_tokens: int = 0
    """What came before the answer, its own earlier parts not counted."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved."""
    preemptions: int = 0
    earlier_tokens: int = 0
    """Tokens of the parts before the one under way; like the next two, not kept on disk."""
    earlier_gaps: int = 0
    earlier_seconds: float = 0.0

    def count(self, tokens: int, now: float) -> None:
        if tokens <= 0:
            return
        if self.first is None:
            self.first = now
            if self.sent is not None and not self.earlier_tokens:
                self.ttft = max(0.0, now - self.sent)
        self.last = now
        self.tokens += tokens
        gaps = self.earlier_gaps + self.tokens - self.earlier_tokens - 1
        seconds = self.earlier_seconds + self.last - self.first
        if gaps > 0 and seconds > 0:
            self.tokens_per_second = gaps / seconds

    def begin_part(self) -> None:
        """The answer is continued: what is counted from here on comes on top."""
        if self.tokens_per_second:
            if self.first is not None and self.last is not None:
                self.earlier_gaps += self.tokens - self.earlier_tokens - 1
                self.earlier_seconds += self.last - self.first
            elif not self.earlier_gaps:  # read from disk
                self.earlier_gaps = self.tokens - 1
                self.earlier_seconds = self.earlier_gaps / self.tokens_per_second
        self.earlier_tokens = self.tokens
        self.sent = self.first = self.last = None

    @property
    def part_tokens(self) -> int:
        """Tokens of the part under way, or of the one that ended last."""
        return self.tokens - self.earlier_tokens


@dataclass(slots=True)
class Message:
    role: Role
    text: str = ""
    status: MessageStatus = MessageStatus.COMPLETE
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    parent: str | None = None
    """Id of the message it follows; None: it is a first one."""
    number: int = 0
    """Rises within a conversation, in the order in which messages were written; above the parent's."""
    created: float = 0.0
    """Seconds since 1970."""
    request_id: int | None = None
    """Its number in the engine that runs now; None for answers of an earlier one."""
    error: str = ""
    """A sentence for the user: why there is no answer, or why it ends where it does."""
    finish_reason: str = ""
    """Of a continued answer: how its last part ended."""
    timings: AnswerTimings = field(default_factory=AnswerTimings)
    params: SamplingParams | None = None
    """An answer: what it was sampled with."""
    dropped: int = 0
    """An answer: how many of the oldest messages the model was not told, because they did not fit."""
    model: str = ""
    """An answer: name of the model that wrote it."""
    continued: int = 0
    """An open answer: so many characters of it were there when it was continued, and the model is told them."""
    damage: str = ""
    """Why its row on disk could not be read; such a message is shown, kept, never written and never sent."""

    @property
    def can_continue(self) -> bool:
        """Whether it is an answer that ended before the model had said all."""
        if self.role is not Role.ASSISTANT or self.damage:
            return False
        cut = self.status is MessageStatus.COMPLETE and self.finish_reason == "length"
        return cut or self.status in (MessageStatus.STOPPED, MessageStatus.INCOMPLETE, MessageStatus.ERROR)


@dataclass(frozen=True, slots=True)
class ScrollPlace:
    """Where the transcript stands: a message, and how far its top is above the viewport's, in pixels."""

    message_id: str
    offset: ScrollOffset


@dataclass(slots=True)
class Conversation:
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    title: str = ""
    created: float = 0.0
    updated: float = 0.0
    system_prompt: str = ""
    params: SamplingParams = DEFAULT_CHAT_PARAMS
    priority: int = 0
    """Of its requests; the lower runs first."""
    pinned: bool = False
    folder: str = ""
    """A name; empty: in none."""
    draft: str = ""
    """What is written and not sent."""
    scroll: ScrollPlace | None = None
    """None: at the end."""
    policy: ContextPolicy = ContextPolicy.REFUSE
    tree: MessageTree | None = field(default_factory=MessageTree)
    """None: still on disk."""
    choices: dict[str, str] = field(default_factory=dict)
    """Of a tree that is still on disk: :attr:`MessageTree.choices`."""
    damage: str = ""
    """Why its row on disk could not be read; such a conversation can be looked at, not continued."""
    last_begun: Message | None = field(default=None, compare=False, repr=False)
    """The answer that was begun last: the only one that can be open."""

    @property
    def is_loaded(self) -> bool:
        """False: its messages are still on disk."""
        return self.tree is not None

    @property
    def path(self) -> list[Message]:
        """What is shown, first to last."""
        return [] if self.tree is None else self.tree.path

    @property
    def messages(self) -> list[Message]:
        """All branches, in the order in which they were written."""
        return [] if self.tree is None else self.tree.messages

    @property
    def num_messages(self) -> int:
        return 0 if self.tree is None else len(self.tree)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written in it."""
        return self.tree is not None and not len(self.tree) and not self.title and not self.damage

    @property
    def open_answer(self) -> Message | None:
        """The answer that is being written or waits for the model, wherever in the tree."""
        answer = self.last_begun
        return answer if answer is not None and answer.status.is_open else None

    def find(self, message_id: str) -> Message | None:
        return None if self.tree is None else self.tree.get(message_id)

    def versions(self, message_id: str) -> list[Message]:
        """The message and its siblings, oldest first; empty where there is no such message."""
        message = self.find(message_id)
        return [] if message is None or self.tree is None else self.tree.children(message.parent)

    def context(self) -> list[ChatMessage]:
        """What the model is told for the open answer or, where none is open, for what follows the path: the system
        prompt and every text on the way.

        A question whose answer holds no text joins the one after it, with an empty line between, so roles alternate
        and no text that is on the screen is left out. The text of an answer that is being continued comes last.
        """
        if self.tree is None:
            return []
        messages: list[ChatMessage] = []
        open_answer = self.open_answer
        line = self.path if open_answer is None else self.tree.ancestors(open_answer)
        for question, answer in zip(line[::2], line[1::2], strict=True):
            if question.damage or not question.text:
                continue
            text = question.text
            if messages and messages[-1].role == Role.USER:
                text = f"{messages.pop().content}\n\n{text}"
            messages.append(ChatMessage(Role.USER.value, text))
            said = answer.text[: answer.continued] if answer is open_answer else answer.text
            if said and not answer.damage:
                messages.append(ChatMessage(Role.ASSISTANT.value, said))
        if self.system_prompt.strip():
            messages.insert(0, ChatMessage("system", self.system_prompt))
        return messages


@dataclass(frozen=True, slots=True)
class Deleted:
    """What :meth:`Conversations.delete_message` took out, enough to put it back."""

    messages: tuple[Message, ...]
    """Parents before children."""
    above: tuple[str, ...]
    """Ids of the answers above it, the nearest first."""
    moved: tuple[Message, ...]
    """What followed it and took its place."""
    below: str | None
    """Id of the answer that those followed."""
    choices: dict[str, str]
    """Which branches were shown among what was taken out."""


def sound(text: str) -> str:
    """``text`` without halves of characters, which a clipboard may hold and no file and no engine takes, and without
    NUL, at which searching would end."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")


def as_written(text: str) -> str:
    """A message as it is kept: without the empty lines around it."""
    return sound(text).rstrip().lstrip("\r\n")


def context_ended() -> str:
    """The ``error`` of an answer that was cut because there was no room for more."""
    return tr("Cut where the model's context ends; start a new chat or delete earlier turns for more room.")


def shortened(name: str) -> str:
    """The name of a chat or a folder as it is kept: one line, not longer than any list could show."""
    return " ".join(name[: 4 * NAME_CHARACTERS].split())[:NAME_CHARACTERS]


def title_of(text: str) -> str:
    """A title from the first message: its first line, cut between words."""
    line = next((line.strip() for line in sound(text).splitlines() if line.strip()), "")
    if len(line) <= TITLE_CHARACTERS:
        return line
    cut = line.rfind(" ", TITLE_CHARACTERS // 2, TITLE_CHARACTERS)
    return line[: cut if cut > 0 else TITLE_CHARACTERS].rstrip() + "…"
