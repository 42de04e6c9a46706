"""Reads a workload file beside everything else that the window does: a slice at a time, off no other thread."""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtCore import QObject, QTimer, Signal

from engine.traces import TraceReader
from engine.workload import ShapeError, WorkloadError

SLICE_SECONDS = 0.012
SLICE_ROWS = 50


class TraceLoading(QObject):
    """One file at a time; the last one asked for wins."""

    progressed = Signal()
    loaded = Signal(object)
    """:class:`engine.workload.Workload`."""
    failed = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._reader: TraceReader | None = None
        self._timer = QTimer(self)
        self._timer.setInterval(0)
        self._timer.timeout.connect(self._read)

    @property
    def reading(self) -> bool:
        return self._reader is not None

    @property
    def rows_read(self) -> int:
        return self._reader.rows_read if self._reader is not None else 0

    @property
    def share(self) -> float:
        """How much of the file has been read, 0 to 1."""
        return self._reader.share if self._reader is not None else 0.0

    def start(self, path: Path, *, time_scale: float, limit: int | None) -> None:
        self.stop()
        try:
            self._reader = TraceReader(path, time_scale=time_scale, limit=limit)
        except (WorkloadError, ShapeError) as error:
            self.failed.emit(str(error))
            return
        self._timer.start()

    def stop(self) -> None:
        self._timer.stop()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self) -> None:
        reader = self._reader
        if reader is None:
            return
        until = time.perf_counter() + SLICE_SECONDS
        try:
            more = True
            while more and time.perf_counter() < until:
                more = reader.read(SLICE_ROWS)
            if more:
                self.progressed.emit()
                return
            workload = reader.workload()
        except WorkloadError as error:
            self.stop()
            self.failed.emit(str(error))
            return
        self.stop()
        self.loaded.emit(workload)
