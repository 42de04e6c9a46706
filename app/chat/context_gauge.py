"""How much of the model's context a chat takes up, and what that means: the numbers, and a small bar that shows them.

::

    window ├─ system prompt and history ─┼─ draft ─┼─ room for the answer ─┼─ free ─┤
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from PySide6.QtCore import QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPaintEvent, QPen, QPolygonF
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.chat.conversation import ContextPolicy
from app.theme import SPACING, Theme, mix, readable
from app.translation import ntr, tr
from engine.fitting import answer_room


class Level(enum.Enum):
    FITS = "fits"
    TIGHT = "tight"
    """The answer has less room than it is meant to have, or the oldest messages are left out."""
    OVER = "over"
    """The model would refuse it."""


@dataclass(frozen=True, slots=True)
class ContextUse:
    """Everything in tokens, as the model's own tokenizer counts them."""

    window: int
    """What model and memory have room for, prompt and answer together."""
    history: int
    """The system prompt and everything said so far."""
    draft: int = 0
    """The message that is being written."""
    max_tokens: int | None = None
    """Longest answer that the chat asks for."""
    policy: ContextPolicy = ContextPolicy.REFUSE
    dropped: int = 0
    """How many of the oldest messages would be left out, were that allowed."""
    kept: int = 0
    """The prompt without them."""
    is_estimate: bool = False
    """Whether ``draft`` is estimated from a sample of it."""

    @property
    def total(self) -> int:
        return self.history + self.draft

    @property
    def drops(self) -> bool:
        """Whether messages are left out when this is sent."""
        return self.policy is ContextPolicy.DROP_OLDEST and self.dropped > 0

    @property
    def prompt(self) -> int:
        """What is sent."""
        return self.kept if self.drops else self.total

    @property
    def reserve(self) -> int:
        """What is kept for the answer where messages may be left out, and what an answer should have anyway."""
        return answer_room(self.max_tokens, self.window)

    @property
    def room(self) -> int:
        """What is left for the answer."""
        return max(0, self.window - self.prompt)

    @property
    def excess(self) -> int:
        """By how much the prompt is too long; 0: the model takes it."""
        if self.drops and not self.draft:
            return 0  # the last answer is in the way here, and makes room for whatever is written next
        most = self.window - (self.reserve if self.policy is ContextPolicy.DROP_OLDEST else 1)
        return max(0, self.prompt - most)

    @property
    def dropping_helps(self) -> bool:
        """Whether it would be taken if the oldest messages could be left out."""
        return self.dropped > 0 and self.kept <= self.window - self.reserve

    @property
    def level(self) -> Level:
        if self.excess:
            return Level.OVER
        return Level.TIGHT if self.drops or self.room < self.reserve else Level.FITS

    @property
    def figures(self) -> str:
        """``1,234 of 8,192 tokens``; what is over adds up with :attr:`consequence`."""
        if self.is_estimate:
            return tr("about {total:,} of {window:,} tokens", total=rounded(self.total), window=self.window)
        total = self.prompt if self.excess else self.total
        return tr("{total:,} of {window:,} tokens", total=total, window=self.window)

    @property
    def consequence(self) -> str:
        """What the figures mean for what is sent next; empty: nothing."""
        if self.level is Level.OVER and self.is_estimate:
            return tr("far too many")
        if self.level is Level.OVER and self.policy is ContextPolicy.DROP_OLDEST:
            return tr("{count:,} too many with {room:,} for the answer", count=self.excess, room=self.reserve)
        if self.level is Level.OVER:
            over = self.prompt - self.window
            return ntr("{count:,} too many", "{count:,} too many", over) if over else tr("no room for an answer")
        if self.drops:
            return ntr("{count:,} oldest message left out", "{count:,} oldest messages left out", self.dropped)
        if self.level is Level.TIGHT:
            return ntr("{count:,} left for the answer", "{count:,} left for the answer", self.room)
        return ""

    @property
    def details(self) -> str:
        """Every number, one a line."""
        lines = [tr("System prompt and history: {count:,} tokens", count=self.history)]
        if self.draft:
            about = tr("The message being written: about {count:,}", count=rounded(self.draft))
            exact = tr("The message being written: {count:,}", count=self.draft)
            lines.append(about if self.is_estimate else exact)
        if self.drops:
            lines.append(tr("Without the oldest messages: {count:,}", count=self.kept))
        lines.append(tr("Wanted for the answer: {count:,}", count=self.reserve))
        lines.append(tr("The model's context: {count:,}", count=self.window))
        return "\n".join(lines)


