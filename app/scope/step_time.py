"""Where a step's time goes: its parts, stacked for each of the last steps, and their means over a window; beside them
what the prefix cache and speculation save, and what the processes take of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
from PySide6.QtCore import QPoint, QRect, QSize, QTimer
from PySide6.QtGui import QHideEvent, QPainter, QResizeEvent, QShowEvent
from PySide6.QtWidgets import QBoxLayout, QVBoxLayout, QWidget

from app.scope.age_plot import Mark, MarkedPlot
from app.scope.bars import BAR, bar_boxes
from app.scope.changes import KnobChange
from app.scope.choices import window_choice
from app.scope.figure_table import FigureRow, FigureTable
from app.scope.panel import START_SOMETHING, ScopePanel, ScopeSource
from app.scope.plot import Tick, linear_ticks
from app.scope.process_load import GpuLoad, GpuReader, ProcessLoad, ProcessLoads
from app.scope.rates import Rates
from app.scope.steps import PARTS, StepHistory, StepRow
from app.scroll_column import ScrollColumn
from app.selection import Selection
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import LegendEntry
from app.words import NOT_AVAILABLE, bytes_label, count, percent, seconds_label
from engine.compare_svg import nice_step

SWATCHES = {
    "schedule": LegendEntry(tr("schedule"), "muted"),
    "prepare": LegendEntry(tr("prepare"), "padding", "weave"),
    "forward": LegendEntry(tr("forward"), "accent"),
    "sample": LegendEntry(tr("sample"), "draft", "stripe"),
    "detokenise": LegendEntry(tr("detokenise"), "swapped", "checker"),
}
"""Name, colour and pattern of each part, in the order in which they are done, the lowest first."""
_MEANINGS = {
    "schedule": tr("choosing who runs, and finding blocks for them"),
    "prepare": tr("laying out the batch for the device"),
    "forward": tr("the model"),
    "sample": tr("choosing tokens, and taking them in"),
    "detokenise": tr("tokens to text, and looking for stop strings"),
}
READ_SECONDS = 2.0
"""Between two readings of the processes."""
WIDE = 400
"""From this width on the figures are beside the plot, not under it."""
BESIDE = 210
"""Pixels of the figures' width then."""
BETWEEN = FigureRow("", ("", ""))
"""Between the parts of a step and what is of another kind."""
LONGEST = 1e6
"""Seconds; a step beyond it is drawn as long as this."""


