"""Finds titles and texts by any part of a word, whatever its case.

The index holds the trigrams of every text that is not being written any more: an answer enters it once, when it ends.
It says in which messages all trigrams of a needle occur; whether the needle does is looked up in the text itself. It is
made of the messages and kept up to date by triggers, and it is whole exactly as long as these are there.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.chat.conversation import Conversation

if TYPE_CHECKING:
    from app.chat.store import ChatStore

SNIPPET_BEFORE, SNIPPET_AFTER = 24, 64
"""Characters of a text around its hit."""
HIT_BEGINS, HIT_ENDS = "\u2068", "\u2069"
_MOST_TRIGRAMS = 32
_CLOSED = "{row}.status NOT IN ('streaming', 'queued')"
_OLD_CLOSED, _NEW_CLOSED = _CLOSED.format(row="old"), _CLOSED.format(row="new")
_CHANGED = f"(old.text IS NOT new.text OR ({_OLD_CLOSED}) <> ({_NEW_CLOSED}))"
_ADD = "INSERT INTO message_trigrams (rowid, text) VALUES (new.rowid, new.text);"
_TAKE_OUT = "INSERT INTO message_trigrams (message_trigrams, rowid, text) VALUES ('delete', old.rowid, old.text);"
_TRIGGERS = {
    "trigrams_of_new": f"AFTER INSERT ON messages WHEN {_NEW_CLOSED} BEGIN {_ADD} END",
    "trigrams_of_gone": f"AFTER DELETE ON messages WHEN {_OLD_CLOSED} BEGIN {_TAKE_OUT} END",
    "trigrams_before_change": f"BEFORE UPDATE OF text, status ON messages WHEN {_OLD_CLOSED} AND {_CHANGED} "
    f"BEGIN {_TAKE_OUT} END",
    "trigrams_after_change": f"AFTER UPDATE OF text, status ON messages WHEN {_NEW_CLOSED} AND {_CHANGED} "
    f"BEGIN {_ADD} END",
}


@dataclass(frozen=True, slots=True)
class Found:
    conversation: Conversation
    message_id: str | None
    """Of the youngest message that holds the needle, in whatever branch; None: the title does, or all was asked for."""
    snippet: str
    """The text around the hit, which stands between U+2068 and U+2069; empty where all was asked for."""


def find(needle: str, conversations: Iterable[Conversation], store: ChatStore) -> list[Found]:
    """One for each conversation with ``needle`` in its title or a text, the last used first; for an empty one all.

    Raises :class:`StoreError` where the texts cannot be read.
    """
    ordered = sorted(conversations, key=lambda each: each.updated, reverse=True)
    needle = needle.strip()
    if not needle:
        return [Found(each, None, "") for each in ordered]
    texts = store.find_texts(needle)
    found = []
    for conversation in ordered:
        if needle.casefold() in conversation.title.casefold():
            found.append(Found(conversation, None, snippet_of(conversation.title, needle)))
        elif conversation.id in texts:
            message_id, text = texts[conversation.id]
            found.append(Found(conversation, message_id, snippet_of(text, needle)))
    return found


def snippet_of(text: str, needle: str) -> str:
    """One line of ``text`` with the first hit between the two marks, as if nothing else were one."""
    text = text.replace(HIT_BEGINS, "").replace(HIT_ENDS, "")
    hit = re.search(re.escape(needle), text, re.IGNORECASE)
    start, end = hit.span() if hit is not None else (0, 0)
    first, last = max(0, start - SNIPPET_BEFORE), min(len(text), end + SNIPPET_AFTER)
    if first > 0:
        space = text.find(" ", first, start)
        first = space + 1 if space >= 0 else first
    before, inside, after = text[first:start], text[start:end], text[end:last]
    marked = f"{HIT_BEGINS}{inside}{HIT_ENDS}" if hit is not None else ""
    line = " ".join(f"{before}{marked}{after}".split())
    return f"{'…' if first > 0 else ''}{line}{'…' if last < len(text) else ''}"


# The index ------------------------------------------------------------------------------------------------------------


def prepare_index(connection: sqlite3.Connection) -> None:
    """Builds the index where there is none. Without FTS5, or where that fails, searching reads every text."""
    try:
        have = connection.execute("SELECT count(*) FROM sqlite_master WHERE type = 'trigger'").fetchone()[0]
        if have == len(_TRIGGERS):
            connection.execute("SELECT rowid FROM message_trigrams WHERE message_trigrams MATCH '\"abc\"'").fetchone()
            return
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DROP TABLE IF EXISTS message_trigrams")
        connection.execute(
            "CREATE VIRTUAL TABLE message_trigrams USING fts5(text, content='', tokenize='trigram', detail='none')"
        )
        _fill(connection)
        for name, what in _TRIGGERS.items():
            connection.execute(f"CREATE TRIGGER {name} {what}")
        connection.execute("COMMIT")
    except sqlite3.Error:
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            for name in _TRIGGERS:  # nothing but the messages themselves is written from here on
                connection.execute(f"DROP TRIGGER IF EXISTS {name}")


def _fill(connection: sqlite3.Connection) -> None:
    every = (
        "INSERT INTO message_trigrams (rowid, text) "
        f"SELECT rowid, text FROM messages WHERE {_CLOSED.format(row='messages')}"
    )
    connection.execute(every)


def texts_with(connection: sqlite3.Connection, needle: str) -> dict[str, tuple[str, str]]:
    """Conversation id → id and text of the youngest message in it that holds ``needle``."""
    folded = needle.casefold()
    connection.create_function("holds", 1, lambda value: folded in _text(value).casefold(), deterministic=True)
    whole = "SELECT conversation_id, id, text, max(number) FROM messages WHERE {} GROUP BY conversation_id"
    if len(needle) >= 3 and _is_indexed(connection):
        return _by_index(connection, needle, folded, whole)
    if needle.isascii():
        pattern = "%" + re.sub(r"([\\%_])", r"\\\1", needle) + "%"
        return _rows(connection.execute(whole.format("text LIKE ? ESCAPE '\\'"), (pattern,)))
    return _rows(connection.execute(whole.format("holds(text)")))


def _by_index(connection: sqlite3.Connection, needle: str, folded: str, whole: str) -> dict[str, tuple[str, str]]:
    """Texts that are being written are not in the index; there are never many of them."""
    found = _rows(connection.execute(whole.format("status IN ('streaming', 'queued') AND holds(text)")))
    trigrams = dict.fromkeys(needle[at : at + 3].replace('"', '""') for at in range(len(needle) - 2))
    query = " AND ".join(f'"{each}"' for each in list(trigrams)[:_MOST_TRIGRAMS])
    candidates = connection.execute(
        "SELECT conversation_id, id, messages.rowid FROM message_trigrams "
        "JOIN messages ON messages.rowid = message_trigrams.rowid "
        "WHERE message_trigrams MATCH ? ORDER BY number DESC",
        (query,),
    ).fetchall()
    for conversation_id, message_id, rowid in candidates:
        key = _text(conversation_id)
        if key not in found:
            text = _text(connection.execute("SELECT text FROM messages WHERE rowid = ?", (rowid,)).fetchone()[0])
            if folded in text.casefold():
                found[key] = (_text(message_id), text)
    return found


def _is_indexed(connection: sqlite3.Connection) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger'"
    return connection.execute(query).fetchone()[0] == len(_TRIGGERS)


def _rows(cursor: sqlite3.Cursor) -> dict[str, tuple[str, str]]:
    return {_text(row[0]): (_text(row[1]), _text(row[2])) for row in cursor}


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
