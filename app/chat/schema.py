"""The layout of the chat file, its version, and rows to objects and back.

``PRAGMA user_version`` counts the migrations that a file has been through; ``MIGRATIONS[n]`` takes it from n to n + 1.
Texts are read as bytes and decoded one by one, so that bytes that are no UTF-8 cost their own row and not the query.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from app.chat import files
from app.chat.conversation import (
    LARGEST_NUMBER,
    LATEST,
    AnswerTimings,
    ContextPolicy,
    Conversation,
    Message,
    MessageStatus,
    Role,
    ScrollOffset,
    ScrollPlace,
)
from app.chat.mending import LOST
from app.chat.preset import Preset, PresetKind
from app.translation import tr
from engine.request import SamplingParams

_TURNS_TO_TREE = (
    "UPDATE messages SET number = 2 * number + (role <> 'user') WHERE typeof(number) = 'integer'",
    f"""UPDATE messages SET parent = CASE WHEN role <> 'user' AND NOT EXISTS (
        SELECT 1 FROM messages AS question
        WHERE question.conversation_id = messages.conversation_id AND question.number = messages.number - 1
    ) THEN '{LOST}' || id ELSE (
        SELECT id FROM messages AS before
        WHERE before.conversation_id = messages.conversation_id AND before.number < messages.number
        ORDER BY before.number DESC LIMIT 1
    ) END""",
)


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
    (
        "ALTER TABLE conversations ADD COLUMN priority INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE conversations ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE conversations ADD COLUMN folder TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE conversations ADD COLUMN draft TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE conversations ADD COLUMN scroll TEXT",
        "ALTER TABLE conversations ADD COLUMN policy TEXT NOT NULL DEFAULT 'refuse'",
        "ALTER TABLE conversations ADD COLUMN choices TEXT NOT NULL DEFAULT '{}'",
        "ALTER TABLE messages RENAME COLUMN turn TO number",
        "ALTER TABLE messages ADD COLUMN parent TEXT",
        "ALTER TABLE messages ADD COLUMN dropped INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE messages ADD COLUMN model TEXT NOT NULL DEFAULT ''",
        *_TURNS_TO_TREE,
        """CREATE TABLE presets (
            kind TEXT NOT NULL,
            name TEXT NOT NULL,
            text TEXT NOT NULL,
            params TEXT,
            PRIMARY KEY (kind, name)
        )""",
    ),
)
SCHEMA_VERSION = len(MIGRATIONS)
EARLIEST_DELETED = 1e9
IS_DELETED = f"(typeof(deleted) = 'real' AND deleted BETWEEN {EARLIEST_DELETED} AND {LATEST})"
"""Of a conversation: whatever else damage has put there must not have it removed."""


def tables_of(connection: sqlite3.Connection, names: Iterable[str] | None = None) -> dict[str, list[tuple]]:
    """The columns of each table, in order: number, name, type, whether it must be there, default, place in the key."""
    if names is None:
        names = _names(connection, "SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name: [tuple(row) for row in connection.execute(f"PRAGMA table_info({name})")] for name in names}


def reference(version: int) -> sqlite3.Connection:
    """An empty file of this version, in memory."""
    connection = files.connect(Path(":memory:"))
    bring_forward(connection, version)
    return connection


def is_sound(connection: sqlite3.Connection) -> bool:
    """Whether tables and indices are those of the file's version; says nothing about what is in them."""
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= version <= SCHEMA_VERSION:
            return False
        with contextlib.closing(reference(version)) as expected:
            wanted = tables_of(expected)
            indices = _names(expected, "SELECT name FROM sqlite_master WHERE type = 'index'")
            known = {name: _index(expected, name) for name in indices}
        if version == 0:
            return not _names(connection, "SELECT name FROM sqlite_master WHERE name = 'messages'")
        found = {name: _index(connection, name) for name in indices}
        return tables_of(connection, wanted) == wanted and found == known
    except files.SQLITE_ERRORS:
        return False


def _index(connection: sqlite3.Connection, name: str) -> list[tuple]:
    return [tuple(row) for row in connection.execute(f"PRAGMA index_info({name})")]


