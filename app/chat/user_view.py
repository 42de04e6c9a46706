"""A message of the user's on the screen: as it was written, in an accent-tinted card, and edited in its place."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, Qt, QTimer, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QTextCursor
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.chat.conversation import Message
from app.chat.message_edit import MessageEdit, is_heavy
from app.chat.message_parts import LineButton, MenuEntry
from app.chat.message_view import MessageView, ViewMemory
from app.chat.text_pane import TextPane
from app.theme import PADDING, RADIUS, Theme, mix
from app.translation import tr
from app.widgets import button, label

PART_CHARACTERS = 8_000
"""Of a message that are shown at once; the rest on demand."""
USER_TINT = 0.14


class EditBox(QWidget):
    """A message of the user's while it is edited in its place: Enter sends, Esc leaves it as it was."""

    submitted = Signal(str)
    cancelled = Signal()

    def __init__(self, text: str, *, enter_sends: bool, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = MessageEdit(self)
        self.edit.enter_sends = enter_sends
        self.edit.setAccessibleName(tr("Edited message"))
        self.edit.setToolTip(
            tr("Enter sends it as a new version, Shift+Enter begins a new line, Esc cancels")
            if enter_sends
            else tr("Ctrl+Enter sends it as a new version, Esc cancels")
        )
        self.edit.setPlainText(text)
        self.edit.pasted_heavy.connect(self.edit.insertPlainText)
        self.edit.submitted.connect(self._submit)
        self.edit.installEventFilter(self)
        self.send_button = button(tr("Send"), "primary")
        self.send_button.clicked.connect(self._submit)
        self.cancel_button = button(tr("Cancel"))
        self.cancel_button.clicked.connect(self.cancelled)
        row = QHBoxLayout()
        row.addStretch(1)
        row.addWidget(self.cancel_button)
        row.addWidget(self.send_button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 4, 0)
        column.addWidget(self.edit)
        column.addLayout(row)
        self.edit.textChanged.connect(self._update)
        self._update()

    def to_end(self) -> None:
        """The cursor behind the last word, and the beginning in sight where all of it has room."""
        self.edit.setFocus()
        self.edit.moveCursor(QTextCursor.MoveOperation.End)
        if self.edit.verticalScrollBarPolicy() == Qt.ScrollBarPolicy.ScrollBarAlwaysOff:
            self.edit.verticalScrollBar().setValue(0)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Esc is this box's here, and not the window's that stops an answer."""
        if event.type() in (QEvent.Type.ShortcutOverride, QEvent.Type.KeyPress) and event.key() == Qt.Key.Key_Escape:
            event.accept()
            if event.type() == QEvent.Type.KeyPress:
                self.cancelled.emit()
            return True
        return False

    def _update(self) -> None:
        self.send_button.setEnabled(bool(self.edit.toPlainText().strip()))

    def _submit(self) -> None:
        if self.edit.toPlainText().strip():
            self.submitted.emit(self.edit.toPlainText())


class UserView(MessageView):
    """What the user wrote, as it was written."""

    edited = Signal(str, str)
    """Id of the message, and the text that shall take its place."""

    def __init__(self, message: Message, theme: Theme, memory: ViewMemory, parent: QWidget | None = None) -> None:
        super().__init__(message, theme, memory, parent)
        self.pane = TextPane(self)
        self.pane.setAccessibleName(tr("Your message"))
        self._shown = 0
        """Characters of the message that are on the screen."""
        self.panes = [self.pane]
        self.edit_box: EditBox | None = None
        self._column = QVBoxLayout()
        self._column.addWidget(self.pane)
        self.rest_button = LineButton("", "")
        self.rest_button.clicked.connect(self._show_more)
        self.copy_button = LineButton(tr("Copy"), tr("Copy this message"))
        self.copy_button.clicked.connect(lambda: self._copy_text(self.message.text))
        self.edit_button = LineButton(tr("Edit"), tr("Edit this message and send it as a new version"))
        self.edit_button.clicked.connect(self.begin_edit)
        if message.damage:
            self.pane.hide()
            sentence = label(tr("This message could not be read from disk and is kept there as it is ({why}).",
                                why=message.damage))  # fmt: skip
            sentence.setProperty("role", "error")
            sentence.setWordWrap(True)
            self._column.addWidget(sentence)
        self._column.addWidget(self.rest_button, 0, Qt.AlignmentFlag.AlignLeft)
        self._row.addLayout(self._column, 1)
        self._add_buttons(self.copy_button, self.edit_button, self.more_button)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(PADDING[0], PADDING[1], 4, PADDING[3])
        outer.addLayout(self._row)
        # Once they are in their place: a widget that is shown without a parent is a window.
        self._show_more()
        self.edit_button.setVisible(not message.damage and not is_heavy(message.text))
        theme.changed.connect(self.update)
        if message.id in memory.edits:
            self.begin_edit()

    def _show_more(self) -> None:
        """The next part of the message: laying out a very long one at once would hold the window up."""
        text = self.message.text
        end = min(len(text), self._shown + PART_CHARACTERS)
        if end < len(text):
            end = max(text.rfind("\n", self._shown, end), text.rfind(" ", self._shown, end), self._shown) + 1
            end = end if end > self._shown + 1 else self._shown + PART_CHARACTERS
        pane = self.pane if self._shown == 0 else TextPane(self)
        if pane is not self.pane:
            pane.setAccessibleName(tr("Your message"))
            self._column.insertWidget(self._column.indexOf(self.rest_button), pane)
            self.panes.append(pane)
        pane.setPlainText(text[self._shown : end].removesuffix("\n"))
        self._shown = end
        rest = tr("Show more ({count:,} characters are left)", count=len(text) - end)
        self.rest_button.setText(rest)
        self.rest_button.setToolTip(rest)
        self.rest_button.setAccessibleName(rest)
        self.rest_button.setVisible(end < len(text))

    def begin_edit(self) -> None:
        """Shows the field; with the text that was left in it, where it has been open before."""
        if self.edit_box is None and not self.message.damage and not is_heavy(self.message.text):
            text = self._memory.edits.setdefault(self.message.id, self.message.text)
            self.edit_box = EditBox(text, enter_sends=self._memory.enter_sends)
            self.edit_box.edit.textChanged.connect(self._keep_edit)
            self.edit_box.submitted.connect(lambda text: self.edited.emit(self.message.id, text))
            self.edit_box.cancelled.connect(self.end_edit)
            self._column.addWidget(self.edit_box)
            self._set_reading(False)
        if self.edit_box is not None:
            QTimer.singleShot(0, self.edit_box, self.edit_box.to_end)  # once it has its height

    def end_edit(self) -> None:
        """Takes the field away, and what is in it."""
        self._memory.edits.pop(self.message.id, None)
        if self.edit_box is not None:
            self._column.removeWidget(self.edit_box)
            self.edit_box.hide()
            self.edit_box.deleteLater()
            self.edit_box = None
            self._set_reading(True)
            self.edit_button.setFocus()

    def _set_reading(self, reading: bool) -> None:
        for each in (*self.panes, self.copy_button, self.edit_button, self.more_button):
            each.setVisible(reading)
        if self.switch is not None:
            self.switch.setVisible(reading)

    def _keep_edit(self) -> None:
        if self.edit_box is not None:
            self._memory.edits[self.message.id] = self.edit_box.edit.toPlainText()

    def _menu(self) -> list[MenuEntry]:
        delete = tr("Delete this message and its answers")
        return [(delete, lambda: self.delete_clicked.emit(self.message.id))]

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(mix(self._theme.card, self._theme.accent, USER_TINT))
        painter.drawRoundedRect(self.rect(), RADIUS, RADIUS)
        self._paint_found(painter)
