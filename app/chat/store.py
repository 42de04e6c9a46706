"""The chats on disk: SQLite in WAL mode, written while answers stream.

Every save is one transaction, so a kill at any moment leaves the state before or after it. Who may write holds an
exclusive lock on a small file beside the chats; the operating system lets go of it however the program ends. Where the
file must not be written (a second window has it, a newer version wrote it, the disk refuses) the store works on a copy
in memory and ``notice`` says so.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import platformdirs

from app.chat import files, salvage, schema, search
from app.chat.conversation import Conversation, Message, MessageStatus
from app.chat.mending import mended_tree
from app.chat.preset import Preset, PresetKind
from app.translation import mark, ntr, tr

_T = TypeVar("_T")


class StoreError(Exception):
    """A save or a load that did not happen; the message is a sentence for the user, and the program goes on."""


@dataclass(frozen=True, slots=True)
class SavedMessage:
    """A message and where it belongs."""

    conversation: Conversation
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
        self._has_purged = False

    # Opening and closing ---------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> ChatStore:
        """Opens or makes the file at ``path``. Never raises for the state of the file or the disk: see ``notice``."""
        lock = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = files.take_lock(files.beside(path, ".lock"))
            if lock is None:
                return cls._in_memory(path, tr(_SECOND_WINDOW))
            return cls._open_file(path, lock)
        except (*files.SQLITE_ERRORS, OSError, StoreError) as error:
            if lock is not None:
                lock.close()
            why = str(error) if isinstance(error, StoreError) else _cannot_save(error, path)
            return cls._in_memory(path, f"{why} {tr('Chats of this window are not kept.')}")

    @classmethod
    def _open_file(cls, path: Path, lock: sqlite3.Connection) -> ChatStore:
        notice = ""
        if files.beside(path, files.WIPING).exists():  # the program was ended in the middle of it
            files.shred_beside(path)
        for left in path.parent.glob(f"{path.name}{files.RESTORING}*"):
            left.unlink()
        version = files.version_of(path)
        if version is None:
            notice = _begun_anew(files.set_aside(path))
        elif version > schema.SCHEMA_VERSION:
            raise StoreError(newer_sentence(path, version))
        elif version != 0 and not files.reads(path, schema.is_sound):
            try:
                notice = _salvaged(path)
            except files.SQLITE_ERRORS as error:
                if not files.is_damage(error):
                    raise
                notice = _begun_anew(files.set_aside(path))
        store = cls(files.connect(path), path, notice, lock)
        try:
            store._prepare()
        except files.SQLITE_ERRORS as error:
            if not files.is_damage(error):
                raise
            store._salvage()
        return store

    @classmethod
    def _in_memory(cls, path: Path, notice: str) -> ChatStore:
        """With what can be read of the file."""
        store = cls(files.connect(Path(":memory:")), path, notice, None)
        try:
            version = files.version_of(path)
            if version and version <= schema.SCHEMA_VERSION:
                if files.reads(path, schema.is_sound):
                    with contextlib.closing(files.connect(path, read_only=True)) as source:
                        source.backup(store._connection)
                else:
                    salvage.copy_readable(path, store._connection)
            store._prepare()
        except (*files.SQLITE_ERRORS, OSError) as error:
            store._connection.close()
            store = cls(files.connect(Path(":memory:")), path, f"{notice} {_cannot_read(error, path)}", None)
            store._prepare()
        return store

    def _prepare(self) -> None:
        """Brings the file forward, and marks what an earlier window left in the middle."""
        schema.bring_forward(self._connection)
        search.prepare_index(self._connection)
        open_now = (MessageStatus.STREAMING.value, MessageStatus.QUEUED.value)
        sentence = tr("The program ended before this answer was complete.")
        mark_open = "UPDATE messages SET status = ?, error = ? WHERE status IN (?, ?)"
        execute = self._connection.execute
        for action in (
            lambda: execute(_PURGE),
            lambda: execute(mark_open, (MessageStatus.INCOMPLETE.value, sentence, *open_now)),
            lambda: salvage.recover_conversations(self._connection),
        ):
            with contextlib.suppress(StoreError), self._transaction():  # the first save meets and says the same
                action()

    def close(self) -> None:
        with contextlib.suppress(*files.SQLITE_ERRORS):
            if self.is_kept:
                if self._connection.execute(_PURGE).rowcount or self._has_purged:
                    search.forget_deleted(self._connection)
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()
        if self._lock is not None:
            self._lock.close()

    def copy_to(self, target: sqlite3.Connection) -> None:
        """Everything as it is in the file. Raises :class:`sqlite3.Error`."""
        self._connection.backup(target)

    def replace_file(self, fresh: Path, aside: Path) -> None:
        """Goes on with the file ``fresh``, moved here; what was here is ``aside``. Raises sqlite3.Error, OSError."""
        self._connection.execute("PRAGMA wal_checkpoint(FULL)")
        self._connection.close()
        try:
            files.swap(self.path, fresh, aside)
        finally:
            self._connection = files.connect(self.path)
            self._prepare()

    def _salvage(self) -> None:
        """Goes on with what can be read of a file with damaged pages; the file itself is kept."""
        self._connection.close()
        try:
            self.notice = _salvaged(self.path)
        finally:
            self._connection = files.connect(self.path)
            self._prepare()

    # Reading ---------------------------------------------------------------------------------------------------------

    def conversations(self) -> list[Conversation]:
        """All of them, the last used first, messages still on disk. A damaged row is in the list, with its
        ``damage``."""
        rows, lost = self._rows("conversations", f"NOT ({schema.IS_DELETED})")
        found = []
        for row in rows:
            try:
                found.append(schema.read_conversation(row))
            except schema.DamagedRow as error:
                found.append(schema.damaged_conversation(row, str(error)))
        if lost:
            damage = ntr(
                "{count:,} row of {path} is damaged.", "{count:,} rows of {path} are damaged.", lost, path=self.path
            )
            found.append(Conversation(title=tr("Chats that could not be read"), damage=damage))
        return sorted(found, key=lambda each: each.updated, reverse=True)

    def load_messages(self, conversation: Conversation) -> None:
        """Reads the messages of a conversation that are still on disk."""
        if conversation.tree is not None:
            return
        rows, lost = self._rows("messages", "conversation_id = ?", conversation.id)
        tree = mended_tree(schema.read_messages(rows), conversation.choices)
        if not lost and (not rows or len(tree) > len(rows)):  # the index may have lost what the table still has
            rows, lost = self._rows("messages", "+conversation_id = ?", conversation.id)
            tree = mended_tree(schema.read_messages(rows), conversation.choices)
        conversation.tree = tree
        conversation.choices = {}
        if lost:
            conversation.damage = conversation.damage or ntr(
                "{count:,} message of {path} could not be read.",
                "{count:,} messages of {path} could not be read.",
                lost,
                path=self.path,
            )

    def find_texts(self, needle: str) -> dict[str, search.TextHit]:
        """What each conversation, by its id, holds of ``needle``, whatever its case."""
        texts = search.TextSearch(needle)
        while not self.search_on(texts):
            pass
        return texts.hits

    def search_on(self, texts: search.TextSearch) -> bool:
        """One slice of a search; whether it was the last."""
        return self._salvaging(lambda: texts.more(self._connection))

    def text_of(self, message_id: str) -> str:
        """Of a message as it is saved; empty where it is not there or cannot be read."""
        try:
            with self._said():
                query = "SELECT CAST(text AS TEXT) FROM messages WHERE id = ?"
                row = self._connection.execute(query, (message_id,)).fetchone()
        except StoreError:
            return ""
        text = row[0] if row is not None else b""
        return text.decode(errors="replace") if isinstance(text, bytes) else str(text)

    def index_more(self, seconds: float) -> bool:
        """Makes more texts quick to search, for about so long; whether all are."""
        with self._said():
            return search.fill_index(self._connection, seconds)

    def holds(self, conversation_id: str) -> bool:
        """Whether there is a conversation of that id in the file, a deleted one included."""
        return self._exists("conversations", conversation_id)

    def has_message(self, message_id: str) -> bool:
        return self._exists("messages", message_id)

    def presets(self, kind: PresetKind) -> list[Preset]:
        """The user's own, by name; what cannot be read is left out."""
        with self._said():
            query = "SELECT kind, name, text, params FROM presets WHERE kind = ? ORDER BY name"
            rows = self._connection.execute(query, (kind,)).fetchall()
        found = []
        for row in rows:
            with contextlib.suppress(schema.DamagedRow):
                found.append(schema.read_preset(row))
        return found

    # Writing ---------------------------------------------------------------------------------------------------------

    def save(
        self,
        conversations: Iterable[Conversation],
        messages: Iterable[SavedMessage] = (),
        deleted: Iterable[Message] = (),
    ) -> None:
        """Writes all of it or, with :class:`StoreError`, nothing. Damaged rows are left as they are."""
        conversations, messages, deleted = list(conversations), list(messages), list(deleted)

        def write() -> None:
            execute = self._connection.execute
            for message in deleted:
                execute("DELETE FROM messages WHERE id = ?", (message.id,))
            for conversation in conversations:
                if not conversation.damage:
                    execute(schema.SAVE_CONVERSATION, schema.conversation_values(conversation))
            for saved in messages:
                if not saved.message.damage:
                    execute(schema.SAVE_MESSAGE, schema.message_values(saved.conversation.id, saved.message))
                else:  # where it belongs may have changed
                    execute("UPDATE messages SET parent = ? WHERE id = ?", (saved.message.parent, saved.message.id))

        self._write(write)

    def set_deleted(self, ids: Iterable[str], deleted: bool) -> None:
        """Takes conversations out of the list, or back in. They leave the file when :meth:`purge` is called."""
        value = max(time.time(), schema.EARLIEST_DELETED) if deleted else None
        rows = [(value, each) for each in ids]
        self._write(lambda: self._connection.executemany("UPDATE conversations SET deleted = ? WHERE id = ?", rows))

    def purge(self, conversation_id: str) -> None:
        """Removes a deleted conversation for good; its text is overwritten on disk."""
        self._change(f"DELETE FROM conversations WHERE id = ? AND {schema.IS_DELETED}", conversation_id)
        self._has_purged = True

    def save_preset(self, preset: Preset) -> None:
        """Replaces one of the same kind and name."""
        self._change(schema.SAVE_PRESET, *schema.preset_values(preset))

    def delete_preset(self, preset: Preset) -> None:
        self._change("DELETE FROM presets WHERE kind = ? AND name = ?", preset.kind, preset.name)

    # -----------------------------------------------------------------------------------------------------------------

    def _exists(self, table: str, row_id: str) -> bool:
        query = f"SELECT EXISTS (SELECT 1 FROM {table} WHERE id = ?)"
        return bool(self._salvaging(lambda: self._connection.execute(query, (row_id,)).fetchone()[0]))

    def _change(self, statement: str, *values: object) -> None:
        self._write(lambda: self._connection.execute(statement, values))

    def _write(self, action: Callable[[], object]) -> None:
        """One transaction."""

        def write() -> None:
            with self._transaction():
                action()

        self._salvaging(write)

    def _salvaging(self, action: Callable[[], _T]) -> _T:
        """Does it; where damaged pages are in the way, on a file without them."""
        try:
            with self._said():
                return action()
        except _DamagedFile:
            if not self.is_kept:
                raise
        try:
            self._salvage()
        except (*files.SQLITE_ERRORS, OSError) as error:
            raise StoreError(_cannot_save(error, self.path)) from None
        with self._said():
            return action()

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except files.SQLITE_ERRORS as error:
            kind = _DamagedFile if files.is_damage(error) else StoreError
            raise kind(_cannot_save(error, self.path)) from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._said():
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(*files.SQLITE_ERRORS):  # else no later save could begin
                    if self._connection.in_transaction:
                        self._connection.execute("ROLLBACK")
                raise

    def _rows(self, table: str, condition: str, *values: str) -> tuple[list[sqlite3.Row], int]:
        """The rows of a table, and how many could not be read: a damaged page must not cost the rows on other pages."""
        query = f"SELECT rowid, * FROM {table} WHERE "
        try:
            return self._connection.execute(query + condition, values).fetchall(), 0
        except files.SQLITE_ERRORS:
            pass
        with self._said():
            past_indices = condition.replace("conversation_id", "+conversation_id")
            return salvage.rows_around_damage(self._connection, query + past_indices, table, *values)


