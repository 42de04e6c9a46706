"""One message on the screen: the user's in an accent-tinted card, the model's as plain text with its line below."""

from __future__ import annotations

import time

from PySide6.QtCore import QRectF, QSize, Qt, QTimer, QUrl, Signal
from PySide6.QtGui import QGuiApplication, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QHBoxLayout, QSizePolicy, QToolButton, QVBoxLayout, QWidget

from app.chat.answer_line import describe, explain
from app.chat.answer_text import AnswerText
from app.chat.conversation import Message
from app.chat.markup import MarkdownColors
from app.chat.text_pane import TextPane
from app.selection import Selection
from app.theme import PADDING, RADIUS, Theme, mix, request_color
from app.widgets import label
from engine.request import request_name
from engine.run_state import RunState

UPDATE_SECONDS = 0.05
"""A growing answer is drawn at most 20 times a second …"""
COST_SHARE = 5.0
SLOWEST_SECONDS = 0.25
"""… and less often where drawing is dear, so that about a fifth of the time goes into it."""
SLICE_CHARACTERS = 1_500
"""Most new text that is drawn at once; the rest follows when the window has had its turn."""
CATCH_UP_MS = 1
USER_TINT = 0.14
SELECTED_TINT = 0.08
BAR_PX = 3
NARROW_PX = 520
"""Below this width the buttons of an answer stand under its line and not beside it."""
MOST_BUTTON_PX = 19
"""As high as the line of text that it stands beside."""


def markdown_colors(theme: Theme) -> MarkdownColors:
    return MarkdownColors(
        dark=theme.dark,
        text=theme.text.name(),
        muted=theme.muted.name(),
        accent=theme.accent.name(),
        raised=theme.raised.name(),
        line=theme.line.name(),
    )


def flat_button(text: str, tip: str) -> QToolButton:
    result = QToolButton()
    result.setText(text)
    result.setToolTip(tip)
    result.setAccessibleName(tip)
    result.setProperty("role", "flat")
    result.setMaximumHeight(MOST_BUTTON_PX)
    result.setCursor(Qt.CursorShape.PointingHandCursor)
    return result


