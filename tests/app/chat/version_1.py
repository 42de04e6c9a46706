"""A chat file as the first version of the program wrote it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

_TABLES = (
    """CREATE TABLE conversations (id TEXT PRIMARY KEY, title TEXT NOT NULL, created REAL NOT NULL,
        updated REAL NOT NULL, deleted REAL, system_prompt TEXT NOT NULL, params TEXT NOT NULL)""",
    """CREATE TABLE messages (id TEXT PRIMARY KEY,
        conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
        turn INTEGER NOT NULL, role TEXT NOT NULL, text TEXT NOT NULL, status TEXT NOT NULL, created REAL NOT NULL,
        error TEXT NOT NULL, finish_reason TEXT NOT NULL, ttft REAL, tokens INTEGER NOT NULL, tokens_per_second REAL,
        prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, preemptions INTEGER NOT NULL, params TEXT)""",
    "CREATE INDEX messages_of_conversation ON messages (conversation_id, turn)",
    "CREATE INDEX messages_by_status ON messages (status)",
    "PRAGMA user_version = 1",
)
_PARAMS = '{"temperature":0.7,"top_p":0.9,"max_tokens":1024}'


def make_version_1(path: Path, *, chats: int, turns: int, length: int = 0) -> None:
    """Answers are filled up to ``length`` characters. Every third number of a turn is missing, as after deleting."""
    raw = sqlite3.connect(path, isolation_level=None)
    raw.execute("PRAGMA journal_mode = WAL")
    for statement in _TABLES:
        raw.execute(statement)
    raw.execute("BEGIN")
    for chat in range(chats):
        raw.execute(
            "INSERT INTO conversations VALUES (?, ?, 1.0, ?, NULL, 'Be kind.', ?)",
            (f"chat{chat}", f"chat {chat}", float(chat), _PARAMS),
        )
        for turn in range(turns):
            number = turn if turns < 10 else turn + turn // 2
            for role, text in (("user", f"question {turn}"), ("assistant", f"answer {turn}".ljust(length, "."))):
                params = _PARAMS if role == "assistant" else None
                values = (f"{chat}-{turn}-{role}", f"chat{chat}", number, role, text, params)
                raw.execute(
                    "INSERT INTO messages VALUES (?, ?, ?, ?, ?, 'complete', 1.0, '', 'stop', 0.2, 9, 40, 7, 3, 0, ?)",
                    values,
                )
    raw.execute("COMMIT")
    raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    raw.close()
