"""Which load: a scenario, numbers of one's own, or a file, and under which arrivals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.lab.arrivals_form import ArrivalsForm
from app.lab.choice import Choice
from app.lab.fields import sentence
from app.lab.fold import Fold
from app.lab.load_model import RequestLength, shape_fault
from app.lab.ranges_form import RangesForm
from app.lab.trace_form import TraceForm
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import button
from app.words import as_sentence
from engine.messages import ModelInfo
from engine.workload import (
    EngineOptions,
    Scenario,
    ShapeError,
    Workload,
    WorkloadError,
    list_scenarios,
    load_scenario,
    longest,
    with_seed,
)

RANGES = tr("A load of my own")
FILE = "file:"
"""Data of the entries that are files, before the path."""


class LoadSource(QWidget):
    """Makes a workload. ``changed`` whenever it would make another one."""

    changed = Signal()
    file_chosen = Signal(object)
    """A path from the dialog, for whoever shows its faults."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._scenarios: dict[str, Scenario] = {}
        self._built: Workload | None = None
        """What :meth:`workload` made last, as long as nothing has changed."""
        self.broken: list[str] = []
        """Sentences about scenarios that cannot be read."""
        self.choice = Choice(tr("Load"), theme)
        self.file_button = button(tr("Load a file…"))
        self.file_button.setToolTip(
            tr(
                "ShareGPT json, Azure LLM csv, BurstGPT csv, Mooncake jsonl, vLLM custom jsonl, Batchscope jsonl or a "
                "scenario (.toml); one can also be dropped here"
            )
        )
        self.file_button.clicked.connect(self._ask_for_file)
        self.watch = sentence("muted")
        self.form = RangesForm(theme)
        self.trace = TraceForm()
        self.arrivals = ArrivalsForm(theme)
        self.arrivals_fold = Fold(tr("Arrivals"), self.arrivals)
        self._lay_out()
        self._fill()
        self.choice.currentIndexChanged.connect(self._choice_changed)
        self.form.changed.connect(self._emit)
        self.trace.changed.connect(self._trace_changed)
        self.arrivals.changed.connect(self._emit)
        self._choice_changed()

    def _lay_out(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 4)
        row = QHBoxLayout()
        row.setContentsMargins(0, 0, 0, 2)
        row.setSpacing(SPACING)
        row.addWidget(self.choice, 1)
        row.addWidget(self.file_button)
        column.addLayout(row)
        for widget in (self.watch, self.trace, self.form, self.arrivals_fold):
            column.addWidget(widget)

    def _fill(self) -> None:
        for name in list_scenarios():
            try:
                scenario = load_scenario(name)
            except WorkloadError as error:
                self.broken.append(str(error))
                continue
            self._scenarios[name] = scenario
            self.choice.addItem(scenario.title, name)
        self.choice.addItem(RANGES, None)

    # Choosing ----------------------------------------------------------------------------------------------------

    @property
    def scenario(self) -> Scenario | None:
        """The chosen scenario; None with numbers of one's own or a file."""
        return self._scenarios.get(self.choice.currentData() or "")

    @property
    def is_file(self) -> bool:
        return str(self.choice.currentData() or "").startswith(FILE)

    @property
    def options(self) -> EngineOptions:
        """What the load wants of the engine."""
        return self.scenario.engine if self.scenario is not None else EngineOptions()

    def select_scenario(self, name: str) -> None:
        """Raises :class:`WorkloadError` where there is none of that name."""
        self.show_scenario(self._scenarios.get(name) or load_scenario(name))

    def show_scenario(self, scenario: Scenario) -> None:
        """Choose a scenario, a built-in one or one of the user's own files."""
        if self._scenarios.get(scenario.name) != scenario:
            self._scenarios[scenario.name] = scenario
            if self.choice.findData(scenario.name) < 0:
                self._insert(scenario.title, scenario.name)
        self._select(scenario.name)

    def select_ranges(self) -> None:
        self._select(None)

    def open_file(self, path: Path) -> None:
        """Choose a file: a scenario, or a workload of any known format. Faults of a workload are told by
        :attr:`fault`; raises :class:`WorkloadError` with those of a scenario."""
        if path.suffix == ".toml":
            self.show_scenario(load_scenario(str(path)))
            return
        data = f"{FILE}{path}"
        if self.choice.findData(data) < 0:
            self._insert(path.name, data)
        if self.choice.currentData() == data:
            self.trace.open(path)  # it may be another by now
        else:
            self._select(data)

    def _insert(self, title: str, data: str) -> None:
        """Above the numbers of one's own, which stay last."""
        self.choice.insertItem(self.choice.findData(None), title, data)

    def _select(self, data: str | None) -> None:
        self.choice.setCurrentIndex(self.choice.findData(data))

    def _ask_for_file(self) -> None:
        filters = tr("Workloads (*.jsonl *.json *.csv *.toml);;All files (*)")
        name, _ = QFileDialog.getOpenFileName(self, tr("Load a workload file"), "", filters)
        if name:
            self.file_chosen.emit(Path(name))

    # What changes ------------------------------------------------------------------------------------------------

    def _choice_changed(self) -> None:
        scenario = self.scenario
        self.form.setVisible(scenario is None and not self.is_file)
        self.watch.setVisible(scenario is not None)
        self.watch.setText(scenario.watch.strip() if scenario else "")
        self.trace.setVisible(self.is_file)
        if self.is_file:
            self.trace.open(Path(str(self.choice.currentData()).removeprefix(FILE)))
        self._offer_arrivals()
        self._emit()

    def _offer_arrivals(self) -> None:
        if self.scenario is not None:
            self.arrivals.offer_own(tr("as the scenario has them"))
        elif self.is_file:
            timed = self.trace.workload is not None and self.trace.workload.open_loop
            self.arrivals.offer_own(tr("as recorded") if timed else tr("all at once: the file names no times"))
        else:
            self.arrivals.offer_own(None)

    def _trace_changed(self) -> None:
        if self.is_file:
            self._offer_arrivals()
            self._emit()

    def _emit(self) -> None:
        self._built = None
        self.arrivals_fold.say(self.arrivals.summary())
        self.changed.emit()

    # What it makes -----------------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        return self.choice.currentText()

    def fault(self, info: ModelInfo | None) -> str:
        """Why there is no load to start; empty where there is one."""
        if self.is_file:
            if self.trace.busy or (self.trace.workload is None and not self.trace.fault):
                return tr("The file is being read.")
            return self.trace.fault
        try:
            if self.scenario is None:
                return shape_fault(self.form.shape(), info.max_model_len if info else None)
            self.workload()
        except (WorkloadError, ShapeError) as error:
            return as_sentence(str(error))
        return ""

    def longest(self) -> RequestLength | None:
        """Of numbers of one's own, the longest request there may be, without drawing any; else None."""
        if self.scenario is not None or self.is_file:
            return None
        shape = self.form.shape()
        shared = shape.shared_prefix.tokens if shape.shared_prefix else 0
        return RequestLength(shared + longest(shape.prompt_tokens), longest(shape.output_tokens))

    def workload(self) -> Workload:
        """Raises :class:`WorkloadError` or :class:`ShapeError`."""
        if self._built is None:
            self._built = self._maker()(None)
        return self._built

    def _maker(self) -> Callable[[int | None], Workload]:
        """What makes the load as it stands now, under a seed; None: its own. Raises as :meth:`workload`."""
        arrivals, own = self.arrivals.arrivals(), 0
        draw: Callable[[int | None], Workload]
        if self.scenario is not None:
            own, draw = self.scenario.seed, self.scenario.build
        elif self.is_file:
            read = self.trace.workload
            if read is None:
                raise WorkloadError(self.trace.fault or tr("The file is being read."))
            draw = lambda seed: read if seed is None else with_seed(read, seed)  # noqa: E731
        else:
            shape = self.form.shape()
            own, draw = shape.seed, lambda seed: shape.build("ranges", seed)

        def make(seed: int | None) -> Workload:
            made = draw(seed)
            return made if arrivals is None else made.with_arrivals(arrivals, own if seed is None else seed)

        return make

    def own_load(self) -> tuple[str, Callable[[int | None], Workload]] | None:
        """Numbers of one's own or a file as they stand, to be run elsewhere: a title and a builder. None with a
        scenario, and where there is no load."""
        if self.scenario is not None or self.fault(None):
            return None
        return self.title, self._maker()