def _names(connection: sqlite3.Connection, query: str) -> list[str]:
    return [loose_text(row[0]) for row in connection.execute(query)]


def bring_forward(connection: sqlite3.Connection, target: int = SCHEMA_VERSION) -> None:
    """Takes a file through the migrations up to ``target``, each wholly or not at all. Raises sqlite3.Error."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    for number in range(version, target):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for step in MIGRATIONS[number]:
                connection.execute(step)
            connection.execute(f"PRAGMA user_version = {number + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


_CONVERSATION_COLUMNS = (
    "id", "title", "created", "updated", "system_prompt", "params", "priority", "pinned", "folder", "draft", "scroll",
    "policy", "choices",
)  # fmt: skip
_MESSAGE_COLUMNS = (
    "id", "conversation_id", "parent", "number", "role", "text", "status", "created", "error", "finish_reason", "ttft",
    "tokens", "tokens_per_second", "prompt_tokens", "cached_tokens", "preemptions", "params", "dropped", "model",
)  # fmt: skip


def _upsert(table: str, columns: tuple[str, ...], fixed: tuple[str, ...]) -> str:
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in fixed)
    marks = ", ".join("?" * len(columns))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks}) ON CONFLICT (id) DO UPDATE SET {changes}"


SAVE_CONVERSATION = _upsert("conversations", _CONVERSATION_COLUMNS, ("id", "created"))
SAVE_MESSAGE = _upsert("messages", _MESSAGE_COLUMNS, ("id", "conversation_id", "role", "created"))
SAVE_PRESET = "INSERT OR REPLACE INTO presets (kind, name, text, params) VALUES (?, ?, ?, ?)"


class DamagedRow(ValueError):
    """A row that holds something else than it should; the message says what."""


def conversation_values(conversation: Conversation) -> tuple:
    """In the order of ``SAVE_CONVERSATION``."""
    scroll = conversation.scroll
    choices = conversation.choices if conversation.tree is None else conversation.tree.choices
    return (
        conversation.id,
        conversation.title,
        conversation.created,
        conversation.updated,
        conversation.system_prompt,
        encode(conversation.params),
        conversation.priority,
        int(conversation.pinned),
        conversation.folder,
        conversation.draft,
        None if scroll is None else encode((scroll.message_id, scroll.offset)),
        conversation.policy.value,
        encode(choices),
    )


def message_values(conversation_id: str, message: Message) -> tuple:
    """In the order of ``SAVE_MESSAGE``."""
    timings = message.timings
    return (
        message.id,
        conversation_id,
        message.parent,
        message.number,
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
        None if message.params is None else encode(message.params),
        message.dropped,
        message.model,
    )


def preset_values(preset: Preset) -> tuple:
    """In the order of ``SAVE_PRESET``."""
    return preset.kind, preset.name, preset.text, None if preset.params is None else encode(preset.params)


def read_preset(row: sqlite3.Row) -> Preset:
    """The user's preset of a row. Raises :class:`DamagedRow`."""
    kind: PresetKind = "sampling" if _text(row, "kind") == "sampling" else "system"
    params = None if row["params"] is None else _decode(row, "params", SamplingParams)
    return Preset(_text(row, "name"), kind, _text(row, "text"), params)


def read_conversation(row: sqlite3.Row) -> Conversation:
    """The conversation of a row, its messages still on disk. Raises :class:`DamagedRow`."""
    try:
        policy = ContextPolicy(_text(row, "policy"))
    except ValueError as error:
        raise DamagedRow(f"policy: {error}") from None
    place = None if row["scroll"] is None else _decode(row, "scroll", tuple[str, ScrollOffset])
    return Conversation(
        id=_text(row, "id"),
        title=_text(row, "title"),
        created=_time(row, "created"),
        updated=_time(row, "updated"),
        system_prompt=_text(row, "system_prompt"),
        params=_decode(row, "params", SamplingParams),
        priority=_integer(row, "priority"),
        pinned=bool(_integer(row, "pinned")),
        folder=_text(row, "folder"),
        draft=_text(row, "draft"),
        scroll=None if place is None else ScrollPlace(*place),
        policy=policy,
        tree=None,
        choices=_decode(row, "choices", dict[str, str]),
    )


