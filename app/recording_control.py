"""Recording: each run goes to a file of its own all the time, and what the user wants of it is copied out of that.

So a recording can begin in the past: "save all that is kept" works for what has been seen already.
"""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject, QRunnable, QSettings, QThreadPool, Signal
from PySide6.QtGui import QAction, QActionGroup
from PySide6.QtWidgets import QFileDialog, QMenu, QToolButton, QWidget

from app.engine_bridge import EngineBridge
from app.run_files import LIMITS, SUFFIX, RunFiles
from app.scope.time_travel import TimeTravel
from app.settings.preferences import PreferenceStore
from app.translation import tr
from app.words import bytes_label
from engine.environment import module_command, module_environment
from engine.recording import RecordingError, RunReader

KEPT = "runs/kept"


class _Copy(QRunnable):
    """Copies a run file on a thread of its own: it may be large. ``told`` gets what went wrong, empty: nothing."""

    def __init__(self, source: Path, target: Path, first_step: int | None, told: Callable[[str], None]) -> None:
        super().__init__()
        self._source, self._target, self._first_step, self._told = source, target, first_step, told

    def run(self) -> None:
        try:
            reader = RunReader(self._source)
            try:
                reader.copy(self._target, self._first_step)
            finally:
                reader.close()
        except (RecordingError, OSError) as error:
            self._told(str(error))
        else:
            self._told("")


