"""A tour of about three minutes through three scenarios, in the real window on the user's own engine.

Each stop says in two sentences what will be seen and where to look, runs it, and goes on when the user wants it to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QRectF, QSettings, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.docks import ArrangementName
from app.theme import PADDING, SPACING, Theme
from app.translation import tr
from app.widgets import button, label, paint_surface
from engine.config import EngineConfig
from engine.workload import load_scenario

if TYPE_CHECKING:
    from app.main_window import MainWindow

OFFERED = "tour/offered"


@dataclass(frozen=True, slots=True)
class Stop:
    title: str
    text: str
    scenario: str
    discipline: str
    arrangement: ArrangementName
    docks: tuple[str, ...]
    """Those to look at."""


STOPS = (
    Stop(
        tr("A static batch is a bus"),
        tr(
            "Three requests of different lengths ride together, and nobody gets off before the last one does. In the "
            "timeline, the crosshatched ends of the short lanes are padding: computed, and thrown away."
        ),
        "bus-and-metro",
        "static",
        "monitor",
        ("occupancy", "timeline"),
    ),
    Stop(
        tr("Continuous batching is a metro"),
        tr(
            "The same three requests, planned anew at every step. Whoever is done leaves at once: no padding, and the "
            "lanes end one after the other. The bars of the batch occupancy shrink with the riders."
        ),
        "bus-and-metro",
        "vllm",
        "monitor",
        ("occupancy", "timeline"),
    ),
    Stop(
        tr("Rush hour"),
        tr(
            "More requests arrive than this machine can serve, and one in four is urgent. In the queue each says why "
            "it waits and about how long; the urgent ones pass the others. Drag one up, and it joins sooner."
        ),
        "rush-hour",
        "vllm",
        "monitor",
        ("queue", "latency"),
    ),
    Stop(
        tr("Memory runs out"),
        tr(
            "Twelve requests in a pool that holds about four whole ones. The block map fills up, the latest gives its "
            "blocks back, and the ledger says who, for whom and at what cost. Click an entry to go to its moment."
        ),
        "kv-crunch",
        "vllm",
        "monitor",
        ("blocks", "ledger"),
    ),
)


class TourBar(QWidget):
    """Where the tour is, and the ways on, back and out."""

    next_wanted = Signal()
    back_wanted = Signal()
    again_wanted = Signal()
    end_wanted = Signal()

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.setAccessibleName(tr("Tour"))
        self.title = label("", "title")
        self.text = label("")
        self.text.setWordWrap(True)
        self.state = label("", "muted")
        self.back = button(tr("Back"), "flat")
        self.again = button(tr("Once more"), "flat", tr("Run this stop once more"))
        self.next = button(tr("Next"), "primary")
        self.end = button(tr("End the tour"), "flat")
        line = QHBoxLayout()
        line.setSpacing(SPACING)
        line.addWidget(self.title)
        line.addWidget(self.state, 1)
        for each, signal in (
            (self.back, self.back_wanted),
            (self.again, self.again_wanted),
            (self.end, self.end_wanted),
            (self.next, self.next_wanted),
        ):
            each.clicked.connect(signal)
            line.addWidget(each)
        column = QVBoxLayout(self)
        column.setContentsMargins(*PADDING)
        column.setSpacing(SPACING // 2)
        column.addLayout(line)
        column.addWidget(self.text)
        theme.changed.connect(self.update)
        self.hide()

    def show_stop(self, index: int) -> None:
        stop = STOPS[index]
        self.title.setText(tr("{number} of {stops}: {title}", number=index + 1, stops=len(STOPS), title=stop.title))
        self.text.setText(stop.text)
        self.back.setEnabled(index > 0)
        self.next.setText(tr("Next") if index + 1 < len(STOPS) else tr("Finish"))
        self.next.setAccessibleName(self.next.text())
        self.show()

    def paintEvent(self, event: QPaintEvent) -> None:
        paint_surface(QPainter(self), QRectF(self.rect()), self._theme.raised, self._theme.accent, 6)


class Tour(QObject):
    """Walks through :data:`STOPS`. Ends with the engine as it was configured before."""

    ended = Signal()

    def __init__(self, window: MainWindow, settings: QSettings | None) -> None:
        super().__init__(window)
        self._window = window
        self._settings = settings
        self.index: int | None = None
        """The stop; None while there is no tour."""
        self._before: EngineConfig | None = None
        self._due = False
        """The stop's load starts as soon as the engine is ready for it."""
        self._restarting = False
        self.bar = TourBar(window.theme)
        self.bar.next_wanted.connect(lambda: self._go(1))
        self.bar.back_wanted.connect(lambda: self._go(-1))
        self.bar.again_wanted.connect(lambda: self._go(0))
        self.bar.end_wanted.connect(self.end)
        window.bridge.ready.connect(lambda _info: self._start_due())
        window.bridge.compare_done.connect(lambda _done: self._start_due())
        window.bridge.state_changed.connect(self._engine_changed)

    @property
    def is_running(self) -> bool:
        return self.index is not None

    def offer(self) -> None:
        """On the first visit, once the model is there."""
        settings = self._settings
        if settings is None or settings.value(OFFERED) or self.is_running:
            return
        settings.setValue(OFFERED, "yes")
        self._window.notice.say(
            tr(
                "New here? A tour of three minutes shows, on this machine, why continuous batching wins (later: View ▸ "
                "Tour)."
            ),
            action=(tr("Take the tour"), self.begin),
            dismiss=tr("Not now"),
        )

    def begin(self) -> None:
        if self.is_running:
            return
        self._window.notice.expire()
        self._window.load_panel.finished.connect(self._load_finished)
        self._before = self._window.bridge.config
        self.index = 0
        self._go(0)

    def end(self) -> None:
        """Stop what runs and give the engine back as it was."""
        if self.index is None:
            return
        self.index = None
        self._due = False
        self.bar.hide()
        self._window.load_panel.stop()
        self._window.load_panel.finished.disconnect(self._load_finished)
        bridge, before = self._window.bridge, self._before
        if before is not None and before != bridge.config:
            if bridge.state == "ready" and replace(before, scheduler=bridge.config.scheduler) == bridge.config:
                bridge.reconfigure(before.scheduler)
            elif bridge.state in ("starting", "loading", "ready"):
                bridge.start(before)
        self.ended.emit()

    def _go(self, by: int) -> None:
        if self.index is None:
            return
        index = max(0, self.index + by)
        if index >= len(STOPS):
            self.end()
            return
        self.index = index
        window, stop = self._window, STOPS[index]
        window.load_panel.stop()
        window.travel.show_newest()
        window.arrange(stop.arrangement)
        window.reveal(*stop.docks)
        self.bar.show_stop(index)
        self._due = True
        self._start_due()

    def _start_due(self) -> None:
        """Run the stop's scenario: on the engine as it is where that will do, else on one made for it."""
        if self.index is None or not self._due:
            return
        window, stop = self._window, STOPS[self.index]
        bridge = window.bridge
        run = window.load_panel.run
        if bridge.state != "ready" or (run is not None and run.active):
            self.bar.state.setText(tr("waits for the engine"))
            return
        if bridge.comparing:
            self.bar.state.setText(tr("waits until the comparison is over"))
            return
        if bridge.paused:
            bridge.set_paused(False)
        scenario = load_scenario(stop.scenario)
        base = self._before or bridge.config
        wanted = scenario.engine.config(base)
        wanted = replace(wanted, scheduler=replace(wanted.scheduler, discipline=stop.discipline))
        if replace(wanted, scheduler=bridge.config.scheduler) != bridge.config:
            self.bar.state.setText(tr("the engine starts with the memory that this stop needs"))
            self._restarting = True
            bridge.start(wanted)
            self._restarting = False
            return
        if wanted != bridge.config:
            bridge.reconfigure(wanted.scheduler)
        self._due = False
        window.load_panel.show_scenario(scenario)
        window.load_panel.start()
        self.bar.state.setText(tr("running"))

    def _load_finished(self, summary: dict[str, object]) -> None:
        if self.index is None:
            return
        if self._due:  # the stop before this one has been let go
            self._start_due()
            return
        self.bar.state.setText(tr("done: look around, run it once more, or go on"))

    def _engine_changed(self, state: str) -> None:
        if self.index is not None and not self._restarting and state in ("dead", "failed", "stopped"):
            self._before = None  # there is nothing to give back
            self.end()
