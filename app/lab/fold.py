"""A part of a form that folds away to one line, which says what is set in it."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QSizePolicy, QVBoxLayout, QWidget

from app.chat.elided import ElidedLabel
from app.theme import SPACING
from app.translation import tr

OPEN, CLOSED = "▾", "▸"


class Fold(QWidget):
    """A heading that opens and closes ``content``; closed it shows a summary. ``toggled`` tells of either."""

    toggled = Signal(bool)

    def __init__(self, title: str, content: QWidget, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._title = title
        self.content = content
        self.heading = QPushButton()
        self.heading.setProperty("role", "flat")
        self.heading.setStyleSheet("padding: 1px 4px 1px 0;")  # its text stands where the fields' names do
        self.heading.setCheckable(True)
        self.heading.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        self.heading.toggled.connect(self._toggle)
        self.summary = ElidedLabel("muted")
        line = QHBoxLayout()
        line.setSpacing(SPACING)
        line.addWidget(self.heading)
        line.addWidget(self.summary, 1)
        line.addStretch()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 2)
        column.addLayout(line)
        column.addWidget(content)
        self._toggle(False)

    @property
    def is_open(self) -> bool:
        return self.heading.isChecked()

    def open(self, wanted: bool = True) -> None:
        self.heading.setChecked(wanted)

    def say(self, summary: str) -> None:
        """What is set inside, in a few words."""
        self.summary.setText(summary)
        self.heading.setAccessibleDescription(summary)

    def _toggle(self, wanted: bool) -> None:
        self.heading.setText(f"{OPEN if wanted else CLOSED}  {self._title}")
        name = tr("{title}, open", title=self._title) if wanted else tr("{title}, folded", title=self._title)
        self.heading.setAccessibleName(name)
        self.content.setVisible(wanted)
        self.summary.setVisible(not wanted)
        self.toggled.emit(wanted)
