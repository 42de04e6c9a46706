"""The text of an answer on the screen, while it grows and afterwards.

Pieces of Markdown that are finished gather in panes; a pane that holds ``PANE_CHARACTERS`` is left alone from then on
and the next one begins below it. So what an update lays out again is bounded, however long the answer is.
"""

from __future__ import annotations

from PySide6.QtCore import QUrl, Signal
from PySide6.QtGui import QColor, QGuiApplication, QTextCharFormat, QTextCursor
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.chat.blocks import BLOCK_LIMIT
from app.chat.markdown import MarkdownStream, RenderedPiece, style_sheet
from app.chat.markup import MarkdownColors
from app.chat.text_pane import TextPane
from app.translation import tr

PANE_CHARACTERS = 600
"""Fewer than a piece of a long table or code block has: one that is finished is not laid out again with the next."""
UPDATE_LIMIT = PANE_CHARACTERS + 2 * BLOCK_LIMIT
"""Most characters of source that one update lays out again, besides what is new in it."""
SLICE_CHARACTERS = 1_500
"""Most new text that is drawn at once; the rest follows when the window has had its turn."""
CARET = "▍"


class AnswerText(QWidget):
    copied = Signal(str)
    """Code that was put on the clipboard."""
    link_clicked = Signal(QUrl)

    def __init__(self, colors: MarkdownColors, parent: QWidget | None = None, *, muted: bool = False) -> None:
        super().__init__(parent)
        self._colors = colors
        self._muted = muted
        self._stream = MarkdownStream(colors)
        self._text = ""
        self._growing = False
        self._panes: list[TextPane] = []
        self._begins: list[int] = []
        """Number of the first piece of each pane."""
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(0)
        self.laid_out_characters = 0
        """Source that the last update laid out."""

    @property
    def html(self) -> str:
        return self._stream.html

    @property
    def panes(self) -> list[TextPane]:
        return list(self._panes)

    def draw(self, text: str, *, growing: bool) -> bool:
        """Shows ``text`` as far as one turn of the event loop has room for it; whether some of it is left to draw."""
        drawn = min(len(text), len(self._text) + SLICE_CHARACTERS)
        is_behind = drawn < len(text)
        if drawn != len(self._text) or (growing or is_behind) != self._growing:
            self.set_text(text[:drawn], growing=growing or is_behind)
        return is_behind

    def plain_text(self) -> str:
        """As it is read, without its marks."""
        shown = [pane.toPlainText() for pane in self._panes]
        return "\n".join(shown).removesuffix(CARET if self._growing else "")

    def set_text(self, text: str, *, growing: bool) -> None:
        """Shows ``text``, which begins with what was shown before; ``growing`` adds the caret."""
        self._text, self._growing = text, growing
        self._stream.update(text)
        self.laid_out_characters = 0
        pieces = self._stream.pieces
        finished = len(self._stream.finished)
        if not self._panes and pieces:
            self._add_pane(0)
        while self._panes:
            begin = self._begins[-1]
            end = self._end_of_pane(pieces, begin, finished)
            self._lay_out(self._panes[-1], pieces[begin:end])
            if end == len(pieces):
                break
            self._add_pane(end)
        if growing and self._panes:
            self._add_caret()

    def set_colors(self, colors: MarkdownColors) -> None:
        """Whoever owns it draws it again."""
        self._colors = colors
        self.clear()

    def clear(self) -> None:
        self._stream = MarkdownStream(self._colors)
        for pane in self._panes:
            self._column.removeWidget(pane)
            pane.hide()
            pane.deleteLater()
        self._panes, self._begins = [], []
        self._text, self._growing = "", False

    @staticmethod
    def _end_of_pane(pieces: list[RenderedPiece], begin: int, finished: int) -> int:
        size = 0
        for number in range(begin, finished):
            size += len(pieces[number].piece.source)
            if size >= PANE_CHARACTERS and number + 1 < len(pieces):
                return number + 1
        return len(pieces)

    def _lay_out(self, pane: TextPane, pieces: list[RenderedPiece]) -> None:
        self.laid_out_characters += sum(len(piece.piece.source) for piece in pieces)
        # A line end after the last block would become a space in it.
        pane.set_html("".join(piece.html for piece in pieces).rstrip())

    def _add_pane(self, begin: int) -> None:
        pane = TextPane(self, color=self._colors.muted if self._muted else "")
        pane.setAccessibleName(tr("Thinking") if self._muted else tr("Answer"))
        pane.document().setDefaultStyleSheet(style_sheet(self._colors))
        pane.copy_clicked.connect(self._copy)
        pane.link_clicked.connect(self.link_clicked)
        self._column.addWidget(pane)
        self._panes.append(pane)
        self._begins.append(begin)

    def _add_caret(self) -> None:
        cursor = QTextCursor(self._panes[-1].document())
        cursor.movePosition(QTextCursor.MoveOperation.End)
        look = QTextCharFormat()
        look.setForeground(QColor(self._colors.accent))
        cursor.insertText(CARET, look)

    def _copy(self, address: str) -> None:
        piece, _, block = address.partition(".")
        code = self._stream.code(int(piece), int(block))
        QGuiApplication.clipboard().setText(code)
        self.copied.emit(code)
