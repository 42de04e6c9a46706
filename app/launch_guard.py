"""Remembers that a model is being loaded, so that a start which never got past it is not repeated by itself."""

from __future__ import annotations

import contextlib
from pathlib import Path


class LaunchGuard:
    """A small file that exists while a model loads. Found at a start, it says that the last start did not survive."""

    def __init__(self, folder: Path | None) -> None:
        """``folder``: the user's state folder; None: nothing is remembered."""
        self._file = folder / "loading" if folder is not None else None

    def interrupted(self) -> str | None:
        """The model whose loading the last start did not survive."""
        if self._file is None:
            return None
        try:
            return self._file.read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def begin(self, model: str) -> None:
        if self._file is not None:
            # A state folder that cannot be written must not keep a model from loading.
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.write_text(model, encoding="utf-8")

    def end(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)
