"""The few widgets that every panel is made of: the quiet card, its legend, a gauge, a page for an empty panel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from PySide6.QtCore import QEvent, QPoint, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPaintEvent, QPen, QPolygonF, QResizeEvent
from PySide6.QtWidgets import (
    QFrame,
    QHBoxLayout,
    QLabel,
    QLayout,
    QPushButton,
    QSizePolicy,
    QStackedLayout,
    QToolTip,
    QVBoxLayout,
    QWidget,
)

from app.theme import PADDING, RADIUS, SPACING, Theme
from app.translation import tr

HEADER_HEIGHT = 34
"""Title lines of all cards, whatever they hold, so that neighbours align."""
Pattern = Literal[
    "solid", "hatch", "weave", "stripe", "checker", "line", "dashed", "dot", "frame", "triangle", "inset", "notch"
]
PATTERN_BRUSHES: dict[str, Qt.BrushStyle] = {
    "hatch": Qt.BrushStyle.BDiagPattern,
    "weave": Qt.BrushStyle.DiagCrossPattern,
    "stripe": Qt.BrushStyle.HorPattern,
    "checker": Qt.BrushStyle.Dense6Pattern,
}
"""Patterns that are drawn onto a filled area, however large."""


def set_role(widget: QWidget, role: str) -> None:
    """Sets the role by which the style sheet finds the widget: ``muted``, ``title``, ``primary``, ``flat`` …"""
    if widget.property("role") != role:
        widget.setProperty("role", role)
        widget.style().unpolish(widget)
        widget.style().polish(widget)


def label(text: str = "", role: str = "", parent: QWidget | None = None) -> QLabel:
    """A plain-text label; text that comes from a model or a file is never read as markup."""
    result = QLabel(parent)
    result.setTextFormat(Qt.TextFormat.PlainText)
    result.setText(text)
    if role:
        result.setProperty("role", role)
    return result


def button(text: str, role: str = "", accessible: str = "") -> QPushButton:
    result = QPushButton(text)
    if role:
        result.setProperty("role", role)
    result.setAccessibleName(accessible or text)
    return result


class _Title(QLabel):
    """Has its room before legends, which can do with less, and is elided only where buttons and figures leave none."""

    LEAST = 40

    def minimumSizeHint(self) -> QSize:
        hint, line = super().minimumSizeHint(), self.parentWidget()
        room = line.room_for_title() if isinstance(line, TitleLine) else self.LEAST
        return QSize(min(hint.width(), max(self.LEAST, room)), hint.height())

    def paintEvent(self, event: QPaintEvent) -> None:
        words = self.fontMetrics().elidedText(self.text(), Qt.TextElideMode.ElideRight, self.width())
        place, role = self.contentsRect(), self.foregroundRole()
        flags = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter
        self.style().drawItemText(QPainter(self), place, flags, self.palette(), self.isEnabled(), words, role)


class TitleLine(QWidget):
    """The title line of a card. ``narrowest``: a dock asks no more width for it, and what does not fit is cut."""

    narrowest = 10_000

    def __init__(self, title: _Title, trailing: QLayout, parent: QWidget) -> None:
        super().__init__(parent)
        self._title = title
        self._trailing = trailing
        line = QHBoxLayout(self)
        line.setContentsMargins(PADDING[0], 4, PADDING[2], 0)
        line.setSpacing(SPACING)
        line.addWidget(title)
        line.addStretch(1)
        line.addLayout(trailing)

    def room_for_title(self) -> int:
        """Pixels that what stands beside the title leaves of the line at least."""
        return self.width() - PADDING[0] - PADDING[2] - 2 * SPACING - self._trailing.minimumSize().width()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._title.updateGeometry()

    def minimumSizeHint(self) -> QSize:
        hint, title = super().minimumSizeHint(), self._title.minimumSizeHint().width()
        # Else the line could not become narrower than its title is at the moment.
        width = hint.width() - max(0, title - _Title.LEAST)
        return QSize(min(width, self.narrowest), hint.height())


class Card(QFrame):
    """A quiet surface with a title line: the title on the left, legends and figures on the right, the body below.

    In a dock the title line becomes the dock's handle (:meth:`take_header`) and the dock draws the surface.
    """

    def __init__(self, title: str, *trailing: QWidget, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._framed = True
        self._title = _Title(title)
        self._title.setTextFormat(Qt.TextFormat.PlainText)
        set_role(self._title, "title")
        self._trailing = QHBoxLayout()
        self._trailing.setSpacing(SPACING + 4)
        self.header = TitleLine(self._title, self._trailing, self)
        self.header.setMinimumHeight(HEADER_HEIGHT)
        self.body = QVBoxLayout()
        """Where the content goes."""
        self.body.setContentsMargins(*PADDING)
        self.body.setSpacing(SPACING)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.setSpacing(0)
        outer.addWidget(self.header)
        outer.addLayout(self.body, 1)
        self.setAccessibleName(title)
        for widget in trailing:
            self.add_trailing(widget)

    @property
    def title(self) -> str:
        return self._title.text()

    def add_trailing(self, widget: QWidget) -> None:
        self._trailing.addWidget(widget)

    def add_figure(self, role: str = "muted") -> Figure:
        """A figure at the right end of the title line."""
        figure = Figure(role, Qt.AlignmentFlag.AlignRight)
        figure.hide()
        self.add_trailing(figure)
        return figure

    def take_header(self) -> TitleLine:
        """Hands the title line over to a dock, which then draws the surface too."""
        self.layout().removeWidget(self.header)
        self._framed = False
        return self.header

    def paintEvent(self, event: QPaintEvent) -> None:
        if self._framed:
            painter = QPainter(self)
            paint_surface(painter, QRectF(self.rect()), self.palette().base().color(), self.palette().mid().color())


class Figure(QLabel):
    """Text that changes with every step. Its size is fixed and seldom changes: a label that may ask for another has
    the whole window laid out anew each time."""

    SLACK = 14
    """Pixels that may stay unused before the figure gives them back."""

    def __init__(self, role: str, alignment: Qt.AlignmentFlag = Qt.AlignmentFlag.AlignLeft) -> None:
        super().__init__()
        self.setTextFormat(Qt.TextFormat.PlainText)
        self.setProperty("role", role)
        self.setAlignment(alignment | Qt.AlignmentFlag.AlignVCenter)

    def say(self, text: str) -> None:
        """Shows the text; an empty one takes no room."""
        if text == self.text():
            return
        self.ensurePolished()
        metrics = self.fontMetrics()
        wanted = metrics.horizontalAdvance(text) + 2
        if not wanted <= self.width() <= wanted + self.SLACK or not self.text():
            self.setFixedSize(wanted, metrics.height() + 2)
        self.setText(text)
        self.setVisible(bool(text))


def paint_surface(painter: QPainter, rect: QRectF, surface: QColor, line: QColor, radius: float = RADIUS) -> None:
    """The card's surface: filled, with a hairline and round corners."""
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(QPen(line, 1))
    painter.setBrush(surface)
    painter.drawRoundedRect(rect.adjusted(0.5, 0.5, -0.5, -0.5), radius, radius)


