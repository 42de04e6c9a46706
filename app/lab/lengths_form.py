"""The fields of a distribution of lengths."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QBoxLayout, QVBoxLayout, QWidget

from app.lab.choice import Choice
from app.lab.fields import decimal, pair, text, whole
from app.theme import SPACING, Theme
from app.translation import tr
from engine.workload import Exponential, Lengths, LogNormal, Normal, ShapeError, Uniform

MOST = 1_000_000
WIDE_PX = 330
"""From this width on the fields stand beside the distribution, else below it."""
KINDS = {
    "uniform": (tr("uniform"), tr("Every length between two, equally likely")),
    "constant": (tr("constant"), tr("All have the same length")),
    "lognormal": (tr("lognormal"), tr("median · exp(σ · N(0, 1)): most short, a few long, as in conversations")),
    "exponential": (tr("exponential"), tr("Many short, few long")),
    "normal": (tr("normal"), tr("mean ± standard deviation")),
    "list": (tr("list, in turn"), tr("Lengths that are gone through one after the other")),
}


class LengthsForm(QWidget):
    """Makes :data:`engine.workload.Lengths`; lengths in tokens. ``changed`` whenever a field does."""

    changed = Signal()

    def __init__(self, what: str, low: int, high: int, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        middle = (low + high) // 2
        self.kind = Choice(tr("Distribution of {what} lengths", what=what), theme)
        for row, (kind, (title, tip)) in enumerate(KINDS.items()):
            self.kind.addItem(title, kind)
            self.kind.setItemData(row, tip, Qt.ItemDataRole.ToolTipRole)
        self.value = whole(tr("Every {what} in tokens", what=what), 1, MOST, middle)
        self.median = whole(tr("Median {what} in tokens", what=what), 1, MOST, middle, prefix="median ")
        self.sigma = decimal(tr("Sigma of the logarithm of {what} lengths", what=what), 0.0, 10.0, 0.6, prefix="σ ")
        self.mean = whole(tr("Mean {what} in tokens", what=what), 1, MOST, middle, prefix="mean ")
        self.deviation = whole(tr("Standard deviation of {what} lengths", what=what), 0, MOST, middle // 4, prefix="± ")
        self.low = whole(tr("Shortest {what} in tokens", what=what), 1, MOST, low)
        self.high = whole(tr("Longest {what} in tokens", what=what), 1, MOST, high)
        self.list = text(tr("{what} lengths in tokens, separated by commas", what=what.capitalize()), "100, 200, 150")
        self._lognormal = pair(self.median, self.sigma, "")
        self._normal = pair(self.deviation, QWidget(), "")
        self._limits = pair(self.low, self.high)
        fields = QWidget()
        column = QVBoxLayout(fields)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 2)
        for widget in (self.value, self._lognormal, self.mean, self._normal, self._limits, self.list):
            column.addWidget(widget)
        self._box = QBoxLayout(QBoxLayout.Direction.TopToBottom, self)
        self._box.setContentsMargins(0, 0, 0, 0)
        self._box.setSpacing(SPACING // 2)
        self._box.addWidget(self.kind, 1, Qt.AlignmentFlag.AlignTop)
        self._box.addWidget(fields, 1, Qt.AlignmentFlag.AlignTop)
        for box in (self.value, self.median, self.sigma, self.mean, self.deviation, self.low, self.high):
            box.valueChanged.connect(lambda _value: self.changed.emit())
        self.list.textChanged.connect(lambda _text: self.changed.emit())
        self.kind.currentIndexChanged.connect(self._show_fields)
        self._show_fields()

    def minimumSizeHint(self) -> QSize:
        """That of the fields below the distribution, however they stand: side by side they must not force it wide."""
        narrow = max(self._box.itemAt(i).widget().minimumSizeHint().width() for i in range(self._box.count()))
        return QSize(narrow, super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        wide = self.width() >= WIDE_PX
        self._box.setDirection(QBoxLayout.Direction.LeftToRight if wide else QBoxLayout.Direction.TopToBottom)
        for index in range(self._box.count()):
            self._box.setStretch(index, int(wide))

    def choose(self, kind: str) -> None:
        """One of :data:`KINDS`."""
        self.kind.setCurrentIndex(self.kind.findData(kind))

    def lengths(self) -> Lengths:
        """Raises :class:`engine.workload.ShapeError` where the fields make none."""
        kind, low, high = self.kind.currentData(), self.low.value(), self.high.value()
        if kind == "constant":
            return self.value.value()
        if kind == "list":
            return _parse_list(self.list.text())
        if kind == "lognormal":
            return LogNormal(self.median.value(), self.sigma.value(), low, high)
        if kind == "normal":
            return Normal(self.mean.value(), self.deviation.value(), low, high)
        if kind == "exponential":
            return Exponential(self.mean.value(), low, high)
        return Uniform(low=low, high=high)

    def _show_fields(self) -> None:
        kind = self.kind.currentData()
        self.kind.setToolTip(KINDS[kind][1])
        shown: dict[QWidget, Sequence[str]] = {
            self.value: ("constant",),
            self._lognormal: ("lognormal",),
            self.mean: ("normal", "exponential"),
            self._normal: ("normal",),
            self._limits: ("uniform", "lognormal", "normal", "exponential"),
            self.list: ("list",),
        }
        for widget, kinds in shown.items():
            widget.setVisible(kind in kinds)
        self.changed.emit()


def _parse_list(written: str) -> list[int]:
    parts = [part.strip() for part in written.split(",") if part.strip()]
    if not parts:
        raise ShapeError(tr("the list of lengths is empty; write some, e.g. 100, 200, 150"))
    for part in parts:
        if not part.isdecimal() or not 1 <= int(part) <= MOST:
            raise ShapeError(
                tr("{part!r} is no length; lengths are whole numbers from 1 to {most:,}", part=part, most=MOST)
            )
    return [int(part) for part in parts]
