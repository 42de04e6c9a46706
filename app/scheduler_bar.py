"""The scheduler's knobs in the top bar: what is in force, and menus to change it while the engine runs."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QAction, QActionGroup
from PySide6.QtWidgets import QHBoxLayout, QMenu, QToolButton, QWidget

from app.knob_words import KNOBS, NAMES, meaning
from app.theme import SPACING
from app.translation import tr
from engine.config import SchedulerConfig
from engine.run_state import RunState


class KnobButton(QToolButton):
    """Shows the value in force; its menu has the others, each with what it does."""

    chosen = Signal(str, str)
    """Knob and value."""

    def __init__(self, knob: str) -> None:
        super().__init__()
        self.knob = knob
        self._title, values = KNOBS[knob]
        self._value = self._pending = ""
        menu = QMenu(self)
        group = QActionGroup(self)
        self.actions_by_value: dict[str, QAction] = {}
        for value in values:
            action = menu.addAction(meaning(knob, value))
            action.setCheckable(True)
            action.triggered.connect(lambda _=False, value=value: self._choose(value))
            group.addAction(action)
            self.actions_by_value[value] = action
        menu.aboutToShow.connect(lambda: menu.setActiveAction(group.checkedAction()))  # where the keys begin
        self.setMenu(menu)
        self.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self.setAccessibleName(NAMES[knob].capitalize())

    def show_value(self, value: str, pending: str = "") -> None:
        """``pending``: the value that takes over when the batch has drained."""
        if (value, pending) == (self._value, self._pending):
            return
        self._value, self._pending = value, pending
        self.setText(f"{value} → {pending} ▾" if pending else f"{value} ▾")
        lines = [self._title, meaning(self.knob, value)]
        if pending:
            lines.append(tr("then {meaning}, when the batch has drained", meaning=meaning(self.knob, pending)))
        self.setToolTip("\n".join(lines))
        self.setAccessibleDescription("; ".join(lines[1:]))
        action = self.actions_by_value.get(pending or value)
        if action is not None:
            action.setChecked(True)

    def _choose(self, value: str) -> None:
        # What is ticked is what the engine says: an answer that never comes must not look like one.
        current = self.actions_by_value.get(self._pending or self._value)
        if current is not None:
            current.setChecked(True)
        if value != (self._pending or self._value):
            self.chosen.emit(self.knob, value)


class SchedulerBar(QWidget):
    """A button for each knob. Shows what the run says, and without a run what the next engine starts with."""

    chosen = Signal(str, str)

    def __init__(self) -> None:
        super().__init__()
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACING // 2)
        self.buttons = {knob: KnobButton(knob) for knob in KNOBS}
        for each in self.buttons.values():
            each.chosen.connect(self.chosen)
            row.addWidget(each)

    def refresh(self, state: RunState, config: SchedulerConfig, *, alive: bool) -> None:
        """``alive``: whether there is an engine to be changed."""
        self.setEnabled(alive)
        for knob, each in self.buttons.items():
            value = getattr(state, knob) if alive else ""
            pending = state.pending_discipline if alive and knob == "discipline" else ""
            each.show_value(value or getattr(config, knob), pending)
