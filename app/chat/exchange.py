"""Chats as a file for others: JSON with every field and every branch, and Markdown of what is shown.

The JSON is one object: ``{"format": "batchscope-chats", "version": 1, "exported": "2026-…", "conversations": […]}``;
each conversation has the fields of :class:`app.chat.conversation.Conversation`, its ``messages`` in the order in which
they were written and each with the id of its ``parent``. What is exported and imported again is equal to what it was.
"""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from app.chat.conversation import (
    LARGEST_NUMBER,
    LATEST,
    AnswerTimings,
    ContextPolicy,
    Conversation,
    Message,
    MessageStatus,
    Role,
    ScrollPlace,
    shortened,
    sound,
)
from app.chat.mending import mended_tree
from app.chat.store import ChatStore
from app.translation import tr
from engine.request import SamplingParams

FORMAT = "batchscope-chats"
VERSION = 1


class ExchangeError(ValueError):
    """A file that cannot be imported; the message is a sentence for the user."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
_Order = Annotated[int, msgspec.Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
_Time = Annotated[float, msgspec.Meta(ge=-LATEST, le=LATEST)]
_Id = Annotated[str, msgspec.Meta(min_length=1)]


class _Timings(msgspec.Struct):
    ttft: float | None
    tokens: _Count
    tokens_per_second: float | None
    prompt_tokens: _Count
    cached_tokens: _Count
    preemptions: _Count


class _Message(msgspec.Struct):
    id: _Id
    parent: str | None
    number: _Order
    role: Role
    text: str
    status: MessageStatus
    created: _Time
    error: str = ""
    finish_reason: str = ""
    timings: _Timings | None = None
    params: SamplingParams | None = None
    dropped: _Count = 0
    model: str = ""
    damage: str = ""
    """Why it could not be read when it was exported."""


class _Conversation(msgspec.Struct):
    id: _Id
    title: str
    created: _Time
    updated: _Time
    system_prompt: str
    params: SamplingParams
    messages: list[_Message]
    priority: _Order = 0
    pinned: bool = False
    folder: str = ""
    draft: str = ""
    scroll: ScrollPlace | None = None
    policy: ContextPolicy = ContextPolicy.REFUSE
    choices: dict[str, str] = {}
    """At which message (empty: at the beginning) which of the next is shown, where it is not the youngest."""


class _Head(msgspec.Struct):
    format: str
    version: int


class _File(msgspec.Struct):
    format: str
    version: int
    exported: str
    conversations: list[_Conversation]


def export_json(conversations: Iterable[Conversation]) -> bytes:
    """``conversations`` must be loaded."""
    return b"".join(json_parts(conversations))


def json_parts(conversations: Iterable[Conversation]) -> Iterator[bytes]:
    """The exported file piece by piece, one for each conversation and one at either end."""
    exported = datetime.now(UTC).isoformat(timespec="seconds")
    head, _, tail = _formatted(_File(FORMAT, VERSION, exported, [])).rpartition(b"[]")
    yield head + b"["
    for number, conversation in enumerate(conversations):
        one = _formatted(_outward(conversation)).replace(b"\n", b"\n    ")
        yield b"%s\n    %s" % (b"," if number else b"", one)
    yield b"\n  ]" + tail + b"\n"


def _formatted(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def export_markdown(conversation: Conversation) -> str:
    """What is shown of a conversation: a heading for each message, its text as it was written."""
    parts = [f"# {conversation.title or tr('New chat')}"]
    if conversation.system_prompt.strip():
        parts.append(f"## {tr('System prompt')}\n\n{conversation.system_prompt.strip()}")
    for message in conversation.path:
        heading = tr("You") if message.role is Role.USER else message.model or tr("Model")
        note = f"\n\n*{_note(message)}*" if _note(message) else ""
        parts.append(f"## {heading}\n\n{message.text.strip()}{note}".rstrip())
    return "\n\n".join(parts) + "\n"


def import_json(data: bytes) -> list[Conversation]:
    """The conversations of an exported file. Raises :class:`ExchangeError`, and nothing is imported then."""
    data = data.removeprefix(codecs.BOM_UTF8)
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.ValidationError:
        raise ExchangeError(tr("This file holds no chats that Batchscope exported.")) from None
    except (ValueError, RecursionError) as error:
        raise ExchangeError(tr("This file is no JSON, or is cut short ({reason}).", reason=error)) from None
    if head.format != FORMAT:
        raise ExchangeError(tr("This file holds no chats that Batchscope exported."))
    if head.version > VERSION:
        raise ExchangeError(
            tr(
                "This file was exported by a newer Batchscope (format {version}; this one knows up to {known}). "
                "Update Batchscope to import it.",
                version=head.version,
                known=VERSION,
            )
        )
    try:
        file = msgspec.json.decode(data, type=_File)
    except (ValueError, RecursionError) as error:  # RequestError of bad sampling values, too
        raise ExchangeError(tr("This file is damaged: {reason}. Nothing was imported.", reason=error)) from None
    return [_inward(each) for each in file.conversations]


def with_free_ids(imported: list[Conversation], store: ChatStore) -> list[Conversation]:
    """The same conversations; where an id of theirs is in use in ``store`` or twice among them, with other ids."""
    seen: set[str] = set()
    for conversation in imported:
        ids = [message.id for message in conversation.messages]
        taken = store.holds(conversation.id) or any(store.has_message(each) for each in ids)
        if taken or not seen.isdisjoint([conversation.id, *ids]):
            _renew(conversation)
        seen.update([conversation.id], [message.id for message in conversation.messages])
    return imported


def _renew(conversation: Conversation) -> None:
    assert conversation.tree is not None
    fresh = {message.id: uuid.uuid4().hex for message in conversation.messages}
    choices = {fresh.get(key, ""): fresh[value] for key, value in conversation.tree.choices.items()}
    for message in conversation.messages:
        message.id = fresh[message.id]
        message.parent = None if message.parent is None else fresh[message.parent]
    place = conversation.scroll
    if place is not None:
        conversation.scroll = ScrollPlace(fresh.get(place.message_id, place.message_id), place.offset)
    conversation.id = uuid.uuid4().hex
    conversation.tree = mended_tree(conversation.messages, choices)


def _outward(conversation: Conversation) -> _Conversation:
    assert conversation.tree is not None
    return _Conversation(
        id=conversation.id,
        title=conversation.title,
        created=conversation.created,
        updated=conversation.updated,
        system_prompt=conversation.system_prompt,
        params=conversation.params,
        priority=conversation.priority,
        pinned=conversation.pinned,
        folder=conversation.folder,
        draft=conversation.draft,
        scroll=conversation.scroll,
        policy=conversation.policy,
        choices=conversation.tree.choices,
        messages=[_message_outward(message) for message in conversation.messages],
    )


def _message_outward(message: Message) -> _Message:
    timings = message.timings
    return _Message(
        id=message.id,
        parent=message.parent,
        number=message.number,
        role=message.role,
        text=message.text,
        status=message.status,
        created=message.created,
        error=message.error,
        finish_reason=message.finish_reason,
        timings=_Timings(
            timings.ttft,
            timings.tokens,
            timings.tokens_per_second,
            timings.prompt_tokens,
            timings.cached_tokens,
            timings.preemptions,
        ),
        params=message.params,
        dropped=message.dropped,
        model=message.model,
        damage=message.damage,
    )


def _inward(conversation: _Conversation) -> Conversation:
    ids = {message.id for message in conversation.messages}
    if len(ids) < len(conversation.messages):
        raise ExchangeError(tr("This file is damaged: two messages have the same id. Nothing was imported."))
    try:  # whole numbers of any size are JSON, but none that an engine could be told
        msgspec.msgpack.encode([conversation.params, [each.params for each in conversation.messages]])
    except (OverflowError, ValueError) as error:
        raise ExchangeError(tr("This file is damaged: {reason}. Nothing was imported.", reason=error)) from None
    return Conversation(
        id=conversation.id,
        title=shortened(sound(conversation.title)),
        created=conversation.created,
        updated=conversation.updated,
        system_prompt=sound(conversation.system_prompt),
        params=conversation.params,
        priority=conversation.priority,
        pinned=conversation.pinned,
        folder=shortened(sound(conversation.folder)),
        draft=sound(conversation.draft),
        scroll=conversation.scroll,
        policy=conversation.policy,
        tree=mended_tree([_message_inward(each) for each in conversation.messages], conversation.choices),
    )


def _message_inward(message: _Message) -> Message:
    """An answer that was being written when it was exported will not go on here; a damaged one is a gap with a word."""
    status, error = message.status, message.error
    if status.is_open:
        status, error = MessageStatus.INCOMPLETE, tr("This answer was exported before it was complete.")
    if message.damage:
        status, error = MessageStatus.INCOMPLETE, tr("This message could not be read when it was exported.")
    timings = AnswerTimings()
    if message.timings is not None:
        timings = AnswerTimings(**msgspec.structs.asdict(message.timings))
    return Message(
        role=message.role,
        text=sound(message.text),
        status=status,
        id=message.id,
        parent=message.parent,
        number=message.number,
        created=message.created,
        error=error,
        finish_reason=message.finish_reason,
        timings=timings,
        params=message.params,
        dropped=message.dropped,
        model=message.model,
    )


def _note(message: Message) -> str:
    if message.damage:
        return tr("This message could not be read.")
    if message.status is MessageStatus.STOPPED:
        return tr("Stopped here.")
    if message.status.is_open or message.status is MessageStatus.INCOMPLETE:
        return tr("This answer is incomplete.")
    return message.error
