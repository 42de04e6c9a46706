"""The decisions of the shown step as sentences, and below them what is known of the selected request."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QModelIndex, QObject, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QPlainTextEdit, QSizePolicy, QVBoxLayout, QWidget

from app.scope.decision_words import Decision, decisions
from app.scope.panel import START_SOMETHING, ScopePanel, ScopeSource
from app.scope.request_words import find_request, request_figures, request_status
from app.scope.tables import ROOT, ColumnModel, Index, TopDelegate, WrappedRows, make_table, stacked
from app.selection import Selection
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import label
from app.words import seconds_label
from engine.request import request_name

_DOT, _TEXT = 0, 1
DOT_PIXELS = 22
PAIR_PIXELS = 170
"""A name and its figure, beside each other."""
TEXT_LINES = 4
"""Of a prompt or an answer, before it scrolls."""
MOST_CHARACTERS = 4_000
"""Of a text; what is longer is cut in the middle."""


class DecisionsModel(ColumnModel):
    """A sentence a row, with the dot of the request that it is about."""

    def __init__(self, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(theme, ("", tr("decision")), ("", tr("What the step decided")), parent)
        self.rows: list[Decision] = []

    def show_rows(self, rows: list[Decision]) -> None:
        if rows == self.rows:
            return
        self.beginResetModel()
        self.rows = rows
        self.endResetModel()

    def rowCount(self, parent: Index = ROOT) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        row, column = self.rows[index.row()], index.column()
        if role == Qt.ItemDataRole.DisplayRole:
            return row.text if column == _TEXT else ""
        if role in (Qt.ItemDataRole.ToolTipRole, Qt.ItemDataRole.AccessibleTextRole):
            return row.text
        if role == Qt.ItemDataRole.DecorationRole and column == _DOT:
            return self._picture(row)
        return None

    def _picture(self, row: Decision) -> Any:
        if row.look in ("preempted", "swapped"):
            return self._swatches.state(row.look)
        return self._swatches.request(row.requests[0]) if len(row.requests) == 1 else None


class DecisionsPanel(ScopePanel):
    """A click on a sentence selects whom it is about; of several, one after the other."""

    empty_text = tr(
        "What a step decides is listed here in sentences: who joins, waits and yields, and why. {start_something}, "
        "and pause it to read one step after the other.",
        start_something=START_SOMETHING,
    )
    refresh_seconds = 0.2

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.model = DecisionsModel(theme)
        self.table = make_table(tr("Decisions of the step"))
        self.details = RequestDetails(source)
        super().__init__(tr("Decisions"), source, theme, selection, stacked(self.table, self.details), parent)
        self.model.setParent(self)
        table = self.table
        table.setModel(self.model)
        table.horizontalHeader().hide()
        table.setColumnWidth(_DOT, DOT_PIXELS)
        table.setWordWrap(True)
        table.setItemDelegate(TopDelegate(table))
        # Whether the bar is there must not depend on the rows, whose heights depend on the room beside it.
        table.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOn)
        self._wrapped = WrappedRows(table, _TEXT)
        table.resized.connect(self._fit)
        table.verticalScrollBar().valueChanged.connect(self._fit)
        table.clicked.connect(self._choose)
        table.activated.connect(self._choose)
        self._step = self.add_figure()
        self._shown_step = -1

    def has_content(self) -> bool:
        return self.source.state.last_record is not None

    def refresh(self) -> None:
        state = self.source.state
        record = state.last_record
        if record is None:
            return
        self.model.show_rows(decisions(state, self.source.block_bytes))
        if record.step != self._shown_step:
            self._shown_step = record.step
            self.table.scrollToTop()
        self._fit()
        self._follow_selection()
        self._step.say(tr("step {step:,} · {total}", step=record.step, total=seconds_label(record.timings.total)))
        self.details.show_request(self.selection.request_id)

    def _fit(self) -> None:
        self._wrapped.fit([row.text for row in self.model.rows])

    def _follow_selection(self) -> None:
        """The first sentence about the selected request, unless the current one is about it too."""
        chosen, current = self.selection.request_id, self.table.currentIndex()
        rows = self.model.rows
        if current.isValid() and (chosen in rows[current.row()].requests or not rows[current.row()].requests):
            return
        place = next((i for i, row in enumerate(rows) if chosen in row.requests), None)
        self.table.setCurrentIndex(QModelIndex() if place is None else self.model.index(place, _TEXT))

    def _choose(self, index: QModelIndex) -> None:
        requests = self.model.rows[index.row()].requests
        chosen = self.selection.request_id
        if chosen in requests:
            self.selection.select(requests[(requests.index(chosen) + 1) % len(requests)])
        elif requests:
            self.selection.select(requests[0])


class RequestDetails(QWidget):
    """The figures of a request at the shown step and, where a recording has them, its texts."""

    def __init__(self, source: ScopeSource, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._source = source
        self._title = label("", "title")
        self._missing = label(tr("It is not in this step: it comes later, or ended too long ago to be kept."), "muted")
        self._missing.setWordWrap(True)
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(SPACING)
        self._grid.setVerticalSpacing(2)
        self._pairs: list[tuple[QLabel, QLabel]] = []
        self._columns = 0
        self.texts = _text_pane(tr("Prompt and answer of the selected request"))
        column = QVBoxLayout(self)
        column.setContentsMargins(0, SPACING // 2, 0, 0)
        column.setSpacing(SPACING // 2)
        column.addWidget(self._title)
        column.addWidget(self._missing)
        column.addLayout(self._grid)
        column.addWidget(self.texts)
        self.setAccessibleName(tr("Details of the selected request"))
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.hide()

    def show_request(self, request_id: int | None) -> None:
        self.setVisible(request_id is not None)
        if request_id is None:
            return
        source = self._source
        request = find_request(source.state, request_id)
        state = f": {request_status(source.state, request)}" if request is not None else ""
        self._title.setText(tr("Request {request_name}{state}", request_name=request_name(request_id), state=state))
        self._missing.setVisible(request is None)
        lanes = source.history.lanes
        figures = request_figures(request, source.now, lanes.begin) if request is not None else []
        self._show_figures(figures)
        self.setAccessibleDescription(", ".join(f"{name} {figure}" for name, figure in figures))
        self._show_texts(request_id)

    def _show_figures(self, figures: list[tuple[str, str]]) -> None:
        while len(self._pairs) < len(figures):
            pair = (label("", "muted"), label(""))
            pair[1].setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
            self._pairs.append(pair)
            self._columns = 0
        self._place_pairs()
        for place, (name, figure) in enumerate(self._pairs):
            shown = place < len(figures)
            name.setVisible(shown)
            figure.setVisible(shown)
            if shown:
                name.setText(figures[place][0])
                figure.setText(figures[place][1])
                figure.setToolTip(figures[place][1])

    def _place_pairs(self) -> None:
        """As many beside each other as there is room for."""
        columns = max(1, self.width() // PAIR_PIXELS)
        if columns == self._columns:
            return
        self._columns = columns
        for place, (name, figure) in enumerate(self._pairs):
            row, column = divmod(place, columns)
            self._grid.addWidget(name, row, 2 * column)
            self._grid.addWidget(figure, row, 2 * column + 1)
        for column in range(self._grid.columnCount()):
            self._grid.setColumnStretch(column, column % 2 if column < 2 * columns else 0)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._place_pairs()

    def _show_texts(self, request_id: int) -> None:
        texts_of = self._source.texts
        texts = texts_of(request_id) if texts_of is not None else None
        self.texts.setVisible(bool(texts) and any(texts))
        if texts:
            shown = "\n\n".join(
                f"{who}: {_cut(text)}" for who, text in zip((tr("Prompt"), tr("Answer")), texts, strict=True) if text
            )
            if shown != self.texts.toPlainText():
                self.texts.setPlainText(shown)


def _text_pane(name: str) -> QPlainTextEdit:
    pane = QPlainTextEdit()
    pane.setReadOnly(True)
    pane.setTabChangesFocus(True)
    pane.setAccessibleName(name)
    pane.setMaximumHeight(pane.fontMetrics().lineSpacing() * 2 * TEXT_LINES)
    pane.hide()
    return pane


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return tr(
        "{begin}\n… {more:,} characters …\n{end}",
        begin=text[:half],
        more=len(text) - MOST_CHARACTERS,
        end=text[-half:],
    )
