"""The load panel: which load, start and stop, live percentiles, the result, the rate where the queue begins to grow.

Its requests go through the same bridge, engine and queue as the chats, so every view shows both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QMimeData, Qt, QTimer, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QGuiApplication
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app.lab.fields import sentence
from app.lab.fold import Fold
from app.lab.load_control import LoadControl
from app.lab.load_model import (
    NOT_READY,
    ScenarioConfigs,
    clip_remarks,
    differences,
    fitted,
    lengths_of,
    live_latencies,
    misfits,
)
from app.lab.load_run import LoadRun
from app.lab.load_source import LoadSource
from app.lab.measure_form import MeasureForm
from app.lab.rate_view import RateView
from app.lab.request_table import RequestTable
from app.lab.result_view import LoadFigures
from app.run_files import SUFFIX
from app.scroll_column import ScrollColumn
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import Card, button, label
from engine.config import ConfigError, EngineConfig
from engine.messages import ModelInfo
from engine.saturation import probe_size
from engine.workload import Scenario, ShapeError, Workload, WorkloadError

if TYPE_CHECKING:
    from app.engine_bridge import EngineBridge
    from app.selection import Selection

REFRESH_MS = 500
REFRESH_SHARE = 40
"""The figures may take this part of one core: a refresh that was dear is followed by a longer pause."""


class LoadPanel(Card):
    """Everything of a load in one card. ``finished`` carries the summary of a run that has ended, however it ended;
    ``searched`` the result of a search for the saturation rate."""

    finished = Signal(dict)
    searched = Signal(dict)

    def __init__(self, bridge: EngineBridge, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self._headline = label("", "muted")
        super().__init__(tr("Load"), self._headline, parent=parent)
        self.control = LoadControl(bridge, self)
        self._bridge = bridge
        self._configs = ScenarioConfigs()
        self._wanted: EngineConfig | None = None
        self._remarks: tuple[Workload, ModelInfo, list[str]] | None = None
        """What was last said about a workload on an engine."""
        self._refresh_timer = QTimer(self)
        self._refresh_timer.setSingleShot(True)
        self._refresh_timer.timeout.connect(self._refresh)
        self.setAcceptDrops(True)
        self._make_widgets(theme, selection)
        self._lay_out()
        self._connect()
        self._show_faults(self.source.broken)
        self._check()

    # Layout ------------------------------------------------------------------------------------------------------

    def _make_widgets(self, theme: Theme, selection: Selection) -> None:
        self.source = LoadSource(theme)
        self.form = self.source.form
        self.arrivals = self.source.arrivals
        self.measure = MeasureForm()
        self.measure_fold = Fold(tr("Measuring"), self.measure)
        self.notice = sentence("muted")
        self.restart_button = button(tr("Restart the engine with these options"))
        self.start_button = button(tr("Start"), "primary", tr("Start the load"))
        self.stop_button = button(tr("Stop"), accessible=tr("Stop the load"))
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("Requests that have ended"))
        self.figures = LoadFigures()
        self.faults = sentence("error")
        self.table = RequestTable(theme, selection)
        self.copy_button = button(tr("Copy result as JSON"), "flat")
        self.rates = RateView(theme)
        self.search_fold = Fold(tr("Saturation"), self.rates)
        self.search_fold.say(tr("the rate where the queue starts to grow"))

    def _lay_out(self) -> None:
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(0, 0, SPACING // 2, 0)
        column.setSpacing(SPACING // 2)
        for widget in (self.source, self.measure_fold, self.search_fold, self.notice, self.restart_button):
            column.addWidget(widget)
        row = QHBoxLayout()
        row.setContentsMargins(0, SPACING // 2, 0, 0)
        row.setSpacing(SPACING)
        row.addWidget(self.start_button)
        row.addWidget(self.stop_button)
        row.addWidget(self.progress, 1)
        column.addLayout(row)
        for widget in (self.faults, self.figures, self.copy_button):
            column.addWidget(widget)
        column.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.column = ScrollColumn(content)
        self.body.setSpacing(SPACING // 2)
        self.body.addWidget(self.column)
        self.body.addWidget(self.table, 1)  # below what scrolls, not in it: it scrolls by itself
        for hidden in (self.faults, self.copy_button, self.table):
            hidden.hide()

    def _connect(self) -> None:
        self.source.changed.connect(self._check)
        self.source.file_chosen.connect(self.open_file)
        self.measure.changed.connect(self._check)
        self.restart_button.clicked.connect(self.restart_engine)
        self.start_button.clicked.connect(self.start)
        self.stop_button.clicked.connect(self.stop)
        self.rates.search_button.clicked.connect(self.find_rate)
        self.copy_button.clicked.connect(self._copy_result)
        self.control.begun.connect(self._begun)
        self.control.ended.connect(self._ended)
        self.control.held.connect(self._check)
        self._bridge.stepped.connect(self._stepped)
        self._bridge.state_changed.connect(lambda _state: self._check())
        self._bridge.config_changed.connect(self._check)
        self._bridge.paced.connect(lambda _paused: self._check())
        self._bridge.ready.connect(self._suit_probes)
        if self._bridge.state == "ready":
            self._suit_probes(self._bridge.info)

    def _suit_probes(self, info: ModelInfo) -> None:
        self.rates.probe_requests.setValue(probe_size(info.max_num_seqs))

    # Choosing ----------------------------------------------------------------------------------------------------

    @property
    def run(self) -> LoadRun | None:
        return self.control.run

    @property
    def clock(self) -> Callable[[], float]:
        """The engine's clock."""
        return self.control.clock

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        self.control.clock = clock

    @property
    def scenario(self) -> Scenario | None:
        """The chosen scenario; None with numbers of one's own or a file."""
        return self.source.scenario

    def select_scenario(self, name: str) -> None:
        """Choose a built-in scenario. Raises :class:`WorkloadError` where there is none."""
        self.source.select_scenario(name)

    def show_scenario(self, scenario: Scenario) -> None:
        """Choose a scenario, a built-in one or one of the user's own files."""
        self.source.show_scenario(scenario)

    def select_ranges(self) -> None:
        self.source.select_ranges()

    def open_file(self, path: Path) -> None:
        """Choose a workload file or a scenario's; what is wrong with it is shown."""
        if self.control.active:
            self._show_faults([tr("A load is running: stop it first, then load the file.")])
            return
        try:
            self.source.open_file(path)
        except WorkloadError as error:
            self._show_faults([str(error)])
        else:
            self._show_faults([])
            self.column.show_from(self.source)

    def own_load(self) -> tuple[str, Callable[[int | None], Workload]] | None:
        """The panel's own numbers or file, to be run elsewhere; see :meth:`LoadSource.own_load`."""
        return self.source.own_load()

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if _file_of(event.mimeData()) is not None:
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        path = _file_of(event.mimeData())
        if path is not None:
            event.acceptProposedAction()
            self.open_file(path)

    def _check(self) -> None:
        """Say what stands between this load and this engine, and enable what can be done."""
        info = self._bridge.info if self._bridge.state == "ready" else None
        active, comparing = self.control.active, self._bridge.comparing
        fault, remarks = self.source.fault(info), [self._waits()]
        try:
            self._wanted = self._wanted_config()
        except ConfigError as error:
            self._wanted = None
            remarks.append(tr("The options of this scenario do not go with the engine's: {error}.", error=error))
        if not active and info is not None:
            if self._wanted is not None:
                remarks.append(
                    tr("This scenario wants ") + ", ".join(differences(self._wanted, self._bridge.config)) + "."
                )
            elif not fault:
                remarks += self._remarks_about(info)
        if info is None:
            remarks = [] if active else [NOT_READY.get(self._bridge.state, "")]
        self.notice.setText(fault if fault and not active else " ".join(filter(None, remarks)))
        self.notice.setVisible(bool(self.notice.text()))
        self.restart_button.setVisible(self._wanted is not None and not fault and not active and not comparing)
        self.restart_button.setToolTip(tr("Answers that are still open end; their text stays."))
        for each in (self.start_button, self.rates.search_button):
            each.setEnabled(info is not None and not fault and not active and not comparing)
        self.stop_button.setEnabled(self.run is not None and self.run.phase in ("warming", "running"))
        for part in (self.source, self.measure, self.rates.probe_requests):
            part.setEnabled(not active)
        self.measure_fold.say(self.measure.summary())

    def _waits(self) -> str:
        """What the load waits for, or would; empty where it is nothing."""
        active = self.control.active
        if self._bridge.comparing:
            return (
                tr("The load waits: a comparison has the engine.")
                if active
                else tr("A comparison has the engine: wait for it.")
            )
        if self._bridge.paused:
            return (
                tr("The load waits until the engine runs on.")
                if active
                else tr("The engine pauses: a load will wait with it.")
            )
        return ""

    def _wanted_config(self) -> EngineConfig | None:
        """The configuration of the chosen scenario where the engine, ready, has another. Raises ConfigError."""
        if self._bridge.state != "ready":
            return None
        wanted = self._configs.wanted(self.source.options, self._bridge.config)
        return None if wanted == self._bridge.config else wanted

    def _remarks_about(self, info: ModelInfo) -> list[str]:
        """What becomes of requests that this engine cannot hold; counted once for a workload."""
        longest = self.source.longest()
        if longest is not None:
            return misfits([longest], info)
        workload = self.source.workload()
        if self._remarks is None or self._remarks[0] is not workload or self._remarks[1] is not info:
            lengths = lengths_of(fitted(workload, info.max_model_len))
            self._remarks = workload, info, clip_remarks(workload, info.max_model_len) + misfits(lengths, info)
        return self._remarks[2]

    def restart_engine(self) -> None:
        """Restart the engine with the options of the chosen scenario."""
        if self._wanted is not None:
            wanted = self._wanted
            self._configs.restarted(wanted)
            self._bridge.start(wanted)

    # Running -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the chosen load; nothing where one is running or the engine is not ready."""
        self._start(self.control.start)

    def find_rate(self) -> None:
        """Search the rate where the queue starts to grow under the chosen load."""
        self.search_fold.open()
        requests = self.rates.probe_requests.value()
        self._start(lambda workload, **given: self.control.start_search(workload, requests, **given))

    def _start(self, begin: Callable[..., None]) -> None:
        if not self.control.can_start:
            return
        try:
            workload = self.source.workload()
        except (WorkloadError, ShapeError) as error:
            self._show_faults([str(error)])
            return
        self._show_faults([])
        begin(workload, warm_up=self.measure.warm_up, objectives=self.measure.objectives())

    def stop(self) -> None:
        """Send nothing more and abort what is open; the result tells of what completed."""
        self.control.stop()
        self._check()

    def _begun(self) -> None:
        assert self.run is not None
        self.progress.setRange(0, len(self.run.workload.requests))
        self.figures.begin()
        self.copy_button.hide()
        self.table.show_run(self.run)
        self.table.show()
        self._show_search()
        self._refresh()
        self._check()

    def _ended(self) -> None:
        assert self.run is not None
        self._refresh_timer.stop()
        self._show_progress()
        self._show_result()
        self._show_search()
        self._check()
        search = self.control.search
        self.column.reveal(self.copy_button if search is None else self.rates)
        if search is None:
            self.finished.emit(self.run.summary())
        else:
            self.searched.emit(search.result())

    def _stepped(self) -> None:
        """The records of the last steps come after the last tokens."""
        if self.run is not None and not self.run.active and self.copy_button.isVisibleTo(self) and self.run.lagging:
            self._show_result()

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
        if self.run.phase == "warming":
            self._headline.setText(tr("warming up, {warm_up_left:,} left", warm_up_left=self.run.warm_up_left))
            return
        flight = tr(" · {open:,} in flight", open=len(recorder.open)) if self.run.active else ""
        rate = self.run.tokens_per_second
        self._headline.setText(
            tr(
                "{ended:,} of {total:,}{flight} · {rate:,.0f} tok/s",
                ended=recorder.ended,
                total=total,
                flight=flight,
                rate=rate,
            )
        )

    def _show_live(self) -> None:
        assert self.run is not None
        timelines = self.run.recorder.timelines
        self.figures.show_latencies(live_latencies(timelines, open_loop=self.run.workload.open_loop))
        self.table.refresh()
        self._show_faults(self.run.refusals())

    def _show_result(self) -> None:
        assert self.run is not None
        self.figures.show_summary(self.run.summary())
        self.copy_button.show()
        self.table.refresh()
        self._show_faults([self.run.reason] * bool(self.run.reason) + self.run.refusals())

    def _show_search(self) -> None:
        search = self.control.search
        if search is not None:
            self.rates.show_search(search, running=self.control.searching)
            self.search_fold.say(self.rates.sentence.text())

    def _show_faults(self, sentences: list[str]) -> None:
        text = "\n".join(sentences[:5])
        if len(sentences) > 5:
            text += tr("\nand {sentences} other reasons", sentences=len(sentences) - 5)
        self.faults.setText(text)
        self.faults.setVisible(bool(text))
        if text:
            self.column.reveal(self.faults)

    def result_json(self) -> str:
        """The last run, or search, as strict JSON, keys as in ``bench``; empty before the first."""
        if self.run is None:
            return ""
        search = self.control.search
        return json.dumps(self.run.summary() if search is None else search.result(), allow_nan=False, indent=2)

    def _copy_result(self) -> None:
        QGuiApplication.clipboard().setText(self.result_json())


def _file_of(data: QMimeData) -> Path | None:
    """The one file that is dragged, unless it is a recorded run."""
    urls = data.urls()
    if len(urls) != 1 or not urls[0].isLocalFile():
        return None
    path = Path(urls[0].toLocalFile())
    return None if path.suffix == SUFFIX else path
