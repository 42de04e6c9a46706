"""What a model thought, folded to one line until somebody wants to read it."""

from __future__ import annotations

from PySide6.QtCore import Qt, QUrl, Signal
from PySide6.QtWidgets import QToolButton, QVBoxLayout, QWidget

from app.chat.answer_text import AnswerText
from app.chat.markup import MarkdownColors
from app.translation import ntr

INDENT_PX = 14


class ThoughtView(QWidget):
    """While it is folded its text is not laid out at all."""

    toggled = Signal(bool)
    """Whether it is unfolded now."""
    copied = Signal(str)
    link_clicked = Signal(QUrl)

    def __init__(self, colors: MarkdownColors, *, unfolded: bool = False, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._colors = colors
        self._text = ""
        self._growing = False
        self.header = QToolButton()
        self.header.setCheckable(True)
        self.header.setChecked(unfolded)
        self.header.setProperty("role", "flat")
        self.header.setArrowType(Qt.ArrowType.NoArrow)
        self.header.setCursor(Qt.CursorShape.PointingHandCursor)
        self.header.toggled.connect(self._toggle)
        self.body = AnswerText(colors, muted=True)
        self.body.copied.connect(self.copied)
        self.body.link_clicked.connect(self.link_clicked)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 4)
        column.setSpacing(4)
        column.addWidget(self.header, 0, Qt.AlignmentFlag.AlignLeft)
        column.addWidget(self.body)
        self.body.setContentsMargins(INDENT_PX, 0, 0, 0)
        self.body.setVisible(unfolded)

    @property
    def is_unfolded(self) -> bool:
        return self.header.isChecked()

    def draw(self, text: str, *, growing: bool) -> bool:
        """Shows the summary, and where it is unfolded the text; whether some of it is left to draw."""
        if text != self._text or growing != self._growing or not self.header.text():
            self._text, self._growing = text, growing
            self._say()
        return self.is_unfolded and self.body.draw(text, growing=growing)

    def set_colors(self, colors: MarkdownColors) -> None:
        self.body.set_colors(colors)

    def _say(self) -> None:
        words = len(self._text.split())
        if self._growing:
            summary = ntr("Thinking… {count:,} word", "Thinking… {count:,} words", words)
        else:
            summary = ntr("Thought for {count:,} word", "Thought for {count:,} words", words)
        self.header.setText(f"{'▾' if self.is_unfolded else '▸'} {summary}")
        self.header.setAccessibleName(summary)

    def _toggle(self, unfolded: bool) -> None:
        self._say()
        self.body.setVisible(unfolded)
        self.toggled.emit(unfolded)