@dataclass(frozen=True, slots=True)
class LegendEntry:
    text: str
    token: str
    """Name of a colour of the theme."""
    pattern: Pattern = "solid"


class Legend(QWidget):
    """Swatches with words, for the title line of a card. A state differs in pattern as well as in colour."""

    SWATCH = 10
    GAP = 5
    BETWEEN = 12

    def __init__(self, theme: Theme, entries: list[LegendEntry], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._entries = entries
        self.setAccessibleName(tr("Legend: ") + ", ".join(entry.text for entry in entries))
        self.setToolTip(", ".join(entry.text for entry in entries))
        self.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        theme.changed.connect(self.update)

    def set_entries(self, entries: list[LegendEntry]) -> None:
        if entries == self._entries:
            return
        before = self.sizeHint()
        self._entries = entries
        self.setToolTip(", ".join(entry.text for entry in entries))
        if self.sizeHint() != before:
            self.updateGeometry()
        self.update()

    def _advance(self, entry: LegendEntry) -> int:
        return self.SWATCH + self.GAP + self.fontMetrics().horizontalAdvance(entry.text)

    def sizeHint(self) -> QSize:
        width = sum(self._advance(entry) + self.BETWEEN for entry in self._entries) - self.BETWEEN
        return QSize(max(0, width), self.fontMetrics().height() + 2)

    def minimumSizeHint(self) -> QSize:
        """A narrow card shows fewer entries, whole ones, rather than being forced wide; the tooltip has them all."""
        return QSize(0, self.sizeHint().height())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        metrics = self.fontMetrics()
        baseline = (self.height() + metrics.ascent() - metrics.descent()) // 2
        x = 0
        for entry in self._entries:
            if x + self._advance(entry) > self.width():
                break
            top = (self.height() - self.SWATCH) // 2
            color: QColor = getattr(self._theme, entry.token)
            swatch = QRectF(x, top, self.SWATCH, self.SWATCH)
            mark = self._theme.text if entry.pattern == "notch" else self._theme.card
            paint_swatch(painter, swatch, color, entry.pattern, mark)
            painter.setPen(self._theme.muted)
            painter.drawText(x + self.SWATCH + self.GAP, baseline, entry.text)
            x += self._advance(entry) + self.BETWEEN


def paint_swatch(painter: QPainter, rect: QRectF, color: QColor, pattern: Pattern, mark: QColor) -> None:
    """The small sample of a state; ``mark`` is the colour of what is drawn onto it."""
    middle = rect.center().y()
    if pattern == "line":
        painter.fillRect(QRectF(rect.left(), middle - 1, rect.width(), 2), color)
    elif pattern == "dashed":
        for part in (0.0, 0.6):
            painter.fillRect(QRectF(rect.left() + part * rect.width(), middle - 1, 0.4 * rect.width(), 2), color)
    elif pattern == "inset":
        painter.fillRect(rect.adjusted(2, 2, -2, -2), color)
    elif pattern == "frame":
        painter.setPen(QPen(color, 1.5))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawRect(rect.adjusted(1.5, 1.5, -2, -2))
    elif pattern in ("triangle", "dot"):
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(color)
        if pattern == "dot":
            painter.drawEllipse(rect.adjusted(1, 1, -1, -1))
        else:
            corners = [rect.bottomLeft(), rect.bottomRight(), QPointF(rect.center().x(), rect.top())]
            painter.drawPolygon(QPolygonF(corners))
        painter.restore()
    else:
        painter.fillRect(rect, color)
        if pattern in PATTERN_BRUSHES:
            painter.fillRect(rect, QBrush(mark, PATTERN_BRUSHES[pattern]))
        elif pattern == "notch":
            painter.save()
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(mark)
            half = rect.width() / 2
            corner = rect.topRight()
            painter.drawPolygon(QPolygonF([corner, corner - QPointF(half, 0), corner + QPointF(0, half)]))
            painter.restore()


class TellingWidget(QWidget):
    """Says in a tooltip what lies under the pointer."""

    def tip_at(self, position: QPoint) -> str:
        """What is said at a logical pixel; empty: nothing, or the tooltip of the widget as a whole."""
        return ""

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip:
            tip = self.tip_at(event.pos())
            if tip:
                QToolTip.showText(event.globalPos(), tip, self)
                return True
            QToolTip.hideText()
        return super().event(event)


class Gauge(QWidget):
    """A muted word and a bold figure. Setting the same text again costs nothing."""

    def __init__(self, name: str, tooltip: str = "", parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._name = name
        self._value = Figure("number")
        self._value.say("–")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(5)
        row.addWidget(label(name, "muted"))
        row.addWidget(self._value)
        self.setToolTip(tooltip)
        self.setAccessibleName(name)

    @property
    def text(self) -> str:
        return self._value.text()

    def set_text(self, text: str) -> None:
        if text != self._value.text():
            self._value.say(text)
            self.setAccessibleDescription(f"{self._name} {text}")


class EmptyState(QWidget):
    """A sentence in the middle of an empty panel that says what to do, with buttons where something can be pressed."""

    def __init__(self, text: str, *buttons: QPushButton, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._text = label(text, "muted")
        self._text.setWordWrap(True)
        self._text.setAlignment(Qt.AlignmentFlag.AlignCenter)
        column = QVBoxLayout(self)
        column.addStretch(1)
        column.addWidget(self._text)
        if buttons:
            row = QHBoxLayout()
            row.addStretch(1)
            for each in buttons:
                row.addWidget(each)
            row.addStretch(1)
            column.addLayout(row)
        column.addStretch(1)

    def set_text(self, text: str) -> None:
        self._text.setText(text)

    @property
    def text(self) -> str:
        return self._text.text()


class Emptiable(QWidget):
    """Shows an :class:`EmptyState` until there is content."""

    def __init__(self, content: QWidget, empty: EmptyState, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.empty = empty
        self.content = content
        self._stack = QStackedLayout(self)
        self._stack.setContentsMargins(0, 0, 0, 0)
        self._stack.addWidget(empty)
        self._stack.addWidget(content)

    @property
    def is_empty(self) -> bool:
        return self._stack.currentWidget() is self.empty

    def set_empty(self, empty: bool) -> None:
        if empty != self.is_empty:
            self._stack.setCurrentWidget(self.empty if empty else self.content)