class RecordingControl(QObject):
    """The button and its menu, and the run file behind them."""

    said = Signal(str, bool)
    """A sentence for the user, and whether it is of a failure."""
    cut_off = Signal(str, object)
    """The run has ended while it was recorded: a sentence, and what saves it after all."""
    fork_wanted = Signal()
    _copied = Signal(str, str)

    def __init__(
        self,
        bridge: EngineBridge,
        travel: TimeTravel,
        folder: Path | None,
        settings: QSettings | None,
        preferences: PreferenceStore,
        parent: QWidget,
        recordings_folder: Path | None = None,
    ) -> None:
        """folder: of run files, in the user's cache; None: none are written. settings: where it is remembered that the
        window's end cut a recording off. preferences: what is kept of a run. recordings_folder: where a recording goes
        that was cut off so; None: it is lost."""
        super().__init__(parent)
        self._bridge = bridge
        self._travel = travel
        self._files = RunFiles(folder)
        self._recordings_folder = recordings_folder
        self._settings = settings
        self._preferences = preferences
        self._parent = parent
        self._pool = QThreadPool(self)
        self.marked: int | None = None
        """The step after which a recording began; None while none is made."""
        self._unsaved: Path | None = None
        """The run file of the recording that was cut off last."""
        self.keys: Callable[[], str] = str
        """The keys that call :meth:`toggle`, for the tooltip; see :meth:`show_keys`."""
        self._limit_actions: dict[int, QAction] = {}
        self.button = QToolButton()
        self.button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self._build_menu()
        self._show()
        self._files.drop_abandoned()
        bridge.recording_failed.connect(self._failed)
        self._copied.connect(self._tell_copied)

    # The run file ------------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """The engine has begun a run: keep it from here on."""
        self.end_run()
        path = self._files.next_path(keep=self._unsaved)
        self._travel.follow(path)
        if path is not None:
            self._bridge.record(str(path), self.limit, self.texts)

    def end_run(self) -> None:
        """The engine does something else. What was being recorded can still be saved, until that happens again."""
        path, first_step = self._travel.path, self.marked
        self._mark(None)
        if path is not None and first_step is not None:
            self._unsaved = path
            words = tr(
                "The run has ended, and with it the recording that was made since step {first_step:,}.",
                first_step=first_step,
            )
            self.cut_off.emit(words, lambda: self._ask_and_copy(path, first_step))

    def close(self) -> None:
        """The window closes; the engine has ended."""
        self._pool.waitForDone()
        self._keep_what_is_recorded()
        self._travel.close()
        self._files.close()

    def _keep_what_is_recorded(self) -> None:
        source, folder = self._travel.path, self._recordings_folder
        if self.marked is None or source is None or folder is None:
            return
        target = folder / f"{datetime.datetime.now():%Y-%m-%d %H.%M.%S}{SUFFIX}"
        faults: list[str] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _Copy(source, target, self.marked, faults.append).run()
        except OSError as error:
            faults.append(str(error))
        if not any(faults) and self._settings is not None:
            self._settings.setValue(KEPT, str(target))

    def tell_kept(self) -> None:
        """Where the recording is that the end of the last window cut off."""
        kept = self._settings.value(KEPT) if self._settings is not None else None
        if kept and self._settings is not None:
            self._settings.remove(KEPT)
            self.said.emit(tr("The recording that was made when the window closed is {path}.", path=kept), False)

    def wipe_recordings(self) -> None:
        """Deletes the recordings that were kept at the end of windows. Raises OSError."""
        if self._recordings_folder is not None:
            for path in self._recordings_folder.glob(f"*{SUFFIX}"):
                path.unlink()

    def wipe_runs(self) -> None:
        """Deletes all run files but those of other windows that are open; the run that goes on is kept from here on
        anew, and what was being recorded is lost."""
        self._mark(None)
        self._unsaved = None
        self._travel.follow(None)
        self._files.close()
        self._files.drop_abandoned()
        if self._bridge.state == "ready" and not self._bridge.comparing:
            self.begin_run()

    @property
    def limit(self) -> int:
        """Most bytes of a run file."""
        return self._preferences.values.runs_limit_mb << 20

    @property
    def texts(self) -> bool:
        """Whether prompts and answers are kept with the run."""
        return self._preferences.values.record_texts

    def _failed(self, message: str) -> None:
        self._mark(None)
        self.said.emit(tr("The run is not kept any more: {reason}.", reason=message.rstrip(".")), True)

    # What the user wants of it -----------------------------------------------------------------------------------

    def toggle(self) -> None:
        """Begin a recording, or end the one that is made and ask where it goes."""
        if self.marked is not None:
            if self.save(self.marked):
                self._mark(None)
        elif self._travel.is_possible:
            self._mark(self._bridge.run_state.step)
        else:
            self.said.emit(self.no_run(tr("record")), True)

    def no_run(self, what: str) -> str:
        """Why there is nothing to ``what`` (a verb in the user's language), and the way out."""
        if self._bridge.comparing:
            return tr(
                "There is nothing to {what} while a comparison has the engine: cancel it, or wait until it is over.",
                what=what,
            )
        return tr("There is no run to {what}: load a model and let it do something first.", what=what)

    def save(self, first_step: int | None = None) -> bool:
        """Ask for a file and copy the run there, from ``first_step`` on or all that is kept; whether one was given."""
        if self._travel.path is None:
            self.said.emit(self.no_run(tr("save")), True)
            return False
        return self._ask_and_copy(self._travel.path, first_step)

    def _ask_and_copy(self, source: Path, first_step: int | None) -> bool:
        name = f"{datetime.datetime.now():%Y-%m-%d %H.%M}{SUFFIX}"
        target, _ = QFileDialog.getSaveFileName(self._parent, tr("Save the run"), name, _filter())
        if target:
            self._copy(source, Path(target), first_step)
        return bool(target)

    def save_to(self, target: Path, first_step: int | None = None) -> None:
        if self._travel.path is not None:
            self._copy(self._travel.path, target, first_step)

    def _copy(self, source: Path, target: Path, first_step: int | None) -> None:
        told = lambda fault: self._copied.emit(str(target), fault)  # noqa: E731
        self._pool.start(_Copy(source, target, first_step, told))

    def _tell_copied(self, target: str, fault: str) -> None:
        if fault:
            self.said.emit(tr("The run could not be saved: {reason}.", reason=fault.rstrip(".")), True)
        else:
            words = tr("Saved {path}. Look at it with: batchscope replay, or Open a run file.", path=target)
            self.said.emit(words, False)

    def open(self) -> None:
        """Ask for a run file and show it in a window of its own."""
        path, _ = QFileDialog.getOpenFileName(self._parent, tr("Open a run"), "", _filter())
        if path:
            subprocess.Popen(
                module_command("app.cli", "replay", path), env=module_environment(), start_new_session=True
            )

    # The menu ----------------------------------------------------------------------------------------------------

    def _build_menu(self) -> None:
        menu = QMenu(self._parent)
        self.record_action = self._entry(menu, tr("Record from here on"), self.toggle)
        self._entry(menu, tr("Save all that is kept…"), lambda: self.save())
        self._entry(menu, tr("Run again from the shown step…"), self.fork_wanted.emit)
        menu.addSeparator()
        self._entry(menu, tr("Open a run file…"), self.open)
        menu.addSeparator()
        limits = menu.addMenu(tr("Keep at most"))
        group = QActionGroup(self)
        for limit in LIMITS:
            action = self._entry(limits, bytes_label(limit), lambda _=False, limit=limit: self._set_limit(limit))
            action.setCheckable(True)
            group.addAction(action)
            self._limit_actions[limit] = action
        self.texts_action = self._entry(menu, tr("Keep prompts and answers, too"), lambda on: self._set_texts(on))
        self.texts_action.setCheckable(True)
        self.button.setMenu(menu)
        self._preferences.changed.connect(self._show_preferences)
        self._show_preferences()

    def _show_preferences(self) -> None:
        """A limit that the menu does not offer, chosen in the settings, has no mark in it."""
        for limit, action in self._limit_actions.items():
            action.setChecked(limit == self.limit)
        self.texts_action.setChecked(self.texts)

    @staticmethod
    def _entry(menu: QMenu, text: str, slot: Callable[..., object]) -> QAction:
        action = menu.addAction(text)
        action.triggered.connect(slot)
        return action

    def _set_limit(self, limit: int) -> None:
        self._change(runs_limit_mb=limit >> 20)

    def _set_texts(self, on: bool) -> None:
        self._change(record_texts=on)

    def _change(self, **fields: object) -> None:
        self._preferences.change(**fields)
        if self._travel.is_possible:
            self.said.emit(tr("This holds from the engine's next start on; what is kept now stays as it is."), False)

    def show_keys(self, keys: Callable[[], str]) -> None:
        self.keys = keys
        self._show()

    def _mark(self, step: int | None) -> None:
        self.marked = step
        self._show()

    def _show(self) -> None:
        recording = self.marked is not None
        self.button.setText(tr("● Recording ▾") if recording else tr("○ Record ▾"))
        self.button.setAccessibleName(tr("Recording menu: a recording is made") if recording else tr("Recording menu"))
        keys = self.keys()
        if recording:
            tip = tr("Recording since step {step:,}", step=self.marked)
            tip += tr(". {keys} ends it and asks where it goes", keys=keys) if keys else ""
        else:
            tip = tr("Record from here on ({keys}), or save what is kept already", keys=keys)
            tip = tip if keys else tr("Record from here on, or save what is kept already")
        self.button.setToolTip(tip)
        self.record_action.setText(tr("End the recording and save…") if recording else tr("Record from here on"))


def _filter() -> str:
    return tr("Batchscope runs (*{suffix})", suffix=SUFFIX)
