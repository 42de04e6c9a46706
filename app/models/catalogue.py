"""The models on this machine as the window knows them: searched for in a process beside, kept here, told in batches."""

from __future__ import annotations

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from app.models.line_process import LineProcess
from app.translation import tr
from engine.model_catalog import Found, Machine, ModelEntry, Room, Scanned, scan_events

TOLD_MILLISECONDS = 120
"""While a search finds models, how often that is told at most."""


class Catalogue(QObject):
    changed = Signal()
    """Entries, the machine's figures, or whether it is being searched, are others."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.entries: dict[str, ModelEntry] = {}
        """By what loads them, or by their path where nothing does."""
        self.machine: Machine | None = None
        self.problems: list[str] = []
        """What could not be searched, each a sentence."""
        self.failure = ""
        """Why the search itself failed."""
        self._found: dict[str, ModelEntry] = {}
        self._finished = True
        self._process = LineProcess("engine.model_scan", self)
        self._process.said.connect(self._said)
        self._process.ended.connect(self._ended)
        self._due = QTimer(self)
        self._due.setSingleShot(True)
        self._due.timeout.connect(self.changed)

    @property
    def is_searching(self) -> bool:
        return self._process.is_running

    def search(self, folders: tuple[str, ...] = (), *, engine_pid: int | None = None, anew: bool = False) -> None:
        """Look again; what is known stays until it turns out to be gone. ``anew``: remember nothing."""
        arguments = [f"--folder={folder}" for folder in folders]
        if engine_pid is not None:
            arguments.append(f"--engine={engine_pid}")
        if anew:
            arguments.append("--anew")
        self._found, self._finished, self.failure = {}, False, ""
        self._process.start(*arguments)
        self._due.start(0)

    def cancel(self) -> None:
        """Ends the search; what it has found is kept."""
        if self.is_searching:
            self._process.cancel()
            self.entries |= self._found
            self._due.start(0)

    def close(self) -> None:
        self._process.cancel()
        self._due.stop()

    def _said(self, line: bytes) -> None:
        try:
            event = scan_events.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return  # a library's own words
        if isinstance(event, Room):
            self.machine = event.machine
        elif isinstance(event, Found):
            entry = event.entry
            self._found[key_of(entry)] = entry
            self.entries[key_of(entry)] = entry
        elif isinstance(event, Scanned):
            self._finished = True
            self.entries = self._found
            self.problems = list(event.problems)
            if not event.complete:
                self.problems.append(
                    tr("Only the first {count:,} folders were searched; add deeper ones.", count=event.folders)
                )
        if not self._due.isActive():
            self._due.start(TOLD_MILLISECONDS)

    def _ended(self, code: int, errors: str) -> None:
        if not self._finished:
            lines = errors.splitlines() or [tr("exit code {code}", code=code)]
            self.failure = tr("The search for models failed: {reason}", reason=lines[-1])
        self._due.start(0)


def key_of(entry: ModelEntry) -> str:
    return entry.model if entry.is_loadable else entry.path
