"""A line that says something and, where there is something to do about it, has a button for it."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QTimer
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QWidget

from app.theme import SPACING, Theme
from app.widgets import button, label, paint_surface, set_role


class NoticeBar(QWidget):
    """Hidden until there is something to say."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._action: Callable[[], object] | None = None
        self._expired: Callable[[], None] | None = None
        self._stays = False
        self._text = label()
        self._text.setWordWrap(True)
        self.button = QPushButton(self)
        self.button.clicked.connect(self._act)
        self.dismiss_button = button("", "flat")
        self.dismiss_button.clicked.connect(self.expire)
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 6, 6, 6)
        row.setSpacing(SPACING)
        row.addWidget(self._text, 1)
        row.addWidget(self.button)
        row.addWidget(self.dismiss_button)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self.expire)
        self.hide()

    @property
    def text(self) -> str:
        return self._text.text() if not self.isHidden() else ""

    def say(
        self,
        text: str,
        *,
        is_error: bool = False,
        action: tuple[str, Callable[[], object]] | None = None,
        seconds: float | None = None,
        expired: Callable[[], None] | None = None,
        stays: bool = False,
        dismiss: str = "",
    ) -> None:
        """Shows ``text``, with a button for ``action``, until said otherwise or for ``seconds``.

        ``stays``: also once the action was taken, for what lasts until somebody else ends it.
        ``dismiss``: the words of a second button, which only takes the notice away; empty: there is none.
        ``expired`` is called when it goes without the action having been taken: after its time, or for another notice.
        """
        self.expire()
        self._text.setText(text)
        set_role(self._text, "error" if is_error else "")
        self._action = action[1] if action else None
        self._expired, self._stays = expired, stays
        self.button.setVisible(action is not None)
        if action is not None:
            self.button.setText(action[0])
            self.button.setAccessibleName(action[0])
        self.dismiss_button.setVisible(bool(dismiss))
        self.dismiss_button.setText(dismiss)
        self.show()
        if seconds is not None:
            self._timer.start(round(seconds * 1000))

    def set_text(self, text: str) -> None:
        """Other words in a notice that is shown."""
        self._text.setText(text)

    def expire(self) -> None:
        """Takes the notice away."""
        self._timer.stop()
        expired, self._expired, self._action = self._expired, None, None
        self.hide()
        if expired is not None:
            expired()

    def _act(self) -> None:
        action = self._action
        if not self._stays:
            self._expired = None
            self.expire()
        if action is not None:
            action()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        paint_surface(painter, self.rect().toRectF(), self._theme.raised, self._theme.line, 6)
