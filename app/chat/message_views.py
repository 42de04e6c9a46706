"""One message on the screen: the user's in an accent-tinted card, the model's as plain text with its line below."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from PySide6.QtCore import QEvent, QObject, QRectF, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QGuiApplication, QKeyEvent, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app.chat.answer_line import describe, details, explain
from app.chat.answer_text import AnswerText
from app.chat.composer import MessageEdit
from app.chat.conversation import Message
from app.chat.draw_queue import DrawQueue
from app.chat.markup import MarkdownColors
from app.chat.message_parts import HueDot, MenuEntry, MoreButton, VersionSwitch, flat_button
from app.chat.text_pane import TextPane, plain_tip
from app.chat.thinking import Parts, split
from app.chat.thought_view import ThoughtView
from app.selection import Selection
from app.theme import PADDING, RADIUS, Theme, mix, request_color
from app.translation import tr
from app.widgets import button, label
from engine.run_state import RunState

UPDATE_SECONDS = 0.05
"""A growing answer is drawn at most 20 times a second …"""
COST_SHARE = 5.0
SLOWEST_SECONDS = 0.25
"""… and less often where drawing is dear, so that about a fifth of the time goes into it."""
USER_TINT = 0.14
SELECTED_TINT = 0.08
BAR_PX = 3
NARROW_PX = 520
"""Below this width the buttons of a message stand under it and not beside it."""


def markdown_colors(theme: Theme) -> MarkdownColors:
    return MarkdownColors(
        dark=theme.dark,
        text=theme.text.name(),
        muted=theme.muted.name(),
        accent=theme.accent.name(),
        raised=theme.raised.name(),
        line=theme.line.name(),
    )


@dataclass(slots=True)
class ViewMemory:
    """What the user did to messages on the screen; it outlives their views. Keys are ids of messages."""

    unfolded: set[str] = field(default_factory=set)
    """Answers whose thoughts are unfolded."""
    edits: dict[str, str] = field(default_factory=dict)
    """Messages that are being edited, and the text as it is by now."""


class MessageView(QWidget):
    """What both kinds have: versions to switch between, and a row of buttons that moves below where it is narrow."""

    delete_clicked = Signal(str)
    """Id of the message."""
    version_chosen = Signal(str, int)
    """Id of the version to show, and whether it is an earlier (-1) or a later one (1)."""
    copied = Signal()

    def __init__(self, message: Message, theme: Theme, memory: ViewMemory, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.message = message
        self._theme = theme
        self._memory = memory
        self._versions: list[str] = [message.id]
        self.switch: VersionSwitch | None = None
        """None: there is one version."""
        self.more_button = MoreButton(self._menu)
        self._row = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._row.setSpacing(4)
        self._buttons = QHBoxLayout()
        self._buttons.setSpacing(4)
        self._is_marked_briefly = False

    def set_versions(self, versions: Sequence[Message]) -> None:
        self._versions = [each.id for each in versions] or [self.message.id]
        if self.switch is None and len(self._versions) > 1:
            self.switch = VersionSwitch()
            self.switch.stepped.connect(self.step_version)
            self._buttons.insertWidget(1, self.switch, 0, Qt.AlignmentFlag.AlignTop)
        if self.switch is not None:
            self.switch.set_versions(self._versions.index(self.message.id) + 1, len(self._versions))

    def step_version(self, step: int) -> None:
        number = self._versions.index(self.message.id) + step
        if 0 <= number < len(self._versions):
            self.version_chosen.emit(self._versions[number], step)

    def set_found(self, found: bool) -> None:
        """Whether it is framed as what was looked for."""
        self._is_marked_briefly = found
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        step = {Qt.Key.Key_Left: -1, Qt.Key.Key_Right: 1}.get(event.key())
        if step is not None and event.modifiers() == Qt.KeyboardModifier.AltModifier and len(self._versions) > 1:
            self.step_version(step)
        else:
            super().keyPressEvent(event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        narrow = event.size().width() < NARROW_PX
        direction = QBoxLayout.Direction.TopToBottom if narrow else QBoxLayout.Direction.LeftToRight
        if direction != self._row.direction():
            self._row.setDirection(direction)

    def minimumSizeHint(self) -> QSize:
        return QSize(80, super().minimumSizeHint().height())

    def _menu(self) -> list[MenuEntry]:
        raise NotImplementedError

    def _copy_text(self, text: str) -> None:
        QGuiApplication.clipboard().setText(text)
        self.copied.emit()

    def _add_buttons(self, *buttons: QWidget) -> None:
        self._buttons.addStretch(1)
        for each in buttons:
            self._buttons.addWidget(each, 0, Qt.AlignmentFlag.AlignTop)
        self._row.addLayout(self._buttons)

    def _paint_found(self, painter: QPainter) -> None:
        if self._is_marked_briefly:
            painter.setPen(self._theme.accent)
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), RADIUS, RADIUS)


class EditBox(QWidget):
    """A message of the user's while it is edited in its place: Enter sends, Esc leaves it as it was."""

    submitted = Signal(str)
    cancelled = Signal()

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = MessageEdit(self)
        self.edit.setAccessibleName(tr("Edited message"))
        self.edit.setToolTip(tr("Enter sends it as a new version, Shift+Enter begins a new line, Esc cancels"))
        self.edit.setPlainText(text)
        self.edit.moveCursor(self.edit.textCursor().MoveOperation.End)
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
        self.pane.setPlainText(message.text)
        self.edit_box: EditBox | None = None
        self._column = QVBoxLayout()
        self._column.addWidget(self.pane)
        self.copy_button = flat_button(tr("Copy"), tr("Copy this message"))
        self.copy_button.clicked.connect(lambda: self._copy_text(self.message.text))
        self.edit_button = flat_button(tr("Edit"), tr("Edit this message and send it as a new version"))
        self.edit_button.clicked.connect(self.begin_edit)
        if message.damage:
            self.pane.hide()
            self.edit_button.hide()
            sentence = label(tr("This message could not be read from disk and is kept there as it is ({why}).",
                                why=message.damage))  # fmt: skip
            sentence.setProperty("role", "error")
            sentence.setWordWrap(True)
            self._column.addWidget(sentence)
        self._row.addLayout(self._column, 1)
        self._add_buttons(self.copy_button, self.edit_button, self.more_button)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(PADDING[0], PADDING[1], 4, PADDING[3])
        outer.addLayout(self._row)
        theme.changed.connect(self.update)
        if message.id in memory.edits:
            self.begin_edit()

    def begin_edit(self) -> None:
        """Shows the field; with the text that was left in it, where it has been open before."""
        if self.edit_box is None and not self.message.damage:
            self.edit_box = EditBox(self._memory.edits.setdefault(self.message.id, self.message.text))
            self.edit_box.edit.textChanged.connect(self._keep_edit)
            self.edit_box.submitted.connect(lambda text: self.edited.emit(self.message.id, text))
            self.edit_box.cancelled.connect(self.end_edit)
            self._column.addWidget(self.edit_box)
            self.pane.hide()
            self.edit_button.hide()
        if self.edit_box is not None:
            self.edit_box.edit.setFocus()

    def end_edit(self) -> None:
        """Takes the field away, and what is in it."""
        self._memory.edits.pop(self.message.id, None)
        if self.edit_box is not None:
            self._column.removeWidget(self.edit_box)
            self.edit_box.hide()
            self.edit_box.deleteLater()
            self.edit_box = None
            self.pane.show()
            self.edit_button.show()
            self.edit_button.setFocus()

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


