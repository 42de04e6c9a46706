"""The window on a recorded run: the views of the live window, fed from a file, with a player in place of an engine.

::

    open ─▶ fold all records, a slice of them between two turns of the event loop ─▶ shown; any step by the time bar
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from PySide6.QtCore import QRectF, QSettings, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QMenu, QToolButton, QWidget

from app.docks import ArrangementName
from app.scope.panel import RunHistory, ScopeSource
from app.scope_window import ScopeWindow
from app.settings.preferences import PreferenceStore, default_preferences_path
from app.start import delete_in_order, languages, make_application, signals_close
from app.theme import PADDING, SPACING, Theme
from app.translation import tr, use_language
from app.widgets import label, paint_surface
from app.words import count, seconds_label
from engine.events import Keyframe, StepRecord
from engine.recording import RecordingError, RunReader, Text
from engine.run_state import RunState

SLICE_SECONDS = 0.02
"""How long the window reads before it lets the user do something."""
FRAME_MS = 33
SPEEDS = (0.25, 1.0, 4.0, 16.0)
PICTURE_MS = 400
"""Before a picture: layouts come to rest."""


class ReplayWindow(ScopeWindow):
    arrangements: tuple[ArrangementName, ...] = ("monitor", "chat")
    opened = Signal()
    """All of the file is read."""

    def __init__(
        self,
        path: Path,
        theme: Theme,
        *,
        settings: QSettings | None = None,
        preferences: PreferenceStore | None = None,
    ) -> None:
        """Raises :class:`engine.recording.RecordingError` where the file is no run that this program can read."""
        self._reader = RunReader(path)
        self._path = path
        self._state = RunState()
        self._history = RunHistory()
        source = ScopeSource(self._state, self._history, live=False)
        super().__init__(source, theme, settings=settings, preferences=preferences)
        self.setWindowTitle(tr("{name} – Batchscope", name=path.name))
        header = self._reader.header
        if header.config is not None:
            self.source.scheduler = header.config.scheduler
        if header.info is not None:
            self.source.block_bytes = header.info.kv_bytes_per_block
        self._items: Iterator[Keyframe | StepRecord] = iter(())
        self._whole = 0
        """Steps that could be read."""
        self._reading = QTimer(self)
        self._reading.timeout.connect(self._read_on)
        self._playing = QTimer(self)
        self._playing.timeout.connect(self._play_on)
        self._speed = 1.0
        self._played_from = (0.0, 0.0)
        """(clock here, clock of the run) when the player was started."""
        for panel in self.panels.values():  # what the live window advises does not help here
            panel.pages.empty.set_text(tr("Nothing of this kind up to the shown step of the recording."))
        self.build_docks({})
        self._build_top()
        bar = self.time_bar
        bar.live_button.setText(tr("End"))
        bar.live_button.setAccessibleName(tr("To the last step of the recording"))
        bar.live_tip = tr("To the last step of the recording")
        bar.pause_wanted.connect(self.pause)
        bar.step_wanted.connect(lambda: self.travel.move(1))
        self.action(tr("Play or pause"), "F8", lambda: self.pause(self._playing.isActive()), name="engine.pause")
        self.action(tr("One step on"), "F10", lambda: self.travel.move(1), name="engine.step")
        self.action(tr("Close"), "Ctrl+Q", self.close, name="window.quit")
        self.restore_layout()

    def _build_top(self) -> None:
        top = _Top(self.theme)
        self.title = label("", "title")
        self.facts = label("", "muted")
        self.speed = QToolButton()
        self.speed.setText("×1 ▾")
        self.speed.setAccessibleName(tr("Speed of the player"))
        self.speed.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        menu = QMenu(self)
        for speed in SPEEDS:
            menu.addAction(f"×{speed:g}").triggered.connect(lambda _=False, speed=speed: self.set_speed(speed))
        self.speed.setMenu(menu)
        view = QToolButton()
        view.setText(tr("View ▾"))
        view.setAccessibleName(tr("View menu"))
        view.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        view.setMenu(self.view_menu())
        for widget in (self.title, view, self.speed):
            top.row.addWidget(widget)
        top.row.addWidget(self.facts, 1, Qt.AlignmentFlag.AlignRight)
        self.title.setText(self._path.name)
        self.build_top(top)

    # Reading -----------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Begin to fold the file; ``opened`` tells when all of it is."""
        self._items = self._reader.replay()
        self._reading.start(0)

    def _read_on(self) -> None:
        until = time.perf_counter() + SLICE_SECONDS
        try:
            for item in self._items:
                self._whole += isinstance(item, StepRecord)
                for fold in (self._state, self._history):
                    if isinstance(item, Keyframe):
                        fold.restore(item)
                    else:
                        fold.apply(item)
                if time.perf_counter() >= until:
                    break
            else:
                self._read_all()
                return
        except (RecordingError, OSError) as error:
            self._read_all(f"{str(error).rstrip('.')}.")
            return
        reader = self._reader
        share = (self._state.step - reader.first_step) / max(1, reader.last_step - reader.first_step)
        self.facts.setText(tr("reading: {share:.0%}", share=share))

    def _read_all(self, fault: str = "") -> None:
        """``fault``: why no more could be read, a sentence."""
        self._reading.stop()
        reader, lanes = self._reader, self._history.lanes
        model = reader.header.info.name if reader.header.info is not None else ""
        facts = [model, self._state.discipline, count(self._whole, "step")]
        if self._whole:
            facts.append(seconds_label(lanes.end - lanes.begin))
        self.facts.setText(" · ".join(filter(None, facts)))
        self.facts.setToolTip(tr("{path}\nrecorded {created}", path=self._path, created=reader.header.created))
        if lacking := " ".join(filter(None, (fault, self._lacking()))):
            self.notice.say(lacking, action=(tr("Close"), lambda: None))
        if reader.header.texts:
            self.source.texts = _Texts(reader, self.source).of
        self.travel.follow(self._path)
        self.time_bar.show_pace(alive=True, paused=True)
        self.show_again()
        self.opened.emit()

    def _lacking(self) -> str:
        """What the window does not show of the run, in sentences; empty: nothing."""
        reader, said = self._reader, []
        if not reader.num_steps:
            return tr("There is no whole step in this file, so nothing can be shown: record while the engine works.")
        if reader.truncated:
            last = tr("{last_step:,}, the last whole one", last_step=reader.last_step)
            said.append(tr("The file ends within a step: it is shown up to step {last}.", last=last))
        if self._whole < reader.num_steps:
            missing = f"{reader.num_steps - self._whole:,} of {count(reader.num_steps, 'step')}"
            said.append(tr("The file is damaged: {missing} cannot be read and are left out.", missing=missing))
        return " ".join(said)

    # Playing -----------------------------------------------------------------------------------------------------

    def set_speed(self, speed: float) -> None:
        self._speed = speed
        self.speed.setText(f"×{speed:g} ▾")
        self._start_clock()

    def pause(self, paused: bool) -> None:
        if paused:
            self._playing.stop()
        else:
            if self.travel.is_live:
                self.travel.show_step(self._reader.first_step)
            self._start_clock()
            self._playing.start(FRAME_MS)
        self.time_bar.show_pace(alive=True, paused=paused)

    def _start_clock(self) -> None:
        self._played_from = (time.perf_counter(), self.source.now)

    def _play_on(self) -> None:
        here, run = self._played_from
        self.travel.show_time(run + (time.perf_counter() - here) * self._speed)
        if self.travel.is_live:
            self.pause(True)

    def closeEvent(self, event: QCloseEvent) -> None:
        self._reading.stop()
        self._playing.stop()
        self.rest()
        self.save_layout()
        self.travel.close()
        self._reader.close()
        event.accept()


