"""The small parts of a message on the screen: its buttons, the dot in its request's colour, the switch of versions."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QPoint, QRectF, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent, QPen
from PySide6.QtWidgets import QHBoxLayout, QLabel, QMenu, QSizePolicy, QToolButton, QWidget

from app.chat.conversation import Message, Role
from app.selection import Selection
from app.theme import Theme, request_color
from app.translation import ntr, tr
from app.widgets import label
from engine.request import request_name

MenuEntry = tuple[str, Callable[[], object]]


class LineButton(QToolButton):
    """As high as the line of text that it stands beside."""

    def __init__(self, text: str, tip: str, spare_px: int = 1) -> None:
        """``spare_px``: how much higher than its text."""
        super().__init__()
        self._spare_px = spare_px
        self.setText(text)
        self.setToolTip(tip)
        self.setAccessibleName(tip)
        self.setProperty("role", "flat")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange:
            self._fit()

    def _fit(self) -> None:
        self.setMaximumHeight(self.fontMetrics().height() + self._spare_px)


class MoreButton(LineButton):
    """What is seldom wanted, behind three dots; ``entries`` is asked when the menu opens."""

    def __init__(self, entries: Callable[[], list[MenuEntry]]) -> None:
        super().__init__("⋯", tr("More"))
        self._entries = entries
        self.clicked.connect(self.open_menu)

    def open_menu(self) -> QMenu:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        for text, slot in self._entries():
            menu.addAction(text).triggered.connect(lambda _checked=False, slot=slot: slot())
        menu.popup(self.mapToGlobal(QPoint(0, self.height())))
        return menu


class VersionSwitch(QWidget):
    """``‹ 2/3 ›``: which of several versions is shown. Hidden where there is one only."""

    stepped = Signal(int)
    """-1: the version before, 1: the one after."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.back = LineButton("‹", tr("Show the version before (Alt+Left)"))
        self.forth = LineButton("›", tr("Show the version after (Alt+Right)"))
        self.figure = QLabel()
        self.figure.setProperty("role", "muted")
        self.figure.setTextFormat(Qt.TextFormat.PlainText)
        self.back.clicked.connect(lambda: self.stepped.emit(-1))
        self.forth.clicked.connect(lambda: self.stepped.emit(1))
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(0)
        for each in (self.back, self.figure, self.forth):
            row.addWidget(each)
        self.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Maximum)
        self.hide()

    def set_versions(self, number: int, total: int) -> None:
        """``number`` counts from 1."""
        self.figure.setText(f"{number}/{total}")
        self.setAccessibleName(tr("Version {number} of {total}", number=number, total=total))
        self.figure.setToolTip(tr("Version {number} of {total}", number=number, total=total))
        self.back.setEnabled(number > 1)
        self.forth.setEnabled(number < total)
        self.setVisible(total > 1)

    def set_focus(self, step: int) -> None:
        """The button that steps on in the same direction, or the other one at the end."""
        wanted, other = (self.back, self.forth) if step < 0 else (self.forth, self.back)
        (wanted if wanted.isEnabled() else other).setFocus(Qt.FocusReason.OtherFocusReason)


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
        self.setToolTip(tr("Show request {name} in the scope", name=name))
        self.setAccessibleName(tr("Select request {name}", name=name))
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


def first_told(path: list[Message], dropped: int) -> Message | None:
    """The first message of the path that the model is told where it is not told the ``dropped`` oldest; counted as
    :meth:`Conversation.context` counts, which joins questions that have no answer between them."""
    number, after_question = 0, False
    for message in path:
        if message.damage or not message.text:
            continue
        is_question = message.role is Role.USER
        if not (is_question and after_question):
            if number >= dropped:
                return message
            number += 1
        after_question = is_question
    return None


class ContextMarker(QWidget):
    """A line across the transcript: the model was not told what stands above it."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        self._label = label("", "muted")
        self._label.setWordWrap(True)
        self._label.setAlignment(Qt.AlignmentFlag.AlignCenter)
        row = QHBoxLayout(self)
        row.setContentsMargins(24, 2, 24, 2)
        row.addWidget(self._label, 1)
        theme.changed.connect(self.update)

    @property
    def text(self) -> str:
        return self._label.text()

    def set_count(self, dropped: int) -> None:
        text = ntr(
            "The model was not told the message above: it no longer fits its context",
            "The model was not told the {count:,} messages above: they no longer fit its context",
            dropped,
        )
        self._label.setText(text)
        self.setAccessibleName(text)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setPen(QPen(self._theme.swapped, 1, Qt.PenStyle.DashLine))
        middle = self.height() // 2
        shown = min(self._label.width(), self._label.fontMetrics().horizontalAdvance(self.text) + 16)
        side = (self.width() - shown) // 2
        for begin, end in ((0, side), (self.width() - side, self.width())):
            painter.drawLine(begin, middle, end, middle)
