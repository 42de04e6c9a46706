"""An answer on the screen: what the model thought, what it wrote, and the line that says how."""

from __future__ import annotations

import time

from PySide6.QtCore import QRectF, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QSizePolicy, QVBoxLayout, QWidget

from app.chat.answer_line import describe, details, explain
from app.chat.answer_text import AnswerText
from app.chat.conversation import Message
from app.chat.draw_queue import DrawQueue
from app.chat.markup import MarkdownColors
from app.chat.message_parts import HueDot, LineButton, MenuEntry
from app.chat.message_view import MessageView, ViewMemory
from app.chat.text_pane import plain_tip
from app.chat.thinking import Parts, split
from app.chat.thought_view import ThoughtView
from app.selection import Selection
from app.theme import PADDING, RADIUS, Theme, mix, request_color
from app.translation import tr
from app.widgets import label
from engine.run_state import RunState

UPDATE_SECONDS = 0.05
"""A growing answer is drawn at most 20 times a second …"""
COST_SHARE = 5.0
SLOWEST_SECONDS = 0.25
"""… and less often where drawing is dear, so that about a fifth of the time goes into it."""
SELECTED_TINT = 0.08
BAR_PX = 3


def markdown_colors(theme: Theme) -> MarkdownColors:
    return MarkdownColors(
        dark=theme.dark,
        text=theme.text.name(),
        muted=theme.muted.name(),
        accent=theme.accent.name(),
        raised=theme.raised.name(),
        line=theme.line.name(),
    )


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
        self.continue_button = LineButton(tr("Continue"), tr("Let the model go on where this answer ends"))
        self.continue_button.clicked.connect(self.continue_clicked)
        self.copy_button = LineButton(tr("Copy"), tr("Copy this answer as Markdown"))
        self.copy_button.clicked.connect(lambda: self._copy_text(self._answer() or self.message.text))
        self.regenerate_button = LineButton(tr("Regenerate"), tr("Write another version of this answer"))
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
