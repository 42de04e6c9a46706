"""Has loads run through the window's engine: one at a time, or probe after probe until the saturation rate is found.

::

    start ─▶ LoadRun ─▶ ended                    pump: sends what is due, on a timer
    search ─▶ LoadRun ─▶ judged ─▶ LoadRun ─▶ … ─▶ search_ended
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Qt, QTimer, Signal

from app.lab.load_run import LoadRun
from app.translation import tr
from engine.events import Keyframe, StepRecord
from engine.saturation import SaturationSearch, first_rate_of, judge, probe_workload
from engine.workload import Workload

if TYPE_CHECKING:
    from app.engine_bridge import EngineBridge
    from engine.client import EngineDied
    from engine.messages import CompareDone, CompareProgress, Output


class LoadControl(QObject):
    """A fold of the bridge. Holds a load up while the engine pauses or a comparison has it."""

    begun = Signal()
    """``run`` is another one."""
    progressed = Signal()
    """What was sent or came back has changed nothing but figures."""
    ended = Signal()
    """``run`` has ended, however it ended; of a search only the last."""
    held = Signal()
    """Whether the load is held up may have changed."""

    def __init__(self, bridge: EngineBridge, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.run: LoadRun | None = None
        self.search: SaturationSearch | None = None
        """The search in progress, or the last one; None after a plain load."""
        self.clock: Callable[[], float] = time.perf_counter
        """The engine's clock: one for all processes of a machine."""
        self._bridge = bridge
        self._searched: Workload | None = None
        self._probe_requests = 0
        self._warm_up = 0
        self._objectives: dict[str, float] | None = None
        self._reported = True
        """Whether the end of the run has been told."""
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._pump)
        bridge.add_fold(self)
        bridge.outputs.connect(self._take_outputs)
        bridge.died.connect(self._engine_died)
        bridge.state_changed.connect(self._state_changed)
        bridge.paced.connect(lambda _paused: self._hold())
        bridge.compare_progress.connect(self._comparing)
        bridge.compare_done.connect(self._compared)

    # What is asked -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self.run is not None and self.run.active

    @property
    def searching(self) -> bool:
        """Whether probes are being made."""
        return self.active and self._searched is not None

    @property
    def can_start(self) -> bool:
        return (
            self._bridge.state == "ready" and self._bridge.info is not None and not self.active and not self.comparing
        )

    @property
    def comparing(self) -> bool:
        return self._bridge.comparing

    def start(self, workload: Workload, *, warm_up: int = 0, objectives: dict[str, float] | None = None) -> None:
        """Run a load; nothing where none can be started."""
        if self.can_start:
            self.search = self._searched = None
            self._begin(workload, warm_up, objectives)

    def start_search(
        self, workload: Workload, requests: int, *, warm_up: int = 0, objectives: dict[str, float] | None = None
    ) -> None:
        """Find the rate where the queue starts to grow under this load, with so many ``requests`` a probe."""
        if self.can_start:
            self.search = SaturationSearch(first_rate_of(workload))
            self._searched, self._probe_requests = workload, requests
            self._objectives = objectives
            self._next_probe(warm_up)

    def _next_probe(self, warm_up: int = 0) -> None:
        assert self.search is not None and self._searched is not None
        rate = self.search.next_rate
        assert rate is not None
        probe = probe_workload(self._searched, rate, len(self.search.probes), self._probe_requests)
        self._begin(probe, warm_up, self._objectives)

    def _begin(self, workload: Workload, warm_up: int, objectives: dict[str, float] | None) -> None:
        info = self._bridge.info
        assert info is not None
        self._reported = False
        self.run = LoadRun(
            workload,
            self._bridge,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            totals=self._bridge.run_state.totals,
            warm_up=warm_up,
            objectives=objectives,
            clock=self.clock,
        )
        self._bridge.hurry_ends(workload.arrivals.max_concurrency is not None)
        if self._bridge.paused:
            self.run.hold()
        self._send_due()
        self.begun.emit()
        self._settle()

    def stop(self) -> None:
        """Send nothing more and abort what is open; a search ends with what it knows."""
        if self.run is None:
            return
        if self.searching and self.search is not None:
            self.search.cancelled = True
        self.run.stop()
        self._timer.stop()
        self._settle()

    # What happens ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._send_due()
        self._settle()

    def _send_due(self) -> None:
        wait = None if self.run is None else self.run.pump()
        if wait is not None:
            self._timer.start(max(1, round(wait * 1000)))

    def _take_outputs(self, outputs: list[Output]) -> None:
        if not self.active or self.run is None:
            return
        self.run.take_outputs(outputs)
        if self.run.active and not self._timer.isActive():
            self._pump()
        else:
            self._settle()

    def _settle(self) -> None:
        """Go on to the next probe, or end, where the run has ended."""
        run = self.run
        if run is None or run.active or self._reported:
            self.progressed.emit()
            return
        self._timer.stop()
        if self._searched is not None and self.search is not None and run.phase == "done":
            rate = run.workload.arrivals.request_rate
            assert rate is not None
            self.search.note(judge(run.recorder.timelines, rate))
            if self.search.next_rate is not None:
                self._next_probe()
                return
        self._reported = True
        self._searched = None
        self._bridge.hurry_ends(False)
        self.ended.emit()

    def _hold(self) -> None:
        if self.run is not None and (self._bridge.paused or self._bridge.comparing):
            self.run.hold()
            self._timer.stop()
        elif self.run is not None and self.run.held:
            self.run.resume()
            self._pump()
        self.held.emit()

    def _comparing(self, progress: CompareProgress) -> None:
        if self.run is not None:
            self.run.take_engine(progress.run >= 0)
        self._hold()

    def _compared(self, _done: CompareDone) -> None:
        if self.run is not None:
            self.run.take_engine(False)
        self._hold()

    def apply(self, record: StepRecord) -> None:
        """A fold of the bridge: the load takes its admissions and totals from it."""
        if self.run is not None:
            self.run.apply(record)

    def restore(self, keyframe: Keyframe) -> None:
        if self.run is not None:
            self.run.restore(keyframe)

    def _engine_died(self, death: EngineDied) -> None:
        self._break_off(tr("The engine died in the middle of the load: {reason}", reason=death.reason))

    def _state_changed(self, state: str) -> None:
        if state not in ("ready", "dead"):
            self._break_off(tr("The engine was stopped in the middle of the load."))

    def _break_off(self, reason: str) -> None:
        if self.active and self.run is not None:
            if self.searching and self.search is not None:
                self.search.cancelled = True
            self.run.break_off(reason)
            self._settle()
