"""Throughput and latency over a window of time as curves, with the figures over it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QPainter, QPen, QResizeEvent
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.scope.age_plot import AgePlot, Mark, marks_of, tamed
from app.scope.choices import MenuChoice, window_choice
from app.scope.figure_table import FigureRow, FigureTable
from app.scope.panel import ScopePanel, ScopeSource
from app.scope.plot import Tick, linear_ticks
from app.scope.rates import FINEST, RateSeries
from app.scope.samples import NO_SAMPLE, Percentiles, SampleSet, grouped_quantiles
from app.selection import Selection
from app.theme import SPACING, Theme, request_color
from app.translation import tr
from app.widgets import Legend, LegendEntry
from app.words import NOT_AVAILABLE, seconds_label

CURVE_POINTS = 60
"""Of a curve of percentiles, at most; each sums up the gaps of an equal stretch of time."""
DOT_PIXELS = 3
"""Dots nearer to each other than this are one."""
MOST_DOTS = 200
"""Of one kind are painted; where there are more they are thinned out evenly over the plot."""
TABLE_HEIGHT = 170
"""Where a panel is lower than this the plot has the table's room; the title line keeps the medians."""
_DECADES = tuple(10.0**power for power in range(-4, 5))


class ThroughputPlot(AgePlot):
    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self.setAccessibleName(tr("Tokens per second over time, prompt and output"))
        self._ages = self._prompt = self._output = np.zeros(0)

    def show_series(self, series: RateSeries, window: float, marks: list[Mark], *, past: bool) -> None:
        self._ages, self._prompt, self._output = series.ages, tamed(series.prompt), tamed(series.output)
        self.show_ages(-float(self._ages[0]), window, marks, past=past)
        self._lay_out()
        self.update()

    def _lay_out(self) -> None:
        most = float(np.nanmax(np.concatenate([self._prompt, self._output, [0.0]])))
        self.y_range = (0.0, max(most * 1.1, 1.0))
        self.y_ticks = linear_ticks(0.0, self.y_range[1], max(2, self.height() // 36))
        self.layout_axes()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def paint_data(self, painter: QPainter) -> None:
        self.paint_marks(painter)
        prompt = QPen(self.theme.prefill, 1.5, Qt.PenStyle.DashLine)
        self.paint_curve(painter, self._ages, self._prompt, prompt)
        self.paint_curve(painter, self._ages, self._output, QPen(self.theme.decode, 1.8))


class ThroughputPanel(ScopePanel):
    empty_text = tr("No tokens yet. Prompt and output tokens per second appear here once something runs.")
    refresh_seconds = 0.3

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = ThroughputPlot(theme)
        super().__init__(tr("Throughput"), source, theme, selection, self.plot, parent)
        self._legend = Legend(theme, _throughput_entries(None))
        self.body.insertWidget(0, self._legend)  # with the figures beside it the title line would name one line only
        self.window_choice = window_choice()
        self.window_choice.chosen.connect(self.show_anew)
        self.add_trailing(self.window_choice)
        self._rate = self.add_figure("number")
        self._rate.setToolTip(tr("Output tokens per second, the mean over the last two seconds of steps"))

    def _series(self) -> RateSeries | None:
        return self.source.history.rates.series(self.window_choice.value, self.source.now)

    def has_content(self) -> bool:
        return self._series() is not None

    def refresh(self) -> None:
        series, source = self._series(), self.source
        if series is None:
            return
        past = source.moment is not None
        now = min(source.now, source.history.rates.end)
        marks = marks_of(source.history.changes.between(now + float(series.ages[0]), now), now)
        self.plot.show_series(series, self.window_choice.value, marks, past=past)
        told = past or source.live
        rates = (source.history.rates.rate(name, None if not past else now) for name in ("prompt", "output"))
        prompt, output = (0.0 if source.idle else rate for rate in rates)
        self._rate.say(f"{output:,.0f} tok/s" if told else "")
        self._legend.set_entries(_throughput_entries(prompt if told else None))


def _throughput_entries(prompt: float | None) -> list[LegendEntry]:
    rate = f" {prompt:,.0f} tok/s" if prompt is not None else ""
    return [LegendEntry(tr("output"), "decode", "line"), LegendEntry(tr("prompt") + rate, "prefill", "dashed")]


@dataclass(frozen=True, slots=True)
class GapCurves:
    """ITL percentiles of each of some equal stretches of time; NaN in one without gaps."""

    ages: np.ndarray
    p50: np.ndarray
    p99: np.ndarray


def gap_curves(gaps: SampleSet, now: float) -> GapCurves:
    """Over the time from the oldest sample to ``now``, in at most :data:`CURVE_POINTS` stretches."""
    if not len(gaps):
        return GapCurves(np.zeros(0), np.zeros(0), np.zeros(0))
    apart = max(2 * FINEST, (now - float(gaps.times[0])) / CURVE_POINTS)
    bins = np.floor((now - gaps.times) / apart).astype(np.int64)
    oldest = int(bins[0])
    places = (oldest - bins).astype(np.int16)
    p50, p99 = grouped_quantiles(gaps.values, gaps.weights, places, oldest + 1, (0.5, 0.99))
    ages = np.minimum(-(np.arange(oldest, -1, -1) + 0.5) * apart, 0.0)
    ages[-1] = 0.0
    return GapCurves(ages, p50, p99)


@dataclass(frozen=True, slots=True)
class Dots:
    """A latency of single requests: seconds before the right edge, seconds it took, request ids; all [n]."""

    ages: np.ndarray
    seconds: np.ndarray
    request_ids: np.ndarray

    @classmethod
    def of(cls, samples: SampleSet, now: float) -> Dots:
        fit = np.isfinite(samples.values) & (samples.values > 0)
        return cls(samples.times[fit] - now, samples.values[fit], samples.request_ids[fit])


NO_DOTS = Dots(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))


class LatencyPlot(AgePlot):
    """TTFT as dots and E2EL as squares in the request's hue, ITL as two curves; all on a log scale."""

    def __init__(self, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self.log_y = True
        self.y_range = (0.01, 1.0)
        self._selection = selection
        self._curves = GapCurves(np.zeros(0), np.zeros(0), np.zeros(0))
        self._ttft = self._e2el = NO_DOTS
        self.setAccessibleName(tr("Time to first token, time between tokens and time to the last token, over time"))

    def show_latency(self, curves: GapCurves, ttft: Dots, e2el: Dots) -> None:
        self._curves, self._ttft, self._e2el = curves, ttft, e2el
        self._lay_out()
        self.update()

    def _lay_out(self) -> None:
        values = np.concatenate([self._curves.p50, self._curves.p99, self._ttft.seconds, self._e2el.seconds])
        values = values[np.isfinite(values) & (values > 0)]
        least, most = float(values.min(initial=0.02)), float(values.max(initial=0.5))
        low = max((d for d in _DECADES if d <= least), default=_DECADES[0])
        high = min((d for d in _DECADES if d >= most), default=_DECADES[-1])
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
        self.paint_marks(painter)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        for dots, square in ((self._e2el, True), (self._ttft, False)):
            self._paint_dots(painter, dots, square=square)
        self.paint_curve(painter, curves.ages, curves.p99, QPen(theme.muted, 1.5, Qt.PenStyle.DotLine))
        self.paint_curve(painter, curves.ages, curves.p50, QPen(theme.text, 1.5))

    def _paint_dots(self, painter: QPainter, dots: Dots, *, square: bool) -> None:
        """The newest of those that would lie on each other, and the selected request's over all."""
        if not len(dots.ages):
            return
        (left, right), (low, high) = self.x_range, self.y_range
        xs = self.area.left() + (dots.ages - left) / (right - left) * self.area.width()
        levels = np.log10(np.clip(dots.seconds, low, high) / low) / math.log10(high / low)
        ys = self.area.bottom() + 1 - levels * self.area.height()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing, not square)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(Qt.BrushStyle.NoBrush)
        for index in apart(xs, ys):
            color = request_color(int(dots.request_ids[index]), self.theme)
            if square:
                painter.setPen(color)
                painter.drawRect(round(xs[index]) - 2, round(ys[index]) - 2, 4, 4)
            else:
                painter.setBrush(color)
                painter.drawEllipse(QPointF(xs[index], ys[index]), 3.0, 3.0)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(QPen(self.theme.text, 1.5))
        for index in np.flatnonzero(dots.request_ids == (self._selection.request_id or 0)).tolist():
            painter.setBrush(request_color(int(dots.request_ids[index]), self.theme))
            box = QRectF(xs[index] - 4.5, ys[index] - 4.5, 9, 9)
            (painter.drawRect if square else painter.drawEllipse)(box)


def apart(xs: np.ndarray, ys: np.ndarray) -> list[int]:
    """Of points [n] in pixels, the oldest first: the newest in each cell of a grid, whose cells are of
    :data:`DOT_PIXELS`, or of so many that at most :data:`MOST_DOTS` points are left."""
    cell = float(DOT_PIXELS)
    while True:
        places = (np.rint(ys / cell) + 100_000 * np.rint(xs / cell)).astype(np.int64)
        _, newest = np.unique(places[::-1], return_index=True)
        if len(newest) <= MOST_DOTS:
            return np.sort(len(xs) - 1 - newest).tolist()
        cell *= math.sqrt(len(newest) / MOST_DOTS) * 1.05


class LatencyContent(QWidget):
    """The figures above the plot, where there is height for both."""

    def __init__(self, theme: Theme, plot: LatencyPlot) -> None:
        super().__init__()
        self.plot = plot
        self.table = FigureTable(tr("Percentiles of the latencies"), theme, ("p50", "p90", "p99"))
        self.table.show_rows(_latency_rows(NO_SAMPLE, NO_SAMPLE, NO_SAMPLE))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 2)
        column.addWidget(self.table)
        column.addWidget(plot, 1)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.table.setVisible(self.height() >= TABLE_HEIGHT)


