"""The scheduler's knobs in the top bar: what is in force, and menus to change it while the engine runs."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QAction, QActionGroup
from PySide6.QtWidgets import QHBoxLayout, QMenu, QToolButton, QWidget

from app.theme import SPACING
from engine.config import DISCIPLINES, ORDERS, PREEMPTIONS, SchedulerConfig
from engine.run_state import RunState

KNOBS: dict[str, tuple[str, tuple[str, ...]]] = {
    "discipline": ("Discipline: who joins the batch, and when", DISCIPLINES),
    "order": ("Order of the waiting queue", ORDERS),
    "preemption": ("Preemption: what happens to a request whose memory is taken", PREEMPTIONS),
}
"""Field of :class:`SchedulerConfig` -> what it is, and its values."""
MEANINGS: dict[str, dict[str, str]] = {
    "discipline": {
        "static": "a batch joins and leaves together, padded to its longest; rows that are over run on",
        "orca": "joins at every step, whole prompts; memory is reserved up to max_tokens",
        "vllm": "joins at every step, prompts in chunks; memory block by block, the last in line is preempted",
        "tgi": "the waiting join once they are many enough; their prefill pauses decoding",
        "trtllm-no-evict": "joins once the memory for its whole answer is sure; nobody is preempted",
        "trtllm-max-util": "as many join as fit now; the newest is paused when memory is gone",
    },
    "order": {
        "fcfs": "first come, first served",
        "priority": "the lower number first; waiting counts where ageing is set",
        "fair": "first the user who was served least, by weight",
    },
    "preemption": {
        "recompute": "its blocks are freed, its tokens computed again",
        "swap": "its blocks move to host memory and back",
        "auto": "whichever of the two is estimated to take less time",
    },
}
"""In a few words, as far as there are any: a discipline is a file, and its name alone will do."""


def meaning(knob: str, value: str) -> str:
    """``name: what it does``, or the name alone."""
    words = MEANINGS[knob].get(value)
    return f"{value}: {words}" if words else value


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
        self.setAccessibleName(knob.capitalize())

    def show_value(self, value: str, pending: str = "") -> None:
        """``pending``: the value that takes over when the batch has drained."""
        if (value, pending) == (self._value, self._pending):
            return
        self._value, self._pending = value, pending
        self.setText(f"{value} → {pending} ▾" if pending else f"{value} ▾")
        lines = [self._title, meaning(self.knob, value)]
        if pending:
            lines.append(f"then {meaning(self.knob, pending)}, when the batch has drained")
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
