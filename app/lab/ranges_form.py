"""The fields of a load by its ranges."""

from __future__ import annotations

from typing import TypeVar

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QAbstractSpinBox, QDoubleSpinBox, QFormLayout, QHBoxLayout, QSizePolicy, QSpinBox, QWidget

from app.lab.choice import Choice
from app.lab.load_model import ArrivalKind, LoadRanges
from app.theme import SPACING, Theme
from app.widgets import label

ARRIVALS: tuple[tuple[str, ArrivalKind], ...] = (
    ("all at once", "at once"),
    ("closed loop: next when one is answered", "closed loop"),
    ("open loop: at a rate", "open loop"),
)

LEAST_PX = 72
"""Of a field: enough for what is usual, where its largest value would force the panel wide."""

Box = TypeVar("Box", bound=QAbstractSpinBox)


class RangesForm(QWidget):
    """Spin boxes for :class:`LoadRanges`. ``changed`` whenever a value does."""

    changed = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        usual = LoadRanges()
        self.requests = self._whole("Requests", 1, 100_000, usual.requests)
        self.prompt_low = self._whole("Shortest prompt in tokens", 1, 1_000_000, usual.prompt_low)
        self.prompt_high = self._whole("Longest prompt in tokens", 1, 1_000_000, usual.prompt_high)
        self.output_low = self._whole("Shortest answer in tokens", 1, 1_000_000, usual.output_low)
        self.output_high = self._whole("Longest answer in tokens", 1, 1_000_000, usual.output_high)
        self.arrivals = Choice("Arrivals", theme)
        for text, _ in ARRIVALS:
            self.arrivals.addItem(text)
        self.concurrency = self._whole("Requests in flight", 1, 10_000, usual.concurrency)
        self.rate = self._decimal("Requests per second", 0.01, 10_000.0, usual.rate)
        self.burstiness = self._decimal("Burstiness, 1 is Poisson", 0.01, 1_000.0, usual.burstiness)
        self.urgent = self._whole("Urgent requests in percent", 0, 100, usual.urgent_percent)
        self.urgent.setSuffix(" %")
        self.urgent.setToolTip("Urgent requests have priority 0, the others 1; with 0 % all are alike.")
        self.seed = self._whole("Seed", 0, 1_000_000, usual.seed)
        self._form = QFormLayout(self)
        self._form.setContentsMargins(0, 0, 0, 0)
        self._form.setSpacing(SPACING)
        self._form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
        self._form.setLabelAlignment(Qt.AlignmentFlag.AlignLeft)
        self._form.addRow("requests", self.requests)
        self._form.addRow("prompt tokens", _pair(self.prompt_low, self.prompt_high))
        self._form.addRow("answer tokens", _pair(self.output_low, self.output_high))
        self._form.addRow("arrivals", self.arrivals)
        self._form.addRow("in flight", self.concurrency)
        self._form.addRow("per second", self.rate)
        self._form.addRow("burstiness", self.burstiness)
        self._form.addRow("urgent", self.urgent)
        self._form.addRow("seed", self.seed)
        self.arrivals.currentIndexChanged.connect(self._show_fields)
        self._show_fields()

    def ranges(self) -> LoadRanges:
        return LoadRanges(
            requests=self.requests.value(),
            prompt_low=self.prompt_low.value(),
            prompt_high=self.prompt_high.value(),
            output_low=self.output_low.value(),
            output_high=self.output_high.value(),
            arrivals=self._kind(),
            concurrency=self.concurrency.value(),
            rate=self.rate.value(),
            burstiness=self.burstiness.value(),
            urgent_percent=self.urgent.value(),
            seed=self.seed.value(),
        )

    def _kind(self) -> ArrivalKind:
        return ARRIVALS[self.arrivals.currentIndex()][1]

    def _show_fields(self) -> None:
        kind = self._kind()
        self._form.setRowVisible(self.concurrency, kind == "closed loop")
        self._form.setRowVisible(self.rate, kind == "open loop")
        self._form.setRowVisible(self.burstiness, kind == "open loop")
        self.changed.emit()

    def _whole(self, name: str, low: int, high: int, value: int) -> QSpinBox:
        box = QSpinBox()
        box.setRange(low, high)
        box.setValue(value)
        box.setGroupSeparatorShown(True)
        box.valueChanged.connect(self._value_changed)
        return _plain(box, name)

    def _decimal(self, name: str, low: float, high: float, value: float) -> QDoubleSpinBox:
        box = QDoubleSpinBox()
        box.setRange(low, high)
        box.setDecimals(2)
        box.setValue(value)
        box.valueChanged.connect(self._value_changed)
        return _plain(box, name)

    def _value_changed(self, _value: float) -> None:
        self.changed.emit()


def _plain(box: Box, name: str) -> Box:
    """As wide as there is room. The style sheet hides the buttons: keys, the wheel and typing change it."""
    box.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
    box.setMinimumWidth(LEAST_PX)
    box.lineEdit().setTextMargins(SPACING, 0, SPACING, 0)  # without buttons Qt forgets the style sheet's padding
    box.setAccessibleName(name)
    return box


def _pair(low: QWidget, high: QWidget) -> QWidget:
    pair = QWidget()
    row = QHBoxLayout(pair)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(SPACING)
    row.addWidget(low, 1)
    row.addWidget(label("to", "muted"))
    row.addWidget(high, 1)
    return pair
