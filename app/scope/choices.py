"""Small choices in the title line of a card: the window of time, the priority."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QActionGroup, QKeyEvent
from PySide6.QtWidgets import QMenu, QToolButton, QWidget

from app.translation import tr
from app.widgets import set_role

WINDOWS: tuple[tuple[str, float], ...] = (
    ("10 s", 10.0),
    (tr("1 min"), 60.0),
    (tr("5 min"), 300.0),
    (tr("all kept"), math.inf),
)
"""What may be chosen, in seconds."""
USUAL_WINDOW = 60.0


class MenuChoice(QToolButton):
    """One of a few values; its menu has all of them, and the arrow keys go from one to the next."""

    chosen = Signal()

    def __init__(self, name: str, tip: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._options: tuple[tuple[str, Any], ...] = ()
        self._place = 0
        self._name = name
        self.setToolTip(tip)
        self.setAccessibleName(name)
        self.setMenu(QMenu(self))
        self.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        set_role(self, "flat")
        self.setStyleSheet("padding: 3px;")  # narrow docks have little room in the title line
        self._group = QActionGroup(self)

    @property
    def value(self) -> Any:
        return self._options[self._place][1] if self._options else None

    def set_options(self, options: Sequence[tuple[str, Any]]) -> None:
        """(text, value) of each. The chosen one stays, or the first is, where it is gone."""
        options = tuple(options)
        if options == self._options:
            return
        before = self.value
        self._options = options
        for action in self._group.actions():
            self._group.removeAction(action)
            action.deleteLater()
        self.menu().clear()
        for place, (text, _) in enumerate(options):
            action = self.menu().addAction(text)
            action.setCheckable(True)
            action.triggered.connect(lambda _=False, place=place: self._choose(place))
            self._group.addAction(action)
        self._show(next((i for i, (_, value) in enumerate(options) if value == before), 0))

    def set_value(self, value: Any) -> None:
        self._choose(next(i for i, (_, each) in enumerate(self._options) if each == value))

    def _choose(self, place: int) -> None:
        if place != self._place:
            self._show(place)
            self.chosen.emit()

    def _show(self, place: int) -> None:
        self._place = place
        text = self._options[place][0]
        self.setText(f"{text} ▾")
        self.setAccessibleDescription(text)
        self._group.actions()[place].setChecked(True)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        step = {Qt.Key.Key_Up: -1, Qt.Key.Key_Left: -1, Qt.Key.Key_Down: 1, Qt.Key.Key_Right: 1}.get(event.key())
        if step is None:
            super().keyPressEvent(event)
        else:
            self._choose(max(0, min(len(self._options) - 1, self._place + step)))


def window_choice() -> MenuChoice:
    """Of the stretch of time that ends with what is shown; ``value`` in seconds."""
    choice = MenuChoice(
        tr("Window of time"), tr("How far back the curves and figures reach; the arrow keys change it too")
    )
    choice.set_options(WINDOWS)
    choice.set_value(USUAL_WINDOW)
    return choice
