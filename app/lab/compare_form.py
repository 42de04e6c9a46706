"""The fields of a comparison: disciplines or a knob with its values, seeds, baseline, warm-up, objectives."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.knob_words import MEANINGS, meaning
from app.lab.check_list import CheckList
from app.lab.choice import Choice
from app.lab.compare_model import KNOBS, CompareChoice, CompareFault, CompareLoad, Knob, named_variants, parse_values
from app.lab.fields import form_layout, text
from app.lab.fold import Fold
from app.lab.measure_form import MeasureForm
from app.theme import SPACING, Theme
from app.translation import tr
from engine.config import DISCIPLINES

USUAL_DISCIPLINES = ("static", "orca", "vllm")
USUAL_WARM_UP = 1
"""Requests: the first run must not pay for what every first step of a process pays."""
AUTOMATIC_BASELINE = tr("static, else the first")


class CompareForm(QWidget):
    """Makes a :class:`CompareChoice`. ``changed`` whenever a field does."""

    changed = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.what = Choice(tr("What to compare"), theme)
        self.what.addItem(tr("Disciplines"), None)
        for knob in KNOBS:
            self.what.addItem(tr("Values of {title}", title=knob.title), knob.name)
        self.disciplines = CheckList(tr("Disciplines"), theme)
        tips = [meaning("discipline", name) for name in DISCIPLINES]
        self.disciplines.set_names(DISCIPLINES, USUAL_DISCIPLINES, tips)
        self.options = CheckList(tr("Values"), theme)
        self.values = text(tr("Values, separated by commas"))
        self.baseline = Choice(tr("Baseline of the ratios"), theme)
        self.seeds = text(tr("Seeds of prompts, arrivals and sampling"), tr("the workload's own; or 1, 2, 3 or 1-3"))
        self.seeds.setToolTip(tr("Each variant runs once for every seed; the result shows the median and the spread."))
        self.measure = MeasureForm()
        self.measure.warm_up_field.setValue(USUAL_WARM_UP)
        self.measure_fold = Fold(tr("Measuring"), self.measure)
        self._lay_out()
        self._connect()
        self._what_changed()

    def _lay_out(self) -> None:
        fields = QWidget()
        self._form = form_layout(fields)
        self._form.addRow(tr("compare"), self.what)
        self._form.addRow(tr("disciplines"), self.disciplines)
        self._form.addRow(tr("values"), self.options)
        self._form.addRow(tr("values"), self.values)
        self._form.addRow(tr("baseline"), self.baseline)
        self._form.addRow(tr("seeds"), self.seeds)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING)
        column.addWidget(fields)
        column.addWidget(self.measure_fold)

    def _connect(self) -> None:
        self.what.currentIndexChanged.connect(self._what_changed)
        for check_list in (self.disciplines, self.options):
            check_list.changed.connect(self._variants_changed)
        self.values.textChanged.connect(self._variants_changed)
        self.seeds.textChanged.connect(self._emit)
        self.measure.changed.connect(self._emit)
        self.baseline.currentIndexChanged.connect(self._emit)

    @property
    def knob(self) -> Knob | None:
        """The knob whose values are compared; None with disciplines."""
        name = self.what.currentData()
        return next((knob for knob in KNOBS if knob.name == name), None)

    def select_knob(self, name: str | None) -> None:
        """A knob by its option's name; None: disciplines."""
        self.what.setCurrentIndex(self.what.findData(name))

    def choice(self, load: CompareLoad, *, beside_recorded: bool = False) -> CompareChoice:
        return CompareChoice(
            load=load,
            disciplines=self.disciplines.ticked(),
            knob=self.knob,
            values=self._values(),
            seeds=self.seeds.text() if load.seeded else "",
            baseline=self.baseline.currentData() or "",
            warm_up=self.measure.warm_up,
            objectives=self.measure.objectives(),
            beside_recorded=beside_recorded,
        )

    def _values(self) -> tuple[str, ...]:
        typed = self.knob is not None and self.knob.typed
        return parse_values(self.values.text()) if typed else self.options.ticked()

    def allow_seeds(self, allowed: bool) -> None:
        self._form.setRowVisible(self.seeds, allowed)

    def _what_changed(self) -> None:
        knob = self.knob
        typed = knob is not None and knob.typed
        self.disciplines.tick(USUAL_DISCIPLINES if knob is None else ())
        tip = "" if knob is None else tr("Every ticked discipline runs under each value; none: the one in force.")
        self.disciplines.setToolTip(tip)
        self._form.setRowVisible(self.options, knob is not None and not typed)
        self._form.setRowVisible(self.values, typed)
        if knob is not None and typed:
            self.values.setText(", ".join(knob.usual))
            self.values.setPlaceholderText(tr("e.g. {usual}", usual=", ".join(knob.usual)))
            self.values.setToolTip(tr("{knob} in {unit}", knob=knob.title.capitalize(), unit=knob.unit))
        elif knob is not None:
            tips = [meaning(knob.name, v) for v in knob.usual] if knob.name in MEANINGS else ()
            self.options.set_names(knob.usual, knob.usual, tips)
        self._variants_changed()

    def _variants_changed(self) -> None:
        """Offer what is compared as baseline, and keep the chosen one where it is still there."""
        try:
            names = [variant.name for variant in named_variants(self.disciplines.ticked(), self.knob, self._values())]
        except CompareFault:
            names = []
        chosen = self.baseline.currentData()
        blocked = self.baseline.blockSignals(True)
        self.baseline.clear()
        self.baseline.addItem(AUTOMATIC_BASELINE, "")
        for name in names:
            self.baseline.addItem(name, name)
        self.baseline.setCurrentIndex(max(0, self.baseline.findData(chosen)))
        self.baseline.blockSignals(blocked)
        self._emit()

    def _emit(self, _value: object = None) -> None:
        self.measure_fold.say(self.measure.summary())
        self.changed.emit()