class _Texts:
    """Prompts and answers of a recording that kept them."""

    def __init__(self, reader: RunReader, source: ScopeSource) -> None:
        self._source = source
        self._pieces: dict[int, list[tuple[int, Text]]] = {}
        for step, text in reader.texts():
            self._pieces.setdefault(text.request_id, []).append((step, text))

    def of(self, request_id: int) -> tuple[str, str] | None:
        """Prompt and answer as far as they had come at the shown step; None where nothing was kept."""
        last = self._source.last_step
        pieces = [text for step, text in self._pieces.get(request_id, []) if last is None or step <= last]
        prompt = "\n".join(text.text for text in pieces if text.role != "assistant")
        answer = "".join(text.text for text in pieces if text.role == "assistant")
        return (prompt, answer) if pieces else None


class _Top(QWidget):
    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.row = QHBoxLayout(self)
        self.row.setContentsMargins(PADDING[0], 7, PADDING[2], 7)
        self.row.setSpacing(SPACING)
        theme.changed.connect(self.update)

    def paintEvent(self, event: QPaintEvent) -> None:
        paint_surface(QPainter(self), QRectF(self.rect()), self._theme.card, self._theme.line)


def show_replay(path: Path, *, step: int | None, screenshot: Path | None, stays: bool) -> str:
    """Open the window on a run, at ``step`` or its end; save a picture of it where one is wanted. ``stays``: until the
    user closes it, else it is gone when all is done. Returns what went wrong; empty: nothing."""
    application = make_application()
    preferences = PreferenceStore(default_preferences_path())
    use_language(*languages(preferences))
    window = ReplayWindow(path, Theme(application), preferences=preferences)
    fault = ""

    def shown() -> None:
        if step is not None:
            window.travel.show_step(step)
        QTimer.singleShot(PICTURE_MS, window, picture)

    def picture() -> None:
        nonlocal fault
        if screenshot is not None and not window.grab().save(str(screenshot), tr("PNG")):
            fault = f"--screenshot {screenshot}: the picture cannot be saved there"
        if not stays:
            window.close()

    window.opened.connect(shown)
    window.show()
    QTimer.singleShot(0, window, window.read)
    with signals_close(window.close):
        application.exec()
    delete_in_order(window)
    return fault
