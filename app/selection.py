"""Which request is selected: one answer for the whole window. Selecting anywhere selects everywhere."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal


class Selection(QObject):
    changed = Signal(object)
    """The request's id, or None."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._request_id: int | None = None

    @property
    def request_id(self) -> int | None:
        return self._request_id

    def select(self, request_id: int | None) -> None:
        if request_id != self._request_id:
            self._request_id = request_id
            self.changed.emit(request_id)
