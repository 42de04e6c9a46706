"""What came of a comparison: timelines on one axis, the figures with their ratios, bars with the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QGuiApplication, QKeyEvent, QKeySequence
from PySide6.QtWidgets import QFormLayout, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from app.lab.choice import Choice
from app.lab.compare_bars import Bar, BarChart, BarGrid
from app.lab.compare_result import ComparedResult, efficiency_formulas
from app.lab.compare_table import CompareTable
from app.lab.compare_timeline_plot import CompareTimelineView
from app.lab.fields import sentence
from app.scope.lane_painter import legend_entries
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import Legend, button, label
from app.words import seconds_label
from engine.comparison import Figure

CHOICE_MOST = 280
HOW = tr("Ctrl and the wheel zoom, dragging moves, a double click shows all. Keys: + − ← → Home, ↑ ↓ for a request.")
HINT = tr("Point at a request, or press ↑ and ↓, to see it in every variant.")


class CompareView(QWidget):
    """Shows one result. The baseline and the seed of the timelines can be chosen; nothing runs again for that."""

    save = Signal()
    report = Signal()
    copied = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.result: ComparedResult | None = None
        self._theme = theme
        self.title = sentence("heading")
        self.watch = sentence("")
        self.about = sentence("muted")
        self.faults = sentence("error")
        self.baseline = Choice(tr("Baseline of the ratios in the result"), theme)
        self.baseline.currentIndexChanged.connect(self._baseline_chosen)
        self.seed = Choice(tr("Seed of the timelines"), theme)
        self.seed.currentIndexChanged.connect(self._show_timelines)
        self.timelines = CompareTimelineView(theme)
        self.timelines.plot.hovered.connect(self._show_request)
        self.timelines.plot.setToolTip(HOW)
        self.legend = Legend(theme, [])
        self.request_note = sentence("muted")
        self.request_note.setMinimumHeight(2 * self.request_note.fontMetrics().lineSpacing())  # so that nothing jumps
        self.request_note.setAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignTop)
        self.table = CompareTable(tr("Figures of the variants"), theme)
        self.footnote = sentence("muted")
        self.told = sentence("")
        self.told.setToolTip(efficiency_formulas())
        self.bars = BarGrid(theme)
        self.waste = CompareTable(tr("Waste of the variants"), theme)
        self.save_button = button(tr("Save…"), accessible=tr("Save the result"))
        self.save_button.clicked.connect(self.save)
        self.report_button = button(tr("HTML report…"), accessible=tr("Write a report in HTML"))
        self.report_button.clicked.connect(self.report)
        self.copy_button = button(tr("Copy table"), accessible=tr("Copy the table"))
        self.copy_button.clicked.connect(self.copy_table)
        self._lay_out()

    def _lay_out(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING)
        buttons = QHBoxLayout()
        buttons.setSpacing(SPACING)
        for each in (self.save_button, self.report_button, self.copy_button):
            buttons.addWidget(each)
        buttons.addStretch(1)
        for choice in (self.baseline, self.seed):
            choice.setMaximumWidth(CHOICE_MOST)
        self._choices = QFormLayout()
        self._choices.setSpacing(SPACING)
        self._choices.setLabelAlignment(Qt.AlignmentFlag.AlignLeft)
        self._choices.addRow(tr("baseline"), self.baseline)
        self._choices.addRow(tr("timelines of seed"), self.seed)
        for widget in (self.title, self.about, self.watch, self.faults):
            column.addWidget(widget)
        column.addLayout(buttons)
        column.addLayout(self._choices)
        for widget in (self.legend, self.timelines, self.request_note, self.told, self.table, self.footnote):
            column.addWidget(widget)
        self.bars_title, self.waste_title = label(tr("Side by side"), "title"), label(tr("Waste"), "title")
        for widget in (self.bars_title, self.bars, self.waste_title, self.waste):
            column.addWidget(widget)
        column.addStretch(1)

    # Showing -----------------------------------------------------------------------------------------------------

    def show_result(self, result: ComparedResult) -> None:
        self.result = result
        self.title.setText(result.title)
        self.about.setText(result.about)
        _say(self.watch, result.watch)
        _say(self.faults, "\n".join(result.faults()))
        _fill(self.baseline, [(name, name) for name in result.variants], result.baseline)
        _fill(self.seed, [(result.seed_name(seed), seed) for seed in result.seeds], result.seeds[0])
        self._choices.setRowVisible(self.seed, len(result.seeds) > 1)
        self._show_timelines()
        self._show_figures()

    def _show_timelines(self, _index: int = 0) -> None:
        if self.result is None:
            return
        self.timelines.plot.show_runs(self.result.runs_of_seed(self.seed.currentData()))
        self.legend.set_entries(legend_entries(self.timelines.plot.model.kinds, drafted=False))
        self._show_request(None)

    def _baseline_chosen(self, _index: int) -> None:
        name = self.baseline.currentData()
        if self.result is not None and name is not None and name != self.result.baseline:
            self.result = self.result.against(name)
            self._show_figures()

    def _show_figures(self) -> None:
        result = self.result
        assert result is not None
        self.table.show_rows(result.rows(), result.variants, result.baseline)
        waste = result.waste_rows()
        self.waste.show_rows(waste, result.variants, result.baseline)
        for widget in (self.waste_title, self.waste):
            widget.setVisible(bool(waste))
        self.footnote.setText(result.footnote)
        _say(self.told, "\n".join(f"• {each}" for each in result.sentences()))
        self.bars.show_charts([self._chart(figure) for figure in result.charted()])

    def _chart(self, figure: Figure) -> BarChart:
        assert self.result is not None
        baseline = self.result.baseline
        bars = [Bar(cell, cell.variant == baseline) for cell in self.result.cells(figure)]
        return BarChart(figure.label, figure.direction, figure.meaning, bars)

    def _show_request(self, request: int | None) -> None:
        """How long a request took in every variant."""
        parts = []
        for band in self.timelines.plot.model.bands if request is not None else ():
            lane = band.lanes.get(request)
            if lane is not None:
                took = (
                    seconds_label(lane.finished_at - lane.arrival)
                    if lane.finished_at is not None
                    else tr("not finished")
                )
                parts.append(f"{band.variant} {took}")
        self.request_note.setText(tr("Request {request}: ", request=request) + ", ".join(parts) if parts else HINT)
        self.timelines.plot.setAccessibleDescription(self.request_note.text())

    # Copying -----------------------------------------------------------------------------------------------------

    def copy_table(self) -> None:
        """The figures as a table that a spreadsheet takes: columns apart by tabs."""
        if self.result is not None:
            QGuiApplication.clipboard().setText(self.result.table_text())
            self.copied.emit()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.matches(QKeySequence.StandardKey.Copy):
            self.copy_table()
        else:
            super().keyPressEvent(event)


def _fill(choice: Choice, entries: Sequence[tuple[str, object]], chosen: object) -> None:
    blocked = choice.blockSignals(True)
    choice.clear()
    for text, data in entries:
        choice.addItem(text, data)
    choice.setCurrentIndex(max(0, [data for _, data in entries].index(chosen)))
    choice.blockSignals(blocked)


def _say(where: QLabel, text: str) -> None:
    where.setText(text)
    where.setVisible(bool(text))