class LatencyPanel(ScopePanel):
    empty_text = tr("No latency yet. Time to first token and time between tokens appear with the first answer.")
    refresh_seconds = 0.5

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = LatencyPlot(theme, selection)
        self.figures = LatencyContent(theme, self.plot)
        super().__init__(tr("Latency"), source, theme, selection, self.figures, parent)
        self._legend = Legend(theme, _latency_entries(NO_SAMPLE, NO_SAMPLE, NO_SAMPLE))
        self.add_trailing(self._legend)
        self.priority_choice = MenuChoice(
            tr("Priority"), tr("Of the requests of all priorities, or of one: the lower goes first")
        )
        self.priority_choice.set_options([(tr("all"), None)])
        self.priority_choice.hide()
        self.window_choice = window_choice()
        for choice in (self.priority_choice, self.window_choice):
            choice.chosen.connect(self.show_anew)
            self.add_trailing(choice)

    def has_content(self) -> bool:
        begin = self.source.history.latency.begin
        return begin is not None and begin <= self.source.now

    def refresh(self) -> None:
        latency, source = self.source.history.latency, self.source
        now, window = source.now, self.window_choice.value
        begin = now - window
        seen = latency.ttft.priorities(begin, now) + latency.e2el.priorities(begin, now)
        self._offer_priorities(sorted(set(seen)))
        mine = (begin, now, self.priority_choice.value)
        ttft, itl, e2el = latency.ttft.between(*mine), latency.itl.between(*mine), latency.e2el.between(*mine)
        oldest = max((now - float(s.times[0]) for s in (ttft, itl, e2el) if len(s)), default=0.0)
        marks = marks_of(source.history.changes.between(now - oldest, now), now)
        self.plot.show_ages(oldest, window, marks, past=source.moment is not None)
        self.plot.show_latency(gap_curves(itl, now), Dots.of(ttft, now), Dots.of(e2el, now))
        self._say(ttft.percentiles(), itl.percentiles(), e2el.percentiles())

    def _offer_priorities(self, seen: list[int]) -> None:
        choice = self.priority_choice
        if choice.value is not None and choice.value not in seen:
            seen = sorted({*seen, choice.value})  # what was chosen is not taken back while it has no samples
        choice.set_options([(tr("all"), None), *((tr("prio {p:,}", p=p), p) for p in seen)])
        choice.setVisible(len(seen) > 1 or choice.value is not None)

    def _say(self, ttft: Percentiles, itl: Percentiles, e2el: Percentiles) -> None:
        self.figures.table.show_rows(_latency_rows(ttft, itl, e2el))
        self._legend.set_entries(_latency_entries(ttft, itl, e2el))

    def clear(self) -> None:
        super().clear()
        self._say(NO_SAMPLE, NO_SAMPLE, NO_SAMPLE)
        self._offer_priorities([])


