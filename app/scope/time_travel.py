"""Looking back: which step the panels show, taken from the run file that the engine writes.

::

    run file   ├─keyframe─┬─records─…─┤─keyframe─┬─records─…─┤─keyframe─┬─records─…▶ engine
                          ▲ show_step: the keyframe before it, and the records up to it
    live       ──────────────────────────────────────────────────────────────────▶ goes on behind

The window keeps nothing of the past but its histories; what a step looked like is read from disk when it is asked for.
"""

from __future__ import annotations

import time
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.scope.panel import Moment, ScopeSource
from app.translation import tr
from engine.recording import RecordingError, RunReader

KEEP_UP_SECONDS = 2.0


class TimeTravel(QObject):
    moved = Signal()
    """Another step is shown, or the newest again."""
    failed = Signal(str)
    """Why a step cannot be shown; what is shown stays as it is."""

    def __init__(self, source: ScopeSource, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._source = source
        self._path: Path | None = None
        self._reader: RunReader | None = None
        self._kept_up_at = 0.0

    def follow(self, path: Path | None) -> None:
        """The run file of the run that the panels follow; None: nothing can be looked back at."""
        self.show_newest()
        self.close()
        self._path = path

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = self._path = None

    @property
    def path(self) -> Path | None:
        return self._path

    @property
    def is_possible(self) -> bool:
        return self._path is not None

    @property
    def first_step(self) -> int:
        """The oldest step that can be shown, as far as is known."""
        return self._reader.first_step if self._reader is not None else 0

    @property
    def shown_step(self) -> int:
        return self._source.state.step

    @property
    def is_live(self) -> bool:
        return self._source.moment is None

    def reader(self) -> RunReader | None:
        """The run file as far as it is written; None where there is none, which has been said then."""
        if self._path is None:
            return None
        try:
            if self._reader is None:
                self._reader = RunReader(self._path)
            else:
                self._reader.refresh()
        except (RecordingError, OSError) as error:
            self._reader = None
            self.failed.emit(tr("The past cannot be shown: {error}", error=error))
        return self._reader

    def keep_up(self) -> None:
        """Take in now and then what is written, so that a jump need not go through all of it."""
        now = time.perf_counter()
        if self._path is not None and self._source.moment is None and now - self._kept_up_at >= KEEP_UP_SECONDS:
            self._kept_up_at = now
            if self._path.exists():
                self.reader()

    def show_step(self, step: int) -> None:
        """The run as it was right after ``step``, or the nearest step that is kept; the newest is shown live."""
        if step >= self._source.live_state.step:
            self.show_newest()
            return
        reader = self.reader()
        if reader is None:
            return
        step = max(reader.first_step, min(step, reader.last_step))
        if self._source.moment is not None and self._source.moment.step == step:
            return
        try:
            state = reader.state_at(step)
            self._source.moment = Moment(state, reader.end_of(step))
        except (RecordingError, OSError) as error:
            self.failed.emit(tr("Step {step:,} cannot be shown: {error}", step=step, error=error))
            return
        self.moved.emit()

    def show_time(self, time: float) -> None:
        """The newest step that had ended at ``time``, engine clock."""
        if time >= self._source.history.lanes.end:
            self.show_newest()
            return
        reader = self.reader()
        if reader is not None:
            self.show_step(reader.step_at(time))

    def move(self, steps: int) -> None:
        """So many steps on, or back."""
        self.show_step(max(0, self.shown_step + steps))

    def show_newest(self) -> None:
        if self._source.moment is not None:
            self._source.moment = None
            self.moved.emit()
