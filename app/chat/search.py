"""Finds titles and texts by any part of a word, whatever its case.

The index holds the trigrams of every text that is not being written any more: an answer enters it once, when it ends.
It says in which messages all trigrams of a needle occur; whether the needle does is looked up in the text itself. It is
made of the messages, as far as ``trigrams_filled`` says, and to there kept up to date by triggers; it can be trusted
exactly as long as these are there. What lies beyond is read.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from app.chat import files, schema
from app.chat.conversation import Conversation

if TYPE_CHECKING:
    from app.chat.store import ChatStore

SNIPPET_BEFORE, SNIPPET_AFTER = 24, 64
"""Characters of a text around its hit."""
HIT_BEGINS, HIT_ENDS = "\u2068", "\u2069"
_LONGEST_NEEDLE = 1_000
_MOST_TRIGRAMS = 32
_QUICK_BLOCKS = 5_000
"""So many blocks of the index, of 4 KB, are written anew in well under a second."""
_ALL = 2**62
"""As the last row that is in the index: every one there is or will be."""
_FIRST_SECONDS = 0.05
"""As long as a start may take for indexing; the rest follows in slices."""
_BATCH_ROWS, _BATCH_BYTES = 500, 250_000
"""Indexed at once, in some 20 ms."""
_CLOSED = "{row}.status NOT IN ('streaming', 'queued')"
_INDEXED = f"({_CLOSED} AND {{row}}.rowid <= (SELECT up_to FROM trigrams_filled))"
_OLD_CLOSED, _NEW_CLOSED = _INDEXED.format(row="old"), _INDEXED.format(row="new")
_CHANGED = f"(old.text IS NOT new.text OR ({_OLD_CLOSED}) <> ({_NEW_CLOSED}))"
_ADD = "INSERT INTO message_trigrams (rowid, text) VALUES (new.rowid, new.text);"
_TAKE_OUT = "INSERT INTO message_trigrams (message_trigrams, rowid, text) VALUES ('delete', old.rowid, old.text);"
_TABLE = "CREATE VIRTUAL TABLE message_trigrams USING fts5(text, content='', tokenize='trigram', detail='none')"
_FILLED = "CREATE TABLE trigrams_filled (up_to INTEGER NOT NULL)"
_TRIGGERS = (
    f"CREATE TRIGGER trigrams_of_new AFTER INSERT ON messages WHEN {_NEW_CLOSED} BEGIN {_ADD} END",
    f"CREATE TRIGGER trigrams_of_gone AFTER DELETE ON messages WHEN {_OLD_CLOSED} BEGIN {_TAKE_OUT} END",
    "CREATE TRIGGER trigrams_before_change BEFORE UPDATE OF text, status ON messages "
    f"WHEN {_OLD_CLOSED} AND {_CHANGED} BEGIN {_TAKE_OUT} END",
    "CREATE TRIGGER trigrams_after_change AFTER UPDATE OF text, status ON messages "
    f"WHEN {_NEW_CLOSED} AND {_CHANGED} BEGIN {_ADD} END",
)


@dataclass(frozen=True, slots=True)
class Found:
    conversation: Conversation
    message_id: str | None
    """Of the youngest message that holds the needle, in whatever branch; None: the title does, or all was asked for."""
    snippet: str
    """The text around the hit, which stands between U+2068 and U+2069; empty where all was asked for."""
    messages: int = 0
    """How many hold the needle."""


class TextHit(NamedTuple):
    """The youngest message of a conversation that holds the needle, and how many do."""

    message_id: str
    text: str
    messages: int


def find(needle: str, conversations: Iterable[Conversation], store: ChatStore) -> list[Found]:
    """One for each conversation with ``needle`` in its title or a text, the last used first; for an empty one all.

    Raises :class:`StoreError` where the texts cannot be read.
    """
    ordered = sorted(conversations, key=lambda each: each.updated, reverse=True)
    needle = needle.strip()[:_LONGEST_NEEDLE]
    if not needle:
        return [Found(each, None, "") for each in ordered]
    texts = store.find_texts(needle)
    found = []
    for conversation in ordered:
        if needle.casefold() in conversation.title.casefold():
            messages = texts[conversation.id].messages if conversation.id in texts else 0
            found.append(Found(conversation, None, snippet_of(conversation.title, needle), messages))
        elif conversation.id in texts:
            message_id, text, messages = texts[conversation.id]
            found.append(Found(conversation, message_id, snippet_of(text, needle), messages))
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
    """Begins the index where there is none, to be filled by :func:`fill_index`. Without FTS5, or where that fails,
    searching reads every text."""
    try:
        if _is_indexed(connection):
            connection.execute("SELECT rowid FROM message_trigrams WHERE message_trigrams MATCH '\"abc\"'").fetchone()
            if connection.execute("SELECT count(*) FROM trigrams_filled").fetchone()[0] == 1:
                return
        connection.execute("BEGIN IMMEDIATE")
        _drop_triggers(connection)
        for table in ("message_trigrams", "trigrams_filled"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in (_TABLE, _FILLED, "INSERT INTO trigrams_filled VALUES (0)", *_TRIGGERS):
            connection.execute(statement)
        connection.execute("COMMIT")
        fill_index(connection, _FIRST_SECONDS)
    except files.SQLITE_ERRORS:
        with contextlib.suppress(*files.SQLITE_ERRORS):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            _drop_triggers(connection)  # nothing but the messages is written from here on


def forget_deleted(connection: sqlite3.Connection) -> None:
    """Takes the trigrams of deleted texts, which are only marked so, out of the file; of a large index at another time:
    it is written anew for this."""
    with contextlib.suppress(*files.SQLITE_ERRORS):
        if connection.execute("SELECT count(*) FROM message_trigrams_data").fetchone()[0] < _QUICK_BLOCKS:
            connection.execute("INSERT INTO message_trigrams (message_trigrams) VALUES ('optimize')")


def fill_index(connection: sqlite3.Connection, seconds: float) -> bool:
    """Goes on with the index for about so long; whether it is whole now. Raises one of :data:`files.SQLITE_ERRORS`."""
    until = time.perf_counter() + seconds
    while _is_indexed(connection):
        connection.execute("BEGIN IMMEDIATE")
        try:
            is_whole = _index_batch(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if is_whole:
            return True
        if time.perf_counter() > until:
            return False
    return True  # there is none


def _index_batch(connection: sqlite3.Connection) -> bool:
    first = connection.execute("SELECT up_to FROM trigrams_filled").fetchone()[0]
    if first >= _ALL:
        return True
    last, size = _ALL, 0
    query = "SELECT rowid, length(CAST(text AS BLOB)) FROM messages WHERE rowid > ? ORDER BY rowid LIMIT ?"
    for rowid, length in connection.execute(query, (first, _BATCH_ROWS)):
        last, size = rowid, size + (length or 0)
        if size > _BATCH_BYTES:
            break
    connection.execute(
        "INSERT INTO message_trigrams (rowid, text) SELECT rowid, text FROM messages "
        f"WHERE rowid > ? AND rowid <= ? AND {_CLOSED.format(row='messages')}",
        (first, last),
    )
    connection.execute("UPDATE trigrams_filled SET up_to = ?", (last,))
    return last >= _ALL


def texts_with(connection: sqlite3.Connection, needle: str) -> dict[str, TextHit]:
    """What each conversation holds of ``needle``, by its id."""
    folded = needle.casefold()
    connection.create_function("holds", 1, lambda value: folded in _text(value).casefold(), deterministic=True)
    if needle.isascii():  # several times as fast
        holds, values = "text LIKE ? ESCAPE '\\'", ["%" + re.sub(r"([\\%_])", r"\\\1", needle) + "%"]
    else:
        holds, values = "holds(text)", []
    if len(needle) < 3 or not _is_indexed(connection):
        return _hits(connection, holds, values)
    # What is being written, of which there is never much, is not in the index, nor what it has not come to yet.
    beyond = "(status IN ('streaming', 'queued') OR rowid > (SELECT up_to FROM trigrams_filled))"
    found = _hits(connection, f"{beyond} AND {holds}", values)
    trigrams = dict.fromkeys(needle[at : at + 3].replace('"', '""') for at in range(len(needle) - 2))
    query = " AND ".join(f'"{each}"' for each in list(trigrams)[:_MOST_TRIGRAMS])
    candidates = "rowid IN (SELECT rowid FROM message_trigrams WHERE message_trigrams MATCH ?)"
    for key, hit in _hits(connection, f"{candidates} AND {holds}", [query, *values]).items():
        if key in found:
            hit = found[key]._replace(messages=hit.messages + found[key].messages)
        found[key] = hit
    return found


def _hits(connection: sqlite3.Connection, condition: str, values: list[str]) -> dict[str, TextHit]:
    query = "SELECT conversation_id, id, text, count(*), max(number) FROM messages WHERE {} GROUP BY conversation_id"
    rows = connection.execute(query.format(condition), values)
    return {_text(row[0]): TextHit(_text(row[1]), _text(row[2]), row[3]) for row in rows}


def _is_indexed(connection: sqlite3.Connection) -> bool:
    return _parts(connection) == _whole_index()


@functools.cache
def _whole_index() -> dict[str, str]:
    with contextlib.closing(schema.reference(schema.SCHEMA_VERSION)) as reference:
        for statement in (_TABLE, _FILLED, *_TRIGGERS):
            reference.execute(statement)
        return _parts(reference)


def _parts(connection: sqlite3.Connection) -> dict[str, str]:
    """The triggers and tables of the index that there are, by name, in SQL."""
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger' OR name LIKE '%trigrams%'")
    return {_text(row[0]): _text(row[1]) for row in rows}


def _drop_triggers(connection: sqlite3.Connection) -> None:
    for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        name = _text(row[0]).replace('"', '""')
        connection.execute(f'DROP TRIGGER "{name}"')


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
