"""Where the window's engines write their run files, and what becomes of those whose window is gone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from engine.recording import DEFAULT_LIMIT_BYTES

SUFFIX = ".batchscope"
LIMITS = (64 << 20, DEFAULT_LIMIT_BYTES, 1 << 30, 4 << 30)
"""Bytes of a run file that can be chosen; beyond them the oldest steps go."""


class RunFiles:
    """One file for each run of an engine, named by the window's process; deleted with the window, or by the next one
    where the window had no time to."""

    def __init__(self, folder: Path | None) -> None:
        """``folder``: in the user's cache; None: runs are not kept."""
        self._folder = folder
        self._number = 0
        self._made: list[Path] = []

    def next_path(self, keep: Path | None = None) -> Path | None:
        """A file for another run; those before it go, except ``keep``. None where there is no folder, or none can be
        made."""
        if self._folder is None:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        self._drop([path for path in self._made if path != keep])
        self._made = [path for path in self._made if path == keep]
        self._number += 1
        path = self._folder / f"run-{os.getpid()}-{self._number}{SUFFIX}"
        self._made.append(path)
        return path

    def drop_abandoned(self) -> None:
        """Delete the files of processes that are gone."""
        if self._folder is None or not self._folder.is_dir():
            return
        for path in self._folder.glob(f"run-*{SUFFIX}*"):
            pid = path.name.split("-")[1]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                self._drop([path])

    def close(self) -> None:
        self._drop(self._made)
        self._made = []

    @staticmethod
    def _drop(paths: list[Path]) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()
