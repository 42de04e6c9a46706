"""Batch occupancy: the tokens of each of the last steps, stacked by kind, against the step's token budget.

Each step is a bar of whole device pixels, as many steps as fit; so no two bars are ever drawn on one pixel and nothing
aliases. What was lost or is of no use is patterned as well as coloured.
"""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QEvent, QRect, Qt
from PySide6.QtGui import QBrush, QPainter, QPen, QResizeEvent
from PySide6.QtWidgets import QToolTip, QWidget

from app.scope.panel import START_SOMETHING, ScopePanel, ScopeSource
from app.scope.plot import Plot, Tick, linear_ticks, nice_step
from app.scope.steps import LAYERS, StepHistory, StepRow
from app.selection import Selection
from app.theme import Theme
from app.widgets import PATTERN_BRUSHES, Legend, LegendEntry
from app.words import count, seconds_label
from engine.events import BatchEnded

BAR = 3
"""Logical pixels of a bar, the gap of one device pixel included."""
OFF_SCALE = 0.3
"""Below this share of the budget the bars have a scale of their own, and the budget is named at the top instead."""
LEGEND = {
    "decode": LegendEntry("decode", "decode"),
    "prefill": LegendEntry("prefill", "prefill"),
    "recompute": LegendEntry("recomputed", "preempted", "hatch"),
    "accepted": LegendEntry("draft", "draft", "stripe"),
    "rejected": LegendEntry("rejected", "draft", "hatch"),
    "padding": LegendEntry("padding", "padding", "weave"),
}
"""Name, colour and pattern of each layer, the lowest first."""
_ALWAYS_NAMED = ("decode", "prefill")