def rounded(tokens: float) -> int:
    """An estimate to two figures: more are not known."""
    whole = round(tokens)
    return round(whole, min(0, 2 - len(str(whole))))


class ContextGauge(QWidget):
    """The bar and its figures; empty while nothing is known. Showing the same use again costs nothing."""

    BAR_WIDTH = 140
    BAR_HEIGHT = 6
    MARK = 9

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._use: ContextUse | None = None
        self.setAccessibleName(tr("Context"))
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        theme.changed.connect(self.update)

    @property
    def use(self) -> ContextUse | None:
        return self._use

    @property
    def text(self) -> str:
        """What stands beside the bar, as far as there is room."""
        if self._use is None:
            return ""
        return ", ".join(part for part in (self._use.figures, self._use.consequence) if part)

    def show_use(self, use: ContextUse | None) -> None:
        if use == self._use:
            return
        self._use = use
        self.setToolTip("" if use is None else use.details)
        self.setAccessibleDescription(self.text)
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(self.BAR_WIDTH, self.fontMetrics().height() + 2)

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        use = self._use
        if use is None:
            return
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        width = min(self.BAR_WIDTH, round(self.width() * 0.35))
        self._paint_bar(painter, use, QRectF(0, (self.height() - self.BAR_HEIGHT) / 2, width, self.BAR_HEIGHT))
        left = width + SPACING
        if use.level is not Level.FITS:
            self._paint_mark(painter, use.level, QRectF(left, (self.height() - self.MARK) / 2, self.MARK, self.MARK))
            left += self.MARK + SPACING // 2
        painter.setPen(self._color(use.level) if use.level is not Level.FITS else self._theme.muted)
        room = QRectF(left, 0, self.width() - left, self.height())
        painter.drawText(room, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, self._text_for(room.width()))

    def _text_for(self, width: float) -> str:
        """The longest of the texts that ``width`` has room for: the numbers before the words."""
        use = self._use
        assert use is not None
        short = f"{rounded(use.total) if use.is_estimate else use.total:,} / {use.window:,}"
        metrics = self.fontMetrics()
        fits = (text for text in (self.text, use.figures, short) if metrics.horizontalAdvance(text) <= width)
        return next(fits, metrics.elidedText(short, Qt.TextElideMode.ElideRight, int(width)))

    def _color(self, level: Level) -> QColor:
        return readable(self._theme.error if level is Level.OVER else self._theme.swapped, self._theme)

    def _paint_bar(self, painter: QPainter, use: ContextUse, bar: QRectF) -> None:
        theme = self._theme
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing, False)
        painter.fillRect(bar, theme.line)
        scale = bar.width() / use.window
        if use.level is Level.OVER:
            painter.fillRect(bar, theme.error)
            painter.fillRect(bar, QBrush(theme.card, Qt.BrushStyle.DiagCrossPattern))
        else:
            draft = min(use.draft, use.prompt)
            left = bar.left()
            parts = (
                (use.prompt - draft, theme.accent, Qt.BrushStyle.NoBrush),
                (draft, mix(theme.accent, theme.text, 0.45), Qt.BrushStyle.NoBrush),
                (min(use.reserve, use.room), theme.muted, Qt.BrushStyle.Dense5Pattern),
            )
            for tokens, color, pattern in parts:
                # A part that there is shall be seen, however small its share.
                width = max(1.0, round(tokens * scale)) if tokens else 0.0
                width = min(width, bar.right() - left)
                rect = QRectF(left, bar.top(), width, bar.height())
                painter.fillRect(rect, QBrush(color) if pattern is Qt.BrushStyle.NoBrush else QBrush(color, pattern))
                left += width
        painter.restore()

    def _paint_mark(self, painter: QPainter, level: Level, rect: QRectF) -> None:
        """A triangle or a cross: the levels differ by more than their colour."""
        painter.save()
        color = self._color(level)
        if level is Level.TIGHT:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(color)
            painter.drawPolygon(
                QPolygonF([rect.bottomLeft(), rect.bottomRight(), QPointF(rect.center().x(), rect.top())])
            )
        else:
            painter.setPen(QPen(color, 2))
            inner = rect.adjusted(1, 1, -1, -1)
            painter.drawLine(inner.topLeft(), inner.bottomRight())
            painter.drawLine(inner.topRight(), inner.bottomLeft())
        painter.restore()