class AnswerView(MessageView):
    """What the model wrote, and the line that says how. Marked in the request's hue while the request is selected."""

    regenerate_clicked = Signal(str)
    """Id of the answer."""
    continue_clicked = Signal()
    link_clicked = Signal(QUrl)

    def __init__(
        self,
        message: Message,
        theme: Theme,
        memory: ViewMemory,
        queue: DrawQueue,
        selection: Selection,
        run_state: RunState,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(message, theme, memory, parent)
        self._queue = queue
        self._selection = selection
        self._run_state = run_state
        self._cost = self._drawn_at = 0.0
        self.is_behind = False
        """Whether there is text that is not drawn yet."""
        self._is_last = False
        self.thought: ThoughtView | None = None
        self.text = AnswerText(markdown_colors(theme), self)
        self.text.link_clicked.connect(self.link_clicked)
        self.text.copied.connect(lambda _code: self.copied.emit())
        self.sentence = label("", "muted")
        self.sentence.setWordWrap(True)
        self.sentence.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.dot = HueDot(theme, selection, self)
        self.line = label("", "muted")
        self.line.setWordWrap(True)
        self.line.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.continue_button = flat_button(tr("Continue"), tr("Let the model go on where this answer ends"))
        self.continue_button.clicked.connect(self.continue_clicked)
        self.copy_button = flat_button(tr("Copy"), tr("Copy this answer as Markdown"))
        self.copy_button.clicked.connect(lambda: self._copy_text(self._answer() or self.message.text))
        self.regenerate_button = flat_button(tr("Regenerate"), tr("Write another version of this answer"))
        self.regenerate_button.clicked.connect(self._regenerate)
        self._lay_out()
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self.draw)
        theme.changed.connect(self._recolor)
        selection.changed.connect(self._selected)
        self.draw()

    def _lay_out(self) -> None:
        words = QHBoxLayout()
        words.setSpacing(4)
        words.addWidget(self.dot, 0, Qt.AlignmentFlag.AlignTop)
        words.addWidget(self.line, 1, Qt.AlignmentFlag.AlignTop)
        self._row.addLayout(words, 1)
        self._add_buttons(self.continue_button, self.copy_button, self.regenerate_button, self.more_button)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(PADDING[0], 4, 4, 4)
        self._column.setSpacing(4)
        self._column.addWidget(self.text)
        self._column.addWidget(self.sentence)
        self._column.addLayout(self._row)

    def refresh(self) -> None:
        """The message has changed: drawn soon while it grows, at once when it has ended; see ``SLICE_CHARACTERS``."""
        if not self.message.status.is_open:
            self._timer.stop()
            self.draw()
        elif not self._timer.isActive():
            pause = min(SLOWEST_SECONDS, max(UPDATE_SECONDS, COST_SHARE * self._cost))
            wait = self._drawn_at + pause - time.perf_counter()
            if wait <= 0:  # with the frame that brings it, so that both are painted at once
                self.draw()
            else:
                self._timer.start(round(1000 * wait))

    def refresh_line(self) -> None:
        """The engine has moved on: the line only."""
        self.line.setText(describe(self.message, self._run_state))

    def set_last(self, is_last: bool) -> None:
        """Only the last answer can go on."""
        self._is_last = is_last
        self._show_buttons()

    def draw(self) -> None:
        """Brings the message to the screen, as far as one turn of the event loop has room for it."""
        begun = time.perf_counter()
        growing = self.message.status.is_open
        parts = split(self.message.text, growing=growing)
        self._show_thought(parts)
        self.is_behind = self.thought is not None and self.thought.draw(
            parts.thought or "", growing=growing and parts.is_thinking
        )
        if not self.is_behind:
            self.is_behind = self.text.draw(parts.answer, growing=growing and not parts.is_thinking)
        self.text.setVisible(bool(parts.answer))
        sentence = explain(self.message, is_thinking=parts.is_thinking)
        self.sentence.setText(sentence)
        self.sentence.setVisible(bool(sentence))
        self.dot.set_request(self.message.request_id)
        self.refresh_line()
        if not growing:
            self.line.setToolTip(plain_tip(details(self.message)))
        self._show_buttons()
        self._drawn_at = time.perf_counter()
        self._cost = self._drawn_at - begun
        if self.is_behind:
            self._queue.add(self)

    def _show_thought(self, parts: Parts) -> None:
        """A thought may turn out to be one only when its end comes; what was shown as the answer begins anew then."""
        if (parts.thought is not None) == (self.thought is not None):
            return
        self.text.clear()
        if self.thought is not None:
            self._column.removeWidget(self.thought)
            self.thought.hide()
            self.thought.deleteLater()
            self.thought = None
            return
        unfolded = self.message.id in self._memory.unfolded
        self.thought = ThoughtView(markdown_colors(self._theme), unfolded=unfolded)
        self.thought.toggled.connect(self._unfolded)
        self.thought.link_clicked.connect(self.link_clicked)
        self.thought.copied.connect(lambda _code: self.copied.emit())
        self._column.insertWidget(0, self.thought)

    def _unfolded(self, unfolded: bool) -> None:
        if unfolded:
            self._memory.unfolded.add(self.message.id)
            self.draw()
        else:
            self._memory.unfolded.discard(self.message.id)

    def _show_buttons(self) -> None:
        message = self.message
        is_open = message.status.is_open
        self.copy_button.setVisible(bool(message.text) and not is_open)
        self.regenerate_button.setVisible(self._is_last and not is_open and not message.damage)
        self.continue_button.setVisible(self._is_last and bool(message.text) and message.can_continue)
        self.more_button.setVisible(not is_open)

    def _answer(self) -> str:
        return split(self.message.text).answer

    def _regenerate(self) -> None:
        self.regenerate_clicked.emit(self.message.id)

    def _menu(self) -> list[MenuEntry]:
        entries: list[MenuEntry] = []
        parts = split(self.message.text)
        if parts.thought is not None and parts.answer:
            entries.append((tr("Copy with its thinking"), lambda: self._copy_text(self.message.text)))
        if parts.answer:
            entries.append((tr("Copy as plain text"), lambda: self._copy_text(self.text.plain_text())))
        if not self._is_last and not self.message.damage:
            entries.append((tr("Write another version from here"), self._regenerate))
        one_of_several = len(self._versions) > 1
        delete = tr("Delete this version") if one_of_several else tr("Delete this answer and its message")
        return [*entries, (delete, lambda: self.delete_clicked.emit(self.message.id))]

    def _recolor(self) -> None:
        colors = markdown_colors(self._theme)
        self.text.set_colors(colors)
        if self.thought is not None:
            self.thought.set_colors(colors)
        self.draw()
        self.update()

    def _selected(self, _request_id: int | None) -> None:
        self.update()

    @property
    def is_marked(self) -> bool:
        """Whether its request is the one selected in the window."""
        return self.message.request_id is not None and self._selection.request_id == self.message.request_id

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if self.is_marked:
            hue = request_color(self.message.request_id, self._theme)
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(mix(self._theme.card, hue, SELECTED_TINT))
            painter.drawRoundedRect(self.rect(), RADIUS, RADIUS)
            painter.setBrush(hue)
            painter.drawRoundedRect(QRectF(0, 4, BAR_PX, self.height() - 8), BAR_PX / 2, BAR_PX / 2)
        self._paint_found(painter)
