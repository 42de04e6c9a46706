"""The fields of a comparison: disciplines or a knob with its values, seeds, baseline, warm-up, objectives."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFormLayout, QLineEdit, QSizePolicy, QSpinBox, QWidget

from app.knob_words import MEANINGS, meaning
from app.lab.check_list import CheckList
from app.lab.choice import Choice
from app.lab.compare_model import KNOBS, CompareChoice, CompareFault, CompareLoad, Knob, named_variants, parse_values
from app.theme import SPACING, Theme
from engine.config import DISCIPLINES

USUAL_DISCIPLINES = ("static", "orca", "vllm")
MOST_WARM_UPS = 1_000
AUTOMATIC_BASELINE = "static, else the first"


class CompareForm(QWidget):
    """Makes a :class:`CompareChoice`. ``changed`` whenever a field does."""

    changed = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.what = Choice("What to compare", theme)
        self.what.addItem("Disciplines", None)
        for knob in KNOBS:
            self.what.addItem(f"Values of {knob.title}", knob.name)
        self.disciplines = CheckList("Disciplines", theme)
        tips = [meaning("discipline", name) for name in DISCIPLINES]
        self.disciplines.set_names(DISCIPLINES, USUAL_DISCIPLINES, tips)
        self.options = CheckList("Values", theme)
        self.values = _field("Values, separated by commas")
        self.baseline = Choice("Baseline of the ratios", theme)
        self.seeds = _field("Seeds of prompts, arrivals and sampling", "the workload's own; or 1, 2, 3 or 1-3")
        self.seeds.setToolTip("Each variant runs once for every seed; the result shows the median and the spread.")
        self.warm_up = QSpinBox()
        self.warm_up.setRange(0, MOST_WARM_UPS)
        self.warm_up.setValue(1)
        self.warm_up.setAccessibleName("Warm-up requests before each run")
        self.warm_up.setToolTip("Requests before each run that do not count: the first must not pay for all others.")
        self.warm_up.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.warm_up.lineEdit().setTextMargins(SPACING, 0, SPACING, 0)
        self.goodput = _field("Objectives of goodput in milliseconds", "none; e.g. ttft:500, tpot:50, e2el:5000")
        self.goodput.setToolTip("Goodput counts the requests per second that meet every objective, in milliseconds.")
        self._lay_out()
        self._connect()
        self._what_changed()

    def _lay_out(self) -> None:
        self._form = QFormLayout(self)
        self._form.setContentsMargins(0, 0, 0, 0)
        self._form.setSpacing(SPACING)
        self._form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.AllNonFixedFieldsGrow)
        self._form.setLabelAlignment(Qt.AlignmentFlag.AlignLeft)
        self._form.addRow("compare", self.what)
        self._form.addRow("disciplines", self.disciplines)
        self._form.addRow("values", self.options)
        self._form.addRow("values", self.values)
        self._form.addRow("baseline", self.baseline)
        self._form.addRow("seeds", self.seeds)
        self._form.addRow("warm-up", self.warm_up)
        self._form.addRow("goodput", self.goodput)

    def _connect(self) -> None:
        self.what.currentIndexChanged.connect(self._what_changed)
        for check_list in (self.disciplines, self.options):
            check_list.changed.connect(self._variants_changed)
        self.values.textChanged.connect(self._variants_changed)
        for field in (self.seeds, self.goodput):
            field.textChanged.connect(self._emit)
        self.warm_up.valueChanged.connect(self._emit)
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
            warm_up=self.warm_up.value(),
            goodput=self.goodput.text(),
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
        tip = "" if knob is None else "Every ticked discipline runs under each value; none: the one in force."
        self.disciplines.setToolTip(tip)
        self._form.setRowVisible(self.options, knob is not None and not typed)
        self._form.setRowVisible(self.values, typed)
        if knob is not None and typed:
            self.values.setText(", ".join(knob.usual))
            self.values.setPlaceholderText(f"e.g. {', '.join(knob.usual)}")
            self.values.setToolTip(f"{knob.title.capitalize()} in {knob.unit}")
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
        self.changed.emit()


def _field(name: str, placeholder: str = "") -> QLineEdit:
    field = QLineEdit()
    field.setAccessibleName(name)
    field.setPlaceholderText(placeholder)
    field.setMinimumWidth(80)
    return field
