"""The load panel: a scenario or ranges, start and stop, live percentiles, the result.

Its requests go through the same bridge, engine and queue as the chats, so every view shows both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, QTimer, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QHBoxLayout, QLabel, QProgressBar, QVBoxLayout, QWidget

from app.lab.choice import Choice
from app.lab.load_model import (
    RequestLength,
    ScenarioConfigs,
    differences,
    lengths_of,
    live_latencies,
    misfits,
    result_rows,
)
from app.lab.load_run import LoadRun
from app.lab.ranges_form import RangesForm
from app.lab.request_table import RequestTable
from app.lab.result_view import PercentileGrid, ResultGrid
from app.lab.scroll_column import ScrollColumn
from app.theme import SPACING, Theme
from app.widgets import Card, button, label
from engine.config import ConfigError, EngineConfig
from engine.events import Keyframe, StepRecord
from engine.workload import EngineOptions, Scenario, ShapeError, Workload, WorkloadError, list_scenarios, load_scenario

if TYPE_CHECKING:
    from app.engine_bridge import EngineBridge
    from app.selection import Selection
    from engine.client import EngineDied
    from engine.messages import Output

REFRESH_MS = 500
REFRESH_SHARE = 40
"""The figures may take this part of one core: a refresh that was dear is followed by a longer pause."""
RANGES = "Ranges of my own"


class LoadPanel(Card):
    """Everything of a load in one card. ``finished`` carries the summary of a run that has ended, however it ended."""

    finished = Signal(dict)

    def __init__(self, bridge: EngineBridge, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self._headline = label("", "muted")
        super().__init__("Load", self._headline, parent=parent)
        self.run: LoadRun | None = None
        self.clock: Callable[[], float] = time.perf_counter
        """The engine's clock: one for all processes of a machine."""
        self._bridge = bridge
        self._configs = ScenarioConfigs()
        self._scenarios: dict[str, Scenario] = {}
        self._wanted: EngineConfig | None = None
        self._reported = True
        """Whether the end of the run has been shown and said."""
        self._pump_timer = QTimer(self)
        self._pump_timer.setSingleShot(True)
        self._pump_timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._pump_timer.timeout.connect(self._pump)
        self._refresh_timer = QTimer(self)
        self._refresh_timer.setSingleShot(True)
        self._refresh_timer.timeout.connect(self._refresh)
        self._build(theme, selection)
        self._fill_sources()
        bridge.add_fold(self)
        bridge.outputs.connect(self._take_outputs)
        bridge.stepped.connect(self._stepped)
        bridge.died.connect(self._engine_died)
        bridge.state_changed.connect(self._state_changed)
        bridge.config_changed.connect(self._check)
        self._source_changed()

    # Layout ------------------------------------------------------------------------------------------------------

    def _build(self, theme: Theme, selection: Selection) -> None:
        self.source = Choice("Scenario", theme)
        self.source.currentIndexChanged.connect(self._source_changed)
        self.watch = _sentence("muted")
        self.form = RangesForm(theme)
        self.form.changed.connect(self._check)
        self.notice = _sentence("muted")
        self.restart_button = button("Restart the engine with these options")
        self.restart_button.clicked.connect(self.restart_engine)
        self.start_button = button("Start", "primary", "Start the load")
        self.start_button.clicked.connect(self.start)
        self.stop_button = button("Stop", accessible="Stop the load")
        self.stop_button.clicked.connect(self.stop)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName("Requests that have ended")
        self.percentiles = PercentileGrid()
        self.result = ResultGrid()
        self.faults = _sentence("error")
        self.table = RequestTable(theme, selection)
        self.copy_button = button("Copy result as JSON", "flat")
        self.copy_button.clicked.connect(self._copy_result)
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(0, 0, SPACING // 2, 0)
        column.setSpacing(SPACING)
        for widget in (self.source, self.watch, self.form, self.notice, self.restart_button):
            column.addWidget(widget)
        row = QHBoxLayout()
        row.setSpacing(SPACING)
        row.addWidget(self.start_button)
        row.addWidget(self.stop_button)
        row.addWidget(self.progress, 1)
        column.addLayout(row)
        for widget in (self.faults, self.percentiles, self.result, self.copy_button):
            column.addWidget(widget)
        column.addStretch(1)
        self.column = ScrollColumn(content)
        self.body.addWidget(self.column)
        self.body.addWidget(self.table, 1)  # below what scrolls, not in it: it scrolls by itself
        for widget in (self.faults, self.result, self.copy_button, self.table):
            widget.hide()

    def _fill_sources(self) -> None:
        broken = []
        for name in list_scenarios():
            try:
                scenario = load_scenario(name)
            except WorkloadError as error:
                broken.append(str(error))
                continue
            self._scenarios[name] = scenario
            self.source.addItem(scenario.title, name)
        self.source.addItem(RANGES, None)
        if broken:
            self._show_faults(broken)

    # Choosing ----------------------------------------------------------------------------------------------------

    @property
    def scenario(self) -> Scenario | None:
        """The chosen scenario; None with ranges."""
        name = self.source.currentData()
        return None if name is None else self._scenarios[name]

    def select_scenario(self, name: str) -> None:
        """Choose a built-in scenario. Raises :class:`WorkloadError` where there is none."""
        self.show_scenario(self._scenarios.get(name) or load_scenario(name))

    def show_scenario(self, scenario: Scenario) -> None:
        """Choose a scenario, a built-in one or one of the user's own files."""
        index = self.source.findData(scenario.name)
        if self._scenarios.get(scenario.name) != scenario:
            self._scenarios[scenario.name] = scenario
            if index < 0:
                index = self.source.count() - 1
                self.source.insertItem(index, scenario.title, scenario.name)
        self.source.setCurrentIndex(index)

    def select_ranges(self) -> None:
        self.source.setCurrentIndex(self.source.count() - 1)

    def _source_changed(self) -> None:
        scenario = self.scenario
        self.form.setVisible(scenario is None)
        self.watch.setVisible(scenario is not None)
        self.watch.setText(scenario.watch.strip() if scenario else "")
        self._check()

    def _workload(self) -> Workload:
        return self.scenario.build() if self.scenario else self.form.ranges().build()

    def _check(self) -> None:
        """Say what stands between this load and this engine, and enable what can be done."""
        info = self._bridge.info if self._bridge.state == "ready" else None
        active = self.run is not None and self.run.active
        fault, remarks = "", []
        if self.scenario is None:
            fault = self.form.ranges().fault(info.max_model_len if info else None)
        try:
            self._wanted = self._wanted_config()
        except ConfigError as error:
            self._wanted = None
            remarks.append(f"The options of this scenario do not go with the engine's: {error}.")
        if self._wanted is not None and not active:
            remarks.append("This scenario wants " + ", ".join(differences(self._wanted, self._bridge.config)) + ".")
        if not fault and info is not None and not active:
            remarks += self._misfits(self._wanted is not None)
        if not info:
            remarks = [] if active else [_NOT_READY.get(self._bridge.state, "")]
        self.notice.setText(fault or " ".join(filter(None, remarks)))
        self.notice.setVisible(bool(self.notice.text()))
        self.restart_button.setVisible(self._wanted is not None and not fault and not active)
        self.restart_button.setToolTip("Answers that are still open end; their text stays.")
        self.start_button.setEnabled(info is not None and not fault and not active)
        self.stop_button.setEnabled(self.run is not None and self.run.phase == "running")
        self.source.setEnabled(not active)
        self.form.setEnabled(not active)

    def _wanted_config(self) -> EngineConfig | None:
        """The configuration of the chosen scenario where the engine, ready, has another. Raises ConfigError."""
        if self._bridge.state != "ready":
            return None
        options = self.scenario.engine if self.scenario else EngineOptions()
        wanted = self._configs.wanted(options, self._bridge.config)
        return None if wanted == self._bridge.config else wanted

    def _misfits(self, other_engine: bool) -> list[str]:
        if other_engine or self._bridge.info is None:
            return []
        try:
            if self.scenario is None:
                ranges = self.form.ranges()
                return misfits([RequestLength(ranges.prompt_high, ranges.output_high)], self._bridge.info)
            return misfits(lengths_of(self.scenario.build()), self._bridge.info)
        except (WorkloadError, ShapeError) as error:
            return [str(error)]

    def restart_engine(self) -> None:
        """Restart the engine with the options of the chosen scenario."""
        if self._wanted is not None:
            wanted = self._wanted
            self._configs.restarted(wanted)
            self._bridge.start(wanted)

    # Running -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the chosen load; nothing where one is running or the engine is not ready."""
        if self._bridge.info is None or self._bridge.state != "ready" or (self.run is not None and self.run.active):
            return
        try:
            workload = self._workload()
        except (WorkloadError, ShapeError) as error:
            self._show_faults([str(error)])
            return
        self._show_faults([])
        info, totals = self._bridge.info, self._bridge.run_state.totals
        self._reported = False
        self.run = LoadRun(workload, self._bridge, vocab_size=info.vocab_size, totals=totals, clock=self.clock)
        self.progress.setRange(0, len(workload.requests))
        self.result.hide()
        self.copy_button.hide()
        self.table.show_run(self.run)
        self.table.show()
        self._pump()
        self._refresh()
        self._check()

    def stop(self) -> None:
        """Send nothing more and abort what is open; the result tells of what completed."""
        if self.run is not None:
            self.run.stop()
            self._pump_timer.stop()
            self._check()
            self._after_change()

    def _pump(self) -> None:
        if self.run is None:
            return
        wait = self.run.pump()
        if wait is not None:
            self._pump_timer.start(max(1, round(wait * 1000)))
        self._after_change()

    def _take_outputs(self, outputs: list[Output]) -> None:
        if self.run is None or not self.run.active:
            return
        self.run.take_outputs(outputs)
        if self.run.active and not self._pump_timer.isActive():
            self._pump()
        self._after_change()

    def _after_change(self) -> None:
        """End the run where it has ended."""
        if self.run is None or self.run.active or self._reported:
            return
        self._reported = True
        self._refresh_timer.stop()
        self._pump_timer.stop()
        self._show_progress()
        self._show_result()
        self._check()
        self.column.reveal(self.copy_button)
        self.finished.emit(self.run.summary())

    def apply(self, record: StepRecord) -> None:
        """A fold of the bridge: the load takes its admissions and totals from it."""
        if self.run is not None:
            self.run.apply(record)

    def restore(self, keyframe: Keyframe) -> None:
        if self.run is not None:
            self.run.restore(keyframe)

    def _stepped(self) -> None:
        """The records of the last steps come after the last tokens."""
        if self.run is not None and not self.run.active and self.result.isVisibleTo(self) and self.run.lagging:
            self._show_result()

    def _engine_died(self, death: EngineDied) -> None:
        self._break_off(f"The engine died in the middle of the load: {death.reason}")

    def _state_changed(self, state: str) -> None:
        if state not in ("ready", "dead"):
            self._break_off("The engine was stopped in the middle of the load.")
        self._check()

    def _break_off(self, reason: str) -> None:
        if self.run is not None and self.run.active:
            self.run.break_off(reason)
            self._after_change()

    # Showing -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Figures of a run in progress, a few times a second."""
        if self.run is None or not self.run.active:
            return
        begun = self.run.clock()
        self._refresh_timer.start(REFRESH_MS)
        self._show_progress()
        if self.isVisible():
            self._show_live()
        cost = self.run.clock() - begun
        self._refresh_timer.start(max(REFRESH_MS, round(cost * REFRESH_SHARE * 1000)))

    def _show_progress(self) -> None:
        if self.run is None:
            return
        recorder = self.run.recorder
        total = len(recorder.timelines)
        self.progress.setValue(recorder.ended)
        flight = f" · {len(recorder.open):,} in flight" if self.run.active else ""
        rate = self.run.tokens_per_second
        self._headline.setText(f"{recorder.ended:,} of {total:,}{flight} · {rate:,.0f} tok/s")

    def _show_live(self) -> None:
        assert self.run is not None
        timelines = self.run.recorder.timelines
        self.percentiles.show_figures(live_latencies(timelines, open_loop=self.run.workload.open_loop))
        self.table.refresh()
        self._show_faults(self.run.refusals())

    def _show_result(self) -> None:
        assert self.run is not None
        summary = self.run.summary()
        self.percentiles.show_figures(summary)
        self.result.show_rows(result_rows(summary))
        self.result.show()
        self.copy_button.show()
        self.table.refresh()
        self._show_faults([self.run.reason] * bool(self.run.reason) + self.run.refusals())

    def _show_faults(self, sentences: list[str]) -> None:
        text = "\n".join(sentences[:5])
        if len(sentences) > 5:
            text += f"\nand {len(sentences) - 5} other reasons"
        self.faults.setText(text)
        self.faults.setVisible(bool(text))

    def result_json(self) -> str:
        """The last run as strict JSON, keys as in ``bench``; empty before the first."""
        return json.dumps(self.run.summary(), allow_nan=False, indent=2) if self.run is not None else ""

    def _copy_result(self) -> None:
        QGuiApplication.clipboard().setText(self.result_json())


_NOT_READY: dict[str, str] = {
    "stopped": "No model is loaded yet: load one, then start the load.",
    "starting": "The engine is starting; the load can begin when the model is ready.",
    "loading": "The model is loading; the load can begin when it is ready.",
    "failed": "The model could not be loaded: load another one, then start the load.",
    "dead": "The engine has died: restart it, then start the load.",
}


def _sentence(role: str) -> QLabel:
    result = label("", role)
    result.setWordWrap(True)
    result.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return result
