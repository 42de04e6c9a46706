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
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from app.chat import files, schema
from app.chat.conversation import Conversation

if TYPE_CHECKING:
    from app.chat.store import ChatStore

SNIPPET_BEFORE, SNIPPET_AFTER = 24, 64
"""Characters of a text around its hit."""
HIT_BEGINS, HIT_ENDS = "\u2068", "\u2069"
SLICE_BYTES, ROW_BYTES = 1_000_000, 500
"""What one slice of a search looks at, and what a text costs besides its length."""
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


class Found:
    """A conversation that a search found."""

    def __init__(
        self,
        conversation: Conversation,
        message_id: str | None = None,
        messages: int = 0,
        cut: Callable[[], str] = lambda: "",
    ) -> None:
        self.conversation = conversation
        self.message_id = message_id
        """Of the youngest message that holds the needle, in whatever branch; None: the title does, or all was asked
        for."""
        self.messages = messages
        """How many hold the needle."""
        self._cut = cut

    @functools.cached_property
    def snippet(self) -> str:
        """The text around the hit, which stands between U+2068 and U+2069; empty where all was asked for. It is cut
        when it is asked for, since few of many are ever seen."""
        return self._cut()


class TextHit(NamedTuple):
    """The youngest message of a conversation that holds the needle, and how many do."""

    message_id: str
    messages: int
    number: int


class Search:
    """A needle in titles and texts, looked for in slices: the titles at once, then the youngest messages first."""

    def __init__(self, needle: str, conversations: Iterable[Conversation], store: ChatStore) -> None:
        self._needle = needle.strip()[:_LONGEST_NEEDLE]
        self._ordered = sorted(conversations, key=attrgetter("updated"), reverse=True)
        folded = self._needle.casefold()
        self._titled = {each.id for each in self._ordered if folded in each.title.casefold()}
        self._store = store
        self._texts = TextSearch(self._needle)

    def more(self) -> bool:
        """Looks through one slice of the texts; whether that was the last. Raises :class:`StoreError`."""
        return not self._needle or self._store.search_on(self._texts)

    @property
    def found(self) -> list[Found]:
        """One for each conversation that is known to hold the needle, the last used first; for an empty one all."""
        if not self._needle:
            return [Found(each) for each in self._ordered]
        hits, titled = self._texts.hits, self._titled
        return [self._found(each) for each in self._ordered if each.id in titled or each.id in hits]

    def _found(self, conversation: Conversation) -> Found:
        message_id, messages, _ = self._texts.hits.get(conversation.id, (None, 0, 0))
        if conversation.id in self._titled:
            return Found(conversation, None, messages, lambda: snippet_of(conversation.title, self._needle))
        return Found(conversation, message_id, messages, lambda: snippet_of(self._text_of(message_id), self._needle))

    def _text_of(self, message_id: str | None) -> str:
        return self._store.text_of(message_id or "")


def find(needle: str, conversations: Iterable[Conversation], store: ChatStore) -> list[Found]:
    """All that :class:`Search` finds, at once. Raises :class:`StoreError` where the texts cannot be read."""
    search = Search(needle, conversations, store)
    while not search.more():
        pass
    return search.found


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


class TextSearch:
    """Which texts hold a needle, from the youngest row back. A slice looks at ``SLICE_BYTES``, or at one text."""

    def __init__(self, needle: str) -> None:
        self._needle = needle
        self.hits: dict[str, TextHit] = {}
        """By the id of the conversation."""
        self._parts: list[tuple[str, list[object]]] | None = None
        """Where rows are still to be looked at, in SQL, and its values."""
        self._below = _ALL

    def more(self, connection: sqlite3.Connection) -> bool:
        """Looks at one slice; whether that was the last."""
        if self._parts is None:
            self._parts = self._all_parts(connection)
        folded = self._needle.casefold()
        connection.create_function("holds", 1, lambda value: folded in _text(value).casefold(), deterministic=True)
        left = SLICE_BYTES
        while self._parts:
            rows, values = self._parts[0]
            left = self._look(connection.execute(rows, [*self._pattern(), *values, self._below]), left)
            if left <= 0:
                return False
            del self._parts[0]
            self._below = _ALL
        return True

    def _look(self, rows: sqlite3.Cursor, left: int) -> int:
        """Looks at rows until ``left``, in bytes, is used up; what is left."""
        try:
            for rowid, conversation_id, message_id, number, length, holds in rows:
                self._below = rowid
                left -= (length or 0) + ROW_BYTES
                if holds:
                    self._count(_text(conversation_id), _text(message_id), number)
                if left <= 0:
                    break
        finally:
            rows.close()  # else it would keep the file's state of this moment
        return left

    def _count(self, conversation_id: str, message_id: str, number: int) -> None:
        hit = self.hits.get(conversation_id)
        if hit is None or number > hit.number:
            self.hits[conversation_id] = TextHit(message_id, 1 + (hit.messages if hit else 0), number)
        else:
            self.hits[conversation_id] = hit._replace(messages=hit.messages + 1)

    def _pattern(self) -> list[str]:
        return ["%" + re.sub(r"([\\%_])", r"\\\1", self._needle) + "%"] if self._needle.isascii() else []

    def _all_parts(self, connection: sqlite3.Connection) -> list[tuple[str, list[object]]]:
        like = "messages.text LIKE ? ESCAPE '\\'"  # far quicker than a function of ours
        holds = like if self._needle.isascii() else "holds(messages.text)"
        columns = f"messages.rowid, conversation_id, id, number, length(messages.text), {holds}"
        read = f"SELECT {columns} FROM messages WHERE {{}} AND rowid < ? ORDER BY rowid DESC"
        if len(self._needle) < 3 or not _is_indexed(connection):
            return [(read.format("1"), [])]
        # What is being written, of which there is never much, is not in the index, nor what it has not come to yet.
        up_to = connection.execute("SELECT up_to FROM trigrams_filled").fetchone()[0]
        written = "status IN ('streaming', 'queued') AND rowid <= ?"
        needle = self._needle
        trigrams = dict.fromkeys(needle[at : at + 3].replace('"', '""') for at in range(len(needle) - 2))
        query = " AND ".join(f'"{each}"' for each in list(trigrams)[:_MOST_TRIGRAMS])
        candidates = (
            f"SELECT {columns} FROM message_trigrams CROSS JOIN messages ON messages.rowid = message_trigrams.rowid "
            "WHERE message_trigrams MATCH ? AND message_trigrams.rowid <= ? AND message_trigrams.rowid < ? "
            "ORDER BY message_trigrams.rowid DESC"
        )
        return [
            (read.format("rowid > ?"), [up_to]),
            (read.format(written), [up_to]),
            (candidates, [query, up_to]),
        ]


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
