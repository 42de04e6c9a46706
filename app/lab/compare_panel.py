"""The compare panel: one workload through several disciplines, or values of one knob, and what came of it.

The engine makes all runs by itself, one after the other; chats that are sent meanwhile wait until it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from PySide6.QtCore import QSize, QThreadPool, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QSizePolicy, QVBoxLayout, QWidget

from app.lab.choice import Choice
from app.lab.compare_form import CompareForm
from app.lab.compare_model import (
    Build,
    CompareChoice,
    CompareFault,
    CompareLoad,
    plan_fault,
    plan_remarks,
    plan_summary,
)
from app.lab.compare_progress import CompareClock, progress_sentence, progress_share
from app.lab.compare_results import CompareResults
from app.lab.fields import sentence
from app.lab.recorded_load import RecordedLoad, RecordedReading
from app.lab.sides import Sides
from app.run_files import SUFFIX
from app.scroll_column import ScrollColumn
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import Card, button, label
from app.words import count
from engine.messages import CompareDone, ComparePlan, CompareProgress
from engine.variants import MAX_RUNS
from engine.workload import Scenario, WorkloadError, list_scenarios, load_scenario

if TYPE_CHECKING:
    from app.engine_bridge import EngineBridge

THE_LOAD = tr("the load panel's")
"""Among the workloads, by their keys."""
WIDE = 880
"""Logical pixels from which on the result stands beside the form."""
FORM_WIDTH = 340
PROGRESS_PARTS = 1000
RECORDED_KEPT = 6
"""Recorded runs that are offered; the oldest go first."""
WorkloadSource = Callable[[], "tuple[str, Build] | None"]
"""Title, and workload by seed, of what another panel has in its fields; None: nothing that could be run."""
CHATS_WAIT = tr("Chats that are sent meanwhile wait until it is over.")


class ComparePanel(Card):
    """Everything of a comparison in one card. ``finished`` carries a result, also of one that was cut short."""

    finished = Signal(dict)
    _recording_read = Signal(object)

    def __init__(self, bridge: EngineBridge, theme: Theme, parent: QWidget | None = None) -> None:
        self._headline = label("", "muted")
        super().__init__(tr("Compare"), self._headline, parent=parent)
        self.clock: Callable[[], float] = time.monotonic
        self.workload_source: WorkloadSource | None = None
        """Where the load panel's own ranges or file come from; see :meth:`refresh_source`."""
        self._bridge = bridge
        self._loads: dict[str, CompareLoad] = {}
        self._recorded: dict[str, RecordedLoad] = {}
        self._plan: ComparePlan | None = None
        """The comparison that was asked for and is not over."""
        self._beside: RecordedLoad | None = None
        """The recorded run that its result will stand beside."""
        self._progress_clock = CompareClock()
        self._pool = QThreadPool(self)
        """Its destruction waits for what is being read."""
        self._recording_read.connect(self._take_recording)
        self.setAcceptDrops(True)
        self._build(theme)
        self._fill_sources()
        bridge.state_changed.connect(self._check)
        bridge.config_changed.connect(self._check)
        bridge.compare_progress.connect(self._show_progress)
        bridge.compare_done.connect(self._done)
        self._source_changed()

    # Layout ------------------------------------------------------------------------------------------------------

    def _build(self, theme: Theme) -> None:
        self.source = Choice(tr("Workload to compare on"), theme)
        self.source.currentIndexChanged.connect(self._source_changed)
        self.watch = sentence("muted")
        self.form = CompareForm(theme)
        self.form.changed.connect(self._check)
        self.notice = sentence("muted")
        self.start_button = button(tr("Compare"), "primary", tr("Start the comparison"))
        self.start_button.clicked.connect(self.start)
        self.cancel_button = button(tr("Cancel"), accessible=tr("Cancel the comparison"))
        self.cancel_button.setToolTip(tr("The runs that are complete are kept."))
        self.cancel_button.clicked.connect(self.cancel)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setRange(0, PROGRESS_PARTS)
        self.progress.setAccessibleName(tr("How much of the comparison is over"))
        self.status = sentence("muted")
        self.faults = sentence("error")
        self.results = CompareResults(theme)
        self.results.said.connect(self._said)
        self.results.opened.connect(lambda: self.column.show_from(self.results.view.title))
        form = QVBoxLayout()
        form.setSpacing(SPACING)
        row = QHBoxLayout()
        row.setSpacing(SPACING)
        for widget in (self.start_button, self.cancel_button):
            row.addWidget(widget)
        row.addWidget(self.progress, 1)
        for widget in (self.source, self.watch, self.form, self.notice):
            form.addWidget(widget)
        form.addLayout(row)
        for widget in (self.status, self.faults):
            form.addWidget(widget)
        form.addStretch(1)
        self._form_column = QWidget()
        form.setContentsMargins(0, 0, 0, 0)
        self._form_column.setLayout(form)
        self.sides = Sides(self._form_column, self.results, wide=WIDE, first_width=FORM_WIDTH)
        self.column = ScrollColumn(self.sides)
        self.column.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Expanding)
        self.body.addWidget(self.column)

    def sizeHint(self) -> QSize:
        return super().sizeHint().boundedTo(QSize(560, 700))

    # Choosing ----------------------------------------------------------------------------------------------------

    def _fill_sources(self) -> None:
        broken = []
        for name in list_scenarios():
            try:
                self._add_load(name, _scenario_load(load_scenario(name)))
            except WorkloadError as error:
                broken.append(str(error))
        self._show_faults(broken)

    def _add_load(self, key: str, load: CompareLoad) -> None:
        self._loads[key] = load
        if self.source.findData(key) < 0:
            self.source.addItem(load.title, key)

    def refresh_source(self) -> None:
        """The load panel has changed: take what it has in its fields."""
        offered = self.workload_source() if self.workload_source is not None else None
        index = self.source.findData(THE_LOAD)
        if offered is not None:
            title, build = offered
            self._add_load(THE_LOAD, CompareLoad(title, build))
            self.source.setItemText(self.source.findData(THE_LOAD), title)
        elif index >= 0:
            del self._loads[THE_LOAD]
            self.source.removeItem(index)
        self._check()

    def select_scenario(self, name: str) -> None:
        """Choose a built-in scenario, or one by the path of its file. Raises :class:`WorkloadError`."""
        if name not in self._loads:
            self.show_scenario(load_scenario(name))
        else:
            self.source.setCurrentIndex(self.source.findData(name))

    def show_scenario(self, scenario: Scenario) -> None:
        """Choose a scenario, a built-in one or one of the user's own files."""
        self._add_load(scenario.name, _scenario_load(scenario))
        self.source.setCurrentIndex(self.source.findData(scenario.name))
        self._source_changed()

    def compare_recording(self, path: str, from_step: int | None = None) -> None:
        """Offer the requests of a run file, those from a step on, to be run again beside what was recorded."""
        if self._plan is not None:
            self._show_faults(
                [tr("A comparison goes on: cancel it, or wait for its end, to run something else again.")]
            )
            return
        self._show_faults([])
        self.status.setText(tr("Reading the recorded run …"))
        self._pool.start(RecordedReading(path, from_step, self._recording_read.emit))

    def _take_recording(self, read: RecordedLoad | str) -> None:
        self.status.setText("")
        if isinstance(read, str):
            self._show_faults([read])
        elif self._plan is None:
            self._recorded[read.key] = read
            while len(self._recorded) > RECORDED_KEPT:
                oldest = next(iter(self._recorded))
                del self._recorded[oldest], self._loads[oldest]
                self.source.removeItem(self.source.findData(oldest))
            self._add_load(read.key, read.load)
            self.source.setCurrentIndex(self.source.findData(read.key))
            self._source_changed()

    @property
    def load(self) -> CompareLoad | None:
        return self._loads.get(self.source.currentData())

    def _source_changed(self, _index: int = 0) -> None:
        load = self.load
        watch = load.watch.strip() if load is not None else ""
        self.watch.setText(watch)
        self.watch.setVisible(bool(watch))
        self.form.allow_seeds(load is not None and load.seeded)
        self._check()

    def choice(self) -> CompareChoice | None:
        """What the form has; None without a workload."""
        load = self.load
        if load is None:
            return None
        return self.form.choice(load, beside_recorded=self.source.currentData() in self._recorded)

    def _check(self, _state: object = None) -> None:
        """Say how much this is and what stands in its way, and enable what can be done."""
        busy = self._plan is not None
        plan, words, ready = None, "", False
        choice = self.choice()
        try:
            plan = choice.plan() if choice is not None else None
        except CompareFault as fault:
            words = str(fault)
        if plan is not None:
            words, ready = self._verdict(plan)
        self.notice.setText("" if busy else words)
        self.notice.setVisible(bool(self.notice.text()))
        self.start_button.setEnabled(ready and not busy)
        self.cancel_button.setVisible(busy)
        self.progress.setVisible(busy)
        for widget in (self.source, self.form):
            widget.setEnabled(not busy)

    def _verdict(self, plan: ComparePlan) -> tuple[str, bool]:
        """The words for a plan, and whether it can be started."""
        bridge = self._bridge
        info = bridge.info if bridge.state == "ready" else None
        summary = plan_summary(plan, self.results.tokens_per_second(info.name if info is not None else ""))
        if info is None:
            return f"{summary} {_NOT_READY.get(bridge.state, '')}".strip(), False
        fault = plan_fault(plan, bridge.config, info)
        if fault:
            return fault, False
        remarks = plan_remarks(plan, bridge.config, info)
        if bridge.paused:
            remarks.append(tr("The engine pauses; it runs on for the comparison."))
        recorded = self._recorded.get(self.source.currentData())
        if recorded is not None and recorded.model != info.name:
            remarks.append(
                tr("It was recorded with {model}, and runs again with {name}.", model=recorded.model, name=info.name)
            )
        return " ".join([summary, *remarks]), True

    # Running -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the comparison in the form; nothing where one is running or cannot be run."""
        choice = self.choice()
        if not self.start_button.isEnabled() or choice is None:
            return
        try:
            plan = choice.plan()
        except CompareFault:
            self._check()
            return
        self._plan = plan
        self._beside = self._recorded.get(self.source.currentData())
        self._progress_clock = CompareClock()
        self._show_faults([])
        self.progress.setValue(0)
        self.status.setText(tr("The engine is asked to begin. {chats_wait}", chats_wait=CHATS_WAIT))
        self._headline.setText("")
        self._check()
        self._bridge.compare(plan)

    def cancel(self) -> None:
        """End the comparison after the step in progress; what is complete is shown."""
        if self._plan is not None:
            self.cancel_button.setEnabled(False)
            self.status.setText(tr("It ends after the step in progress; the runs that are complete are kept."))
            self._bridge.cancel_compare()

    def _show_progress(self, progress: CompareProgress) -> None:
        if self._plan is None:
            return
        self.progress.setValue(round(progress_share(progress) * PROGRESS_PARTS))
        if not self.cancel_button.isEnabled():
            return  # it says that it is about to end
        left = self._progress_clock.left(progress, self.clock())
        words = progress_sentence(progress)
        if progress.run < 0:
            self._headline.setText("")
            self.status.setText(f"{words} {CHATS_WAIT}")
        else:
            self._headline.setText(tr("run {run:,} of {runs:,}", run=progress.run + 1, runs=progress.runs))
            self.status.setText(f"{words[:1].upper()}{words[1:]}{f' · {left}' if left else ''}. {CHATS_WAIT}")

    def _done(self, done: CompareDone) -> None:
        if self._plan is None:
            return
        plan, beside = self._plan, self._beside
        self._plan = self._beside = None
        self.cancel_button.setEnabled(True)
        self._headline.setText("")
        faults = [done.error] if done.error else []
        result = None
        if done.result:
            try:
                result = self.results.add_bytes(done.result, beside.run if beside is not None else None)
            except ValueError as error:
                faults.append(str(error))
        runs, complete = len(plan.variants) * len(plan.seeds), len(result.own_runs) if result is not None else 0
        self.status.setText("" if faults else tr("The comparison is complete."))
        if faults and 0 < complete < runs:
            self.status.setText(
                tr("{complete:,} of {runs} are complete and shown.", complete=complete, runs=count(runs, "run"))
            )
        self._show_faults(faults)
        self._check()
        if result is not None:
            self.column.show_from(self.results.view.title)
            self.finished.emit(result.plain)

    # Saying ------------------------------------------------------------------------------------------------------

    def _said(self, words: str, fault: bool) -> None:
        """A result was opened, written or copied, or could not be."""
        self._show_faults([words] if fault else [])
        if self._plan is None and not fault:
            self.status.setText(words)
        self._check()

    def _show_faults(self, sentences: list[str]) -> None:
        self.faults.setText("\n".join(sentences))
        self.faults.setVisible(bool(sentences))
        if sentences:
            self.column.reveal(self.faults)

    # Dropping ----------------------------------------------------------------------------------------------------

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        if _dropped_file(event):
            event.acceptProposedAction()

    def dropEvent(self, event: QDropEvent) -> None:
        """A saved result is shown; a run file is offered to be run again."""
        path = _dropped_file(event)
        if path.endswith(SUFFIX):
            self.compare_recording(path)
        elif path:
            self.results.open(path)
        event.acceptProposedAction()


def _dropped_file(event: QDropEvent) -> str:
    """The one local file that is dragged; empty where it is something else."""
    paths = [url.toLocalFile() for url in event.mimeData().urls() if url.isLocalFile()]
    return paths[0] if len(paths) == 1 else ""


def _scenario_load(scenario: Scenario) -> CompareLoad:
    build = lru_cache(maxsize=MAX_RUNS)(scenario.build)  # the form asks again with every change
    return CompareLoad(scenario.title, build, scenario.watch, scenario.engine)


_NOT_READY: dict[str, str] = {
    "stopped": tr("No model is loaded yet: load one, then compare."),
    "starting": tr("The engine is starting; the comparison can begin when the model is ready."),
    "loading": tr("The model is loading; the comparison can begin when it is ready."),
    "failed": tr("The model could not be loaded: load another one, then compare."),
    "dead": tr("The engine has died: restart it, then compare."),
}
