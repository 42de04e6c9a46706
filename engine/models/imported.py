"""Folders of the cache that are made by this program: whole or not there, and made by one process at a time.

    .NAME-xxxx/NAME/   ──all of it written──rename──▶   NAME/

So what an interruption leaves behind is never taken for a model, and the next who makes one clears it away.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from engine.models.errors import ModelLoadError
from engine.models.shards import find_shards

Progress = Callable[[str, int, int], None]
"""Stage as a sentence, done, total (bytes; 0: unknown)."""


def is_whole(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        find_shards(folder)
    except ModelLoadError:
        return False
    # Empty: what a power cut may leave of a file whose name was on the disk before its content.
    others = (folder / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json"))
    return all(path.is_file() and path.stat().st_size > 0 for path in others)


@contextlib.contextmanager
def only_one(path: Path, progress: Progress, waiting: str) -> Iterator[None]:
    """Held by one process; the system lets go of it when that ends, however it ends. ``waiting``: what is said while
    another has it."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress(waiting, 0, 0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def working_folder(parent: Path, prefix: str, needed: int, what: str) -> Iterator[Path]:
    """A folder in ``parent`` that is gone afterwards, as are those that were left over; whoever uses it holds the lock.

    Raises :class:`ModelLoadError` where the disk has less than ``needed`` bytes free.
    """
    for left_over in parent.glob(f"{prefix}*/"):
        shutil.rmtree(left_over, ignore_errors=True)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ModelLoadError(
            f"{what} needs {needed / 1e6:,.0f} MB while it is imported; {parent} has {free / 1e6:,.0f} MB free.",
            "other",
        )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as working:
        yield Path(working)


def put_in_place(made: Path, folder: Path) -> None:
    """Give what was made its final name."""
    if folder.exists():
        shutil.rmtree(folder)
    made.replace(folder)
