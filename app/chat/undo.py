"""What was deleted or moved last can be taken back, the newest first, for as long as the notice of it is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from PySide6.QtCore import QObject

from app.chat.notice import NoticeBar
from app.translation import tr

UNDO_SECONDS = 10.0


class _Step(NamedTuple):
    text: str
    undo: Callable[[], None]
    expired: Callable[[], None] | None


class UndoStack(QObject):
    def __init__(self, notice: NoticeBar, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._notice = notice
        self._steps: list[_Step] = []
        self._replacing = False

    def push(self, text: str, undo: Callable[[], None], expired: Callable[[], None] | None = None) -> None:
        """Says what was done. ``expired`` is called once it cannot be undone any more."""
        self._steps.append(_Step(text, undo, expired))
        self._show()

    def undo(self) -> None:
        """Takes the newest step back; the one before it can be taken back next."""
        if not self._steps:
            return
        step = self._steps.pop()
        step.undo()
        self._show()

    def forget(self) -> None:
        """What could be undone belongs to chats that are gone."""
        self._steps.clear()
        self._show()

    def _show(self) -> None:
        self._replacing = True
        self._notice.expire()
        self._replacing = False
        if self._steps:
            count = len(self._steps)
            words = tr("Undo") if count == 1 else tr("Undo ({count})", count=count)
            self._notice.say(
                self._steps[-1].text, action=(words, self.undo), seconds=UNDO_SECONDS, expired=self._expired
            )

    def _expired(self) -> None:
        if self._replacing:
            return
        steps, self._steps = self._steps, []
        for step in steps:
            if step.expired is not None:
                step.expired()