def _latency_entries(ttft: Percentiles, itl: Percentiles, e2el: Percentiles) -> list[LegendEntry]:
    """The marks of the plot, with the medians."""
    return [
        LegendEntry(tr("TTFT {p50}", p50=seconds_label(ttft.p50)), "accent", "dot"),
        LegendEntry(tr("ITL {p50}", p50=seconds_label(itl.p50)), "text", "line"),
        LegendEntry(f"p99 {seconds_label(itl.p99)}", "muted", "dashed"),
        LegendEntry(f"E2EL {seconds_label(e2el.p50)}", "accent", "frame"),
    ]


_MEANINGS = {
    "TTFT": tr("from arrival to the first token"),
    "ITL": tr("from one token to the next"),
    "E2EL": tr("from arrival to the end of the answer"),
}


def _latency_rows(ttft: Percentiles, itl: Percentiles, e2el: Percentiles) -> list[FigureRow]:
    named = (("TTFT", ttft, "dot"), ("ITL", itl, "line"), ("E2EL", e2el, "frame"))
    return [
        FigureRow(
            name,
            tuple(
                NOT_AVAILABLE if value is None else seconds_label(value) for value in (found.p50, found.p90, found.p99)
            ),
            LegendEntry(name, "text" if name == "ITL" else "accent", swatch),
            tr("{name}, {meanings}: {count:,} in the window", name=name, meanings=_MEANINGS[name], count=found.count),
        )
        for name, found, swatch in named
    ]
