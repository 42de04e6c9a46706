"""The main window: chats, loads and comparisons on one engine, and the views of what it does.

What the docks show is made elsewhere; the model page lies over them while there is no model.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QRect, QSettings, Qt
from PySide6.QtGui import QCloseEvent, QKeyEvent, QShowEvent
from PySide6.QtWidgets import QWidget

from app.chat.workspace import ChatWorkspace
from app.docks import ArrangementName
from app.engine_bridge import EngineBridge
from app.hold_notice import HoldNotice
from app.lab_docks import lab_contents
from app.launch_guard import LaunchGuard
from app.log_file import LogFile
from app.menus import model_menu, view_menu
from app.models.control import ModelControl
from app.notices import DeathBanner, ModelPage
from app.recording_control import RecordingControl
from app.scope.panel import RunHistory, ScopeSource
from app.scope_window import ScopeWindow
from app.settings.preferences import PreferenceStore
from app.settings.storage import Places
from app.theme import Theme
from app.top_bar import TopBar
from app.tour import Tour
from app.translation import tr
from engine.client import EngineDied
from engine.config import STARTER_MODEL, EngineConfig
from engine.messages import LoadFailed, Loading, ModelInfo
from engine.model_catalog import model_title

if TYPE_CHECKING:
    from app.lab.compare_panel import ComparePanel
    from app.lab.knobs_panel import KnobsPanel
    from app.lab.load_panel import LoadPanel
    from app.settings.control import SettingsControl

FRAMES_KEPT = 4096


@dataclass(slots=True)
class FrameStats:
    """Frames in which a new step was drawn, and what the newest took on the GUI thread: folding and painting."""

    frames: int = 0
    milliseconds: deque[float] = field(default_factory=lambda: deque(maxlen=FRAMES_KEPT))


class MainWindow(ScopeWindow):
    arrangements: tuple[ArrangementName, ...] = ("chat", "monitor", "lab", "comparison", "focus")

    def __init__(
        self,
        bridge: EngineBridge,
        theme: Theme,
        store_path: Path,
        *,
        settings: QSettings | None = None,
        preferences: PreferenceStore | None = None,
        state_folder: Path | None = None,
        runs_folder: Path | None = None,
        recordings_folder: Path | None = None,
        log: LogFile | None = None,
        parent: QWidget | None = None,
    ) -> None:
        """settings: geometry and layout, None: not kept. preferences: see :class:`ScopeWindow`. state_folder: see
        :class:`LaunchGuard`.
        runs_folder: where runs are kept for looking back; None: they are not. recordings_folder: see
        :class:`RecordingControl`. log: None: none is written."""
        self.bridge = bridge
        self.log = log
        self.history = RunHistory()
        source = ScopeSource(bridge.run_state, self.history)
        super().__init__(source, theme, settings=settings, preferences=preferences, parent=parent)
        self.frame_stats = FrameStats()
        self._guard = LaunchGuard(state_folder)
        self._is_loading = False
        self._died_loading = False
        self._step_to_draw = False
        self._drawn_step = 0
        self.setWindowTitle("Batchscope")
        bridge.add_fold(self.history)
        self._build_contents(store_path)
        self.models = ModelControl(self, state_folder)
        self._build_top()
        self._build_time(runs_folder, recordings_folder)
        self._connect_engine()
        log_path = log.path if log is not None else None
        self._places = Places(store_path, recordings_folder, runs_folder, log_path, self.preferences.path)
        self._settings_control: SettingsControl | None = None
        self.restore_layout()
        self.recording.tell_kept()
        self.chat.composer.setFocus()

    # Building ----------------------------------------------------------------------------------------------------

    def _build_contents(self, store_path: Path) -> None:
        bridge, theme, selection = self.bridge, self.theme, self.selection
        self.chat = ChatWorkspace(bridge, theme, selection, store_path, self, settings=self.settings)
        self.panels["steptime"].processes = lambda: {"engine": bridge.engine_pid, "window": os.getpid()}
        self.panels["steptime"].device = lambda: bridge.info.device if bridge.info is not None else "cpu"
        self.panels["queue"].priority_wanted.connect(bridge.set_priority)
        self.build_docks(
            {
                "chats": (tr("Chats"), self.chat.list_panel),
                "chat": (tr("Chat"), self.chat.chat_panel),
                **lab_contents(self),
            }
        )

    @property
    def load_panel(self) -> LoadPanel:
        return self.docks["load"].content

    @property
    def compare_panel(self) -> ComparePanel:
        return self.docks["compare"].content

    @property
    def knobs_panel(self) -> KnobsPanel:
        return self.docks["knobs"].content

    def _build_top(self) -> None:
        self.tour = Tour(self, self.settings)
        self.top_bar = TopBar(self.theme, self.source, model_menu(self), view_menu(self))
        self.death_banner = DeathBanner(self.theme)
        self.hold = HoldNotice(self.bridge, self.theme, self.commands)
        self.build_top(self.top_bar, self.tour.bar, self.death_banner, self.hold)
        self.model_page = ModelPage(self.theme, self)
        self.top_bar.loading.cancelled.connect(self.bridge.shutdown)
        self.top_bar.scheduler.chosen.connect(self._change_scheduler)
        self.death_banner.restart.connect(self.bridge.restart)
        self.model_page.open_folder.connect(self.models.choose_folder)
        self.model_page.retry.connect(self.bridge.restart)
        self.model_page.starter.connect(lambda: self.open_model(STARTER_MODEL))
        self.model_page.models.connect(self.models.show_page)
        self.model_page.back.connect(self.models.go_back)
        self.models.first_chat.connect(self._first_chat)
        self.action(tr("New chat"), "Ctrl+N", self._new_chat, name="chat.new")
        self.action(tr("Search chats"), "Ctrl+K", self._search_chats, name="chat.search")
        beside = self.chat.list_panel.open_beside
        self.action(tr("Next chat"), "Ctrl+PgDown", lambda: beside(1), name="chat.next")
        self.action(tr("Chat before"), "Ctrl+PgUp", lambda: beside(-1), name="chat.before")

    def _build_time(self, runs_folder: Path | None, recordings_folder: Path | None) -> None:
        bridge, bar = self.bridge, self.time_bar
        self.recording = RecordingControl(
            bridge, self.travel, runs_folder, self.settings, self.preferences, self, recordings_folder
        )
        self.recording.said.connect(self.say)
        self.recording.cut_off.connect(lambda words, save: self.notice.say(words, action=(tr("Save…"), save)))
        self.recording.fork_wanted.connect(self._run_again)
        bar.row.addWidget(self.recording.button)
        bar.pause_wanted.connect(self._set_paused)
        bar.step_wanted.connect(self._step_once)
        pause = lambda: self._set_paused(not bridge.paused)  # noqa: E731
        self.action(tr("Pause or run on"), "F8", pause, name="engine.pause")
        self.action(tr("Take one step"), "F10", self._step_once, name="engine.step")
        self.action(tr("Record, or end the recording"), "F9", self.recording.toggle, name="record.toggle")
        self.commands.changed.connect(self._show_keys)
        self._show_keys()
        self.preferences.changed.connect(self._take_preferences)
        self._take_preferences()

    @property
    def settings_control(self) -> SettingsControl:
        """Made when it is asked for: its page has more widgets than all else, and few starts need it."""
        if self._settings_control is None:
            from app.settings.control import SettingsControl

            self._settings_control = SettingsControl(self, self._places)
        return self._settings_control

    def _take_preferences(self) -> None:
        """What the chat does as the user has set it."""
        enter_sends = self.preferences.values.enter_sends
        self.chat.composer.enter_sends = self.chat.transcript.memory.enter_sends = enter_sends

    def _show_keys(self) -> None:
        """Keys that stand in the words of widgets which know nothing of commands."""
        self.recording.show_keys(lambda: self.commands.keys("record.toggle"))
        keys = self.commands.keys
        self.chat.list_panel.show_keys(search=keys("chat.search"), new=keys("chat.new"))

    def _connect_engine(self) -> None:
        bridge = self.bridge
        bridge.state_changed.connect(self._engine_state_changed)
        bridge.loading.connect(self._loading)
        bridge.ready.connect(self._ready)
        bridge.load_failed.connect(self._load_failed)
        bridge.died.connect(self._died)
        bridge.stepped.connect(self._stepped)
        bridge.config_changed.connect(self._config_changed)
        bridge.config_refused.connect(self._scheduler_refused)
        bridge.paced.connect(self._paced)
        bridge.pool_shrank.connect(self._pool_shrank)
        bridge.compare_progress.connect(self._comparing)
        bridge.compare_done.connect(self._compared)

    # Models ------------------------------------------------------------------------------------------------------

    def launch(self, config: EngineConfig, *, chosen: bool = False) -> None:
        """Loads the model, unless the last start did not survive that and the user has not ``chosen`` it just now."""
        interrupted = self._guard.interrupted()
        if interrupted is None and not chosen and self.models.is_first_run:
            self.bridge.config = config
            self.models.show_first_run()
            return
        if interrupted is None or chosen:
            self.bridge.config = config
            self.models.open(config.model)
            return
        self.bridge.config = config
        self._guard.end()
        self.model_page.show_interrupted(model_title(interrupted), starter=config.model == STARTER_MODEL)

    def open_model(self, model: str) -> None:
        """See :attr:`EngineConfig.model`: loads it in a fresh engine with the other options as they are."""
        self.models.open(model)

    def _change_scheduler(self, knob: str, value: str) -> None:
        self.notice.expire()
        self.bridge.reconfigure(replace(self.bridge.config.scheduler, **{knob: value}))

    def _config_changed(self) -> None:
        self.source.scheduler = self.bridge.config.scheduler
        if self.docks["knobs"].is_made:
            self.knobs_panel.show_anew()

    def _scheduler_refused(self, message: str) -> None:
        if self.docks["knobs"].is_made:
            self.knobs_panel.refused(message)
        self.notice.say(
            tr("The scheduler stays as it is: {reason}.", reason=message),
            is_error=True,
            action=(tr("Close"), lambda: None),
        )

    def _engine_state_changed(self, state: str) -> None:
        self._config_changed()
        self.source.live = state == "ready"
        if state == "starting":
            self._guard.begin(self.bridge.config.model)
            self.model_page.hide()
            self.death_banner.hide()
            self.notice.expire()
            self.top_bar.show_model(None, f"Loading {model_title(self.bridge.config.model)}")
            self.travel.show_newest()
        elif state == "dead" and self._is_loading:
            self._guard.keep()
            self._died_loading = True
        elif state != "loading":
            self._guard.end()
        self._is_loading = state in ("starting", "loading")
        self.top_bar.show_state(state)
        self.hold.refresh()
        if state != "ready":
            self.time_bar.show_pace(alive=False, paused=False)
        if state in ("stopped", "failed", "dead"):
            self.top_bar.show_model(None)
            for panel in self.panels.values():
                panel.run_moved()  # what they show is the past now

    def _loading(self, loading: Loading) -> None:
        self.top_bar.loading.show_stage(loading)

    def _ready(self, info: ModelInfo) -> None:
        self.source.block_bytes = info.kv_bytes_per_block
        self.top_bar.show_model(info)
        self.preferences.change(last_model=self.bridge.config.model)
        self.recording.begin_run()
        self._paced(self.bridge.paused)
        self.tour.offer()

    def _pool_shrank(self, message: str) -> None:
        self.top_bar.show_model(self.bridge.info)
        self.say_fault(message)

    def _load_failed(self, failure: LoadFailed) -> None:
        self.models.load_failed(failure)

    def _died(self, death: EngineDied) -> None:
        self.death_banner.report(death)
        if self._died_loading:
            self._died_loading = False
            self.models.died_loading(death)

    def _first_chat(self) -> None:
        """What the first run ends with."""
        self.arrange("chat")
        self._new_chat()

    def focus_chat(self) -> None:
        self.chat.composer.setFocus()

    # Frames ------------------------------------------------------------------------------------------------------

    def _stepped(self) -> None:
        self.time_bar.refresh()
        if self.travel.is_live:  # else the past is shown, and the run goes on behind it
            self.top_bar.run_moved()
            self.follow_run()
            self.travel.keep_up()
        # A fresh engine, or a gap, moves the run without a step to draw.
        self._step_to_draw = self.source.state.step not in (0, self._drawn_step)
        self._drawn_step = self.source.state.step

    def event(self, event: QEvent) -> bool:
        """Times the painting of frames; everything in the window is painted inside its update request."""
        if event.type() != QEvent.Type.UpdateRequest or not self._step_to_draw:
            return super().event(event)
        begun = time.perf_counter()
        handled = super().event(event)
        self._step_to_draw = False
        self.frame_stats.frames += 1
        self.frame_stats.milliseconds.append(1000 * (self.bridge.frame_seconds + time.perf_counter() - begun))
        return handled

    def show_again(self) -> None:
        super().show_again()
        self.top_bar.refresh()

    # Time --------------------------------------------------------------------------------------------------------

    def _paced(self, paused: bool) -> None:
        self.time_bar.show_pace(alive=self.bridge.state == "ready" and not self.bridge.comparing, paused=paused)
        self.hold.refresh()

    def _set_paused(self, paused: bool) -> None:
        if not self._cannot_pace():
            self.bridge.set_paused(paused)

    def _cannot_pace(self) -> bool:
        """Whether there is nothing to be paused, which is said then."""
        bridge = self.bridge
        if bridge.comparing:
            words = tr("A comparison has the engine: cancel it, or wait until it is over, to pause or take steps.")
            self.say(words, False)
        elif bridge.state != "ready":
            self.say(tr("No engine runs that could pause: load a model, or wait until it is loaded."), False)
        return bridge.comparing or bridge.state != "ready"

    def _step_once(self) -> None:
        """While the past is shown, the next step of it; at the newest one, a step of the engine that pauses."""
        if not self.travel.is_live:
            self.travel.move(1)
        elif self._cannot_pace():
            return
        elif self.bridge.paused:
            self.bridge.step_once()
        else:
            self.say(tr("The engine runs: pause it to take single steps."), False)

    def _run_again(self) -> None:
        """Offer what was recorded, from the shown step on, to be run under other knobs."""
        if (reader := self.travel.reader()) is None:
            self.say(self.recording.no_run(tr("run again")), True)
            return
        self.reveal("compare")
        self.compare_panel.compare_recording(str(reader.path), self.source.last_step)

    def _comparing(self, _progress: object) -> None:
        if self.travel.is_possible:
            self.recording.end_run()
            self.travel.follow(None)
            self.time_bar.show_pace(alive=False, paused=False)
        self.hold.refresh()

    def _compared(self, _done: object) -> None:
        self.hold.refresh()
        if self.bridge.state == "ready":
            self.recording.begin_run()
            self._paced(self.bridge.paused)

    # Layout ------------------------------------------------------------------------------------------------------

    def arrange(self, name: ArrangementName) -> None:
        super().arrange(name)
        # Docks that are moved lose the focus; it belongs where one types.
        (self.chat.composer if name == "chat" else self).setFocus()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """What nobody below wanted: Esc stops the answer wherever the focus is."""
        if event.key() == Qt.Key.Key_Escape:
            self.chat.stop()
        else:
            super().keyPressEvent(event)

    def _new_chat(self) -> None:
        self.reveal("chats", "chat")
        self.chat.new_conversation()

    def _search_chats(self) -> None:
        self.reveal("chat", "chats")
        self.chat.list_panel.focus_search()

    def page_place(self) -> QRect:
        top = self.menuWidget().geometry().bottom() + 1
        return QRect(0, top, self.width(), self.height() - top)

    def room_changed(self) -> None:
        super().room_changed()
        self.model_page.setGeometry(self.page_place())
        self.models.place()
        if self._settings_control is not None:
            self._settings_control.place()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.model_page.setGeometry(self.page_place())
        self.models.place()
        if self._settings_control is not None:
            self._settings_control.place()

    def closeEvent(self, event: QCloseEvent) -> None:
        self.rest()
        self.save_layout()
        if self._settings_control is not None:
            self._settings_control.close()
        self.models.close()
        self.hide()  # at once: the engine may take a moment to end
        self.bridge.shutdown()
        self.chat.shutdown()  # after the engine: its open answers are marked and saved
        self.recording.close()
        self._guard.end()
        event.accept()
