"""The bars of the batch occupancy: tokens per step by kind, and under them how many requests ran and waited.

::

    token budget 512 ┄┄┄┄┄┄┄┄┄┄┄┄┄┄     a bar: one step, or the mean of 2, 4, 8 … and, as a cap, the fullest of them
        █   ▇ █                          (the wheel, + and -)
    ▂▂▂▂█▂▂▂█▂█▂▂▂
    ─── 12 running ┄┄ 3 waiting          the strip, on a scale of its own
    ‾‾\\__/‾‾‾‾‾

Each bar is of whole device pixels, as many as fit; so no two bars are ever drawn on one pixel and nothing aliases. What
was lost or is of no use is patterned as well as coloured.
"""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QPoint, QPointF, QRect, Qt, Signal
from PySide6.QtGui import QKeyEvent, QMouseEvent, QPainter, QPen, QPolygonF, QResizeEvent, QWheelEvent
from PySide6.QtWidgets import QWidget

from app.scope.bars import BAR, Bars, bar_boxes, make_bars, step_points
from app.scope.panel import ScopeSource
from app.scope.plot import Plot, Tick, linear_ticks, tick_label
from app.scope.steps import LAYERS, StepRow
from app.theme import Theme
from app.translation import tr
from app.widgets import LegendEntry
from app.words import count, seconds_label
from engine.compare_svg import nice_step

MOST_STEPS = 1024
"""That one bar sums up."""
OFF_SCALE = 0.3
"""Below this share of the budget the bars have a scale of their own, and the budget is named at the top instead."""
STRIP_LEAST, STRIP_MOST = 14, 28
"""Logical pixels of the lines under the bars: an eighth of the whole, within these."""
STRIP_FROM = 110
"""Logical pixels of the whole plot from which there is room for them."""
GAP = 4
LEGEND = {
    "decode": LegendEntry(tr("decode"), "decode"),
    "prefill": LegendEntry(tr("prefill"), "prefill"),
    "recompute": LegendEntry(tr("recomputed"), "preempted", "hatch"),
    "accepted": LegendEntry(tr("draft"), "draft", "stripe"),
    "rejected": LegendEntry(tr("rejected"), "draft", "hatch"),
    "padding": LegendEntry(tr("padding"), "padding", "weave"),
}
"""Name, colour and pattern of each layer, the lowest first."""
CAP = "cap"
"""Key of the lines over bars of several steps, as high as the fullest of them."""
LOOKS = LEGEND | {CAP: LegendEntry(tr("fullest step"), "text")}
ALWAYS_NAMED = ("decode", "prefill")
LINE_LOOKS = {
    "running": ("text", Qt.PenStyle.SolidLine),
    "waiting": ("muted", Qt.PenStyle.DashLine),
    "swapped": ("swapped", Qt.PenStyle.DotLine),
}


