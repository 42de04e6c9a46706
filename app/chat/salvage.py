"""What can still be read of a chat file with damaged pages, copied into a sound one.

A page of the file that holds something else costs the rows on it; but where SQLite has to change what is beside them it
refuses, and nothing could be saved any more. So the first change that meets damage has the file copied, row by row, and
the damaged one is kept.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from app.chat import files, schema
from app.chat.conversation import DEFAULT_CHAT_PARAMS
from app.translation import tr

_MOST_ROWS = 100_000
_TABLES = (b"conversations", b"messages", b"presets")
_RECOVER_CONVERSATIONS = """
INSERT OR IGNORE INTO conversations (id, title, created, updated, system_prompt, params)
SELECT conversation_id, ?, min(created), max(created), '', ? FROM messages GROUP BY conversation_id"""
"""For messages whose conversation is lost."""


def copy_readable(damaged: Path, fresh: Path) -> int:
    """Makes ``fresh``, of the same version as ``damaged``; returns how many rows were lost. Raises sqlite3.Error."""
    fresh.unlink(missing_ok=True)
    with (
        contextlib.closing(files.connect(damaged, read_only=True)) as source,
        contextlib.closing(files.connect(fresh)) as target,
    ):
        schema.bring_forward(target, source.execute("PRAGMA user_version").fetchone()[0])
        target.execute("PRAGMA foreign_keys = OFF")
        target.execute("BEGIN")
        known = {row[0] for row in target.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        lost = sum(_copy(source, target, table.decode()) for table in _TABLES if table in known)
        target.execute(_RECOVER_CONVERSATIONS, (tr("Recovered chat"), schema.encode(DEFAULT_CHAT_PARAMS)))
        target.execute("COMMIT")
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    files.sync(fresh)
    return lost


def _copy(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> int:
    """Values keep their types and bytes, whatever they are: what is damaged in a row is that row's affair."""
    columns = [row["name"].decode() for row in source.execute(f"PRAGMA table_info({table})")]
    types = ", ".join(f"typeof({name})" for name in columns)
    lost = 0
    for row in _rows(source, f"SELECT {', '.join(columns)}, {types} FROM {table}", table):
        if row is None:
            lost += 1
            continue
        values, kinds = tuple(row)[: len(columns)], tuple(row)[len(columns) :]
        marks = ", ".join("CAST(? AS TEXT)" if kind == b"text" else "?" for kind in kinds)
        statement = f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({marks})"
        target.execute(statement, values)
    return lost


def _rows(source: sqlite3.Connection, query: str, table: str) -> Iterator[sqlite3.Row | None]:
    """None stands for a row that cannot be read."""
    try:
        yield from source.execute(query).fetchall()
        return
    except sqlite3.DatabaseError:
        pass
    try:
        last = min(_MOST_ROWS, source.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] or 0)
    except sqlite3.DatabaseError:
        last = _MOST_ROWS
    for rowid in range(1, last + 1):
        try:
            yield from source.execute(f"{query} WHERE rowid = ?", (rowid,)).fetchall()
        except sqlite3.DatabaseError:
            yield None
