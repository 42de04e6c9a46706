"""Throughput and latency of the last minute as curves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPen, QResizeEvent
from PySide6.QtWidgets import QWidget

from app.scope.panel import ScopePanel, ScopeSource
from app.scope.plot import Plot, Tick, linear_ticks, nice_step
from app.scope.rates import WINDOW_SECONDS, Latency, Percentiles, percentiles
from app.selection import Selection
from app.theme import Theme, request_color
from app.widgets import Legend, LegendEntry
from app.words import seconds_label

SHORTEST_SECONDS = 5.0
"""What the time axis shows at least; it grows with the run up to a minute."""
BIN = 1.0
"""Seconds of gaps that one point of the ITL curves sums up."""
NO_SAMPLE = Percentiles(None, None, 0)
_DECADES = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)


def age_axis(plot: Plot, oldest: float) -> None:
    """The time axis: seconds before the end of the last step."""
    extent = min(WINDOW_SECONDS, max(SHORTEST_SECONDS, math.ceil(oldest / 5.0) * 5.0))
    plot.x_range = (-extent, 0.0)
    step = nice_step(extent, max(2, plot.width() // 80))
    plot.x_ticks = [Tick(-i * step, f"−{i * step:g} s" if i else "now") for i in range(int(extent / step) + 1)]


class ThroughputPlot(Plot):
    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self.setAccessibleName("Tokens per second over the last minute, prompt and output")
        self._ages = self._prompt = self._output = np.zeros(0)

    def show_series(self, ages: np.ndarray, prompt: np.ndarray, output: np.ndarray) -> None:
        self._ages, self._prompt, self._output = ages, prompt, output
        self._lay_out()
        self.update()

    def _lay_out(self) -> None:
        age_axis(self, -float(self._ages[0]) if len(self._ages) else 0.0)
        values = np.concatenate([self._prompt, self._output])
        most = float(values[np.isfinite(values)].max(initial=0.0))
        self.y_range = (0.0, max(most * 1.1, 1.0))
        self.y_ticks = linear_ticks(0.0, self.y_range[1], max(2, self.height() // 36))
        self.layout_axes()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def paint_data(self, painter: QPainter) -> None:
        prompt = QPen(self.theme.prefill, 1.5, Qt.PenStyle.DashLine)
        self.paint_curve(painter, self._ages, self._prompt, prompt)
        self.paint_curve(painter, self._ages, self._output, QPen(self.theme.decode, 1.8))


class ThroughputPanel(ScopePanel):
    empty_text = "No tokens yet. Prompt and output tokens per second appear here once something runs."
    refresh_seconds = 0.3

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = ThroughputPlot(theme)
        super().__init__("Throughput", source, theme, selection, self.plot, parent)
        self.add_trailing(
            Legend(theme, [LegendEntry("output", "decode", "line"), LegendEntry("prompt", "prefill", "dashed")])
        )
        self._rate = self.add_figure("number")
        self._rate.setToolTip("Output tokens per second, the mean over the steps of the last two seconds")

    def has_content(self) -> bool:
        return self.source.history.throughput.series() is not None

    def refresh(self) -> None:
        throughput = self.source.history.throughput
        series = throughput.series()
        if series is not None:
            self._rate.say(f"{throughput.output_rate():,.0f} tok/s" if self.source.live else "")
            self.plot.show_series(series.ages, series.prompt, series.output)


@dataclass(frozen=True, slots=True)
class GapCurves:
    """ITL percentiles per bin of :data:`BIN` seconds; NaN in a bin without gaps."""

    ages: np.ndarray
    p50: np.ndarray
    p99: np.ndarray


def gap_curves(times: np.ndarray, gaps: np.ndarray, end: float) -> GapCurves:
    """times, gaps: [n] in seconds, times rising."""
    if not len(times):
        return GapCurves(np.zeros(0), np.zeros(0), np.zeros(0))
    bins = np.floor((end - times) / BIN).astype(np.int64)
    oldest = int(bins[0])
    p50, p99 = np.full(oldest + 1, np.nan), np.full(oldest + 1, np.nan)
    edges = np.searchsorted(-bins, np.arange(-oldest, 2))
    for index in range(oldest + 1):
        part = gaps[edges[index] : edges[index + 1]]
        found = percentiles(part)
        if found.count:
            p50[index], p99[index] = found.p50, found.p99
    ages = np.minimum(-(np.arange(oldest, -1, -1) + 0.5) * BIN, 0.0)
    ages[-1] = 0.0
    return GapCurves(ages, p50, p99)


@dataclass(frozen=True, slots=True)
class FirstToken:
    age: float
    ttft: float
    request_id: int


class LatencyPlot(Plot):
    """Time to first token as dots in the request's hue, gaps between tokens as two curves; both on a log scale."""

    def __init__(self, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self.log_y = True
        self.y_range = (0.01, 1.0)
        self._selection = selection
        self._curves = GapCurves(np.zeros(0), np.zeros(0), np.zeros(0))
        self._first_tokens: list[FirstToken] = []
        self.setAccessibleName("Time to first token and time between tokens over the last minute")

    def show_latency(self, curves: GapCurves, first_tokens: list[FirstToken]) -> None:
        self._curves = curves
        self._first_tokens = [f for f in first_tokens if math.isfinite(f.ttft) and f.ttft > 0]
        self._lay_out()
        self.update()

    def _lay_out(self) -> None:
        ages = [-f.age for f in self._first_tokens] + [-float(a) for a in self._curves.ages[:1]]
        age_axis(self, max(ages, default=0.0))
        values = np.concatenate([self._curves.p50, self._curves.p99, [f.ttft for f in self._first_tokens]])
        values = values[np.isfinite(values) & (values > 0)]
        low = max((d for d in _DECADES if d <= values.min(initial=0.02)), default=_DECADES[0])
        high = min((d for d in _DECADES if d >= values.max(initial=0.5)), default=_DECADES[-1])
        self.y_range = (low, max(high, low * 10))
        decades = [d for d in _DECADES if low <= d <= self.y_range[1]]
        values_shown = sorted({*decades, *(3 * d for d in decades if 3 * d < high)} if len(decades) < 4 else decades)
        self.y_ticks = [Tick(v, f"{v:g} s" if v >= 0.1 else f"{1000 * v:g} ms") for v in values_shown]
        self.layout_axes()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def paint_data(self, painter: QPainter) -> None:
        curves, theme = self._curves, self.theme
        self.paint_curve(painter, curves.ages, curves.p99, QPen(theme.muted, 1.5, Qt.PenStyle.DotLine))
        self.paint_curve(painter, curves.ages, curves.p50, QPen(theme.text, 1.5))
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        for first in self._first_tokens:
            color: QColor = request_color(first.request_id, theme)
            chosen = first.request_id == self._selection.request_id
            painter.setPen(QPen(theme.text, 1.5) if chosen else Qt.PenStyle.NoPen)
            painter.setBrush(QBrush(color))
            radius = 4.5 if chosen else 3.0
            x, y = self.x_pixel(first.age), self.y_pixel(first.ttft)
            painter.drawEllipse(QRectF(x - radius, y - radius, 2 * radius, 2 * radius))


class LatencyPanel(ScopePanel):
    empty_text = "No latency yet. Time to first token and time between tokens appear with the first answer."
    refresh_seconds = 0.5

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = LatencyPlot(theme, selection)
        super().__init__("Latency", source, theme, selection, self.plot, parent)
        self._legend = Legend(theme, _latency_entries(NO_SAMPLE, NO_SAMPLE))
        self._legend.setToolTip("Of the last minute. TTFT: arrival to first token. ITL: time between two tokens.")
        self.add_trailing(self._legend)

    def has_content(self) -> bool:
        return bool(self.source.history.latency.first_tokens)

    def refresh(self) -> None:
        latency: Latency = self.source.history.latency
        times, gaps = latency.gaps()
        end = latency.end
        fresh = [FirstToken(t - end, ttft, i) for t, ttft, i in latency.first_tokens if t >= end - WINDOW_SECONDS]
        self.plot.show_latency(gap_curves(times, gaps, end), fresh)
        self._legend.set_entries(_latency_entries(latency.ttft(), latency.itl()))

    def clear(self) -> None:
        super().clear()
        self._legend.set_entries(_latency_entries(NO_SAMPLE, NO_SAMPLE))


def _latency_entries(ttft: Percentiles, itl: Percentiles) -> list[LegendEntry]:
    return [
        LegendEntry(f"TTFT p50 {seconds_label(ttft.p50)} · p99 {seconds_label(ttft.p99)}", "accent", "dot"),
        LegendEntry(f"ITL p50 {seconds_label(itl.p50)}", "text", "line"),
        LegendEntry(f"p99 {seconds_label(itl.p99)}", "muted", "dashed"),
    ]
