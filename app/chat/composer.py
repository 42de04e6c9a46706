"""Where a message is written: Enter sends, Shift+Enter makes a line, and Send is Stop while an answer is written."""

from __future__ import annotations

from PySide6.QtCore import QMimeData, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QHBoxLayout, QPlainTextEdit, QPushButton, QWidget

from app.theme import SPACING
from app.widgets import set_role

MOST_LINES = 8
PADDING_PX = 14


class MessageEdit(QPlainTextEdit):
    submitted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setTabChangesFocus(True)
        self.setAccessibleName("Message")
        self.setToolTip("Enter sends, Shift+Enter begins a new line, Esc stops the answer")
        self.textChanged.connect(self._fit)
        self.document().documentLayout().documentSizeChanged.connect(self._fit)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._fit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if is_enter and not event.modifiers() & Qt.KeyboardModifier.ShiftModifier:
            self.submitted.emit()
            return
        super().keyPressEvent(event)

    def insertFromMimeData(self, source: QMimeData) -> None:
        if source.hasText():
            self.insertPlainText(source.text())

    def _fit(self) -> None:
        # The layout of a plain text edit counts lines, not pixels.
        lines = max(1, round(self.document().documentLayout().documentSize().height()))
        shown = min(lines, MOST_LINES)
        self.setFixedHeight(shown * self.fontMetrics().lineSpacing() + PADDING_PX + 4)
        scrolls = lines > MOST_LINES
        policy = Qt.ScrollBarPolicy.ScrollBarAsNeeded if scrolls else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        self.setVerticalScrollBarPolicy(policy)


class Composer(QWidget):
    sent = Signal(str)
    stopped = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = MessageEdit(self)
        self.edit.submitted.connect(self._submit)
        self.edit.textChanged.connect(self._update)
        self.button = QPushButton("Send", self)
        self.button.clicked.connect(self._clicked)
        self.button.setMinimumSize(84, self.edit.height())
        self._generating = False
        self._blocked = ""
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACING)
        row.addWidget(self.edit, 1)
        row.addWidget(self.button, 0, Qt.AlignmentFlag.AlignBottom)
        self.setFocusProxy(self.edit)
        self._update()

    @property
    def text(self) -> str:
        return self.edit.toPlainText()

    def set_text(self, text: str) -> None:
        if text != self.text:
            self.edit.setPlainText(text)
            cursor = self.edit.textCursor()
            cursor.movePosition(cursor.MoveOperation.End)
            self.edit.setTextCursor(cursor)

    def set_state(self, *, generating: bool, blocked: str = "") -> None:
        """``blocked`` is why nothing can be sent now; it stands in the field, and what was written there stays."""
        self._generating, self._blocked = generating, blocked
        self._update()

    @property
    def generating(self) -> bool:
        return self._generating

    def _update(self) -> None:
        self.edit.setPlaceholderText(self._blocked or "Message…   Enter sends")
        text, tip = ("Stop", "Stop this answer (Esc)") if self._generating else ("Send", "Send (Enter)")
        # Text instead of a picture: every font has it, and a screen reader reads it.
        self.button.setText(f"■  {text}" if self._generating else text)
        self.button.setToolTip(self._blocked or tip)
        self.button.setAccessibleName(text)
        self.button.setEnabled(self._generating or (bool(self.text.strip()) and not self._blocked))
        set_role(self.button, "primary")

    def _clicked(self) -> None:
        if self._generating:
            self.stopped.emit()
        else:
            self._submit()

    def _submit(self) -> None:
        """Also while an answer is written: whoever listens says why it cannot be sent now, and the text stays."""
        if not self._blocked and self.text.strip():
            self.sent.emit(self.text)
