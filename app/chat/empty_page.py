"""The page that a conversation without messages shows."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app.theme import SPACING
from app.translation import mark, tr
from app.widgets import label

SUGGESTIONS = (
    mark("Explain to a bus driver what continuous batching is."),
    mark("Write a Python function that finds the longest common prefix of a list of strings."),
    mark("Write a short story about a queue that nobody wanted to leave."),
)


class EmptyPage(QWidget):
    """What a new conversation shows: one sentence and three things to try."""

    chosen = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        column = QVBoxLayout(self)
        column.setSpacing(SPACING)
        column.addStretch(1)
        heading = label(tr("What shall the model write?"), "heading")
        heading.setAlignment(Qt.AlignmentFlag.AlignCenter)
        heading.setWordWrap(True)
        column.addWidget(heading)
        hint = label(tr("It runs on this machine; nothing you write leaves it."), "muted")
        hint.setAlignment(Qt.AlignmentFlag.AlignCenter)
        hint.setWordWrap(True)
        column.addWidget(hint)
        column.addSpacing(SPACING)
        self.buttons = [_Suggestion(tr(text)) for text in SUGGESTIONS]
        middle = QVBoxLayout()
        middle.setSpacing(SPACING)
        for each in self.buttons:
            each.clicked.connect(lambda _checked=False, text=each.full_text: self.chosen.emit(text))
            middle.addWidget(each)
        row = QHBoxLayout()
        row.addStretch(1)
        row.addLayout(middle, 20)
        row.addStretch(1)
        column.addLayout(row)
        column.addStretch(2)


class _Suggestion(QPushButton):
    """A button whose text wraps, which a plain one's does not."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.full_text = text
        self.setAccessibleName(text)
        self._label = label(text, parent=self)
        self._label.setWordWrap(True)
        self._label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 8, 12, 8)
        column.addWidget(self._label)
        self.setMaximumWidth(520)
        policy = self.sizePolicy()
        policy.setHeightForWidth(True)
        policy.setHorizontalPolicy(policy.Policy.Expanding)
        self.setSizePolicy(policy)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        return self._label.heightForWidth(width - 24) + 18

    def minimumSizeHint(self) -> QSize:
        return QSize(160, self.sizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if event.size().width() != event.oldSize().width():
            self.updateGeometry()  # its text may take more lines, or fewer

    def sizeHint(self) -> QSize:
        hint = super().sizeHint()
        hint.setHeight(self.heightForWidth(min(520, max(self.width(), 160))))
        return hint
