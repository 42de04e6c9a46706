"""The drawer of a conversation: its system prompt and how its answers are sampled.

Whatever is typed is checked by :class:`engine.request.SamplingParams` itself; its sentence is shown under the fields,
and the conversation keeps its last good values until the mistake is mended.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from app.chat.conversation import DEFAULT_CHAT_PARAMS, Conversation
from app.theme import SPACING
from app.widgets import button, label
from engine.request import RequestError, SamplingParams

HEIGHT_PX = 350
WIDE_PX = 420
WIDE_COLUMNS, NARROW_COLUMNS = 3, 2
"""Columns of fields where the drawer is at least ``WIDE_PX`` wide, and where it is not."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    """Of :class:`SamplingParams`."""
    title: str
    kind: type
    tip: str
    optional: bool = False
    """An empty field means None."""


FIELDS = (
    _Field("temperature", "Temperature", float, "0: always the likeliest token; higher: more surprising"),
    _Field("top_p", "Top-p", float, "Choose among the likeliest tokens that together reach this probability"),
    _Field("top_k", "Top-k", int, "Choose among the k likeliest tokens; 0: all"),
    _Field("min_p", "Min-p", float, "Drop tokens less likely than this share of the likeliest"),
    _Field("repetition_penalty", "Repetition penalty", float, "Above 1: tokens seen before become less likely"),
    _Field("presence_penalty", "Presence penalty", float, "Above 0: tokens already in the answer become less likely"),
    _Field("frequency_penalty", "Frequency penalty", float, "The same, times how often they occurred"),
    _Field("seed", "Seed", int, "Same seed, same answer; empty: a new one each time", optional=True),
    _Field("max_tokens", "Max tokens", int, "Longest answer; empty: as long as the context allows", optional=True),
)


class OptionsDrawer(QWidget):
    changed = Signal(str, object)
    """System prompt and :class:`SamplingParams`, both good."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._params = DEFAULT_CHAT_PARAMS
        self._filling = False
        self.system_prompt = QPlainTextEdit()
        self.system_prompt.setPlaceholderText("System prompt: how the model shall behave in this chat")
        self.system_prompt.setAccessibleName("System prompt")
        self.system_prompt.setTabChangesFocus(True)
        self.system_prompt.setFixedHeight(64)
        self.system_prompt.textChanged.connect(self._edited)
        self.edits: dict[str, QLineEdit] = {}
        self._titles: dict[str, QLabel] = {}
        self._columns = 0
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(SPACING)
        self._grid.setVerticalSpacing(2)
        self._make_fields()
        self._arrange(NARROW_COLUMNS)
        self.stop = QPlainTextEdit()
        self.stop.setPlaceholderText("Stop strings, one a line; \\n stands for a line end")
        self.stop.setAccessibleName("Stop strings")
        self.stop.setTabChangesFocus(True)
        self.stop.setFixedHeight(46)
        self.stop.textChanged.connect(self._edited)
        self.error = label("", "error")
        self.error.setWordWrap(True)
        self.error.hide()
        reset = button("Defaults", "flat", "Back to the default sampling")
        reset.clicked.connect(self._reset)
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(0, 0, SPACING, 0)
        column.setSpacing(SPACING)
        column.addWidget(self.system_prompt)
        column.addLayout(self._grid)
        column.addWidget(self.stop)
        foot = QHBoxLayout()
        foot.addWidget(self.error, 1)
        foot.addStretch(0)
        foot.addWidget(reset)
        area = QScrollArea(self)
        area.setWidgetResizable(True)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setWidget(page)
        area.viewport().setAutoFillBackground(False)
        page.setAutoFillBackground(False)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.setSpacing(SPACING // 2)
        outer.addWidget(area)
        outer.addLayout(foot)
        self.setMaximumHeight(HEIGHT_PX)

    def _make_fields(self) -> None:
        for each in FIELDS:
            edit = QLineEdit()
            edit.setAccessibleName(each.title)
            edit.setToolTip(each.tip)
            edit.textEdited.connect(self._edited)
            title = label(each.title, "muted")
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

    def show_conversation(self, conversation: Conversation) -> None:
        self.setEnabled(not conversation.damage)
        self._fill(conversation.system_prompt, conversation.params)

    def _fill(self, system_prompt: str, params: SamplingParams) -> None:
        self._filling = True
        self._params = params
        self.system_prompt.setPlainText(system_prompt)
        for each in FIELDS:
            value = getattr(params, each.name)
            self.edits[each.name].setText("" if value is None else str(value).removesuffix(".0"))
        self.stop.setPlainText("\n".join(text.replace("\n", "\\n") for text in params.stop))
        self._filling = False
        self._say("")

    def _reset(self) -> None:
        self._fill(self.system_prompt.toPlainText(), DEFAULT_CHAT_PARAMS)
        self._edited()

    def _edited(self) -> None:
        if self._filling:
            return
        try:
            self._params = self._read()
            self._say("")
        except RequestError as error:
            self._say(f"{error}. The chat goes on with the values before.")
        # A bad number must not cost the system prompt that is written beside it.
        self.changed.emit(self.system_prompt.toPlainText(), self._params)

    def _read(self) -> SamplingParams:
        values: dict[str, Any] = {each.name: _parse(each, self.edits[each.name].text()) for each in FIELDS}
        lines = self.stop.toPlainText().split("\n")
        values["stop"] = tuple(line.replace("\\n", "\n") for line in lines if line)
        return replace(self._params, **values)

    def _say(self, sentence: str) -> None:
        self.error.setText(sentence)
        self.error.setVisible(bool(sentence))


_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")


def _parse(field: _Field, text: str) -> float | int | None:
    text = text.strip()
    if not text and field.optional:
        return None
    try:
        if field.kind is int:
            return int(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
        return float(text.replace(",", "."))
    except ValueError:
        wanted = "a whole number" if field.kind is int else "a number"
        raise RequestError(f"{field.name} is {text!r}; it must be {wanted}") from None
