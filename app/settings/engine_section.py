"""Where and with what a model runs. What a loaded model does not take any more is said, and a reload offered."""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QSpinBox

from app.engine_bridge import EngineBridge
from app.lab.fields import whole
from app.settings.preferences import MOST_MB, SMALLEST_MEMORY_MB, Preferences
from app.settings.rows import Fields, Row, Section
from app.translation import mark, ntr, tr
from app.widgets import button
from app.words import and_list
from engine.config import DEVICES, DTYPES, KV_DTYPES, STARTER_MODEL, EngineConfig
from engine.environment import usable_cores

ENGINE_FIELDS: dict[str, str] = {
    "device": mark("device"),
    "threads": mark("threads"),
    "dtype": mark("type of the weights"),
    "kv_dtype": mark("type of keys and values"),
    "max_model_len": mark("context length"),
    "memory_limit": mark("memory limit"),
}
"""What of :class:`EngineConfig` the preferences set, and what it is called."""
_DEVICES = {"auto": mark("Automatic"), "cpu": mark("Processor"), "cuda": mark("GPU")}
_DTYPES = {
    "auto": mark("Automatic"),
    "int8": "int8",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
}
_KV_DTYPES = {"auto": mark("As the model computes"), "fp8": "fp8"}


class EngineSection(Section):
    reload_wanted = Signal()

    def __init__(self, fields: Fields, bridge: EngineBridge) -> None:
        super().__init__(tr("Engine"))
        self._fields = fields
        self._bridge = bridge
        self._before = fields.store.values
        self._running = bridge.config if bridge.state in ("starting", "loading", "ready") else None
        """What the engine was started with that loads or runs."""
        self.cores = usable_cores()
        self.reload_button = button(tr("Load again"), "primary", tr("Load the model again with these settings"))
        self.reload_button.clicked.connect(self.reload_wanted)
        self.reload_row = Row(tr("The model that is loaded runs with other settings"), self.reload_button)
        self.add(self.reload_row)
        self._add_rows()
        fields.store.changed.connect(self._preferences_changed)
        bridge.state_changed.connect(self._engine_state_changed)
        self._show_reload()

    def _add_rows(self) -> None:
        fields = self._fields
        devices = [(tr(_DEVICES[name]), name) for name in DEVICES]
        hint = tr("Automatic takes the GPU where one works, else the processor.")
        self.device = self.add(fields.choice(tr("Device"), "device", devices, hint))
        self.threads = self.add(self._threads_row())
        dtypes = [(tr(_DTYPES[name]), name) for name in DTYPES]
        hint = tr(
            "int8 needs the least memory; float32 is exact, and takes twice the memory of 16 bits and more time. "
            "Automatic: int8 on a processor, bfloat16 or float16 on a GPU, and int8 where that does not fit."
        )
        self.dtype = self.add(fields.choice(tr("Type of the weights"), "dtype", dtypes, hint))
        kv_dtypes = [(tr(_KV_DTYPES[name]), name) for name in KV_DTYPES]
        hint = tr(
            "fp8 holds twice the tokens in the same memory, a little less exactly, on GPUs that have it: NVIDIA's from "
            "the RTX 40 series on, AMD's MI300. A processor does not."
        )
        self.kv_dtype = self.add(fields.choice(tr("Type of keys and values"), "kv_dtype", kv_dtypes, hint))
        box = whole(tr("Context length"), 0, 1 << 24, 0, suffix=tr(" tokens"), lowest=tr("As the model was made for"))
        hint = tr("The longest conversation, prompt and answer together. A shorter one needs less memory.")
        self.context = self.add(self._number_row(tr("Context length"), box, "max_model_len", 2, hint))
        box = whole(tr("Memory limit"), 0, MOST_MB, 0, suffix=" MiB", lowest=tr("What is free at the load"))
        box.setSingleStep(256)
        hint = tr("Most that weights and KV blocks may take on the device.")
        self.memory = self.add(self._number_row(tr("Memory limit"), box, "memory_limit_mb", SMALLEST_MEMORY_MB, hint))
        starts = [
            (tr("The model used last"), "last"),
            (tr("The starter model"), "starter"),
            (tr("No model"), "nothing"),
        ]
        self.add(fields.choice(tr("At the start, load"), "start_with", starts))
        self.add(
            fields.check(
                tr("Offline"),
                "offline",
                tr("Never fetch anything"),
                tr("Models are then only those that are on this machine."),
            )
        )

    def _threads_row(self) -> Row:
        lowest = ntr("{count} physical core", "{count} physical cores", self.cores)
        box = whole(tr("Threads"), 0, 1024, 0, lowest=lowest)
        hint = ntr(
            "This machine lends {count} physical core. The window needs a little of it too.",
            "This machine lends {count} physical cores. The window needs a little of them too.",
            self.cores,
        )
        row = self._number_row(tr("Threads"), box, "threads", 1, hint)
        self._fields.follow(lambda: self._warn_of_threads(row))
        return row

    def _warn_of_threads(self, row: Row) -> None:
        threads = self._fields.store.values.threads
        too_many = threads is not None and threads > self.cores
        row.say(
            tr(
                "{threads} threads on {cores} physical cores wait for each other at every step: many times slower.",
                threads=threads,
                cores=self.cores,
            )
            if too_many
            else ""
        )

    def _number_row(self, title: str, box: QSpinBox, name: str, least: int, hint: str) -> Row:
        """0 stands for None; what lies between it and ``least`` is taken as ``least``."""
        row = Row(title, box, hint)
        box.valueChanged.connect(lambda value: self._fields.set(row, **{name: max(least, value) if value else None}))
        self._fields.follow(lambda: box.setValue(getattr(self._fields.store.values, name) or 0))
        return row

    # What the engine has of it -------------------------------------------------------------------------------------

    def _preferences_changed(self) -> None:
        """What was changed is what the engine's next start begins with, whoever asks for that."""
        before, values = _config(self._before), _config(self._fields.store.values)
        self._before = self._fields.store.values
        changed = {name: getattr(values, name) for name in ENGINE_FIELDS if _differ(before, values, name)}
        if changed:
            self._bridge.config = replace(self._bridge.config, **changed)
            self._show_reload()

    def _engine_state_changed(self, state: str) -> None:
        if state == "starting":
            self._running = self._bridge.config
        elif state not in ("loading", "ready"):
            self._running = None
        self._show_reload()

    @property
    def stale(self) -> list[str]:
        """What of the settings the engine that runs does not have, by name; empty: nothing, or there is none."""
        if self._running is None:
            return []
        return [name for name in ENGINE_FIELDS if _differ(self._running, self._bridge.config, name)]

    def _show_reload(self) -> None:
        stale = self.stale
        self.reload_row.setVisible(bool(stale))
        if stale:
            what = and_list([tr(ENGINE_FIELDS[name]) for name in stale])
            self.reload_row.explain(tr("Changed since: {what}. They hold once the model is loaded again.", what=what))

    def search(self, words: list[str]) -> int:
        found = super().search(words)
        if not self.stale and not self.reload_row.isHidden():
            self.reload_row.hide()
            found -= 1
            self.setVisible(found > 0)
        return found


def _config(values: Preferences) -> EngineConfig:
    return values.engine_config(STARTER_MODEL)


def _differ(first: EngineConfig, second: EngineConfig, name: str) -> bool:
    return getattr(first, name) != getattr(second, name)
