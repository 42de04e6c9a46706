"""The chats on disk: SQLite in WAL mode, written while answers stream.

Every save is one transaction, so a kill at any moment leaves the state before or after it. Who may write holds an
exclusive lock on a small file beside the chats; the operating system lets go of it however the program ends. Where the
file must not be written (a second window has it, a newer version wrote it, the disk refuses) the store works on a copy
in memory and ``notice`` says so.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from app.chat import schema
from app.chat.conversation import Conversation, Message, MessageStatus, Role, Turn

BUSY_SECONDS = 0.2
"""How long a save waits for another program's lock: the window stands still meanwhile."""
_MAX_ROWS_ONE_BY_ONE = 100_000


class StoreError(Exception):
    """A save or a load that did not happen; the message is a sentence for the user, and the program goes on."""


@dataclass(frozen=True, slots=True)
class SavedMessage:
    """A message and where it belongs."""

    conversation: Conversation
    turn: int
    message: Message


def default_store_path() -> Path:
    return Path(platformdirs.user_data_dir("batchscope", appauthor=False)) / "chats.sqlite3"


class ChatStore:
    """Open it with :meth:`open`. Methods raise :class:`StoreError` and nothing else for what a disk can do."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, notice: str, lock: sqlite3.Connection | None
    ) -> None:
        self._connection = connection
        self._lock = lock
        self.path = path
        self.notice = notice
        """A sentence where chats are not kept on disk, or something had to be set aside; else empty."""
        self.is_kept = lock is not None
        """Whether what is saved here survives the window."""

    # Opening and closing ---------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> ChatStore:
        """Opens or makes the file at ``path``. Never raises for the state of the file or the disk: see ``notice``."""
        lock = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path.with_name(path.name + ".lock"))
            if lock is None:
                return cls._in_memory(path, _SECOND_WINDOW, copy=True)
            return cls._open_file(path, lock)
        except (sqlite3.Error, OSError, StoreError) as error:
            if lock is not None:
                lock.close()
            reason = error if isinstance(error, StoreError) else _sentence(error, path)
            return cls._in_memory(path, f"{reason} Chats of this window are not kept.")

    @classmethod
    def _open_file(cls, path: Path, lock: sqlite3.Connection) -> ChatStore:
        notice = ""
        version = _version_of(path)
        if version is None:
            aside = _set_aside(path)
            notice = f"The chat file could not be read at all. It is kept as {aside}; a new one was begun."
        elif version > schema.SCHEMA_VERSION:
            raise StoreError(
                f"{path} was written by a newer Batchscope (format {version}; this one knows up to "
                f"{schema.SCHEMA_VERSION}). It is left untouched; update Batchscope to open it."
            )
        store = cls(_connect(path), path, notice, lock)
        store._prepare()
        return store

    @classmethod
    def _in_memory(cls, path: Path, notice: str, *, copy: bool = False) -> ChatStore:
        connection = _connect(Path(":memory:"))
        if copy:
            try:
                version = _version_of(path)
                if version is not None and version <= schema.SCHEMA_VERSION:
                    with contextlib.closing(_connect(path, read_only=True)) as source:
                        source.backup(connection)
            except sqlite3.Error as error:
                notice = f"{notice} {_sentence(error, path)}"
        store = cls(connection, path, notice, None)
        store._prepare()
        return store

    def _prepare(self) -> None:
        """Migrates, and marks what an earlier window left in the middle."""
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        for number in range(version, schema.SCHEMA_VERSION):
            with self._transaction():
                for statement in schema.MIGRATIONS[number]:
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {number + 1}")
        try:
            with self._transaction():
                self._connection.execute("DELETE FROM conversations WHERE deleted IS NOT NULL")
                self._connection.execute(
                    "UPDATE messages SET status = ?, error = ? WHERE status IN (?, ?)",
                    (
                        MessageStatus.INCOMPLETE.value,
                        "The program ended before this answer was complete.",
                        MessageStatus.STREAMING.value,
                        MessageStatus.QUEUED.value,
                    ),
                )
        except StoreError as error:
            self.notice = self.notice or str(error)

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self.is_kept:
                self._connection.execute("DELETE FROM conversations WHERE deleted IS NOT NULL")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        if self._lock is not None:
            self._lock.close()

    # Reading ---------------------------------------------------------------------------------------------------------

    def conversations(self) -> list[Conversation]:
        """All of them, the last used first, turns still on disk. A damaged row is in the list with its ``damage``."""
        rows, lost = self._rows("conversations", "SELECT rowid, * FROM conversations WHERE deleted IS NULL")
        found = []
        for row in rows:
            try:
                found.append(schema.read_conversation(row))
            except schema.DamagedRow as error:
                found.append(_damaged_conversation(row, str(error)))
        if lost:
            found.append(
                Conversation(title="Chats that could not be read", damage=f"{lost} rows of {self.path} are damaged.")
            )
        return sorted(found, key=lambda each: each.updated, reverse=True)

    def load_turns(self, conversation: Conversation) -> None:
        """Reads the turns of a conversation that are still on disk."""
        if conversation.turns is not None:
            return
        rows, lost = self._rows("messages", "SELECT rowid, * FROM messages WHERE conversation_id = ?", conversation.id)
        conversation.turns = _turns_of(rows)
        if lost:
            conversation.damage = conversation.damage or f"{lost} messages of {self.path} could not be read."
        conversation.next_turn = max((turn.number + 1 for turn in conversation.turns), default=0)

    def search(self, needle: str) -> set[str]:
        """Ids of the conversations with ``needle`` in title or text, whatever its case."""
        folded = needle.casefold()
        query = (
            "SELECT id FROM conversations WHERE deleted IS NULL AND (holds(title) OR EXISTS "
            "(SELECT 1 FROM messages WHERE conversation_id = conversations.id AND holds(text)))"
        )
        try:
            self._connection.create_function("holds", 1, lambda value: folded in schema.loose_text(value).casefold())
            return {schema.loose_text(row[0]) for row in self._connection.execute(query)}
        except sqlite3.Error as error:
            raise StoreError(_sentence(error, self.path)) from None

    # Writing ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        conversations: Iterable[Conversation],
        messages: Iterable[SavedMessage] = (),
        deleted_messages: Iterable[str] = (),
    ) -> None:
        """Writes all of it or, with :class:`StoreError`, nothing. Damaged rows are left as they are.

        ``deleted_messages`` are ids.
        """
        with self._transaction():
            self._connection.executemany("DELETE FROM messages WHERE id = ?", [(each,) for each in deleted_messages])
            for conversation in conversations:
                if not conversation.damage:
                    self._connection.execute(schema.SAVE_CONVERSATION, schema.conversation_values(conversation))
            for saved in messages:
                if not saved.message.damage:
                    values = schema.message_values(saved.conversation.id, saved.turn, saved.message)
                    self._connection.execute(schema.SAVE_MESSAGE, values)

    def set_deleted(self, conversation_id: str, deleted: bool) -> None:
        """Takes a conversation out of the list, or back in. It leaves the file when :meth:`purge` is called."""
        with self._transaction():
            value = time.time() if deleted else None
            self._connection.execute("UPDATE conversations SET deleted = ? WHERE id = ?", (value, conversation_id))

    def purge(self, conversation_id: str) -> None:
        """Removes a deleted conversation for good; its text is overwritten on disk."""
        with self._transaction():
            self._connection.execute(
                "DELETE FROM conversations WHERE id = ? AND deleted IS NOT NULL", (conversation_id,)
            )

    # -----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            raise StoreError(_sentence(error, self.path)) from None
        except BaseException:
            self._roll_back()  # else no later save could begin
            raise

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    def _rows(self, table: str, query: str, *values: str) -> tuple[list[sqlite3.Row], int]:
        """The rows of a query, and how many could not be read: a damaged page must not cost the rows on other pages."""
        try:
            return self._connection.execute(query, values).fetchall(), 0
        except sqlite3.DatabaseError:
            pass
        rows, lost = [], 0
        single = f"{query} AND {table}.rowid = ?"
        for rowid in range(1, self._last_rowid(table) + 1):
            try:
                rows.extend(self._connection.execute(single, (*values, rowid)).fetchall())
            except sqlite3.DatabaseError:
                lost += 1
        return rows, lost

    def _last_rowid(self, table: str) -> int:
        try:
            last = self._connection.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise StoreError(_sentence(error, self.path)) from None
        return min(last or 0, _MAX_ROWS_ONE_BY_ONE)


_SECOND_WINDOW = (
    "Another Batchscope has the chats open. They can be read here as they were when this window opened; "
    "what you write in this window is not kept."
)


def _connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    target = f"{path.absolute().as_uri()}?mode=ro" if read_only else str(path)
    connection = sqlite3.connect(target, timeout=BUSY_SECONDS, isolation_level=None, uri=read_only)
    connection.text_factory = bytes
    connection.row_factory = sqlite3.Row
    if not read_only:
        connection.execute("PRAGMA journal_mode = WAL")
        # With WAL, NORMAL keeps the file whole through a power cut; a killed process loses nothing that was committed.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
    return connection


def _take_lock(path: Path) -> sqlite3.Connection | None:
    """An exclusive lock that lasts as long as the connection; None where another process has it."""
    lock = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        lock.close()
        if error.sqlite_errorname in ("SQLITE_BUSY", "SQLITE_LOCKED"):
            return None
        raise
    return lock


def _version_of(path: Path) -> int | None:
    """The version of a file, looked at without writing: 0 where there is none yet, None where it is no database."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    try:
        with contextlib.closing(_connect(path, read_only=True)) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return version
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorname in ("SQLITE_NOTADB", "SQLITE_CORRUPT"):
            return None
        raise


