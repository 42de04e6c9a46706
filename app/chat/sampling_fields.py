"""The fields in which a chat's sampling is set.

Whatever is typed is checked by :class:`engine.request.SamplingParams` itself; its sentence is shown under the fields,
and the last good values stay in force until the mistake is mended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from PySide6.QtCore import Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app.chat.conversation import DEFAULT_CHAT_PARAMS
from app.theme import SPACING
from app.translation import mark, tr
from app.widgets import label
from engine.request import RequestError, SamplingParams

WIDE_PX = 420
WIDE_COLUMNS, NARROW_COLUMNS = 3, 2
"""Columns of fields where there are at least ``WIDE_PX``, and where not."""


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    """Of :class:`SamplingParams`."""
    title: str
    kind: type
    tip: str
    optional: bool = False
    """An empty field means None."""


FIELDS = (
    Field("temperature", mark("Temperature"), float, mark("0: always the likeliest token; higher: more surprising")),
    Field(
        "top_p", mark("Top-p"), float, mark("Choose among the likeliest tokens that together reach this probability")
    ),
    Field("top_k", mark("Top-k"), int, mark("Choose among the k likeliest tokens; 0: all")),
    Field("min_p", mark("Min-p"), float, mark("Drop tokens less likely than this share of the likeliest")),
    Field(
        "repetition_penalty",
        mark("Repetition penalty"),
        float,
        mark("Above 1: tokens seen before become less likely"),
    ),
    Field(
        "presence_penalty",
        mark("Presence penalty"),
        float,
        mark("Above 0: tokens already in the answer become less likely"),
    ),
    Field("frequency_penalty", mark("Frequency penalty"), float, mark("The same, times how often they occurred")),
    Field("seed", mark("Seed"), int, mark("Same seed, same answer; empty: a new one each time"), optional=True),
    Field(
        "max_tokens",
        mark("Max tokens"),
        int,
        mark("Longest answer; empty: as long as the program gives an answer by itself"),
        optional=True,
    ),
)


class SamplingFields(QWidget):
    changed = Signal()
    """``params`` are others, or what is typed is no value any more."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.params = DEFAULT_CHAT_PARAMS
        """The last good ones."""
        self._filling = False
        self.edits: dict[str, QLineEdit] = {}
        self._titles: dict[str, QLabel] = {}
        self._columns = 0
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(SPACING)
        self._grid.setVerticalSpacing(2)
        self._make_fields()
        self._arrange(NARROW_COLUMNS)
        self.stop = QPlainTextEdit()
        self.stop.setPlaceholderText(tr("Stop strings, one a line; \\n stands for a line end"))
        self.stop.setAccessibleName(tr("Stop strings"))
        self.stop.setTabChangesFocus(True)
        self.stop.setFixedHeight(46)
        self.stop.textChanged.connect(self._edited)
        self.error = label("", "error")
        self.error.setWordWrap(True)
        self.error.hide()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING)
        column.addLayout(self._grid)
        column.addWidget(self.stop)
        column.addWidget(self.error)

    def _make_fields(self) -> None:
        for each in FIELDS:
            edit = QLineEdit()
            edit.setAccessibleName(tr(each.title))
            edit.setToolTip(tr(each.tip))
            edit.textEdited.connect(self._edited)
            title = label(tr(each.title), "muted")
            title.setBuddy(edit)
            self.edits[each.name] = edit
            self._titles[each.name] = title

    def _arrange(self, columns: int) -> None:
        if columns == self._columns:
            return
        self._columns = columns
        for index, each in enumerate(FIELDS):
            row, column = divmod(index, columns)
            for widget, line in ((self._titles[each.name], 2 * row), (self.edits[each.name], 2 * row + 1)):
                self._grid.removeWidget(widget)
                self._grid.addWidget(widget, line, column)
        for column in range(max(WIDE_COLUMNS, columns)):
            self._grid.setColumnStretch(column, 1 if column < columns else 0)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange(WIDE_COLUMNS if event.size().width() >= WIDE_PX else NARROW_COLUMNS)

    def fill(self, params: SamplingParams) -> None:
        """Shows these values, without telling."""
        self._filling = True
        self.params = params
        for each in FIELDS:
            value = getattr(params, each.name)
            self.edits[each.name].setText("" if value is None else str(value).removesuffix(".0"))
        self.stop.setPlainText("\n".join(text.replace("\n", "\\n") for text in params.stop))
        self._filling = False
        self._say("")

    def _edited(self) -> None:
        if self._filling:
            return
        try:
            self.params = self._read()
            self._say("")
        except RequestError as error:
            self._say(tr("{error}. The chat goes on with the values before.", error=error))
        self.changed.emit()

    def _read(self) -> SamplingParams:
        values: dict[str, Any] = {each.name: _parse(each, self.edits[each.name].text()) for each in FIELDS}
        lines = self.stop.toPlainText().split("\n")
        values["stop"] = tuple(line.replace("\\n", "\n") for line in lines if line)
        return replace(self.params, **values)

    def _say(self, sentence: str) -> None:
        self.error.setText(sentence)
        self.error.setVisible(bool(sentence))


_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")


def _parse(field: Field, text: str) -> float | int | None:
    text = text.strip()
    if not text and field.optional:
        return None
    try:
        if field.kind is int:
            return int(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
        return float(text.replace(",", "."))
    except ValueError:
        if field.kind is int:
            sentence = tr("{name} is {text!r}; it must be a whole number", name=field.name, text=text)
        else:
            sentence = tr("{name} is {text!r}; it must be a number", name=field.name, text=text)
        raise RequestError(sentence) from None
