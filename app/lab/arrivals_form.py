"""The fields of an arrival process."""

from __future__ import annotations

import math

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QWidget

from app.lab.choice import Choice
from app.lab.fields import decimal, form_layout, pair, whole
from app.theme import Theme
from app.translation import tr
from engine.workload import Arrivals

OWN = "own"
KINDS = {
    "at once": tr("all at once"),
    "closed loop": tr("closed loop: next when one is answered"),
    "constant": tr("constant rate"),
    "poisson": tr("Poisson"),
    "gamma": tr("gamma: burstier or more even"),
    "linear": tr("ramp, linear"),
    "exponential": tr("ramp, exponential"),
}
MOST_RATE = 10_000.0


class ArrivalsForm(QWidget):
    """Makes :class:`engine.workload.Arrivals`. ``changed`` whenever a field does."""

    changed = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.kind = Choice(tr("Arrivals"), theme)
        for kind, title in KINDS.items():
            self.kind.addItem(title, kind)
        self.concurrency = whole(tr("Requests in flight"), 1, 10_000, 4)
        self.rate = decimal(tr("Requests per second"), 0.01, MOST_RATE, 2.0)
        self.burstiness = decimal(tr("Burstiness"), 0.01, 1_000.0, 0.5)
        self.burstiness.setToolTip(tr("Shape of the gamma gaps: below 1 burstier than Poisson, above 1 more even"))
        self.start = decimal(tr("Requests per second at the beginning of the ramp"), 0.01, MOST_RATE, 1.0)
        self.end = decimal(tr("Requests per second at the end of the ramp"), 0.01, MOST_RATE, 4.0)
        self._ramp = pair(self.start, self.end)
        self._form = form_layout(self)
        self._form.addRow(tr("come"), self.kind)
        self._form.addRow(tr("in flight"), self.concurrency)
        self._form.addRow(tr("per second"), self.rate)
        self._form.addRow(tr("per second"), self._ramp)
        self._form.addRow(tr("burstiness"), self.burstiness)
        for box in (self.concurrency, self.rate, self.burstiness, self.start, self.end):
            box.valueChanged.connect(lambda _value: self.changed.emit())
        self.kind.currentIndexChanged.connect(self._show_fields)
        self._show_fields()

    def offer_own(self, title: str | None) -> None:
        """Offer, first of all, the arrivals that the load brings along, under ``title``; None: it brings none."""
        blocked = self.kind.blockSignals(True)
        has = self.kind.itemData(0) == OWN
        if title is None and has:
            self.kind.removeItem(0)
        elif title is not None and has:
            self.kind.setItemText(0, title)
        elif title is not None:
            self.kind.insertItem(0, title, OWN)
            self.kind.setCurrentIndex(0)
        self.kind.blockSignals(blocked)
        self._show_fields()

    def choose(self, kind: str) -> None:
        """One of :data:`KINDS`, or :data:`OWN`."""
        self.kind.setCurrentIndex(self.kind.findData(kind))

    def arrivals(self) -> Arrivals | None:
        """None: those that the load brings along."""
        kind, rate = self.kind.currentData(), self.rate.value()
        if kind == "at once":
            return Arrivals(request_rate=math.inf)
        if kind == "closed loop":
            return Arrivals(request_rate=math.inf, max_concurrency=self.concurrency.value())
        if kind == "constant":
            return Arrivals(request_rate=rate, burstiness=math.inf)
        if kind == "poisson":
            return Arrivals(request_rate=rate)
        if kind == "gamma":
            return Arrivals(request_rate=rate, burstiness=self.burstiness.value())
        if kind in ("linear", "exponential"):
            return Arrivals(ramp=f"{self.start.value():g}:{self.end.value():g}:{kind}")
        return None

    def summary(self) -> str:
        kind, rate = self.kind.currentData(), f"{self.rate.value():g}/s"
        details = {
            "closed loop": tr("closed loop, {concurrency:,} in flight", concurrency=self.concurrency.value()),
            "constant": tr("constant, {rate}", rate=rate),
            "poisson": tr("Poisson, {rate}", rate=rate),
            "gamma": tr("gamma, {rate}, burstiness {burstiness:g}", rate=rate, burstiness=self.burstiness.value()),
            "linear": tr("linear, {start:g} to {end:g}/s", start=self.start.value(), end=self.end.value()),
            "exponential": tr("exponential, {start:g} to {end:g}/s", start=self.start.value(), end=self.end.value()),
        }
        return details.get(kind) or self.kind.currentText()

    def _show_fields(self) -> None:
        kind = self.kind.currentData()
        self._form.setRowVisible(self.concurrency, kind == "closed loop")
        self._form.setRowVisible(self.rate, kind in ("constant", "poisson", "gamma"))
        self._form.setRowVisible(self._ramp, kind in ("linear", "exponential"))
        self._form.setRowVisible(self.burstiness, kind == "gamma")
        self.changed.emit()
