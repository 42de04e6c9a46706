"""The field in which a message is written: its keys, how high it is, and what becomes of a very long paste."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QMimeData, Qt, Signal
from PySide6.QtGui import QAbstractTextDocumentLayout, QKeyEvent, QTextCursor, QTextDocument
from PySide6.QtWidgets import QPlainTextDocumentLayout, QPlainTextEdit, QWidget

from app.translation import tr

MOST_LINES = 8
PADDING_PX = 14
LONGEST_LINE = 8_000
"""A text field lays a line out as a whole at every key: beyond so many characters that is felt."""
MOST_PASTED_LINES = 20_000


def is_heavy(text: str) -> bool:
    """Whether a text field could not be typed in any more if it held this."""
    if len(text) <= LONGEST_LINE:
        return False
    return text.count("\n") > MOST_PASTED_LINES or _has_long_line(text)


def _has_long_line(text: str) -> bool:
    start = 0
    while len(text) - start > LONGEST_LINE:
        end = text.rfind("\n", start, start + LONGEST_LINE + 1)
        if end < 0:
            return True
        start = end + 1
    return False


class MessageEdit(QPlainTextEdit):
    submitted = Signal()
    edit_last_wanted = Signal()
    """Up was pressed while the field was empty."""
    pasted_heavy = Signal(str)
    """A text that the field is not to hold."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.enter_sends = True
        self._layout: QAbstractTextDocumentLayout | None = None
        self.setTabChangesFocus(True)
        self.setAccessibleName(tr("Message"))
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.textChanged.connect(self._fit)
        self.show_document(self.new_document())

    def new_document(self) -> QTextDocument:
        """An empty draft with a history of its own, for :meth:`show_document`."""
        document = QTextDocument(self)
        document.setDocumentLayout(QPlainTextDocumentLayout(document))
        return document

    def show_document(self, document: QTextDocument) -> None:
        """Another draft, with what was done to it, which can be undone."""
        if document is self.document():
            return
        if self._layout is not None:
            self._layout.documentSizeChanged.disconnect(self._fit)
        document.setDefaultFont(self.font())
        self.setDocument(document)
        self._layout = document.documentLayout()
        self._layout.documentSizeChanged.connect(self._fit)
        self._fit()
        self.textChanged.emit()

    def is_blank(self) -> bool:
        """Whether there is nothing but white space, without taking the text out."""
        block = self.document().firstBlock()
        while block.isValid():
            if block.text().strip():
                return False
            block = block.next()
        return True

    def replace_text(self, text: str) -> None:
        """Puts ``text`` in place of what there is; undo brings that back."""
        cursor = QTextCursor(self.document())
        cursor.select(QTextCursor.SelectionType.Document)
        cursor.insertText(text)
        self.setTextCursor(cursor)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        modifiers = event.modifiers() & ~Qt.KeyboardModifier.KeypadModifier
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            if modifiers == Qt.KeyboardModifier.ControlModifier or (self.enter_sends and not modifiers):
                self.submitted.emit()
            elif not modifiers & ~Qt.KeyboardModifier.ShiftModifier:
                self.insertPlainText("\n")
                self.ensureCursorVisible()
            return
        if event.key() == Qt.Key.Key_Up and not modifiers and self.document().isEmpty():
            self.edit_last_wanted.emit()
            return
        super().keyPressEvent(event)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange and self._layout is not None:
            self.document().setDefaultFont(self.font())
            self._fit()

    def insertFromMimeData(self, source: QMimeData) -> None:
        if not source.hasText():
            return
        text = source.text()
        if is_heavy(text):
            self.pasted_heavy.emit(text)
        else:
            self.insertPlainText(text)
            self.ensureCursorVisible()

    def _fit(self) -> None:
        # The layout of a plain text edit counts lines, not pixels.
        lines = max(1, round(self.document().documentLayout().documentSize().height()))
        shown = min(lines, MOST_LINES)
        self.setFixedHeight(shown * self.fontMetrics().lineSpacing() + PADDING_PX + 4)
        scrolls = lines > MOST_LINES
        policy = Qt.ScrollBarPolicy.ScrollBarAsNeeded if scrolls else Qt.ScrollBarPolicy.ScrollBarAlwaysOff
        self.setVerticalScrollBarPolicy(policy)
