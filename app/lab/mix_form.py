"""A mix: values and their shares, a line each, as many as one likes."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPushButton, QSpinBox, QVBoxLayout, QWidget

from app.lab.fields import text, whole
from app.theme import SPACING
from app.translation import tr
from app.widgets import button
from engine.workload import PriorityShare, UserShare

MOST_LINES = 12
MOST_SHARE = 1_000


@dataclass(slots=True)
class _Line:
    widget: QWidget
    value: QSpinBox | QLineEdit
    share: QSpinBox
    remove: QPushButton


class MixForm(QWidget):
    """Lines of a value and its share; none: all requests are alike. ``changed`` whenever a line does."""

    changed = Signal()

    def __init__(self, noun: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._noun = noun
        self.lines: list[_Line] = []
        self.add_button = button(tr("Add a {noun}", noun=noun), "flat")
        self.add_button.clicked.connect(self.add)
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(SPACING // 2)
        row = QHBoxLayout()
        row.addWidget(self.add_button)
        row.addStretch(1)
        self._column.addLayout(row)

    def _field(self) -> QSpinBox | QLineEdit:
        """The field of a new line's value."""
        raise NotImplementedError

    def add(self) -> None:
        """Another line; nothing where there are :data:`MOST_LINES`."""
        if len(self.lines) >= MOST_LINES:
            return
        number = len(self.lines) + 1
        value = self._field()
        share = whole(tr("Share of {noun} {number}", noun=self._noun, number=number), 0, MOST_SHARE, 1, prefix="share ")
        share.setToolTip(tr("In proportion to the other shares"))
        remove = button("×", "flat", tr("Remove {noun} {number}", noun=self._noun, number=number))
        widget = QWidget()
        row = QHBoxLayout(widget)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACING // 2)
        row.addWidget(value, 1)
        row.addWidget(share, 1)
        row.addWidget(remove)
        line = _Line(widget, value, share, remove)
        remove.clicked.connect(lambda: self.remove(line))
        change = value.textChanged if isinstance(value, QLineEdit) else value.valueChanged
        change.connect(lambda _value: self.changed.emit())
        share.valueChanged.connect(lambda _value: self.changed.emit())
        self.lines.append(line)
        self._column.insertWidget(len(self.lines) - 1, widget)
        self._lines_changed()

    def remove(self, line: _Line) -> None:
        self.lines.remove(line)
        self._column.removeWidget(line.widget)
        line.widget.hide()
        line.widget.deleteLater()
        self._lines_changed()

    def _lines_changed(self) -> None:
        self.add_button.setEnabled(len(self.lines) < MOST_LINES)
        self.changed.emit()


class PriorityMix(MixForm):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("priority", parent)

    def _field(self) -> QSpinBox:
        box = whole(tr("Priority, lower runs first"), -1_000, 1_000, len(self.lines))
        box.setToolTip(tr("Lower runs first, where the queue's order is by priority"))
        return box

    def shares(self) -> list[PriorityShare]:
        return [PriorityShare(line.value.value(), line.share.value()) for line in self.lines]  # type: ignore[union-attr]

    def summary(self) -> str:
        return _shares_in_words([(f"{s.priority}", s.share) for s in self.shares()])


class UserMix(MixForm):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("user", parent)

    def _field(self) -> QLineEdit:
        field = text(tr("Name of a user"))
        field.setText(tr("user {lines}", lines=len(self.lines) + 1))
        return field

    def shares(self) -> list[UserShare]:
        return [UserShare(line.value.text().strip(), line.share.value()) for line in self.lines]  # type: ignore[union-attr]

    def summary(self) -> str:
        return _shares_in_words([(s.user or tr("no name"), s.share) for s in self.shares()])


def _shares_in_words(shares: list[tuple[str, float]]) -> str:
    total = sum(share for _, share in shares)
    if not total:
        return ""
    return ", ".join(f"{name} {share / total:.0%}" for name, share in shares)
