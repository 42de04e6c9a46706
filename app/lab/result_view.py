"""The figures of a load: percentiles while it runs, the result when it has ended."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.lab.load_model import LIVE_COLUMNS, LIVE_ROWS, milliseconds
from app.theme import SPACING
from app.widgets import label

TOOLTIPS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first: (E2EL − TTFT) / (output tokens − 1)",
    "itl": "Inter-token latency: the gap between two tokens",
    "e2el": "End-to-end latency: to the last token",
}
RESULT_COLUMNS = 2
"""Name-and-figure pairs side by side."""


def _figure(text: str = "") -> QLabel:
    result = label(text, "number")
    result.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
    return result


class PercentileGrid(QWidget):
    """TTFT, TPOT, ITL and E2EL against mean and percentiles; ``n/a`` where there is no sample."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(SPACING + 4)
        grid.setVerticalSpacing(SPACING // 2)
        self.cells: dict[str, QLabel] = {}
        for column, name in enumerate(LIVE_COLUMNS, start=1):
            head = label(name, "muted")
            head.setAlignment(Qt.AlignmentFlag.AlignRight)
            grid.addWidget(head, 0, column)
            grid.setColumnStretch(column, 1)
        for row, (name, key) in enumerate(LIVE_ROWS, start=1):
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
    """Names and figures in pairs of columns."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(SPACING + 4)
        self._grid.setVerticalSpacing(SPACING // 2)
        self.figures: dict[str, QLabel] = {}

    def show_rows(self, rows: list[tuple[str, str]]) -> None:
        if list(self.figures) != [name for name, _ in rows]:
            self._lay_out([name for name, _ in rows])
        for name, text in rows:
            self.figures[name].setText(text)

    def _lay_out(self, names: list[str]) -> None:
        while (item := self._grid.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        self.figures.clear()
        lines = -(-len(names) // RESULT_COLUMNS)
        for index, name in enumerate(names):
            column, row = divmod(index, lines)
            figure = _figure()
            figure.setAccessibleName(name)
            self.figures[name] = figure
            # Three columns a pair: name, figure, and room before the next name.
            self._grid.addWidget(label(name, "muted"), row, column * 3)
            self._grid.addWidget(figure, row, column * 3 + 1)
            self._grid.setColumnStretch(column * 3 + 1, 1)
            self._grid.setColumnMinimumWidth(column * 3 + 2, SPACING if column + 1 < RESULT_COLUMNS else 0)
