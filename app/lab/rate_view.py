"""What a search for the saturation rate has found: achieved against offered throughput, and each probe's figures."""

from __future__ import annotations

import math

from PySide6.QtCore import QPointF, QSize, Qt
from PySide6.QtGui import QColor, QPainter, QPen, QPolygonF, QResizeEvent
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.lab.fields import form_layout, sentence, whole
from app.lab.load_model import milliseconds
from app.scope.figure_table import FigureRow, FigureTable
from app.scope.plot import Plot, linear_ticks
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import Legend, LegendEntry, button
from app.words import NOT_AVAILABLE
from engine.saturation import LEAST_REQUESTS, Probe, SaturationSearch, probe_size

MOST_REQUESTS = 10_000
"""Of a probe."""
DOT = 4.0
"""Half the width of a mark, in pixels."""
HELD = LegendEntry(tr("held"), "decode", "dot")
GREW = LegendEntry(tr("the queue grew"), "preempted", "triangle")
EVEN = LegendEntry(tr("achieved = offered"), "muted", "dashed")


class RatePlot(Plot):
    """A mark for each probe: a dot where the engine kept up, a triangle where the queue grew."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self._probes: list[Probe] = []
        self.setAccessibleName(tr("Achieved against offered requests per second"))
        self.setFixedHeight(140)

    def sizeHint(self) -> QSize:
        return QSize(240, 140)

    def show_probes(self, probes: list[Probe]) -> None:
        self._probes = [p for p in probes if p.offered is not None and p.achieved is not None]
        top = max((max(p.offered or 0.0, p.achieved or 0.0) for p in self._probes), default=0.0)
        end = 1.1 * top if math.isfinite(top) and top > 0 else 1.0
        self.x_range = self.y_range = (0.0, end)
        self._lay_out()
        self.update()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def _lay_out(self) -> None:
        end = self.x_range[1]
        self.x_ticks = linear_ticks(0.0, end, max(2, self.width() // 70))
        self.y_ticks = linear_ticks(0.0, end, 4)
        self.layout_axes()

    def paint_data(self, painter: QPainter) -> None:
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        pen = QPen(self.theme.muted, 1, Qt.PenStyle.DashLine)
        painter.setPen(pen)
        end = self.x_range[1]
        painter.drawLine(self._point(0.0, 0.0), self._point(end, end))
        painter.setPen(Qt.PenStyle.NoPen)
        for probe in self._probes:
            color: QColor = getattr(self.theme, (GREW if probe.grew else HELD).token)
            painter.setBrush(color)
            at = self._point(probe.offered or 0.0, probe.achieved or 0.0)
            if probe.grew:
                corners = [QPointF(-DOT, DOT), QPointF(DOT, DOT), QPointF(0, -DOT)]
                painter.drawPolygon(QPolygonF([at + corner for corner in corners]))
            else:
                painter.drawEllipse(at, DOT, DOT)

    def _point(self, offered: float, achieved: float) -> QPointF:
        return QPointF(self.x_pixel(offered), self.y_pixel(achieved))


class RateView(QWidget):
    """What a search needs to know, the button that begins one, and its sentence, plot and table."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.probe_requests = whole(
            tr("Requests of a probe"), LEAST_REQUESTS, MOST_REQUESTS, probe_size(0), suffix=" requests"
        )
        self.probe_requests.setToolTip(tr("More requests take longer and find the rate more surely"))
        self.search_button = button(tr("Find the saturation rate"))
        self.search_button.setToolTip(tr("Sends this load at one rate after another, until the queue starts to grow"))
        fields = QWidget()
        form_layout(fields).addRow(tr("per probe"), self.probe_requests)
        self.sentence = sentence("")
        self.legend = Legend(theme, [HELD, GREW, EVEN])
        self.plot = RatePlot(theme)
        self.table = FigureTable(tr("Probes"), theme, ("achieved/s", "P99 TTFT", "queue"))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 2)
        for widget in (fields, self.search_button, self.sentence, self.legend, self.plot, self.table):
            column.addWidget(widget)
        for hidden in (self.sentence, self.legend, self.plot, self.table):
            hidden.hide()

    def show_search(self, search: SaturationSearch, *, running: bool) -> None:
        """``running``: whether a probe is in progress; its rate is named then."""
        probes, rate = search.probes, search.next_rate
        if running and rate is not None:
            self.sentence.setText(tr("Probe {probes}: {rate:.3g} requests/s …", probes=len(probes) + 1, rate=rate))
        else:
            self.sentence.setText(search.sentence())
        self.sentence.show()
        for widget in (self.legend, self.plot, self.table):
            widget.setVisible(bool(probes))
        self.plot.show_probes(probes)
        self.plot.setAccessibleDescription(self.sentence.text())
        self.table.show_rows([_row(probe) for probe in sorted(probes, key=lambda p: p.rate)])


def _row(probe: Probe) -> FigureRow:
    achieved = NOT_AVAILABLE if probe.achieved is None else f"{probe.achieved:.3g}"
    queue = GREW if probe.grew else HELD
    cells = (achieved, milliseconds(probe.p99_ttft_ms), "grew" if probe.grew else "held")
    return FigureRow(
        f"{probe.rate:.3g}/s",
        cells,
        queue,
        tr("{completed} of {requests} requests completed", completed=probe.completed, requests=probe.requests),
    )
