"""The layout of the chat file, its version, and rows to objects and back.

``PRAGMA user_version`` counts the migrations that a file has been through; ``MIGRATIONS[n]`` takes it from n to n + 1.
Texts are read as bytes and decoded one by one, so that bytes that are no UTF-8 cost their own row and not the query.
"""

from __future__ import annotations

import sqlite3

import msgspec

from app.chat.conversation import AnswerTimings, Conversation, Message, MessageStatus, Role
from engine.request import SamplingParams

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE conversations (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL,
            created REAL NOT NULL,
            updated REAL NOT NULL,
            deleted REAL,
            system_prompt TEXT NOT NULL,
            params TEXT NOT NULL
        )""",
        """CREATE TABLE messages (
            id TEXT PRIMARY KEY,
            conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
            turn INTEGER NOT NULL,
            role TEXT NOT NULL,
            text TEXT NOT NULL,
            status TEXT NOT NULL,
            created REAL NOT NULL,
            error TEXT NOT NULL,
            finish_reason TEXT NOT NULL,
            ttft REAL,
            tokens INTEGER NOT NULL,
            tokens_per_second REAL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            preemptions INTEGER NOT NULL,
            params TEXT
        )""",
        "CREATE INDEX messages_of_conversation ON messages (conversation_id, turn)",
        "CREATE INDEX messages_by_status ON messages (status)",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)

SAVE_CONVERSATION = """
INSERT INTO conversations (id, title, created, updated, system_prompt, params) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET title = excluded.title, updated = excluded.updated,
    system_prompt = excluded.system_prompt, params = excluded.params"""
SAVE_MESSAGE = """
INSERT INTO messages (id, conversation_id, turn, role, text, status, created, error, finish_reason, ttft, tokens,
    tokens_per_second, prompt_tokens, cached_tokens, preemptions, params) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
ON CONFLICT (id) DO UPDATE SET text = excluded.text, status = excluded.status, error = excluded.error,
    finish_reason = excluded.finish_reason, ttft = excluded.ttft, tokens = excluded.tokens,
    tokens_per_second = excluded.tokens_per_second, prompt_tokens = excluded.prompt_tokens,
    cached_tokens = excluded.cached_tokens, preemptions = excluded.preemptions"""


class DamagedRow(ValueError):
    """A row that holds something else than it should; the message says what."""


def conversation_values(conversation: Conversation) -> tuple:
    return (
        conversation.id,
        conversation.title,
        conversation.created,
        conversation.updated,
        conversation.system_prompt,
        _encode(conversation.params),
    )


def message_values(conversation_id: str, turn: int, message: Message) -> tuple:
    timings = message.timings
    return (
        message.id,
        conversation_id,
        turn,
        message.role.value,
        message.text,
        message.status.value,
        message.created,
        message.error,
        message.finish_reason,
        timings.ttft,
        timings.tokens,
        timings.tokens_per_second,
        timings.prompt_tokens,
        timings.cached_tokens,
        timings.preemptions,
        None if message.params is None else _encode(message.params),
    )


def read_conversation(row: sqlite3.Row) -> Conversation:
    """The conversation of a row, its turns still on disk. Raises :class:`DamagedRow`."""
    return Conversation(
        id=_text(row, "id"),
        title=_text(row, "title"),
        created=_number(row, "created"),
        updated=_number(row, "updated"),
        system_prompt=_text(row, "system_prompt"),
        params=_params(row),
        turns=None,
    )


def read_message(row: sqlite3.Row) -> Message:
    """The message of a row. Raises :class:`DamagedRow`."""
    timings = AnswerTimings(
        tokens=int(_number(row, "tokens")),
        ttft=None if row["ttft"] is None else _number(row, "ttft"),
        tokens_per_second=None if row["tokens_per_second"] is None else _number(row, "tokens_per_second"),
        prompt_tokens=int(_number(row, "prompt_tokens")),
        cached_tokens=int(_number(row, "cached_tokens")),
        preemptions=int(_number(row, "preemptions")),
    )
    try:
        role, status = Role(_text(row, "role")), MessageStatus(_text(row, "status"))
    except ValueError as error:
        raise DamagedRow(f"role or status: {error}") from None
    return Message(
        role=role,
        text=_text(row, "text"),
        status=status,
        id=_text(row, "id"),
        created=_number(row, "created"),
        error=_text(row, "error"),
        finish_reason=_text(row, "finish_reason"),
        timings=timings,
        params=None if row["params"] is None else _params(row),
    )


def loose_text(value: object) -> str:
    """Whatever a damaged row holds, as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _text(row: sqlite3.Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, bytes):
        raise DamagedRow(f"{column} is {value!r}, which is no text")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DamagedRow(f"{column} holds bytes that are no text, from byte {error.start} on") from None


def _number(row: sqlite3.Row, column: str) -> float:
    value = row[column]
    if not isinstance(value, int | float):
        raise DamagedRow(f"{column} is {loose_text(value)[:40]!r}, which is no number")
    return value


def _encode(params: SamplingParams) -> str:
    return msgspec.json.encode(params).decode()


def _params(row: sqlite3.Row) -> SamplingParams:
    try:
        return msgspec.json.decode(_text(row, "params"), type=SamplingParams)
    except msgspec.MsgspecError as error:
        raise DamagedRow(f"params: {error}") from None
