"""The figures of a load: percentiles while it runs, the result when it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PySide6.QtCore import QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QVBoxLayout, QWidget

from app.lab.fold import Fold
from app.lab.load_model import LIVE_COLUMNS, LIVE_ROWS, ORIGIN_ROWS, milliseconds, result_rows
from app.theme import SPACING
from app.translation import tr
from app.widgets import label

TOOLTIPS = {
    "ttft": tr("Time to first token"),
    "tpot": tr("Time per output token after the first: (E2EL − TTFT) / (output tokens − 1)"),
    "itl": tr("Inter-token latency: the gap between two tokens"),
    "e2el": tr("End-to-end latency: to the last token"),
    "schedule_ttft": tr("From the intended arrival to the first token, whoever held it up"),
    "schedule_e2el": tr("From the intended arrival to the last token, whoever held it up"),
    "service_ttft": tr("From the first admission to the first token: without the queue"),
    "service_e2el": tr("From the first admission to the last token: without the queue"),
}
ORIGINS = (("due", "schedule"), ("service", "service"))
"""From when on a latency counts, in a word, and the prefix of its key."""
RESULT_COLUMNS = 2
"""Name-and-figure pairs side by side, where there is room for them."""


def _figure(text: str = "") -> QLabel:
    result = label(text, "number")
    result.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
    return result


class PercentileGrid(QWidget):
    """Latencies against mean and percentiles; ``n/a`` where there is no sample. ``rows``: name and key of each."""

    def __init__(self, rows: Sequence[tuple[str, str]] = LIVE_ROWS, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(SPACING)
        grid.setVerticalSpacing(1)
        self.cells: dict[str, QLabel] = {}
        for column, name in enumerate(LIVE_COLUMNS, start=1):
            head = label(name, "muted")
            head.setAlignment(Qt.AlignmentFlag.AlignRight)
            grid.addWidget(head, 0, column)
            grid.setColumnStretch(column, 1)
        for row, (name, key) in enumerate(rows, start=1):
            head = label(name, "muted")
            head.setToolTip(TOOLTIPS[key])
            grid.addWidget(head, row, 0)
            for column, statistic in enumerate(LIVE_COLUMNS, start=1):
                cell = _figure("–")
                cell.setAccessibleName(f"{name} {statistic}")
                self.cells[f"{statistic}_{key}_ms"] = cell
                grid.addWidget(cell, row, column)

    def show_figures(self, figures: dict[str, Any]) -> None:
        for key, cell in self.cells.items():
            text = milliseconds(figures[key])
            if cell.text() != text:
                cell.setText(text)


class ResultGrid(QWidget):
    """Names and figures in pairs of columns; one pair below the other where two have no room beside each other."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(SPACING)
        self._grid.setVerticalSpacing(SPACING // 2)
        self._names: dict[str, QLabel] = {}
        self.figures: dict[str, QLabel] = {}
        self.columns = 0

    def show_rows(self, rows: list[tuple[str, str]]) -> None:
        if list(self.figures) != [name for name, _ in rows]:
            self._make_labels([name for name, _ in rows])
        for name, text in rows:
            self.figures[name].setText(text)
        self._lay_out()

    def minimumSizeHint(self) -> QSize:
        """That of a single pair of columns: two must not force the panel wide."""
        return QSize(self._pair_width(), super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def _pair_width(self) -> int:
        widest = [max((each.sizeHint().width() for each in side.values()), default=0) for side in self._sides()]
        return sum(widest) + SPACING

    def _sides(self) -> tuple[dict[str, QLabel], dict[str, QLabel]]:
        return self._names, self.figures

    def _make_labels(self, names: list[str]) -> None:
        for side in self._sides():
            for each in side.values():
                self._grid.removeWidget(each)
                each.deleteLater()
        self._names = {name: label(name, "muted", self) for name in names}
        self.figures = {name: _figure() for name in names}
        for name, figure in self.figures.items():
            figure.setAccessibleName(name)
        self.columns = 0

    def _lay_out(self) -> None:
        gap = 3 * SPACING
        columns = max(1, min(RESULT_COLUMNS, (self.width() + gap) // (self._pair_width() + gap)))
        if columns == self.columns:
            return
        self.columns = columns
        lines = -(-len(self.figures) // columns)
        for index, (name, figure) in enumerate(self.figures.items()):
            column, row = divmod(index, lines)
            # Three columns a pair: name, figure, and room before the next name.
            self._grid.addWidget(self._names[name], row, column * 3)
            self._grid.addWidget(figure, row, column * 3 + 1)
        for column in range(RESULT_COLUMNS):
            self._grid.setColumnStretch(column * 3 + 1, int(column < columns))
            self._grid.setColumnMinimumWidth(column * 3 + 2, SPACING if column + 1 < columns else 0)


class LoadFigures(QWidget):
    """The latencies of a load while it runs and afterwards, and its result."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.percentiles = PercentileGrid()
        self.origins = PercentileGrid(ORIGIN_ROWS)
        self.origins_fold = Fold(tr("Queue and service"), self.origins)
        self.result = ResultGrid()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 2)
        for widget in (self.percentiles, self.origins_fold, self.result):
            column.addWidget(widget)
        self.origins_fold.hide()
        self.result.hide()

    def begin(self) -> None:
        self.result.hide()
        self.origins_fold.show()

    def show_latencies(self, figures: dict[str, Any]) -> None:
        """Percentiles from the origin that counts here, and from both others: closed, the fold names their P99."""
        self.percentiles.show_figures(figures)
        self.origins.show_figures(figures)
        parts = (f"{name} {milliseconds(figures[f'p99_{key}_e2el_ms'])}" for name, key in ORIGINS)
        self.origins_fold.say("P99 E2EL: " + ", ".join(parts))

    def show_summary(self, summary: dict[str, Any]) -> None:
        self.show_latencies(summary)
        self.result.show_rows(result_rows(summary))
        self.result.show()
