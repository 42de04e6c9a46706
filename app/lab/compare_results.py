"""The results of the session: one is shown, the others can be chosen again; saving, opening, the report in HTML."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.lab.choice import Choice
from app.lab.compare_result import ComparedResult
from app.lab.compare_view import CompareView
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import EmptyState, button
from app.words import count
from engine.compare_html import html_report
from engine.comparison import ComparisonError, Run, load_comparison, read_comparison
from engine.output_files import OutputFailure, write_target

KEPT = 12
KEPT_BYTES = 64 * 2**20
"""Results that can be shown again, as JSON, and all of them together; the oldest go first, the newest stays."""
EMPTY = tr(
    "Compare disciplines on one workload: tick two or more, press Compare, and see their timelines on one axis, "
    "their figures and how far they are apart. Or open a result that was saved; it can be dropped here, too."
)
JSON_FILES, HTML_FILES = tr("Comparisons (*.json);;All files (*)"), tr("HTML (*.html)")


class CompareResults(QWidget):
    said = Signal(str, bool)
    """What became of a file, a sentence; whether that is a fault."""
    opened = Signal()
    """A saved result is shown."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.kept: list[bytes] = []
        """Newest first, as JSON: some ten times smaller than what is made of it."""
        self._rates: dict[str, float] = {}
        """Tokens per second of the newest result of each model, the mean of its runs."""
        self.recent = Choice(tr("Results of this session"), theme)
        self.recent.currentIndexChanged.connect(self._recent_chosen)
        self.open_button = button(tr("Open…"), accessible=tr("Open a saved result"))
        self.open_button.clicked.connect(self._ask_open)
        self.view = CompareView(theme)
        self.view.save.connect(self._ask_save)
        self.view.report.connect(self._ask_report)
        self.view.copied.connect(lambda: self.said.emit(tr("The table is on the clipboard."), False))
        row = QHBoxLayout()
        row.setSpacing(SPACING)
        row.addWidget(self.recent, 1)
        row.addStretch()
        row.addWidget(self.open_button)
        self.empty = EmptyState(EMPTY)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING)
        column.addLayout(row)
        column.addWidget(self.empty, 1)
        column.addWidget(self.view, 1)
        self.recent.hide()
        self.view.hide()

    @property
    def result(self) -> ComparedResult | None:
        """The one that is shown."""
        return self.view.result

    def tokens_per_second(self, model: str) -> float | None:
        """How many tokens a second, prompt and output, the newest result of this model computed; None: not known."""
        return self._rates.get(model)

    # Results -----------------------------------------------------------------------------------------------------

    def add(self, result: ComparedResult, name: str = "") -> None:
        """Show a result, and keep it for the session."""
        title = name or f"{result.title} · {datetime.now():%H:%M}"
        self.kept.insert(0, msgspec.json.encode(result.plain))
        blocked = self.recent.blockSignals(True)
        self.recent.insertItem(0, f"{title} · {count(len(result.variants), 'variant')}")
        while len(self.kept) > 1 and (len(self.kept) > KEPT or sum(map(len, self.kept)) > KEPT_BYTES):
            self.kept.pop()
            self.recent.removeItem(len(self.kept))
        self.recent.setCurrentIndex(0)
        self.recent.blockSignals(blocked)
        rates = [rate for run in result.own_runs if (rate := run["total_token_throughput"])]
        if rates:
            self._rates[result.own_runs[0]["model_id"]] = sum(rates) / len(rates)
        self._show(result)

    def add_bytes(self, data: bytes, recorded: Run | None = None) -> ComparedResult:
        """The result as the engine sends it, with the recorded run beside it where there is one.

        Raises ValueError with a sentence.
        """
        result = ComparedResult(read_comparison(data))
        if recorded is not None:
            result = result.with_recorded(recorded)
        self.add(result)
        return result

    def _recent_chosen(self, index: int) -> None:
        if 0 <= index < len(self.kept):
            self._show(ComparedResult(msgspec.json.decode(self.kept[index])))

    def _show(self, result: ComparedResult) -> None:
        self.view.show_result(result)
        self.empty.hide()
        self.view.show()
        self.recent.setVisible(len(self.kept) > 1)

    # Files -------------------------------------------------------------------------------------------------------

    def open(self, path: str) -> bool:
        """Show a saved result; says why where it cannot be read."""
        try:
            result = ComparedResult(load_comparison(path))
        except ComparisonError as error:
            self.said.emit(f"{error}", True)
            return False
        self.add(result, Path(path).name)
        self.said.emit(tr("{name} is open.", name=Path(path).name), False)
        self.opened.emit()
        return True

    def save(self, path: str) -> None:
        """Write the result as ``compare --json`` does."""
        if self.result is not None:
            self._write(path, _json(self.result.plain))

    def save_report(self, path: str) -> None:
        """Write the report as ``compare --html`` does."""
        if self.result is not None:
            self._write(path, html_report(self.result.reported))

    def _write(self, path: str, text: str) -> None:
        try:
            write_target(tr("The result"), path, text)
        except OutputFailure as failure:
            self.said.emit(f"{failure}.", True)
        else:
            self.said.emit(tr("{name} is written.", name=Path(path).name), False)

    def _ask_open(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, tr("Open a saved comparison"), "", JSON_FILES)
        if path:
            self.open(path)

    def _ask_save(self) -> None:
        path, _ = QFileDialog.getSaveFileName(self, tr("Save the comparison"), "comparison.json", JSON_FILES)
        if path:
            self.save(path)

    def _ask_report(self) -> None:
        path, _ = QFileDialog.getSaveFileName(self, tr("Write a report in HTML"), "comparison.html", HTML_FILES)
        if path:
            self.save_report(path)


def _json(plain: dict[str, Any]) -> str:
    return msgspec.json.format(msgspec.json.encode(plain), indent=2).decode() + "\n"
