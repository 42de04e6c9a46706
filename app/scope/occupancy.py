"""Batch occupancy: the tokens of each of the last steps, stacked by kind, against the step's token budget.

Each step is a bar of whole device pixels, as many steps as fit; so no two bars are ever drawn on one pixel and nothing
aliases. The bars are one small picture of codes made with numpy, and recomputed tokens are hatched as well as coloured.
"""

from __future__ import annotations

import numpy as np
from PySide6.QtCore import QEvent, QPointF, QRect, Qt
from PySide6.QtGui import QImage, QPainter, QPen, QResizeEvent
from PySide6.QtWidgets import QToolTip, QWidget

from app.scope.panel import ScopePanel, ScopeSource
from app.scope.plot import Plot, Tick, linear_ticks, nice_step, seconds_label
from app.scope.steps import StepHistory, StepRow
from app.selection import Selection
from app.theme import Theme, mix
from app.widgets import Legend, LegendEntry, label

BAR = 3
"""Logical pixels of a bar, the gap of one device pixel included."""
OFF_SCALE = 0.3
"""Below this share of the budget the bars have a scale of their own, and the budget is named at the top instead."""
_GROUND, _RECOMPUTE, _HATCH = 0, 3, 4


class OccupancyPlot(Plot):
    def __init__(self, history: StepHistory, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self._history = history
        self._shown = 0
        self._budget = 0
        self._codes = np.zeros((1, 1), dtype=np.uint8)
        self.setAccessibleName("Tokens per step, stacked: decode, prefill, recomputed; against the token budget")

    def refresh(self) -> None:
        history = self._history
        scale = self.devicePixelRatioF()
        self._shown = max(1, self.area.width() // BAR)
        decode, prefill, recompute = (history.last(n, self._shown) for n in ("decode", "prefill", "recompute"))
        budgets = history.last("budget", 1)
        self._budget = int(budgets[-1]) if len(budgets) else 0
        self._set_ranges(int((decode + prefill + recompute).max(initial=0)))
        self._codes = bar_codes(
            np.stack([decode, prefill, recompute]),
            top=self.y_range[1],
            height=round(self.area.height() * scale),
            bar=max(2, round(BAR * scale)),
        )
        self.update()

    @property
    def budget_on_scale(self) -> bool:
        return self._budget <= self.y_range[1]

    def _set_ranges(self, most: int) -> None:
        top = float(max(most, self._budget)) if most >= OFF_SCALE * self._budget else float(most)
        step = nice_step(max(top, 1.0), 4)
        self.y_range = (0.0, max(top * 1.08, step))
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
        height, width = self._codes.shape
        scale = self.devicePixelRatioF()
        image = QImage(self._codes.data, width, height, width, QImage.Format.Format_Indexed8)
        hatch = mix(theme.preempted, theme.card, 0.55)
        image.setColorTable([0, *(c.rgb() for c in (theme.decode, theme.prefill, theme.preempted, hatch))])
        image.setDevicePixelRatio(scale)
        corner = QPointF(self.area.right() + 1 - width / scale, self.area.bottom() + 1 - height / scale)
        painter.drawImage(corner, image)
        if self._budget and self.budget_on_scale:
            painter.setPen(QPen(theme.muted, 1, Qt.PenStyle.DashLine))
            y = round(self.y_pixel(self._budget))
            painter.drawLine(self.area.left(), y, self.area.right(), y)

    def paint_over(self, painter: QPainter) -> None:
        if not self._budget:
            return
        text = f"token budget {self._budget:,}" + ("" if self.budget_on_scale else ", above this scale")
        width, height = self.metrics.horizontalAdvance(text), self.metrics.height()
        top = round(self.y_pixel(self._budget)) + 2 if self.budget_on_scale else self.area.top()
        box = QRect(self.area.left() + 4, top, width + 8, height)
        painter.fillRect(box, self.theme.card)
        painter.setPen(self.theme.muted)
        painter.drawText(box, Qt.AlignmentFlag.AlignCenter, text)

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


def bar_codes(stacks: np.ndarray, *, top: float, height: int, bar: int) -> np.ndarray:
    """The bars as colour indices: tokens [3, steps] -> uint8 [height, steps × bar rounded up to 4].

    0 is nothing, 1 to 3 the kinds from the bottom up, 4 the hatching of the third. A count above 0 is at least a pixel.
    """
    steps = stacks.shape[1]
    edges = np.cumsum(stacks, axis=0) * (height / top)
    heights = np.where(stacks > 0, np.maximum(np.rint(edges), 1), np.rint(edges)).astype(np.int64)
    heights = np.maximum.accumulate(heights, axis=0)
    level = np.arange(height, 0, -1)[:, None]
    codes = np.zeros((height, steps), dtype=np.uint8)
    for kind in (2, 1, 0):
        codes[level <= heights[kind]] = kind + 1
    wide = np.repeat(codes, bar, axis=1)
    wide[:, bar - 1 :: bar] = _GROUND
    diagonal = (np.arange(height)[:, None] + np.arange(wide.shape[1])[None, :]) % 4 < 2
    wide[(wide == _RECOMPUTE) & diagonal] = _HATCH
    # Scan lines of an 8-bit image begin at multiples of four bytes: pad on the left, the bars end at the right.
    return np.ascontiguousarray(np.pad(wide, ((0, 0), (-wide.shape[1] % 4, 0))))


def step_sentence(row: StepRow) -> str:
    parts = [
        f"{tokens:,} {name}"
        for tokens, name in ((row.decode, "decode"), (row.prefill, "prefill"), (row.recompute, "recomputed"))
        if tokens
    ]
    return (
        f"Step {row.step:,}: {' + '.join(parts) or 'nothing'} = {row.tokens:,} of {row.budget:,} tokens\n"
        f"took {seconds_label(row.seconds)}; {row.running:,} running, {row.waiting:,} waiting after it"
    )


class OccupancyPanel(ScopePanel):
    empty_text = "No step yet. Send a message or start a scenario in the load panel: each step becomes a bar here."

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = OccupancyPlot(source.history.steps, theme)
        super().__init__("Batch occupancy", source, theme, selection, self.plot, parent)
        self._step = label("", "muted")
        self.add_trailing(
            Legend(
                theme,
                [
                    LegendEntry("decode", "decode"),
                    LegendEntry("prefill", "prefill"),
                    LegendEntry("recomputed", "preempted", "hatch"),
                ],
            )
        )
        self.add_trailing(self._step)

    def has_content(self) -> bool:
        return len(self.source.history.steps) > 0

    def refresh(self) -> None:
        self._step.setText(f"step {self.source.state.step:,}")
        self.plot.refresh()