class OccupancyPlot(Plot):
    step_wanted = Signal(int)
    """A step that is to be shown everywhere."""
    zoomed = Signal()

    def __init__(self, source: ScopeSource, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self.source = source
        self.steps_per_bar = 1
        self.bars = make_bars(source.history.steps, 0, 1)
        self.marks: list[tuple[float, str]] = []
        self._budget = 0
        self._boxes: dict[str, list[QRect]] = {}
        self._lines_height = 0
        self._pressed: QPoint | None = None
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.setAccessibleName(
            tr(
                "Tokens per step, stacked: decode, prefill, recomputed, drafts, padding; against the token budget; "
                "under it the running, waiting and swapped requests"
            )
        )

    # Layout ------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        history, last_step = self.source.history.steps, self.source.last_step
        scale = self.devicePixelRatioF()
        self._lines_height = min(STRIP_MOST, max(STRIP_LEAST, self.height() // 8))
        self.foot = self.metrics.height() + self._lines_height + 2 * GAP if self.height() >= STRIP_FROM else 0
        budgets = history.last("budget", 1, last_step)
        self._budget = int(budgets[-1]) if len(budgets) else 0
        # The labels of the scale decide how much room there is for bars, the bars' height decides on the labels.
        self.bars = make_bars(history, self._room(), self.steps_per_bar, last_step)
        self._set_ranges()
        if len(self.bars) > self._room():
            self.bars = make_bars(history, self._room(), self.steps_per_bar, last_step)
        self.marks = self._find_marks()
        bar, height = max(2, round(BAR * scale)), round(self.area.height() * scale)
        boxes = bar_boxes(self.bars.stacks, top=self.y_range[1], height=height, bar=bar)
        self._boxes = dict(zip(LAYERS, boxes, strict=True))
        if self.steps_per_bar > 1:
            self._boxes[CAP] = self._find_caps(height, bar)
        self.update()

    @property
    def layers(self) -> list[str]:
        """Those that the legend names: the usual ones, and what else the shown steps hold."""
        return [layer for layer in LAYERS if layer in ALWAYS_NAMED or self._boxes.get(layer)]

    @property
    def budget_on_scale(self) -> bool:
        return self._budget <= self.y_range[1]

    def _room(self) -> int:
        return max(1, self.area.width() // BAR)

    def _set_ranges(self) -> None:
        most = int(self.bars.most.max(initial=0))
        top = float(max(most, self._budget)) if most >= OFF_SCALE * self._budget else float(most)
        changes = self.source.history.changes
        self.top_margin = max(4, self.metrics.height()) if len(changes.between(*self._times())) else 4
        # Room above the highest bar, or the budget's line, for the budget's words.
        room = self.metrics.height() / max(30.0, self.area.height() - self.metrics.height())
        self.y_range = (0.0, max(top, 1.0) * (1.02 + room))
        self.y_ticks = linear_ticks(0.0, self.y_range[1], max(2, self.area.height() // 32))
        self.layout_axes()
        self.x_range = (-float(self.area.width() / BAR), 0.0)
        every = max(1, int(nice_step(self._room(), max(2, self.area.width() // 90))))
        end = (
            tr("last step")
            if self.source.last_step is None
            else tr("step {last_step:,}", last_step=self.source.last_step)
        )
        together = self.steps_per_bar
        labels = (f"−{i * together:,}" if i else end for i in range(0, self._room() + 1, every))
        self.x_ticks = [Tick(-i * every, label) for i, label in enumerate(labels)]

    def _times(self) -> tuple[float, float]:
        """From the beginning of the first shown step to that of the last, engine clock."""
        wanted = int(self.bars.steps.sum())
        times = self.source.history.steps.last("time", wanted, self.source.last_step)
        return (float(times[0]), float(times[-1])) if len(times) else (0.0, 0.0)

    def _find_marks(self) -> list[tuple[float, str]]:
        changes = self.source.history.changes.between(*self._times())
        places = np.searchsorted(self.bars.last_step, [change.step for change in changes])
        return [
            (float(place) - len(self.bars), change.label)
            for place, change in zip(places.tolist(), changes, strict=True)
        ]

    def _find_caps(self, height: int, bar: int) -> list[QRect]:
        """A line over each bar, as high as its fullest step; device pixels, as :func:`bar_boxes`."""
        tops = np.rint(self.bars.most * (height / self.y_range[1])).astype(np.int64)
        left = (np.arange(len(tops)) - len(tops)) * bar
        return [QRect(x, -top, bar - 1, 1) for x, top in zip(left.tolist(), tops.tolist(), strict=True) if top > 0]

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.layout_axes()
        self.refresh()

    # Painting ----------------------------------------------------------------------------------------------------

    def paint_data(self, painter: QPainter) -> None:
        theme = self.theme
        self.paint_boxes(painter, self._boxes, LOOKS)
        if self._budget and self.budget_on_scale:
            painter.setPen(QPen(theme.muted, 1, Qt.PenStyle.DashLine))
            y = round(self.y_pixel(self._budget))
            painter.drawLine(self.area.left(), y, self.area.right(), y)

    def paint_over(self, painter: QPainter) -> None:
        if self.marks:
            self.paint_labelled_lines(painter, self.marks)
        self._paint_words(painter)
        if self.foot and len(self.bars):
            self._paint_strip(painter)
        self.paint_focus(painter)

    def _paint_words(self, painter: QPainter) -> None:
        parts = []
        if self._budget:
            parts.append(
                tr("token budget {budget:,}", budget=self._budget)
                + ("" if self.budget_on_scale else tr(", above this scale"))
            )
        if self.steps_per_bar > 1:
            parts.append(tr("mean and most of {steps_per_bar:,} steps a bar", steps_per_bar=self.steps_per_bar))
        if not parts:
            return
        on_scale = self._budget and self.budget_on_scale
        baseline = round(self.y_pixel(self._budget)) - 3 if on_scale else self.area.top() + self.metrics.ascent() - 2
        text = self.metrics.elidedText(" · ".join(parts), Qt.TextElideMode.ElideRight, self.area.width() - 8)
        painter.setPen(self.theme.muted)
        painter.drawText(self.area.left() + 4, baseline, text)

    def _paint_strip(self, painter: QPainter) -> None:
        """The counts as steps, the newest in words above them."""
        theme, lines = self.theme, self.bars.lines
        text_top = self.area.bottom() + 1 + GAP
        top = text_top + self.metrics.height()
        height = self._lines_height
        highest = max(1, *(int(values.max(initial=0)) for values in lines.values()))
        label = tick_label(highest)
        painter.setPen(QPen(theme.line, 1))
        painter.drawLine(self.area.left(), top + height, self.area.right(), top + height)
        painter.setPen(theme.muted)
        painter.drawText(self.area.left() - 5 - self.advance(label), top + self.metrics.ascent() // 2 + 1, label)
        x = self.area.left() + 4
        for name, (token, style) in LINE_LOOKS.items():
            values = lines[name]
            if name == "swapped" and not values.any():
                continue
            pen = QPen(getattr(theme, token), 1.5, style)
            painter.setPen(pen)
            points = step_points(values, self.area.right() + 1 - len(values) * BAR, BAR)
            heights = top + height - points[:, 1] * (height - 1) / highest
            painter.drawPolyline(
                QPolygonF([QPointF(px, py) for px, py in zip(points[:, 0].tolist(), heights.tolist(), strict=True)])
            )
            text = f"{int(values[-1]):,} {name}"
            if x + 18 + self.advance(text) <= self.area.right():
                middle = text_top + self.metrics.height() // 2
                painter.drawLine(x, middle, x + 12, middle)
                painter.setPen(theme.muted)
                painter.drawText(x + 17, text_top + self.metrics.ascent(), text)
            x += 29 + self.advance(text)

    # Hands -------------------------------------------------------------------------------------------------------

    def bar_at(self, x: float) -> int | None:
        """Which of the bars is at a logical pixel."""
        place = len(self.bars) - 1 - int((self.area.right() + 1 - x) // BAR)
        return place if 0 <= place < len(self.bars) else None

    def zoom(self, steps_per_bar: int) -> None:
        steps_per_bar = min(MOST_STEPS, max(1, steps_per_bar))
        if steps_per_bar != self.steps_per_bar:
            self.steps_per_bar = steps_per_bar
            self.refresh()
            self.zoomed.emit()

    def wheelEvent(self, event: QWheelEvent) -> None:
        notches = event.angleDelta().y()
        if notches:
            self.zoom(self.steps_per_bar // 2 if notches > 0 else 2 * self.steps_per_bar)
        event.accept()

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() == Qt.MouseButton.LeftButton:
            self._pressed = event.position().toPoint()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        pressed, self._pressed = self._pressed, None
        position = event.position().toPoint()
        # What is shown then ends with the clicked bar: to follow a dragged pointer would move it away under that.
        if pressed is not None and (position - pressed).manhattanLength() <= BAR:
            bar = self.bar_at(position.x())
            if bar is not None:
                self.step_wanted.emit(int(self.bars.last_step[bar]))

    def keyPressEvent(self, event: QKeyEvent) -> None:
        key = event.key()
        if key in (Qt.Key.Key_Plus, Qt.Key.Key_Equal):
            self.zoom(self.steps_per_bar // 2)
        elif key == Qt.Key.Key_Minus:
            self.zoom(2 * self.steps_per_bar)
        elif key in (Qt.Key.Key_Left, Qt.Key.Key_Right):
            steps = self.steps_per_bar if key == Qt.Key.Key_Right else -self.steps_per_bar
            self.step_wanted.emit(max(0, self.source.state.step + steps))
        else:
            super().keyPressEvent(event)

    def tip_at(self, position: QPoint) -> str:
        bar = self.bar_at(position.x())
        if bar is None:
            return ""
        near = [label for at, label in self.marks if abs(self.x_pixel(at) - position.x()) <= 2 * BAR]
        return "\n".join([self._sentence(bar), *near])

    def _sentence(self, bar: int) -> str:
        bars = self.bars
        if bars.steps[bar] > 1:
            return bars_sentence(bars, bar)
        row = self.source.history.steps.row(0, int(bars.last_step[bar]))
        return step_sentence(row) if row is not None else ""


_TOLD = {
    "decode": tr("decode"),
    "prefill": tr("prefill"),
    "recompute": tr("recomputed"),
    "accepted": tr("accepted drafts"),
    "rejected": tr("rejected drafts"),
    "padding": tr("padding"),
}


def step_sentence(row: StepRow) -> str:
    parts = [f"{tokens:,} {_TOLD[layer]}" for layer in LAYERS if (tokens := getattr(row, layer))]
    swapped = tr(", {swapped:,} of them swapped", swapped=row.swapped) if row.swapped else ""
    return tr(
        "Step {step:,}: {parts} = {tokens:,} of {budget:,} tokens\n"
        "took {seconds}; {running:,} running, {waiting:,} waiting{swapped} after it",
        step=row.step,
        parts=" + ".join(parts) or "nothing",
        tokens=row.tokens,
        budget=row.budget,
        seconds=seconds_label(row.seconds),
        running=row.running,
        waiting=row.waiting,
        swapped=swapped,
    )


def bars_sentence(bars: Bars, bar: int) -> str:
    """Several steps that share a bar."""
    parts = [
        f"{tokens:,.1f} {_TOLD[layer]}"
        for layer, tokens in zip(LAYERS, bars.stacks[:, bar].tolist(), strict=True)
        if tokens
    ]
    most = {name: int(values[bar]) for name, values in bars.lines.items()}
    return tr(
        "Steps {first_step:,} to {last_step:,}, {steps}: "
        "{parts} = {sum:,.1f} tokens on average, "
        "{most:,} in the fullest\n"
        "at most {running:,} running, {most3:,} waiting, {most4:,} swapped",
        first_step=bars.first_step[bar],
        last_step=bars.last_step[bar],
        steps=count(int(bars.steps[bar]), "step"),
        parts=" + ".join(parts) or "nothing",
        sum=bars.stacks[:, bar].sum(),
        most=bars.most[bar],
        running=most["running"],
        most3=most["waiting"],
        most4=most["swapped"],
    )
