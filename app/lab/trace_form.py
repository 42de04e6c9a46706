"""A load from a file: which, what was read of it, how much, how fast."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QTimer, Signal
from PySide6.QtGui import QHideEvent, QShowEvent
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app.lab.fields import decimal, form_layout, sentence, whole
from app.lab.trace_loading import TraceLoading
from app.theme import SPACING
from app.translation import tr
from app.widgets import button
from engine.workload import MAX_REQUESTS, Workload

USUAL_ROWS = 1_000
TYPING_MS = 400
"""After a change the file is read once more, unless another follows within this time."""


class TraceForm(QWidget):
    """``changed`` when the workload is another one, or none any more."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.path: Path | None = None
        self.workload: Workload | None = None
        """What was read; None while it is read, and where it cannot be."""
        self.fault = ""
        """Why it cannot be read."""
        self.counts = sentence("muted")
        self.scale = decimal(tr("Time scale"), 0.01, 10_000.0, 1.0, suffix=tr(" × as fast"))
        self.scale.setToolTip(tr("2: requests come twice as fast as recorded"))
        self.limit = whole(
            tr("Rows to read"), 0, MAX_REQUESTS, USUAL_ROWS, prefix="first ", suffix=" rows", lowest=tr("all rows")
        )
        self.progress = QProgressBar()
        self.progress.setRange(0, 1_000)
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("How much of the file has been read"))
        self.cancel_button = button(tr("Cancel"), "flat", tr("Stop reading the file"))
        self.cancel_button.clicked.connect(self.cancel)
        self._reading = QWidget()
        row = QHBoxLayout(self._reading)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.progress, 1)
        row.addWidget(self.cancel_button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING)
        column.addWidget(self.counts)
        column.addWidget(self._reading)
        fields = QWidget()
        self._form = form_layout(fields)
        self._form.addRow(tr("read"), self.limit)
        self._form.addRow(tr("time"), self.scale)
        column.addWidget(fields)
        self._loading = TraceLoading(self)
        self._loading.progressed.connect(self._show_progress)
        self._loading.loaded.connect(self._loaded)
        self._loading.failed.connect(self._failed)
        self._again = QTimer(self)
        self._again.setSingleShot(True)
        self._again.setInterval(TYPING_MS)
        self._again.timeout.connect(self._read)
        for box in (self.scale, self.limit):
            box.valueChanged.connect(self._fields_changed)
        self._reading.hide()

    @property
    def busy(self) -> bool:
        """Whether it is being read, or about to be."""
        return self._loading.reading or self._again.isActive()

    def open(self, path: Path) -> None:
        self.path = path
        self._read()

    def cancel(self) -> None:
        """Stop reading; the file stays chosen, and is read when a field changes or it is chosen again."""
        self._again.stop()
        self._loading.stop()
        self._failed(
            tr(
                "{name} was not read to its end. Lower the number of rows.",
                name=self.path.name if self.path else tr("The file"),
            )
        )

    def _fields_changed(self, _value: float) -> None:
        if self.path is not None:
            self._again.start()
            self.changed.emit()

    def _read(self) -> None:
        """Begin anew; what is not seen is read when it is."""
        self._again.stop()
        self.workload, self.fault = None, ""
        if self.path is None or not self.isVisible():
            return
        limit = self.limit.value() or None
        self._loading.start(self.path, time_scale=self.scale.value(), limit=limit)
        if self._loading.reading:
            self._show_progress()
            self.changed.emit()

    def _show_progress(self) -> None:
        limit = self.limit.value()
        of_rows = self._loading.rows_read / limit if limit else 0.0
        self.progress.setValue(round(1_000 * max(of_rows, self._loading.share)))
        self._reading.show()
        name = self.path.name if self.path is not None else ""
        self.counts.setText(
            tr("Reading {name}: {rows_read:,} rows so far.", name=name, rows_read=self._loading.rows_read)
        )

    def _loaded(self, workload: Workload) -> None:
        self.workload = workload
        self._reading.hide()
        assert workload.rows is not None
        self.counts.setText(f"{workload.rows.sentence()}.")
        self._form.setRowVisible(self.scale, workload.open_loop)
        self.changed.emit()

    def _failed(self, message: str) -> None:
        self.workload, self.fault = None, message
        self._reading.hide()
        self.counts.setText("")
        self.changed.emit()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        if self.busy:
            self._again.stop()
            self._loading.stop()
            self.workload = None

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        if self.workload is None and not self.fault and not self._loading.reading:
            self._read()
