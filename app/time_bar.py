"""The bar under the docks: pause and single steps, a slider over the past, and how far back lies what is shown."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt, QTimer, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QSlider, QToolButton, QWidget

from app.scope.panel import ScopeSource
from app.scope.time_travel import TimeTravel
from app.settings.commands import Commands
from app.theme import PADDING, SPACING, Theme
from app.translation import tr
from app.widgets import Figure, button, paint_surface
from app.words import seconds_label

FEW, MANY = 1, 100
"""Steps that one key moves by."""


class TimeBar(QWidget):
    """The keys of its buttons are the window's commands; here they only stand in the tooltips."""

    pause_wanted = Signal(bool)
    step_wanted = Signal()

    def __init__(self, theme: Theme, source: ScopeSource, travel: TimeTravel, commands: Commands) -> None:
        super().__init__()
        self._commands = commands
        self._pace = (False, False)
        self.live_tip = tr("Back to the newest step")
        self._theme = theme
        self._source = source
        self._travel = travel
        self.setAccessibleName(tr("Time"))
        self.pause_button = _tool("⏸", tr("Pause"))
        self.pause_button.setCheckable(True)
        self.pause_button.clicked.connect(self.pause_wanted)
        self.step_button = _tool("⏭", tr("Step"))
        self.step_button.clicked.connect(self.step_wanted)
        self.slider = QSlider(Qt.Orientation.Horizontal)
        self.slider.setAccessibleName(tr("Step that is shown"))
        self.slider.setSingleStep(FEW)
        self.slider.setPageStep(MANY)
        self.slider.valueChanged.connect(self._slid)
        self.place = Figure("muted")
        self.live_button = button(tr("Live"), "primary", tr("Back to the newest step"))
        self.live_button.clicked.connect(travel.show_newest)
        self.row = QHBoxLayout(self)
        self.row.setContentsMargins(PADDING[0], 4, PADDING[2], 4)
        self.row.setSpacing(SPACING)
        for widget in (self.pause_button, self.step_button):
            self.row.addWidget(widget)
        self.row.addWidget(self.slider, 1)
        self.row.addWidget(self.place)
        self.row.addWidget(self.live_button)
        # While the slider is dragged, one jump a turn of the event loop, to where it is by then.
        self._jump = QTimer(self)
        self._jump.setSingleShot(True)
        self._jump.timeout.connect(lambda: self._travel.show_step(self.slider.value()))
        theme.changed.connect(self.update)
        travel.moved.connect(self.refresh)
        commands.changed.connect(self._show_keys)
        self.show_pace(alive=False, paused=False)

    def paintEvent(self, event: QPaintEvent) -> None:
        line = self._theme.line if self._travel.is_live else self._theme.accent
        paint_surface(QPainter(self), QRectF(self.rect()), self._theme.card, line)

    def show_pace(self, *, alive: bool, paused: bool) -> None:
        """``alive``: whether there is an engine, or a player, to be paused."""
        self._pace = (alive, paused)
        self.pause_button.setEnabled(alive)
        self.pause_button.setChecked(paused)
        self.pause_button.setText("▶" if paused else "⏸")
        name = tr("Run on") if paused else tr("Pause between two steps")
        self.pause_button.setAccessibleName(name)
        self.step_button.setEnabled(alive and paused)
        self._show_keys()
        self.refresh()

    def _show_keys(self) -> None:
        commands, (_, paused) = self._commands, self._pace
        self.pause_button.setToolTip(commands.hint(self.pause_button.accessibleName(), "engine.pause"))
        step = commands.hint(tr("Take one step"), "engine.step")
        first = commands.hint(tr("pause first"), "engine.pause")
        self.step_button.setToolTip(step if paused else f"{step}: {first}")
        self.live_button.setToolTip(commands.hint(self.live_tip, "time.newest"))

    def refresh(self) -> None:
        """Brings slider and words up to date; the live end moves with the run."""
        travel = self._travel
        newest = self._source.live_state.step
        self.slider.setEnabled(travel.is_possible and newest > travel.first_step)
        if not self.slider.isSliderDown():
            blocked = self.slider.blockSignals(True)
            self.slider.setRange(min(travel.first_step, newest), newest)
            self.slider.setValue(travel.shown_step)
            self.slider.blockSignals(blocked)
        if self.live_button.isHidden() != travel.is_live:
            self.live_button.setVisible(not travel.is_live)
            self.update()
        self.place.say(self._words(newest))

    def _words(self, newest: int) -> str:
        moment = self._source.moment
        if moment is None:
            return tr("step {newest:,}", newest=newest) if newest else ""
        ago = seconds_label(max(0.0, self._source.history.lanes.end - moment.time))
        return tr("step {step:,} of {newest:,} · {ago} before the newest", step=moment.step, newest=newest, ago=ago)

    def _slid(self) -> None:
        if not self._jump.isActive():
            self._jump.start(0)


def _tool(sign: str, name: str) -> QToolButton:
    result = QToolButton()
    result.setText(sign)
    result.setAccessibleName(name)
    result.setFocusPolicy(Qt.FocusPolicy.TabFocus)
    return result
