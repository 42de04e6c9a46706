"""Backup, restore and wipe of the whole chat file. All raise :class:`StoreError`; what was there is there then."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.chat import files, schema, search
from app.chat.store import ChatStore, StoreError, newer_sentence
from app.translation import tr


@dataclass(frozen=True, slots=True)
class BackupSummary:
    """What a restored backup held."""

    conversations: int
    messages: int
    kept: Path
    """Where the chats are that were there before."""


def write(store: ChatStore, path: Path) -> None:
    """Copies everything into a single file; one of that name is replaced once the copy is whole."""
    part = files.beside(path, ".part")
    with _said(tr("The backup was not written"), path):
        if path.exists() and store.path.exists() and path.samefile(store.path):
            raise StoreError(tr("{path} is the chat file itself; choose another name for the backup.", path=path))
        part.unlink(missing_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(part)) as target:
                store.copy_to(target)
                target.execute("PRAGMA journal_mode = DELETE")
            files.sync(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def restore(store: ChatStore, path: Path) -> BackupSummary:
    """Puts the backup at ``path`` in the place of the chats, which are kept in a file beside."""
    _check_kept(store)
    fresh = files.beside(store.path, files.RESTORING)
    with _said(tr("The backup was not restored"), path):
        _check_backup(store, path)
        with _fresh_file(fresh) as target:
            with contextlib.closing(files.connect(path, read_only=True)) as source:
                source.backup(target)
            _prepare(target)
            target.execute("DELETE FROM conversations WHERE " + schema.IS_DELETED)
            query = "SELECT count(*), (SELECT count(*) FROM messages) FROM conversations"
            conversations, messages = target.execute(query).fetchone()
        kept = files.free_name(store.path, "before-restore")
        store.replace_file(fresh, kept)
    return BackupSummary(conversations, messages, kept)


def wipe(store: ChatStore) -> None:
    """Begins an empty file with the same presets, and overwrites and deletes the old one and all kept beside it."""
    _check_kept(store)
    fresh = files.beside(store.path, files.RESTORING)
    with _said(tr("The chats were not wiped"), store.path):
        presets = [preset for kind in ("system", "sampling") for preset in store.presets(kind)]
        with _fresh_file(fresh) as target:
            _prepare(target)
            target.executemany(schema.SAVE_PRESET, [schema.preset_values(preset) for preset in presets])
        old = files.beside(store.path, files.WIPING)
        old.unlink(missing_ok=True)
        with files.shredding(files.beside(store.path, "-wal")):
            store.replace_file(fresh, old)
        files.shred_beside(store.path)


def _prepare(target: sqlite3.Connection) -> None:
    schema.bring_forward(target)
    search.prepare_index(target)


@contextlib.contextmanager
def _fresh_file(path: Path) -> Iterator[sqlite3.Connection]:
    path.unlink(missing_ok=True)
    try:
        with contextlib.closing(files.connect(path)) as target:
            yield target
            target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        files.sync(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _check_kept(store: ChatStore) -> None:
    if not store.is_kept:
        raise StoreError(tr("This window cannot write {path}: {notice}", path=store.path, notice=store.notice))


def _check_backup(store: ChatStore, path: Path) -> None:
    version = files.version_of(path)
    if not version or not path.exists():
        raise StoreError(tr("{path} holds no chats of Batchscope; choose a file that a backup wrote.", path=path))
    if store.path.exists() and path.samefile(store.path):
        raise StoreError(tr("{path} is the chat file itself; choose a file that a backup wrote.", path=path))
    if version > schema.SCHEMA_VERSION:
        raise StoreError(newer_sentence(path, version))
    with contextlib.closing(files.connect(path, read_only=True)) as source:
        tables = {bytes(row[0]) for row in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {b"conversations", b"messages"} <= tables:
        raise StoreError(tr("{path} holds no chats of Batchscope; choose a file that a backup wrote.", path=path))


@contextlib.contextmanager
def _said(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (*files.SQLITE_ERRORS, OSError) as error:
        raise StoreError(f"{what}: {files.reason(error, path)}.") from None
