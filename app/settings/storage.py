"""What Batchscope keeps on the disk, where, and how much of it. Sizes are found out on a thread of their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject, QRunnable, QThreadPool, Signal

from engine.model_catalog import hub_cache_folder, starter_folder


@dataclass(frozen=True, slots=True)
class Places:
    """Files and folders of one user; None: this window keeps none."""

    chats: Path
    """The file; with it belong the files whose names begin with its name, SQLite's own and what was kept beside."""
    recordings: Path | None = None
    runs: Path | None = None
    log: Path | None = None
    """The newest of the files."""
    preferences: Path | None = None

    def paths(self) -> dict[str, Path]:
        """Name -> what is measured and opened, of those there are."""
        found = {
            "chats": self.chats,
            "recordings": self.recordings,
            "runs": self.runs,
            "logs": self.log,
            "preferences": self.preferences,
            "starter": starter_folder(),
            "hub": hub_cache_folder(),
        }
        return {name: path for name, path in found.items() if path is not None}


@dataclass(frozen=True, slots=True)
class Size:
    files: int
    bytes: int


class Measure(QObject):
    """Measures all places; ``measured`` tells of each as it is known."""

    measured = Signal(str, object)
    """Name of a place and its :class:`Size`."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._pool = QThreadPool(self)
        self._pool.setMaxThreadCount(1)
        self._stop = _Stop()

    def begin(self, paths: dict[str, Path]) -> None:
        """What is still being measured is left."""
        self._stop.wanted = True
        self._stop = _Stop()
        for name, path in paths.items():
            self._pool.start(_Job(self, name, path, self._stop))

    def end(self) -> None:
        self._stop.wanted = True
        self._pool.clear()
        self._pool.waitForDone()


class _Stop:
    wanted = False


class _Job(QRunnable):
    def __init__(self, told: Measure, name: str, path: Path, stop: _Stop) -> None:
        super().__init__()
        self._told, self._name, self._path, self._stop = told, name, path, stop

    def run(self) -> None:
        files = size = 0
        for each in _files(self._path):
            if self._stop.wanted:
                return
            with contextlib.suppress(OSError):
                facts = each.lstat()
                files, size = files + 1, size + facts.st_size
        if not self._stop.wanted:
            self._told.measured.emit(self._name, Size(files, size))


def size_of(path: Path) -> Size:
    """Of a folder, or of a file and those that belong to it. What cannot be read counts nothing."""
    sizes = []
    for each in _files(path):
        with contextlib.suppress(OSError):
            sizes.append(each.lstat().st_size)
    return Size(len(sizes), sum(sizes))


def _files(path: Path) -> Iterable[Path]:
    """Links are counted as themselves: a Hugging Face cache has its files once, and links to them."""
    if not path.is_dir():
        with contextlib.suppress(OSError):
            yield from sorted(each for each in path.parent.glob(f"{path.name}*") if each.is_file())
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder) / name
