"""One model in figures: what it is, what it takes in memory at a chosen length, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QComboBox, QFormLayout, QHBoxLayout, QLabel, QSlider, QVBoxLayout, QWidget

from app.lab.fields import whole
from app.models.figures import SMALLEST_CONTEXT, Wanted, family_label, need_of, parameters_label, verdict
from app.models.memory_bar import MemoryBar
from app.theme import SPACING, Theme
from app.translation import mark, tr
from app.widgets import Card, Legend, button, label, set_role
from app.words import bytes_label
from engine.config import DTYPES
from engine.model_catalog import Machine, ModelEntry

_RUNNERS = {
    "native": mark("natively"),
    "transformers": mark("through the Transformers library"),
    "": mark("not at all"),
}
_SOURCES = {
    "starter": mark("the starter model"),
    "hub": mark("Hugging Face cache"),
    "folder": mark("a chosen folder"),
    "imported": mark("imported by Batchscope"),
    "gguf": mark("a GGUF file"),
}
LARGEST_CONTEXT = 1_048_576
MOST_CHATS = 256
_SMALLEST_SHIFT = 8
"""The slider goes by powers of two, from 256 tokens on."""


class ModelDetails(Card):
    load = Signal(object, str)
    """:class:`ModelEntry` to load, and the type to keep its weights in."""
    unload = Signal()
    remove = Signal(object)
    resume = Signal(object)
    """The download of an entry is to go on."""
    wanted_changed = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(tr("Details"), parent=parent)
        self._entry: ModelEntry | None = None
        self._machine: Machine | None = None
        self._asking: Callable[[], None] | None = None
        self.wanted = Wanted()
        self.name = label("", "title")
        self.reason = label()
        self.verdict = label()
        for each in (self.name, self.reason, self.verdict):
            each.setWordWrap(True)
            each.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.bar = MemoryBar(theme)
        self.legend = Legend(theme, [])
        self.legend_rest = Legend(theme, [])
        self._figures = QFormLayout()
        self._values: dict[str, QLabel] = {}
        self._build_figures()
        self._build_fields()
        self._build_buttons()
        for each in (self.name, self.reason):
            self.body.addWidget(each)
        self.body.addLayout(self._buttons)
        self.body.addWidget(self._confirm)
        self.body.addWidget(self._memory)
        self.body.addLayout(self._figures)
        self.body.addStretch(1)
        self.show_entry(None, None, loaded=False, busy=False)

    # Building --------------------------------------------------------------------------------------------------------

    def _build_figures(self) -> None:
        self._figures.setHorizontalSpacing(SPACING + 4)
        self._figures.setVerticalSpacing(3)
        for key, title in (
            ("revision", tr("Revision")),
            ("family", tr("Family")),
            ("runs", tr("Runs")),
            ("parameters", tr("Parameters")),
            ("dtype", tr("Stored as")),
            ("context", tr("Context")),
            ("disk", tr("On disk")),
            ("source", tr("From")),
            ("path", tr("Place")),
        ):
            value = self._values[key] = label()
            value.setWordWrap(True)
            value.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
            value.setAccessibleName(title)
            self._figures.addRow(label(title, "muted"), value)

    def _build_fields(self) -> None:
        self.dtype = QComboBox()
        self.dtype.setAccessibleName(tr("Type to load the weights in"))
        for dtype in DTYPES:
            self.dtype.addItem(dtype, dtype)
        self.context = whole(tr("Tokens of a chat"), SMALLEST_CONTEXT, LARGEST_CONTEXT, self.wanted.context)
        self.context.setSingleStep(256)
        self.slider = QSlider(Qt.Orientation.Horizontal)
        self.slider.setAccessibleName(tr("Tokens of a chat, in powers of two"))
        self.chats = whole(tr("Chats at the same time"), 1, MOST_CHATS, self.wanted.chats)
        form = QFormLayout()
        form.setHorizontalSpacing(SPACING + 4)
        form.setVerticalSpacing(4)
        form.addRow(label(tr("Load as"), "muted"), self.dtype)
        length = QHBoxLayout()
        length.setSpacing(SPACING)
        length.addWidget(self.context, 2)
        length.addWidget(self.slider, 3)
        form.addRow(label(tr("Tokens a chat"), "muted"), length)
        form.addRow(label(tr("Chats at once"), "muted"), self.chats)
        self._memory = QWidget()
        column = QVBoxLayout(self._memory)
        column.setContentsMargins(0, SPACING, 0, 0)
        column.setSpacing(SPACING - 2)
        column.addWidget(label(tr("Memory"), "title"))
        column.addLayout(form)
        for each in (self.bar, self.legend, self.legend_rest, self.verdict):
            column.addWidget(each)
        self.dtype.currentIndexChanged.connect(self._fields_changed)
        self.context.valueChanged.connect(self._fields_changed)
        self.chats.valueChanged.connect(self._fields_changed)
        self.slider.valueChanged.connect(self._slid)

    def _build_buttons(self) -> None:
        self.load_button = button(tr("Load"), "primary")
        self.unload_button = button(tr("Unload"))
        self.resume_button = button(tr("Go on with the download"), "primary")
        self.remove_button = button(tr("Remove from disk…"), "flat")
        self._buttons = QHBoxLayout()
        self._buttons.setSpacing(SPACING)
        for each in (self.load_button, self.resume_button, self.unload_button):
            self._buttons.addWidget(each)
        self._buttons.addStretch(1)
        self._buttons.addWidget(self.remove_button)
        self._confirm = QWidget()
        self.question = label("", "error")
        self.question.setWordWrap(True)
        self.yes, self.no = button(tr("Remove")), button(tr("Keep"))
        row = QHBoxLayout(self._confirm)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.question, 1)
        row.addWidget(self.yes)
        row.addWidget(self.no)
        self._confirm.hide()
        self.load_button.clicked.connect(lambda: self._entry and self.load.emit(self._entry, self.dtype.currentData()))
        self.resume_button.clicked.connect(lambda: self._entry and self.resume.emit(self._entry))
        self.unload_button.clicked.connect(self.unload)
        self.remove_button.clicked.connect(self._ask_to_remove)
        self.yes.clicked.connect(self._remove)
        self.no.clicked.connect(self._confirm.hide)

    # Showing ---------------------------------------------------------------------------------------------------------

    @property
    def entry(self) -> ModelEntry | None:
        return self._entry

    def prefer(
        self, device: str, dtype: str, context: int | None, limit_bytes: int | None, kv_dtype: str = "auto"
    ) -> None:
        """What the preferences say: where the fields begin, and what there is to fit into."""
        before = self.wanted
        self.wanted = replace(before, device=device, kv_dtype=kv_dtype, limit_bytes=limit_bytes)
        if before.dtype != dtype and self.dtype.currentData() == before.dtype:
            self.dtype.setCurrentIndex(self.dtype.findData(dtype))
        if context is not None:
            self.context.setValue(context)
        self._fields_changed()

    def show_entry(
        self, entry: ModelEntry | None, machine: Machine | None, *, loaded: bool, busy: bool, removable: bool = False
    ) -> None:
        """``loaded``: the engine has it. ``busy``: a model is being loaded. ``removable``: we put it on the disk."""
        if entry is None or self._entry is None or entry.path != self._entry.path:
            self._confirm.hide()
        self._entry, self._machine = entry, machine
        self.name.setText(entry.name if entry is not None else tr("No model is chosen."))
        self.reason.setText(entry.reason if entry is not None else "")
        self.reason.setVisible(bool(self.reason.text()))
        damaged = entry is not None and entry.state == "damaged"
        set_role(self.reason, "error" if damaged else "muted")
        for row, (key, value) in enumerate(self._values.items()):
            text = _figure(entry, key) if entry is not None else ""
            value.setText(text)
            self._figures.setRowVisible(row, bool(text))
        self.load_button.setVisible(entry is not None and entry.is_loadable and not loaded)
        self.load_button.setEnabled(not busy)
        self.resume_button.setVisible(entry is not None and entry.state == "incomplete" and entry.source == "hub")
        self.unload_button.setVisible(loaded)
        self.remove_button.setVisible(removable)
        self.remove_button.setEnabled(not loaded and not busy)
        self.remove_button.setToolTip(tr("Unload it first.") if loaded else "")
        self._slider_range()
        self._show_need()

    def _slider_range(self) -> None:
        longest = self._entry.max_position if self._entry is not None and self._entry.max_position else LARGEST_CONTEXT
        self.slider.blockSignals(True)
        self.slider.setRange(_SMALLEST_SHIFT, max(_SMALLEST_SHIFT, (longest - 1).bit_length()))
        self.slider.setValue((self.context.value() - 1).bit_length())
        self.slider.blockSignals(False)

    def _slid(self, shift: int) -> None:
        self.context.setValue(1 << shift)

    def _fields_changed(self) -> None:
        dtype, context, chats = self.dtype.currentData(), self.context.value(), self.chats.value()
        self.wanted = replace(self.wanted, dtype=dtype, context=context, chats=chats)
        self._slider_range()
        self._show_need()
        self.wanted_changed.emit()

    def _show_need(self) -> None:
        need = need_of(self._entry, self.wanted, self._machine) if self._entry is not None else None
        self._memory.setVisible(need is not None and self._entry is not None and self._entry.is_loadable)
        self.bar.show_need(need)
        entries = self.bar.entries()
        self.legend.set_entries(entries[:2])
        self.legend_rest.set_entries(entries[2:])
        if need is not None and self._machine is not None:
            self.verdict.setText(verdict(need, self.wanted))
            set_role(self.verdict, "" if need.loads else "error")
            auto = need_of(self._entry, replace(self.wanted, dtype="auto"), self._machine)
            self.dtype.setItemText(self.dtype.findData("auto"), tr("auto: {dtype}", dtype=auto.dtype))

    def _ask_to_remove(self) -> None:
        if self._entry is None:
            return
        self.question.setText(
            tr(
                "Remove {name} ({size}) from the disk? It cannot be brought back without fetching it again.",
                name=self._entry.name,
                size=bytes_label(self._entry.disk_bytes),
            )
        )
        self._confirm.show()
        self.no.setFocus()

    def _remove(self) -> None:
        self._confirm.hide()
        if self._entry is not None:
            self.remove.emit(self._entry)


def _figure(entry: ModelEntry, key: str) -> str:
    if key == "revision":
        return entry.revision + (f" ({entry.commit[:7]})" if entry.commit[:7] not in ("", entry.revision) else "")
    if key == "family":
        return family_label(entry.architecture)
    if key == "runs":
        return tr(_RUNNERS[entry.runner]) if entry.architecture else ""
    if key == "parameters":
        short = parameters_label(entry.parameters)
        return f"{short} ({entry.parameters:,})" if entry.parameters >= 1_000_000 else short
    if key == "context":
        return tr("{tokens:,} tokens", tokens=entry.max_position) if entry.max_position else ""
    if key == "disk":
        return bytes_label(entry.disk_bytes) if entry.disk_bytes and entry.state != "absent" else ""
    return {"dtype": entry.dtype, "source": tr(_SOURCES[entry.source]), "path": entry.path}[key]