def _set_aside(path: Path) -> Path:
    stem = f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    aside = path.with_name(stem)
    number = 2
    while aside.exists():
        aside, number = path.with_name(f"{stem}-{number}"), number + 1
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        extra = path.with_name(path.name + suffix)
        if extra.exists():
            extra.rename(aside.with_name(aside.name + suffix))
    return aside


def _sentence(error: Exception, path: Path) -> str:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return f"Chats cannot be saved: the disk is full ({_free_space(path)} free at {path.parent})."
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"Chats cannot be saved: another program has locked {path}."
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")) or isinstance(error, PermissionError):
        return f"Chats cannot be saved: {path} cannot be written (check its permissions)."
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return f"Part of the chat file {path} is damaged; what can be read is shown, the file is kept."
    return f"Chats cannot be saved: {path}: {error}."


def _free_space(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB"
    except OSError:
        return "unknown space"


def _damaged_conversation(row: sqlite3.Row, reason: str) -> Conversation:
    title = schema.loose_text(row["title"]).strip() or "Damaged chat"
    updated = row["updated"] if isinstance(row["updated"], int | float) else 0.0
    return Conversation(
        id=schema.loose_text(row["id"]), title=title, created=updated, updated=updated, turns=None, damage=reason
    )


def _turns_of(rows: list[sqlite3.Row]) -> list[Turn]:
    """Messages to turns. What a damaged row leaves without its other half gets a placeholder that is never saved."""
    parts: dict[int, dict[Role, Message]] = {}
    for row in sorted(rows, key=_row_order):
        number = row["turn"] if isinstance(row["turn"], int) else max(parts, default=-1) + 1
        slots = parts.setdefault(number, {})
        try:
            message = schema.read_message(row)
        except schema.DamagedRow as error:
            role = Role.ASSISTANT if row["role"] == b"assistant" or Role.USER in slots else Role.USER
            message = Message(role, id=schema.loose_text(row["id"]), damage=str(error))
        slots[message.role] = message
    missing = "The question of this answer is missing from the file."
    return [
        Turn(number, slots.get(Role.USER) or Message(Role.USER, damage=missing), slots.get(Role.ASSISTANT))
        for number, slots in sorted(parts.items())
    ]


def _row_order(row: sqlite3.Row) -> tuple[float, bool]:
    turn = row["turn"] if isinstance(row["turn"], int) else float("inf")
    return turn, row["role"] == b"assistant"
