"""What is measured of a load, and from when: warm-up and objectives."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.lab.fields import form_layout, whole
from app.translation import tr
from app.words import count
from engine.metrics import OBJECTIVES

MOST_WARM_UPS = 10_000
MOST_MILLISECONDS = 10_000_000
TIPS = {
    "ttft": tr("Objective: time to first token, at most"),
    "tpot": tr("Objective: time per output token after the first, at most"),
    "e2el": tr("Objective: time to the last token, at most"),
}


class MeasureForm(QWidget):
    """Warm-up requests and the objectives of goodput. ``changed`` whenever a field does."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.warm_up_field = whole(tr("Warm-up requests"), 0, MOST_WARM_UPS, 0, lowest=tr("none"))
        self.warm_up_field.setToolTip(tr("Requests with prompts of their own before the clock starts; not counted"))
        self.limits = {
            name: whole(
                tr("{metric} objective in milliseconds", metric=name.upper()),
                0,
                MOST_MILLISECONDS,
                0,
                suffix=" ms",
                lowest=tr("none"),
            )
            for name in OBJECTIVES
        }
        form = form_layout(self)
        form.addRow(tr("warm-up"), self.warm_up_field)
        for name, box in self.limits.items():
            box.setToolTip(TIPS[name])
            form.addRow(f"{name.upper()} ≤", box)
        for box in (self.warm_up_field, *self.limits.values()):
            box.valueChanged.connect(lambda _value: self.changed.emit())

    @property
    def warm_up(self) -> int:
        return self.warm_up_field.value()

    def objectives(self) -> dict[str, float] | None:
        """In milliseconds; None where there is none."""
        said = {name: float(box.value()) for name, box in self.limits.items() if box.value()}
        return said or None

    def summary(self) -> str:
        goals = [f"{name.upper()} ≤ {limit:,.0f} ms" for name, limit in (self.objectives() or {}).items()]
        warm = tr("{requests} before", requests=count(self.warm_up, "request")) if self.warm_up else ""
        return " · ".join(filter(None, [warm, *goals])) or tr("no warm-up, no objectives")