class HueDot(QToolButton):
    """The colour of a request; a click selects the request everywhere."""

    SIZE = 9

    def __init__(self, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._selection = selection
        self._request_id: int | None = None
        self.setFixedSize(18, 18)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.clicked.connect(self._toggle)
        self.hide()

    def set_request(self, request_id: int | None) -> None:
        if request_id == self._request_id:
            return
        self._request_id = request_id
        self.setVisible(request_id is not None)
        name = request_name(request_id) if request_id is not None else ""
        self.setToolTip(f"Show request {name} in the scope")
        self.setAccessibleName(f"Select request {name}")
        self.update()

    def _toggle(self) -> None:
        selected = self._selection.request_id == self._request_id
        self._selection.select(None if selected else self._request_id)

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._request_id is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        color = request_color(self._request_id, self._theme)
        margin = (self.width() - self.SIZE) / 2
        circle = QRectF(margin, margin, self.SIZE, self.SIZE)
        if self.hasFocus() or self.underMouse():
            painter.setPen(self._theme.text)
            painter.drawEllipse(circle.adjusted(-2, -2, 2, 2))
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(color)
        painter.drawEllipse(circle)


class UserView(QWidget):
    """What the user wrote, as it was written."""

    delete_clicked = Signal(str)
    copied = Signal()

    def __init__(self, message: Message, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.message = message
        self._theme = theme
        self.pane = TextPane(self)
        self.pane.setAccessibleName("Your message")
        self.pane.setPlainText(message.text)
        row = QHBoxLayout(self)
        row.setContentsMargins(PADDING[0], PADDING[1], 4, PADDING[3])
        column = QVBoxLayout()
        column.addWidget(self.pane)
        if message.damage:
            self.pane.hide()
            sentence = label(f"This message could not be read from disk and is kept there as it is ({message.damage}).")
            sentence.setProperty("role", "error")
            sentence.setWordWrap(True)
            column.addWidget(sentence)
        row.addLayout(column, 1)
        copy = flat_button("Copy", "Copy this message")
        copy.clicked.connect(self._copy)
        delete = flat_button("✕", "Delete this message and its answer")
        delete.clicked.connect(lambda: self.delete_clicked.emit(self.message.id))
        self._buttons = [copy, delete]
        for each in self._buttons:
            row.addWidget(each, 0, Qt.AlignmentFlag.AlignTop)
        row.setSpacing(2)
        theme.changed.connect(self.update)

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self.message.text)
        self.copied.emit()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(mix(self._theme.card, self._theme.accent, USER_TINT))
        painter.drawRoundedRect(self.rect(), RADIUS, RADIUS)


class AnswerView(QWidget):
    """What the model wrote, and the line that says how. Marked in the request's hue while the request is selected."""

    regenerate_clicked = Signal()
    copied = Signal()
    link_clicked = Signal(QUrl)

    def __init__(
        self, message: Message, theme: Theme, selection: Selection, run_state: RunState, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self.message = message
        self._theme = theme
        self._selection = selection
        self._run_state = run_state
        self._cost = self._drawn_at = 0.0
        self._drawn = 0
        """Characters of the message that are on the screen."""
        self._is_last = False
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
        self.copy_button = flat_button("Copy", "Copy this answer as Markdown")
        self.copy_button.clicked.connect(self._copy)
        self.regenerate_button = flat_button("Regenerate", "Replace this answer by a new one")
        self.regenerate_button.clicked.connect(self.regenerate_clicked)
        self._lay_out()
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._draw)
        theme.changed.connect(self._recolor)
        selection.changed.connect(self._selected)
        self._draw()

    def _lay_out(self) -> None:
        words = QHBoxLayout()
        words.setSpacing(4)
        words.addWidget(self.dot, 0, Qt.AlignmentFlag.AlignTop)
        words.addWidget(self.line, 1, Qt.AlignmentFlag.AlignTop)
        buttons = QHBoxLayout()
        buttons.setSpacing(4)
        buttons.addStretch(1)
        for each in (self.copy_button, self.regenerate_button):
            buttons.addWidget(each, 0, Qt.AlignmentFlag.AlignTop)
        self._footer = QBoxLayout(QBoxLayout.Direction.LeftToRight)
        self._footer.setSpacing(4)
        self._footer.addLayout(words, 1)
        self._footer.addLayout(buttons)
        column = QVBoxLayout(self)
        column.setContentsMargins(PADDING[0], 4, 4, 4)
        column.setSpacing(4)
        column.addWidget(self.text)
        column.addWidget(self.sentence)
        column.addLayout(self._footer)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        narrow = event.size().width() < NARROW_PX
        direction = QBoxLayout.Direction.TopToBottom if narrow else QBoxLayout.Direction.LeftToRight
        if direction != self._footer.direction():
            self._footer.setDirection(direction)

    def refresh(self) -> None:
        """The message has changed: drawn soon while it grows, at once when it has ended; see ``SLICE_CHARACTERS``."""
        if not self.message.status.is_open:
            self._timer.stop()
            self._draw()
        elif not self._timer.isActive():
            pause = min(SLOWEST_SECONDS, max(UPDATE_SECONDS, COST_SHARE * self._cost))
            wait = self._drawn_at + pause - time.perf_counter()
            if wait <= 0:  # with the frame that brings it, so that both are painted at once
                self._draw()
            else:
                self._timer.start(round(1000 * wait))

    def refresh_line(self) -> None:
        """The engine has moved on: the line only."""
        self.line.setText(describe(self.message, self._run_state))

    def set_last(self, is_last: bool) -> None:
        """Only the last answer can be replaced."""
        self._is_last = is_last
        self._show_buttons()

    def _draw(self) -> None:
        begun = time.perf_counter()
        message = self.message
        self._drawn = min(len(message.text), self._drawn + SLICE_CHARACTERS)
        is_behind = self._drawn < len(message.text)
        self.text.set_text(message.text[: self._drawn], growing=message.status.is_open or is_behind)
        self.text.setVisible(bool(message.text))
        sentence = explain(message)
        self.sentence.setText(sentence)
        self.sentence.setVisible(bool(sentence))
        self.dot.set_request(message.request_id)
        self.refresh_line()
        self._show_buttons()
        self._drawn_at = time.perf_counter()
        self._cost = self._drawn_at - begun
        if is_behind:
            self._timer.start(CATCH_UP_MS)

    def _show_buttons(self) -> None:
        is_open = self.message.status.is_open
        self.copy_button.setVisible(bool(self.message.text) and not is_open)
        self.regenerate_button.setVisible(self._is_last and not is_open and not self.message.damage)

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self.message.text)
        self.copied.emit()

    def _recolor(self) -> None:
        self.text.set_colors(markdown_colors(self._theme))
        self.update()

    def _selected(self, _request_id: int | None) -> None:
        self.update()

    @property
    def is_marked(self) -> bool:
        """Whether its request is the one selected in the window."""
        return self.message.request_id is not None and self._selection.request_id == self.message.request_id

    def paintEvent(self, event: QPaintEvent) -> None:
        if not self.is_marked:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        hue = request_color(self.message.request_id, self._theme)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(mix(self._theme.card, hue, SELECTED_TINT))
        painter.drawRoundedRect(self.rect(), RADIUS, RADIUS)
        painter.setBrush(hue)
        painter.drawRoundedRect(QRectF(0, 4, BAR_PX, self.height() - 8), BAR_PX / 2, BAR_PX / 2)

    def minimumSizeHint(self) -> QSize:
        return QSize(80, super().minimumSizeHint().height())