class StepTimePlot(MarkedPlot):
    """A bar of whole device pixels for each of the last steps."""

    def __init__(self, history: StepHistory, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(theme, parent)
        self._history = history
        self._last_step: int | None = None
        self._boxes: dict[str, list[QRect]] = {}
        self._changes: list[KnobChange] = []
        self.setAccessibleName(tr("Time of each of the last steps, stacked by its parts"))

    def minimumSizeHint(self) -> QSize:
        return QSize(120, 76)

    def show_steps(self, last_step: int | None, changes: list[KnobChange]) -> None:
        """Up to a step; None: the newest."""
        self._last_step, self._changes = last_step, changes
        self._lay_out()
        self.update()

    def _lay_out(self) -> None:
        self.layout_axes()
        shown = max(1, self.area.width() // BAR)
        parts = np.stack([self._history.last(part, shown, self._last_step) for part in PARTS])
        parts = np.clip(np.nan_to_num(parts, nan=0.0, posinf=LONGEST), 0.0, LONGEST)
        most = float(parts.sum(axis=0).max(initial=0.0))
        self.y_range = (0.0, max(1000 * most * 1.1, 0.1))
        self.y_ticks = [
            Tick(t.value, f"{t.label} ms") for t in linear_ticks(*self.y_range, max(2, self.height() // 32))
        ]
        self.layout_axes()
        self.x_range = (-float(self.area.width() / BAR), 0.0)
        every = max(1, int(nice_step(shown, max(2, self.area.width() // 90))))
        self.x_ticks = [Tick(-i, f"−{i}" if i else tr("last step")) for i in range(0, shown + 1, every)]
        scale = self.devicePixelRatioF()
        height, bar = round(self.area.height() * scale), max(2, round(BAR * scale))
        self._boxes = dict(
            zip(PARTS, bar_boxes(1000 * parts, top=self.y_range[1], height=height, bar=bar), strict=True)
        )
        steps = self._history.last("step", shown, self._last_step)
        self.marks = [
            Mark(float(np.searchsorted(steps, change.step) - len(steps)), change.label, change.step)
            for change in self._changes
            if len(steps) and change.step >= steps[0]
        ]

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def paint_data(self, painter: QPainter) -> None:
        self.paint_boxes(painter, self._boxes, SWATCHES)
        self.paint_marks(painter)

    def step_at(self, x: float) -> StepRow | None:
        """The step whose bar is at a logical pixel."""
        return self._history.row(int((self.area.right() + 1 - x) // BAR), self._last_step)

    def tip_at(self, position: QPoint) -> str:
        row = self.step_at(position.x())
        return super().tip_at(position) or (step_time_sentence(row) if row is not None else "")


def step_time_sentence(row: StepRow) -> str:
    parts = "\n".join(f"{part} {seconds_label(getattr(row, part))}" for part in PARTS)
    return tr(
        "Step {step:,} took {seconds} for {tokens}\n{parts}",
        step=row.step,
        seconds=seconds_label(row.seconds),
        tokens=count(row.tokens, "token"),
        parts=parts,
    )


def part_rows(rates: Rates, begin: float, end: float) -> list[FigureRow]:
    """Mean seconds a step of each part, and its share of the whole, over a stretch of the engine's clock."""
    rows = []
    for part in PARTS:
        mean, share = rates.ratio(part, "steps", begin, end), rates.ratio(part, "seconds", begin, end)
        cells = (NOT_AVAILABLE if mean is None else seconds_label(mean), _share(share))
        rows.append(FigureRow(part, cells, SWATCHES[part], f"{part}: {_MEANINGS[part]}"))
    return rows


def saving_rows(rates: Rates, begin: float, end: float) -> list[FigureRow]:
    """What the prefix cache found, and what of the drafts was right; speculation only where there were drafts."""
    looked_up, drafts = rates.over("prefix_queries", begin, end), rates.over("drafts", begin, end)
    rows = [
        FigureRow(
            tr("prefix hits"),
            (_share(rates.ratio("prefix_hits", "prefix_queries", begin, end)), f"of {looked_up:,.0f}"),
            tip=tr("Of the prompt tokens looked up in the prefix cache at admission, the share that was there"),
        )
    ]
    if drafts > 0:
        accepted = _share(rates.ratio("accepted", "drafts", begin, end))
        tip = tr("Acceptance rate: of the drafted tokens, the share that the model would have given itself")
        rows.append(FigureRow(tr("drafts accepted"), (accepted, f"of {drafts:,.0f}"), tip=tip))
    return rows


def load_rows(loads: dict[str, ProcessLoad], gpu: GpuLoad | None) -> list[FigureRow]:
    cores = os.cpu_count() or 1
    rows = [
        FigureRow(
            name,
            ("–" if load.cores is None else f"{100 * load.cores:.0f} %", bytes_label(load.memory)),
            tip=tr(
                "Processor time of the {name}, 100 % is one of {cores}, and its resident memory",
                name=name,
                cores=count(cores, "core"),
            ),
        )
        for name, load in loads.items()
    ]
    if gpu is not None:
        tip = tr(
            "Share of time in which the GPU computed, and its memory in use, of {total} (NVML)",
            total=bytes_label(gpu.total),
        )
        rows.append(FigureRow("GPU", (f"{100 * gpu.busy:.0f} %", bytes_label(gpu.memory)), tip=tip))
    return rows


def _share(share: float | None) -> str:
    return NOT_AVAILABLE if share is None else percent(share)


class StepTimeContent(QWidget):
    """The plot, and the table, which scrolls, under it or, where it is wide, beside it."""

    def __init__(self, plot: StepTimePlot, theme: Theme) -> None:
        super().__init__()
        self.table = FigureTable(tr("Parts of a step, prefix cache, processes"), theme, ("mean", "share"))
        held = QWidget()
        column = QVBoxLayout(held)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.table)
        column.addStretch(1)
        self._side = ScrollColumn(held)
        self._row = QBoxLayout(QBoxLayout.Direction.TopToBottom, self)
        self._row.setContentsMargins(0, 0, 0, 0)
        self._row.setSpacing(SPACING)
        self._row.addWidget(plot, 1)
        self._row.addWidget(self._side)

    def minimumSizeHint(self) -> QSize:
        """That of the narrower way: lying beside each other must not force it wide."""
        return QSize(160, 120)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        wide = self.width() >= WIDE
        directions = QBoxLayout.Direction
        self._row.setDirection(directions.LeftToRight if wide else directions.TopToBottom)
        self._side.setMinimumWidth(BESIDE if wide else 0)
        self._side.setMaximumWidth(BESIDE if wide else 16_777_215)


class StepTimePanel(ScopePanel):
    empty_text = tr(
        "No step yet. {start_something}: what each step's time is spent on appears here.",
        start_something=START_SOMETHING,
    )
    refresh_seconds = 0.4

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.plot = StepTimePlot(source.history.steps, theme)
        self.figures = StepTimeContent(self.plot, theme)
        super().__init__(tr("Step time"), source, theme, selection, self.figures, parent)
        self.processes: Callable[[], dict[str, int | None]] = lambda: {"window": os.getpid()}
        """Names and ids of the processes whose load is shown; the engine's is called ``engine``."""
        self.device: Callable[[], str] = lambda: "cpu"
        """Where the engine computes; on ``cuda`` the GPU's load is shown too."""
        self.window_choice = window_choice()
        self.window_choice.chosen.connect(self.show_anew)
        self.add_trailing(self.window_choice)
        self._mean = self.add_figure("number")
        self._mean.setToolTip(tr("What a step takes, the mean over the window"))
        self._loads, self._gpu = ProcessLoads(), GpuReader()
        self._load_rows: list[FigureRow] = []
        self._reading = QTimer(self)
        self._reading.setInterval(round(1000 * READ_SECONDS))
        self._reading.timeout.connect(self._read_loads)

    def has_content(self) -> bool:
        return self.source.history.steps.count(self.source.last_step) > 0

    def refresh(self) -> None:
        source, rates = self.source, self.source.history.rates
        end = min(source.now, rates.end)
        begin = end - self.window_choice.value
        self.plot.show_steps(source.last_step, source.history.changes.between(rates.begin, end))
        mean = rates.ratio("seconds", "steps", begin, end)
        self._mean.say("" if mean is None else seconds_label(mean))
        live = [] if source.moment is not None else self._load_rows  # nobody knows what they took then
        rows = [*part_rows(rates, begin, end), BETWEEN, *saving_rows(rates, begin, end), *live]
        self.figures.table.show_rows(rows)

    def _read_loads(self) -> None:
        if not self.is_seen():
            return
        pids = self.processes()
        engine = pids.get("engine")
        on_gpu = engine is not None and self.device().startswith("cuda")
        self._load_rows = load_rows(self._loads.read(pids), self._gpu.read(engine) if on_gpu else None)
        if not self.pages.is_empty:
            self.show_anew()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._read_loads()
        self._reading.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._reading.stop()
