"""Remembers that a model is being loaded, so that a start which never got past it, or whose engine did not, is not
repeated by itself."""

from __future__ import annotations

import contextlib
from pathlib import Path

from PySide6.QtCore import QLockFile


class LaunchGuard:
    """A small file that exists while a model loads. Found at a start, it says that the last start did not survive.

    Whose file it is holds a lock beside it: what another window is loading at this moment is no interrupted start.
    """

    def __init__(self, folder: Path | None) -> None:
        """``folder``: the user's state folder; None: nothing is remembered."""
        self._file = folder / "loading" if folder is not None else None
        self._lock = QLockFile(str(folder / "loading.lock")) if folder is not None else None
        if self._lock is not None:
            self._lock.setStaleLockTime(0)  # loading may take long; the lock of a process that is gone is stale at once

        self._kept = False

    def interrupted(self) -> str | None:
        """The model whose loading the last start did not survive."""
        if self._file is None:
            return None
        try:
            model = self._file.read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None
        if model is None or not self._take():
            return None
        self._lock.unlock()
        return model

    def begin(self, model: str) -> None:
        self._kept = False
        if self._file is not None:
            # A state folder that cannot be written must not keep a model from loading.
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                if self._take():
                    self._file.write_text(model, encoding="utf-8")

    def keep(self) -> None:
        """The engine crashed while it loaded: the next start is told, unless another model loads before."""
        self._kept = True
        if self._lock is not None and self._lock.isLocked():
            self._lock.unlock()

    def end(self) -> None:
        """Nothing is loading any more; what another window loads stays remembered."""
        if self._kept or self._file is None or not (self._lock.isLocked() or self._file.exists()):
            return
        if self._take():
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
            self._lock.unlock()

    def _take(self) -> bool:
        """Whether the file is this window's to write; not while another is loading."""
        return self._lock.isLocked() or self._lock.tryLock(0)
