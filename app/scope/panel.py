"""What all panels of the scope share: where they draw from, and when they may spend time on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from PySide6.QtCore import QTimer, Signal
from PySide6.QtGui import QHideEvent, QPaintEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from app.scope.changes import KnobChanges
from app.scope.latency import Latency
from app.scope.ledger_history import LedgerHistory
from app.scope.rates import Rates
from app.scope.steps import StepHistory
from app.scope.waits import LineHistory
from app.selection import Selection
from app.theme import Theme
from app.translation import tr
from app.widgets import Card, Emptiable, EmptyState, Figure
from engine.config import SchedulerConfig
from engine.events import Keyframe, StepRecord
from engine.lanes import Lanes
from engine.run_state import RunState

START_SOMETHING = tr("Send a message, or start a scenario in the Load panel (View ▸ Load, or Ctrl+3)")
"""What makes an empty panel fill, and where that is."""
PAUSE_SECONDS = 0.3
"""Without a step for so long, what is stale is drawn without one."""


@dataclass(slots=True)
class RunHistory:
    """What a run looked like over time: folds beside the run state, fed with the same records."""

    steps: StepHistory = field(default_factory=StepHistory)
    rates: Rates = field(default_factory=Rates)
    latency: Latency = field(default_factory=Latency)
    lanes: Lanes = field(default_factory=Lanes)
    changes: KnobChanges = field(default_factory=KnobChanges)
    ledger: LedgerHistory = field(default_factory=LedgerHistory)
    line: LineHistory = field(default_factory=LineHistory)

    def restore(self, keyframe: Keyframe) -> None:
        for fold in self._folds():
            fold.restore(keyframe)

    def apply(self, record: StepRecord) -> None:
        for fold in self._folds():
            fold.apply(record)

    def _folds(self) -> Iterator[Any]:
        return (getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True, slots=True)
class Moment:
    """A step that was, in place of the newest: everything is shown as it was right after it."""

    state: RunState
    time: float
    """When the step ended, engine clock."""

    @property
    def step(self) -> int:
        return self.state.step


@dataclass(slots=True)
class ScopeSource:
    """The run that the panels show. They never ask where it comes from: live, or a moment of a recording.

    ``history`` goes on while a moment is shown; panels cut what they take from it at :attr:`last_step` and :attr:`now`.
    """

    live_state: RunState
    history: RunHistory
    moment: Moment | None = None
    """Set while the past is shown."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    block_bytes: int = 0
    """Of one KV block; 0: not known."""
    live: bool = True
    """Whether the run goes on; without an engine the panels show how it ended."""
    texts: Callable[[int], tuple[str, str] | None] | None = None
    """Prompt and answer of a request up to the shown step, where a recording has them."""

    @property
    def state(self) -> RunState:
        """Requests and blocks as they are to be shown. Another object when the moment changes: never keep it."""
        return self.moment.state if self.moment is not None else self.live_state

    @property
    def last_step(self) -> int | None:
        """The step after which the history is to be cut; None: nowhere."""
        return self.moment.step if self.moment is not None else None

    @property
    def now(self) -> float:
        """The right edge of what is shown, engine clock: the end of the shown step."""
        return self.moment.time if self.moment is not None else self.history.lanes.end

    @property
    def idle(self) -> bool:
        return not self.state.requests


class ScopePanel(Card):
    """A card that follows the run. It refreshes only while it is seen, and at most every ``refresh_seconds``.

    Subclasses fill ``content`` (shown once there is something) and implement :meth:`refresh` and :meth:`has_content`.
    """

    refresh_seconds = 0.0
    """Panels of figures that people read need not change faster than they can be read."""
    empty_text = ""
    refreshed = Signal()

    def __init__(
        self,
        title: str,
        source: ScopeSource,
        theme: Theme,
        selection: Selection,
        content: QWidget,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(title, parent=parent)
        self.source = source
        self.theme = theme
        self.selection = selection
        self.content = content
        self.pages = Emptiable(content, EmptyState(self.empty_text))
        self.body.addWidget(self.pages)
        self._figures: list[Figure] = []
        self._stale = True
        self._missed = False
        """Whether it was stale while it could not be seen."""
        self.refreshed_at = 0.0
        """Clock of the last refresh."""
        self.refresh_cost = 0.0
        """Seconds that it took."""
        self._due = QTimer(self)
        self._due.setSingleShot(True)
        self._due.timeout.connect(self._refresh_if_seen)
        selection.changed.connect(self._selection_changed)
        theme.changed.connect(self._theme_changed)

    def add_figure(self, role: str = "muted") -> Figure:
        figure = super().add_figure(role)
        self._figures.append(figure)
        return figure

    def refresh(self) -> None:
        """Brings the content up to date with the source."""
        raise NotImplementedError

    def has_content(self) -> bool:
        raise NotImplementedError

    def clear(self) -> None:
        """Takes the figures of what was shown out of the title line: there is nothing to show any more."""
        for figure in self._figures:
            figure.say("")

    def run_moved(self, *, at_once: bool = False, postponed: bool = False) -> None:
        """The source has changed: refresh now, or when it is due, or when it is seen. ``at_once``: somebody waits.
        ``postponed``: this frame has cost enough already."""
        self._stale = True
        if not self.is_seen():
            self._missed = True
            return
        wait = max(0.0, self.refreshed_at + self.refresh_seconds - time.perf_counter())
        is_due = wait <= 0 and not postponed
        if at_once or is_due or self.source.idle or not self.source.live:
            self._refresh_now()
        else:  # with one of the next frames; on its own only if the steps should pause
            self._due.start(round(1000 * (wait + PAUSE_SECONDS)))

    def is_seen(self) -> bool:
        """Behind another tab it is visible as Qt has it, and lies where nothing of it can be seen."""
        return self.isVisible() and not self.window().isMinimized() and not self.visibleRegion().isEmpty()

    def _refresh_if_seen(self) -> None:
        if self._stale and self.is_seen():
            self._refresh_now()
        else:
            self._missed = self._stale

    def _refresh_now(self) -> None:
        self._stale = self._missed = False
        self._due.stop()
        self.refreshed_at = time.perf_counter()
        filled = self.has_content()
        self.pages.set_empty(not filled)
        if filled:
            self.refresh()
        else:
            self.clear()
        self.refresh_cost = time.perf_counter() - self.refreshed_at
        self.refreshed.emit()

    def show_anew(self) -> None:
        """What is to be shown has changed, though the source has not."""
        self._stale = True
        self._refresh_if_seen()

    def _selection_changed(self, _request_id: int | None) -> None:
        self.show_anew()

    def _theme_changed(self) -> None:
        self.show_anew()
        self.content.update()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refresh_if_seen()

    def paintEvent(self, event: QPaintEvent) -> None:
        super().paintEvent(event)
        if self._missed:  # its tab has come to the front
            self._due.start(0)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._due.stop()
        self._stale = True