def read_message(row: sqlite3.Row) -> Message:
    """The message of a row. Raises :class:`DamagedRow`."""
    timings = AnswerTimings(
        tokens=_integer(row, "tokens"),
        ttft=None if row["ttft"] is None else _number(row, "ttft"),
        tokens_per_second=None if row["tokens_per_second"] is None else _number(row, "tokens_per_second"),
        prompt_tokens=_integer(row, "prompt_tokens"),
        cached_tokens=_integer(row, "cached_tokens"),
        preemptions=_integer(row, "preemptions"),
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
        parent=None if row["parent"] is None else _text(row, "parent"),
        number=_integer(row, "number"),
        created=_time(row, "created"),
        error=_text(row, "error"),
        finish_reason=_text(row, "finish_reason"),
        timings=timings,
        params=None if row["params"] is None else _decode(row, "params", SamplingParams),
        dropped=_integer(row, "dropped"),
        model=_text(row, "model"),
    )


def read_messages(rows: list[sqlite3.Row]) -> list[Message]:
    """The messages of rows; of one that is damaged what can be made out, with its ``damage``."""
    messages: list[Message] = []
    unclear: list[Message] = []
    for row in rows:
        try:
            messages.append(read_message(row))
        except DamagedRow as error:
            message, role_known = _damaged_message(row, str(error))
            messages.append(message)
            if not role_known:
                unclear.append(message)
    last = max((message.number for message in messages), default=0)
    roles = {message.id: message.role for message in messages if message not in unclear}
    for message in messages:
        if message.number < 0:
            message.number = last + 1
    for message in unclear:
        message.role = roles.get(message.parent or "", Role.ASSISTANT).other
    return messages


def _damaged_message(row: sqlite3.Row, reason: str) -> tuple[Message, bool]:
    try:
        role, known = Role(loose_text(row["role"])), True
    except ValueError:
        role, known = Role.USER, False
    message = Message(
        role,
        id=loose_text(row["id"]),
        parent=None if row["parent"] is None else loose_text(row["parent"]),
        number=row["number"] if isinstance(row["number"], int) and abs(row["number"]) <= LARGEST_NUMBER else -1,
        damage=reason,
    )
    return message, known


def damaged_conversation(row: sqlite3.Row, reason: str) -> Conversation:
    """What can be made out of a row that :func:`read_conversation` refuses."""
    title = loose_text(row["title"]).strip() or tr("Damaged chat")
    updated = 0.0
    with contextlib.suppress(DamagedRow):
        updated = _time(row, "updated")
    return Conversation(
        id=loose_text(row["id"]), title=title, created=updated, updated=updated, tree=None, damage=reason
    )


def loose_text(value: object) -> str:
    """Whatever a damaged row holds, as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _text(row: sqlite3.Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, bytes):
        raise DamagedRow(tr("{column} is {value}, which is no text", column=column, value=repr(value)))
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DamagedRow(
            tr("{column} holds bytes that are no text, from byte {start} on", column=column, start=error.start)
        ) from None


def _number(row: sqlite3.Row, column: str) -> float:
    value = row[column]
    if not isinstance(value, int | float) or not math.isfinite(value):
        shown = repr(loose_text(value)[:40])
        raise DamagedRow(tr("{column} is {value}, which is no number", column=column, value=shown))
    return value


def _integer(row: sqlite3.Row, column: str) -> int:
    value = _number(row, column)
    if abs(value) > LARGEST_NUMBER:
        raise DamagedRow(tr("{column} is {value}, which is too large", column=column, value=value))
    return int(value)


def _time(row: sqlite3.Row, column: str) -> float:
    value = _number(row, column)
    if not abs(value) <= LATEST:
        raise DamagedRow(tr("{column} is {value}, which is no time", column=column, value=value))
    return value


def encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _decode(row: sqlite3.Row, column: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(_text(row, column), type=kind)
    except msgspec.MsgspecError as error:
        raise DamagedRow(f"{column}: {error}") from None
