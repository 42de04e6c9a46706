"""What both kinds of messages have on the screen; see ``user_view`` and ``answer_view``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QGuiApplication, QKeyEvent, QPainter, QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QHBoxLayout, QWidget

from app.chat.conversation import Message
from app.chat.message_parts import MenuEntry, MoreButton, VersionSwitch
from app.theme import RADIUS, Theme

NARROW_PX = 520
"""Below this width the buttons of a message stand under it and not beside it."""


@dataclass(slots=True)
class ViewMemory:
    """What the user did to messages on the screen; it outlives their views. Keys are ids of messages."""

    unfolded: set[str] = field(default_factory=set)
    """Answers whose thoughts are unfolded."""
    edits: dict[str, str] = field(default_factory=dict)
    """Messages that are being edited, and the text as it is by now."""
    enter_sends: bool = True
    """In the field of an edited message; else only with Ctrl."""


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
        self.is_found = False
        """Framed as what was looked for."""

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
        self.is_found = found
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
        if self.is_found:
            painter.setPen(self._theme.accent)
            painter.setBrush(Qt.BrushStyle.NoBrush)
            painter.drawRoundedRect(QRectF(self.rect()).adjusted(0.5, 0.5, -0.5, -0.5), RADIUS, RADIUS)