class _DamagedFile(StoreError):
    pass


_SECOND_WINDOW = mark(
    "Another Batchscope has the chats open. They can be read here as they were when this window opened; "
    "what you write in this window is not kept."
)
_PURGE = f"DELETE FROM conversations WHERE {schema.IS_DELETED}"


def newer_sentence(path: Path, version: int) -> str:
    return tr(
        "{path} was written by a newer Batchscope (format {version}; this one knows up to {known}). "
        "It is left untouched; update Batchscope to open it.",
        path=path,
        version=version,
        known=schema.SCHEMA_VERSION,
    )


def _cannot_read(error: Exception, path: Path) -> str:
    return tr("Chats cannot be read: {reason}.", reason=files.reason(error, path))


def _cannot_save(error: Exception, path: Path) -> str:
    return tr("Chats cannot be saved: {reason}.", reason=files.reason(error, path))


def _salvaged(path: Path) -> str:
    """Puts what can be read of the file, which nobody has open, in its place, and says so."""
    fresh, aside = files.beside(path, files.RESTORING), files.free_name(path, "damaged")
    files.fold_in(path)
    fresh.unlink(missing_ok=True)
    with contextlib.closing(files.connect(fresh)) as target:
        lost = salvage.copy_readable(path, target)
        target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    files.sync(fresh)
    files.swap(path, fresh, aside)
    return ntr(
        "Part of the chat file was damaged: {count:,} row is lost, the rest is here. It is kept as {aside}.",
        "Part of the chat file was damaged: {count:,} rows are lost, the rest is here. It is kept as {aside}.",
        lost,
        aside=aside,
    )


def _begun_anew(aside: Path) -> str:
    return tr("The chat file could not be read at all. It is kept as {aside}; a new one was begun.", aside=aside)
