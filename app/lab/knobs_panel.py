"""The scheduler's knobs, turned while it runs, and what the last turn did."""

from __future__ import annotations

from typing import Any

from PySide6.QtCore import QSignalBlocker, Qt, Signal
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QGridLayout, QLabel, QLineEdit, QSizePolicy, QVBoxLayout, QWidget

from app.knob_words import MEANINGS, UNSET, meaning, value_text
from app.lab.before_after import BeforeAfter, before_after
from app.lab.choice import Choice
from app.lab.knobs import KNOBS, OFF, ON, Knob, Knobs, field_text, nudged, parse, with_value
from app.scope.figure_table import FigureRow, FigureTable
from app.scope.panel import ScopePanel, ScopeSource
from app.scroll_column import ScrollColumn
from app.selection import Selection
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import button, label, set_role
from app.words import seconds_label
from engine.config import ConfigError, SchedulerConfig


class NumberField(QLineEdit):
    """A number, or nothing. Enter applies it, Esc takes it back, the up and down keys go to the next one."""

    nudge = Signal(bool)
    """Upwards or downwards."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.setAccessibleName(name)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setMinimumWidth(64)
        self._shown = ""

    def show_text(self, text: str) -> None:
        """Replaces what stands there, unless the user is typing."""
        if text != self._shown or not self.hasFocus():
            self._shown = text
            if self.text() != text:
                self.setText(text)

    @property
    def is_typed(self) -> bool:
        return self.text().strip() != self._shown

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape and self.is_typed:
            self.setText(self._shown)
        elif event.key() in (Qt.Key.Key_Up, Qt.Key.Key_Down):
            self.nudge.emit(event.key() == Qt.Key.Key_Up)
        else:
            super().keyPressEvent(event)


class KnobRow(QWidget):
    """A knob's name and field, and a line below them that says what is wrong or still to come."""

    chosen = Signal(object)
    """The knob's new value."""
    refused = Signal(str)

    def __init__(self, knob: Knob, theme: Theme) -> None:
        super().__init__()
        self.knob = knob
        name = label(knob.name, "muted")
        name.setMinimumWidth(96)
        self.field: Choice | NumberField
        if knob.kind in ("whole", "decimal"):
            self.field = NumberField(knob.name)
        else:
            self.field = Choice(knob.name, theme)
            self.field.setMinimumContentsLength(6)
        self.hint = label("", "muted")
        self.hint.setWordWrap(True)
        self.hint.hide()
        self._value: Any = None
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setSpacing(SPACING // 2)
        grid.addWidget(name, 0, 0)
        grid.addWidget(self.field, 0, 1)
        grid.addWidget(self.hint, 1, 0, 1, 2)
        grid.setColumnStretch(1, 1)
        for widget in (name, self.field):
            widget.setToolTip(knob.tip)
        if isinstance(self.field, NumberField):
            self.field.editingFinished.connect(self._typed)
            self.field.nudge.connect(lambda up: self.chosen.emit(nudged(knob, self._value, up)))
        else:
            self.field.activated.connect(self._picked)

    def show_value(self, value: Any, in_force: str, unset: str, values: tuple[str, ...]) -> None:
        """in_force: what the hint says of a value that is to change. unset: what an empty field stands for."""
        self._value = value
        if isinstance(self.field, NumberField):
            self.field.setPlaceholderText(unset)
            self.field.show_text(field_text(self.knob, value))
        else:
            self._show_choice(value_text(self.knob.field, value), values)
        if self.hint.property("role") != "error" or in_force:
            self.say(in_force)

    def _show_choice(self, text: str, values: tuple[str, ...]) -> None:
        with QSignalBlocker(self.field):
            if [self.field.itemText(i) for i in range(self.field.count())] != list(values):
                self.field.clear()
                for value in values:
                    self.field.addItem(value)
                    if self.knob.field in MEANINGS:
                        tip = meaning(self.knob.field, value)
                        self.field.setItemData(self.field.count() - 1, tip, Qt.ItemDataRole.ToolTipRole)
            self.field.setCurrentText(text)

    def say(self, text: str, *, is_error: bool = False) -> None:
        set_role(self.hint, "error" if is_error else "muted")
        self.hint.setText(text)
        self.hint.setVisible(bool(text))
        self.field.setAccessibleDescription(text)

    def _typed(self) -> None:
        if not self.field.is_typed:
            if self.hint.property("role") == "error":
                self.say("")
            return
        try:
            value = parse(self.knob, self.field.text())
        except ConfigError as error:
            self.refused.emit(str(error))
        else:
            self.chosen.emit(value)

    def _picked(self, _index: int) -> None:
        text = self.field.currentText()
        self.chosen.emit(text == ON if self.knob.kind == "switch" else text)


class KnobsPanel(ScopePanel):
    """The knobs of the engine that runs. Whoever owns the engine connects :attr:`wanted`, and calls :meth:`show_anew`
    when what is asked of it has changed elsewhere."""

    refresh_seconds = 0.5
    wanted = Signal(object)
    """A :class:`SchedulerConfig` that the user asks for."""

    def __init__(self, source: ScopeSource, theme: Theme, parent: QWidget | None = None) -> None:
        content = QWidget()
        super().__init__(tr("Knobs"), source, theme, Selection(), ScrollColumn(content), parent)
        self.knobs = Knobs(source)
        self.rows = {knob.field: KnobRow(knob, theme) for knob in KNOBS}
        self.note = label("", "muted")
        self.note.setWordWrap(True)
        self.back = button(tr("Back"))
        self.heading = label("", "title")
        self.heading.setWordWrap(True)
        self.lengths = label("", "muted")
        self.lengths.setWordWrap(True)
        self.table = FigureTable(tr("Before and after the change"), theme, ("before", "after", "ratio"))
        self._turned = ""
        self._in_force: SchedulerConfig | None = None
        self._lay_out(content)
        for row in self.rows.values():
            row.chosen.connect(lambda value, row=row: self._choose(row, value))
            row.refused.connect(lambda message, row=row: row.say(f"{message.rstrip('.')}.", is_error=True))
        self.back.clicked.connect(self._go_back)

    def _lay_out(self, content: QWidget) -> None:
        column = QVBoxLayout(content)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING)
        widgets: list[QWidget | QLabel] = [self.note, *self.rows.values(), self.back]
        for widget in (*widgets, self.heading, self.lengths, self.table):
            column.addWidget(widget)
        column.addStretch(1)

    def has_content(self) -> bool:
        return True

    def run_moved(self, *, at_once: bool = False, postponed: bool = False) -> None:
        if self.knobs.in_force != self._in_force:
            self.show_anew()  # what was asked is in force: that is not to wait
        else:
            super().run_moved(at_once=at_once, postponed=postponed)

    def refused(self, message: str) -> None:
        """The engine did not take what was asked last; its sentence stands where that was."""
        row = self.rows.get(self._turned)
        if row is not None:
            row.say(f"{message.rstrip('.')}.", is_error=True)
        self.show_anew()

    # Turning -----------------------------------------------------------------------------------------------------

    def _choose(self, row: KnobRow, value: Any) -> None:
        try:
            config = with_value(self.knobs.asked, row.knob, value)
        except ConfigError as error:
            row.say(f"{str(error).rstrip('.')}.", is_error=True)
            return
        row.say("")
        self._ask(config, row.knob.field)

    def _go_back(self) -> None:
        undo = self.knobs.undo()
        if undo is not None:
            self._ask(undo.config, "")

    def _ask(self, config: SchedulerConfig, field: str) -> None:
        if config != self.knobs.asked:
            self._turned = field
            self.wanted.emit(config)
        self.show_anew()

    # Showing -----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        knobs, source = self.knobs, self.source
        self._in_force = knobs.in_force
        asked, alive = knobs.asked, knobs.can_change
        for row in self.rows.values():
            row.setVisible(row.knob.shown(asked))
            row.field.setEnabled(alive)
            pending = knobs.pending_text(row.knob) if alive else ""
            row.show_value(getattr(asked, row.knob.field), pending, self._unset(row.knob), self._values(row.knob))
        self._say_note(alive)
        undo = knobs.undo() if alive else None
        self.back.setVisible(undo is not None)
        if undo is not None:
            self.back.setText(undo.text)
            self.back.setAccessibleName(undo.text)
        self._show_table(before_after(source.history, source.now))

    def _say_note(self, alive: bool) -> None:
        text = ""
        if self.source.moment is not None:
            text = tr("As it was at step {step:,}. Go back to now to change it.", step=self.source.moment.step)
        elif not alive:
            text = tr("No engine runs. These are the knobs with which the next one starts.")
        self.note.setText(text)
        self.note.setVisible(bool(text))

    def _values(self, knob: Knob) -> tuple[str, ...]:
        if knob.kind == "switch":
            return ON, OFF
        return self.knobs.drafters() if knob.field == "speculative" else knob.values

    def _unset(self, knob: Knob) -> str:
        text = UNSET.get(knob.field, "")
        budget = self.source.state.token_budget
        return f"{text}: {budget:,}" if knob.field == "max_num_batched_tokens" and budget else text

    def _show_table(self, found: BeforeAfter | None) -> None:
        for widget in (self.heading, self.lengths, self.table):
            widget.setVisible(found is not None)
        if found is None:
            return
        self.heading.setText(found.change.label)
        self.lengths.setText(_lengths(found))
        self.table.setVisible(found.length > 0)
        self.table.show_rows(
            [FigureRow(line.name, (line.before, line.after, line.ratio_text), tip=line.tip) for line in found.lines]
        )


def _lengths(found: BeforeAfter) -> str:
    if found.length <= 0:
        return tr(
            "Since step {step:,}. The figures come with the next steps, if any were before.", step=found.change.step
        )
    return tr(
        "Since step {step:,}: {length} before and after it", step=found.change.step, length=seconds_label(found.length)
    )
