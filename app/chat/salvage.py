"""What can still be read of a chat file with damaged pages, copied into a sound one.

A page of the file that holds something else costs the rows on it; but where SQLite has to change what is beside them it
refuses, and nothing could be saved any more. So the first change that meets damage has the file copied, row by row, and
the damaged one is kept. Where what the file says about its tables is damaged, they are read as this program makes them.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from app.chat import files, schema
from app.chat.conversation import DEFAULT_CHAT_PARAMS
from app.translation import tr

_MOST_FAILURES = 200_000
_LEAST_ROW_BYTES = 32
_LOST_TEXT = b"\xff"
"""No text: a row that has it says that it is damaged."""
_RECOVER_CONVERSATIONS = """
INSERT OR IGNORE INTO conversations (id, title, created, updated, system_prompt, params)
SELECT conversation_id, ?, min(created), max(created), '', ? FROM messages
WHERE conversation_id NOT IN (SELECT id FROM conversations) GROUP BY conversation_id"""


def copy_readable(damaged: Path, target: sqlite3.Connection) -> int:
    """Into the empty ``target``, in the version of ``damaged``; returns how many rows were lost.

    Raises one of :data:`files.SQLITE_ERRORS`.
    """
    with contextlib.closing(_readable(damaged)) as source:
        schema.bring_forward(target, _version(source))
        target.execute("PRAGMA foreign_keys = OFF")
        target.execute("BEGIN")
        lost = sum(_copy(source, target, name, columns) for name, columns in schema.tables_of(target).items())
        target.execute("COMMIT")
        target.execute("PRAGMA foreign_keys = ON")
    return lost


def recover_conversations(connection: sqlite3.Connection) -> None:
    """Makes a conversation for messages whose own is lost."""
    connection.execute(_RECOVER_CONVERSATIONS, (tr("Recovered chat"), schema.encode(DEFAULT_CHAT_PARAMS)))


def rows_around_damage(
    connection: sqlite3.Connection, query: str, table: str, *values: object
) -> tuple[list[sqlite3.Row], int]:
    """The rows of ``query``, which ends in a condition and uses no index, and how many could not be read.

    Halves whatever range of rows cannot be read, down to the single row.
    """
    rows: list[sqlite3.Row] = []
    lost = failures = 0
    ranges = [(0, _last_rowid(connection, table))]
    while ranges and failures < _MOST_FAILURES:
        first, last = ranges.pop()
        # A range looks at the row after it, too; a single row must not.
        limits, bounds = ("BETWEEN ? AND ?", (first, last)) if first < last else ("= ?", (first,))
        try:
            rows += connection.execute(f"{query} AND {table}.rowid {limits}", (*values, *bounds)).fetchall()
        except files.SQLITE_ERRORS:
            failures += 1
            middle = (first + last) // 2
            lost += first == last
            if first < last:
                ranges += [(middle + 1, last), (first, middle)]
    return rows, lost


def _last_rowid(connection: sqlite3.Connection, table: str) -> int:
    with contextlib.suppress(*files.SQLITE_ERRORS):
        return connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] or 0
    return _most_rows(connection)


def _most_rows(connection: sqlite3.Connection) -> int:
    pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    return pages * size // _LEAST_ROW_BYTES


def _version(source: sqlite3.Connection) -> int:
    version = source.execute("PRAGMA user_version").fetchone()[0]
    return version if 0 < version <= schema.SCHEMA_VERSION else schema.SCHEMA_VERSION


def _readable(damaged: Path) -> sqlite3.Connection:
    """A connection to the file; where its tables are not what they should be, to a copy in memory with plain ones."""
    source = files.connect(damaged, read_only=True)
    if schema.is_sound(source):
        return source
    with contextlib.closing(source):
        memory = files.connect(Path(":memory:"))
        source.backup(memory)
    with contextlib.closing(schema.reference(_version(memory))) as reference:
        tables = schema.tables_of(reference)
        roots = _roots(reference)
    memory.execute("PRAGMA writable_schema = ON")
    roots |= {name: root for name, root in _roots(memory).items() if name in tables}
    memory.execute("DELETE FROM sqlite_master")
    for name, columns in tables.items():
        # With defaults, which stand for columns that were added after a row was written.
        listed = ", ".join(_plain_column(column[1], column[4]) for column in columns)
        row = ("table", name, name, roots[name], f"CREATE TABLE {name} ({listed})")
        memory.execute("INSERT INTO sqlite_master (type, name, tbl_name, rootpage, sql) VALUES (?, ?, ?, ?, ?)", row)
    memory.execute("PRAGMA writable_schema = RESET")
    return memory


def _plain_column(name: bytes, default: bytes | None) -> str:
    return name.decode() if default is None else f"{name.decode()} DEFAULT {default.decode()}"


def _roots(connection: sqlite3.Connection) -> dict[str, int]:
    """The first page of each table."""
    query = "SELECT name, rootpage FROM sqlite_master WHERE type = 'table' AND typeof(rootpage) = 'integer'"
    return {schema.loose_text(name): root for name, root in connection.execute(query)}


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, table: str, columns: list[tuple]) -> int:
    """Values keep their types and bytes, whatever they are: what is damaged in a row is that row's affair."""
    names = [column[1].decode() for column in columns]
    types = ", ".join(f"typeof({name})" for name in names)
    rows, lost = _rows(source, f"SELECT rowid, {', '.join(names)}, {types} FROM {table}", table)
    for row in rows:
        values, kinds = list(row)[1 : 1 + len(names)], list(row)[1 + len(names) :]
        for place, (_, _, kind, is_needed, _, _) in enumerate(columns):
            if values[place] is None and is_needed:
                values[place], kinds[place] = (_LOST_TEXT, b"text") if kind == b"TEXT" else (0, b"integer")
        marks = ", ".join("CAST(? AS TEXT)" if kind == b"text" else "?" for kind in kinds)
        statement = f"INSERT OR IGNORE INTO {table} ({', '.join(names)}) VALUES ({marks})"
        lost += 1 - target.execute(statement, values).rowcount
    return lost


def _rows(source: sqlite3.Connection, query: str, table: str) -> tuple[list[sqlite3.Row], int]:
    """Where links between pages are damaged a search through them finds rows that going from page to page misses."""
    found, lost = rows_around_damage(source, f"{query} WHERE true", table)
    rows = {row[0]: row for row in found}
    refused = 0
    for rowid in range(1, min(_last_rowid(source, table), _most_rows(source)) + 1):
        if rowid not in rows:
            try:
                row = source.execute(f"{query} WHERE rowid = ?", (rowid,)).fetchone()
            except files.SQLITE_ERRORS:
                refused += 1
            else:
                if row is not None:
                    rows[rowid] = row
    return list(rows.values()), max(lost, refused)