class OccupancyPlot(Plot):
    def __init__(self, history: StepHistory, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self._history = history
        self._shown = 0
        self._budget = 0
        self._boxes: dict[str, list[QRect]] = {}
        self.setAccessibleName(
            "Tokens per step, stacked: decode, prefill, recomputed, drafts, padding; against the token budget"
        )

    def refresh(self) -> None:
        history = self._history
        scale = self.devicePixelRatioF()
        self._shown = max(1, self.area.width() // BAR)
        stacks = np.stack([history.last(layer, self._shown) for layer in LAYERS])
        budgets = history.last("budget", 1)
        self._budget = int(budgets[-1]) if len(budgets) else 0
        self._set_ranges(int(stacks.sum(axis=0).max(initial=0)))
        boxes = bar_boxes(
            stacks,
            top=self.y_range[1],
            height=round(self.area.height() * scale),
            bar=max(2, round(BAR * scale)),
        )
        self._boxes = dict(zip(LAYERS, boxes, strict=True))
        self.update()

    @property
    def layers(self) -> list[str]:
        """Those that the legend names: the usual ones, and what else the shown steps hold."""
        return [layer for layer in LAYERS if layer in _ALWAYS_NAMED or self._boxes.get(layer)]

    @property
    def budget_on_scale(self) -> bool:
        return self._budget <= self.y_range[1]

    def _set_ranges(self, most: int) -> None:
        top = float(max(most, self._budget)) if most >= OFF_SCALE * self._budget else float(most)
        # Room above the highest bar, or the budget's line, for the budget's words.
        room = self.metrics.height() / max(30.0, self.area.height() - self.metrics.height())
        self.y_range = (0.0, max(top, 1.0) * (1.02 + room))
        self.y_ticks = linear_ticks(0.0, self.y_range[1], max(2, self.height() // 32))
        self.layout_axes()
        self._shown = max(1, self.area.width() // BAR)
        self.x_range = (-float(self.area.width() / BAR), 0.0)
        every = int(nice_step(self._shown, max(2, self.area.width() // 90)))
        self.x_ticks = [Tick(-i, f"−{i}" if i else "last step") for i in range(0, self._shown + 1, max(1, every))]

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.layout_axes()
        self.refresh()

    def paint_data(self, painter: QPainter) -> None:
        theme = self.theme
        scale = self.devicePixelRatioF()
        painter.save()
        painter.translate(self.area.right() + 1, self.area.bottom() + 1)
        painter.scale(1 / scale, 1 / scale)
        painter.setPen(Qt.PenStyle.NoPen)
        for layer, boxes in self._boxes.items():
            entry = LEGEND[layer]
            painter.setBrush(getattr(theme, entry.token))
            painter.drawRects(boxes)
            if entry.pattern in PATTERN_BRUSHES:
                painter.setBrush(QBrush(theme.card, PATTERN_BRUSHES[entry.pattern]))
                painter.drawRects(boxes)
        painter.restore()
        if self._budget and self.budget_on_scale:
            painter.setPen(QPen(theme.muted, 1, Qt.PenStyle.DashLine))
            y = round(self.y_pixel(self._budget))
            painter.drawLine(self.area.left(), y, self.area.right(), y)

    def paint_over(self, painter: QPainter) -> None:
        if not self._budget:
            return
        on_scale = self.budget_on_scale
        text = f"token budget {self._budget:,}" + ("" if on_scale else ", above this scale")
        baseline = round(self.y_pixel(self._budget)) - 3 if on_scale else self.area.top() + self.metrics.ascent() - 2
        painter.setPen(self.theme.muted)
        painter.drawText(self.area.left() + 4, baseline, text)

    def step_at(self, x: float) -> StepRow | None:
        """The step whose bar is at a logical pixel."""
        return self._history.row(int((self.area.right() + 1 - x) // BAR))

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip:
            row = self.step_at(event.pos().x())
            if row is not None:
                QToolTip.showText(event.globalPos(), step_sentence(row), self)
                return True
            QToolTip.hideText()
        return super().event(event)


def bar_boxes(stacks: np.ndarray, *, top: float, height: int, bar: int) -> list[list[QRect]]:
    """The bars' boxes in device pixels from the lower right corner, one list per layer: tokens [layers, steps].

    ``top`` tokens are ``height`` pixels; a count above 0 is at least one. One of a bar's ``bar`` pixels is its gap.
    """
    steps = stacks.shape[1]
    edges = np.rint(np.cumsum(stacks, axis=0) * (height / top)).astype(np.int64)
    edges = np.where(stacks > 0, np.maximum(edges, 1), edges)
    edges = np.maximum.accumulate(edges, axis=0)
    lower = np.vstack([np.zeros(steps, dtype=np.int64), edges[:-1]])
    left = (np.arange(steps) - steps) * bar
    boxes = []
    for layer in range(len(stacks)):
        seen = np.flatnonzero(edges[layer] > lower[layer])
        columns = zip(left[seen].tolist(), edges[layer][seen].tolist(), lower[layer][seen].tolist(), strict=True)
        boxes.append([QRect(x, -high, bar - 1, high - low) for x, high, low in columns])
    return boxes


_TOLD = {
    "decode": "decode",
    "prefill": "prefill",
    "recompute": "recomputed",
    "accepted": "accepted drafts",
    "rejected": "rejected drafts",
    "padding": "padding",
}


def batch_figure(batch: BatchEnded) -> str:
    """Of what a static batch computed, the share that was of use, for the title line."""
    return f"{100 * batch.measured_useful:.0f} % useful"


def batch_sentence(batch: BatchEnded) -> str:
    """What a static batch computed, and the two shares that its lengths alone predict."""
    total = batch.useful_tokens + batch.padding_tokens
    return (
        f"Batch {batch.batch}: {count(batch.size, 'answer')} in {count(batch.steps, 'step')}\n"
        f"{batch.useful_tokens:,} of {count(total, 'computed token')} were of use: {batch.measured_useful:.1%}; "
        f"{batch.padding_tokens:,} were padding\n"
        f"predicted from its lengths: {batch.predicted_useful:.1%}; the literature's efficiency η is {batch.eta:.2f}"
    )


def step_sentence(row: StepRow) -> str:
    parts = [f"{tokens:,} {_TOLD[layer]}" for layer in LAYERS if (tokens := getattr(row, layer))]
    return (
        f"Step {row.step:,}: {' + '.join(parts) or 'nothing'} = {row.tokens:,} of {row.budget:,} tokens\n"
        f"took {seconds_label(row.seconds)}; {row.running:,} running, {row.waiting:,} waiting after it"
    )


class OccupancyPanel(ScopePanel):
    empty_text = f"No step yet. {START_SOMETHING}: each step becomes a bar here."

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = OccupancyPlot(source.history.steps, theme)
        super().__init__("Batch occupancy", source, theme, selection, self.plot, parent)
        self._legend = Legend(theme, [LEGEND[layer] for layer in _ALWAYS_NAMED])
        self.add_trailing(self._legend)
        self._batch = self.add_figure()

    def has_content(self) -> bool:
        return len(self.source.history.steps) > 0

    def refresh(self) -> None:
        self.plot.refresh()
        self._legend.set_entries([LEGEND[layer] for layer in self.plot.layers])
        batches = self.source.state.batches
        self._batch.say(batch_figure(batches[-1]) if batches else "")
        self._batch.setToolTip(batch_sentence(batches[-1]) if batches else "")
