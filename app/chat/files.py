"""The files of the chats below the level of rows: connecting, locking, setting aside, overwriting.

::

    chats.sqlite3                         the chats          …-wal, …-shm      SQLite's, while it is open
    chats.sqlite3.lock                    held by the window that writes
    chats.sqlite3.damaged-DATE            was no database    chats.sqlite3.before-restore-DATE
    chats.sqlite3.restoring, .wiping      only while that goes on
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from app.translation import tr

BUSY_SECONDS = 0.2
"""How long a save waits for another program's lock: the window stands still meanwhile."""
RESTORING, WIPING = ".restoring", ".wiping"
_BLOCK_BYTES = 1 << 20
SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What reading a damaged file raises: SQLite's words and names of columns quote it, and need not be text then."""


def beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
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


def take_lock(path: Path) -> sqlite3.Connection | None:
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


def version_of(path: Path) -> int | None:
    """The version of a file, looked at without writing: 0 where there is none yet, None where it is no database."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    try:
        with contextlib.closing(connect(path, read_only=True)) as connection:
            return connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return None
        raise


def reads(path: Path, check: Callable[[sqlite3.Connection], bool]) -> bool:
    """What ``check`` says of the file."""
    with contextlib.closing(connect(path, read_only=True)) as connection:
        return check(connection)


def is_damage(error: Exception) -> bool:
    """Whether it is the file's content that is at fault."""
    name = getattr(error, "sqlite_errorname", "") or ""
    return isinstance(error, UnicodeDecodeError) or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def free_name(path: Path, what: str) -> Path:
    """A name beside ``path`` that no file has."""
    stem = f".{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    free, number = beside(path, stem), 2
    while free.exists():
        free, number = beside(path, f"{stem}-{number}"), number + 1
    return free


def fold_in(path: Path) -> None:
    """Moves what is in the log of changes into the file itself, even where its tables make no sense."""
    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def set_aside(path: Path) -> Path:
    aside = free_name(path, "damaged")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        extra = beside(path, suffix)
        if extra.exists():
            extra.rename(beside(aside, suffix))
    return aside


def swap(path: Path, fresh: Path, aside: Path) -> None:
    """Puts ``fresh`` in the place of ``path``, which nobody has open and which stays as ``aside``.

    At no moment is there no file at ``path``, whenever the process is killed.
    """
    wal = beside(path, "-wal")
    if wal.exists() and wal.stat().st_size:
        raise OSError(f"{wal} is in use by another program")
    try:
        os.link(path, aside)
    except OSError:  # a file system without links
        part = beside(aside, ".part")
        shutil.copyfile(path, part)
        part.replace(aside)
    fresh.replace(path)
    for suffix in ("-wal", "-shm"):
        beside(path, suffix).unlink(missing_ok=True)
        beside(fresh, suffix).unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """To the disk itself; a folder, too, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def kept_beside(path: Path) -> list[Path]:
    """Every file that was kept or left beside ``path``, without the lock."""
    lock = path.name + ".lock"
    return [each for each in path.parent.glob(f"{path.name}.*") if each.is_file() and not each.name.startswith(lock)]


def shred_beside(path: Path) -> None:
    """Overwrites and deletes them."""
    for extra in kept_beside(path):
        with extra.open("r+b") as file:
            _overwrite(file.fileno())
        extra.unlink()


@contextlib.contextmanager
def shredding(path: Path) -> Iterator[None]:
    """Overwrites what ``path`` holds now, after SQLite has let go of it and deleted it."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield
        return
    try:
        yield
        _overwrite(handle)
    finally:
        os.close(handle)


def _overwrite(handle: int) -> None:
    left = os.fstat(handle).st_size
    os.lseek(handle, 0, os.SEEK_SET)
    while left > 0:
        left -= os.write(handle, bytes(min(left, _BLOCK_BYTES)))
    os.fsync(handle)


def reason(error: Exception, path: Path) -> str:
    """Why something could not be done with the file at ``path``, for the middle of a sentence."""
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL") or getattr(error, "errno", None) == 28:
        return tr("the disk is full ({free} free at {folder})", free=_free_space(path), folder=path.parent)
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return tr("another program has locked {path}", path=path)
    refused = isinstance(error, PermissionError)
    if refused or name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return tr("{path} cannot be written (check its permissions)", path=path)
    if is_damage(error):
        return tr("part of {path} is damaged; what can be read is shown, the file is kept", path=path)
    return f"{path}: {error}"


def _free_space(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free / 1e6:,.1f} MB"
    except OSError:
        return tr("unknown space")
