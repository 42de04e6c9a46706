"""The timeline: a lane per request over time, live at the right edge. Wheel zooms, dragging moves, a click selects."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QHBoxLayout, QScrollBar, QWidget

from app.scope.choices import MenuChoice
from app.scope.lane_painter import legend_entries
from app.scope.panel import ScopePanel, ScopeSource
from app.scope.timeline_plot import GROUPINGS, TimelinePlot
from app.selection import Selection
from app.theme import Theme
from app.translation import tr
from app.widgets import Legend, button


class TimelinePanel(ScopePanel):
    refresh_seconds = 0.12
    empty_text = tr("Each request becomes a lane here: waiting, prefill, decode, and where it was preempted.")
    moment_wanted = Signal(float)
    """A moment that is to be shown everywhere, engine clock."""

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        content = QWidget()
        scroll = QScrollBar(Qt.Orientation.Vertical)
        scroll.hide()
        self.plot = TimelinePlot(source, theme, selection, scroll)
        row = QHBoxLayout(content)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        row.addWidget(self.plot, 1)
        row.addWidget(scroll)
        super().__init__(tr("Timeline"), source, theme, selection, content, parent)
        self._legend = Legend(theme, legend_entries(set(), drafted=False))
        self.add_trailing(self._legend)
        self._step = self.add_figure()
        self.grouping = MenuChoice(tr("Group lanes"), tr("Group the lanes by user or priority (G); F folds a group"))
        self.grouping.set_options(GROUPINGS)
        self.grouping.chosen.connect(lambda: self.plot.group(self.grouping.value))
        self.add_trailing(self.grouping)
        self.live_button = button(tr("Live"), "flat", tr("Follow the newest step"))
        self.live_button.clicked.connect(self.plot.follow)
        self.live_button.hide()
        self.add_trailing(self.live_button)
        self.plot.moved.connect(self._moved)
        self.plot.grouped.connect(lambda: self.grouping.set_value(self.plot.grouping))
        self.plot.moment_wanted.connect(self.moment_wanted)

    def has_content(self) -> bool:
        return len(self.source.history.lanes) > 0

    def refresh(self) -> None:
        lanes = self.source.history.lanes
        self._legend.set_entries(legend_entries(lanes.kinds_seen, lanes.drafted))
        self._step.say(tr("step {step:,}", step=self.source.state.step))
        self.plot.refresh()
        self._moved()

    def show_time(self, time: float) -> None:
        """Moves so that the moment, engine clock, is seen."""
        self.plot.show_time(time)

    def _moved(self) -> None:
        past = self.source.moment is not None
        window = self.plot.view.window()
        at_it = window.begin <= self.source.now <= window.end if past else self.plot.view.live
        self.live_button.setVisible(not (at_it and self.plot.follows_lanes))
        text, tip = (
            (tr("Shown step"), tr("Back to the shown step (End)"))
            if past
            else (tr("Live"), tr("Follow the newest step (End)"))
        )
        if self.live_button.text() != text:
            self.live_button.setText(text)
            self.live_button.setToolTip(tip)
            self.live_button.setAccessibleName(tip)
