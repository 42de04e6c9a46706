"""The main window: where things are. What they show is made elsewhere.

::

    ┌ top bar: model, view, gauges or loading ────┐
    ├ banner, when the engine has died; notice ───┤
    │ docks, in one of three arrangements         │   the model page lies over the docks while there is no model
    └─────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from PySide6.QtCore import QByteArray, QEvent, QObject, QRect, QSettings, QSize, Qt, QTimer
from PySide6.QtGui import (
    QAction,
    QActionGroup,
    QCloseEvent,
    QKeyEvent,
    QKeySequence,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import QFileDialog, QMainWindow, QMenu, QTabWidget, QVBoxLayout, QWidget

from app.chat.notice import NoticeBar
from app.chat.workspace import ChatWorkspace
from app.docks import ARRANGEMENTS, ArrangementName, Dock, arrange, set_sizes
from app.engine_bridge import EngineBridge
from app.lab.load_panel import LoadPanel
from app.launch_guard import LaunchGuard
from app.notices import DeathBanner, ModelPage
from app.scope.block_map import BlockMapPanel
from app.scope.curves import LatencyPanel, ThroughputPanel
from app.scope.ledger import LedgerPanel
from app.scope.occupancy import OccupancyPanel
from app.scope.panel import RunHistory, ScopePanel, ScopeSource
from app.scope.queue_table import QueuePanel
from app.scope.timeline import TimelinePanel
from app.selection import Selection
from app.theme import SPACING, Scheme, Theme
from app.top_bar import TopBar
from engine.client import EngineDied
from engine.config import STARTER_MODEL, EngineConfig
from engine.messages import LoadFailed, Loading, ModelInfo

LAYOUT_VERSION = 1
"""Raised when docks are added or renamed: a saved layout of another version is not restored."""
FIRST_SIZE = QSize(1440, 900)
SMALLEST = QSize(900, 560)
FRAMES_KEPT = 4096
PANELS: dict[str, type[ScopePanel]] = {
    "occupancy": OccupancyPanel,
    "blocks": BlockMapPanel,
    "throughput": ThroughputPanel,
    "latency": LatencyPanel,
    "queue": QueuePanel,
    "ledger": LedgerPanel,
    "timeline": TimelinePanel,
}


@dataclass(slots=True)
class FrameStats:
    """Frames in which a new step was drawn, and what the newest took on the GUI thread: folding and painting."""

    frames: int = 0
    milliseconds: deque[float] = field(default_factory=lambda: deque(maxlen=FRAMES_KEPT))


def model_title(model: str) -> str:
    """What a model is called before it has said its name itself."""
    return "the starter model" if model == STARTER_MODEL else Path(model).name


class MainWindow(QMainWindow):
    def __init__(
        self,
        bridge: EngineBridge,
        theme: Theme,
        store_path: Path,
        *,
        settings: QSettings | None = None,
        state_folder: Path | None = None,
        parent: QWidget | None = None,
    ) -> None:
        """settings: geometry and layout, None: not kept. state_folder: see :class:`LaunchGuard`."""
        super().__init__(parent)
        self.bridge = bridge
        self.theme = theme
        self.selection = Selection(self)
        self.history = RunHistory()
        self.source = ScopeSource(bridge.run_state, self.history)
        self.frame_stats = FrameStats()
        self._settings = settings
        self._guard = LaunchGuard(state_folder)
        self._step_to_draw = False
        self._drawn_step = 0
        self._arranged: ArrangementName | None = None
        """The arrangement in force; None once the user has made the layout his own."""
        self._settling = QTimer(self)
        self._settling.setSingleShot(True)
        self._settling.timeout.connect(self._settle)
        self.setWindowTitle("Batchscope")
        self.setMinimumSize(SMALLEST)
        self.setDocumentMode(True)
        self.setDockNestingEnabled(True)
        self.setTabPosition(Qt.DockWidgetArea.AllDockWidgetAreas, QTabWidget.TabPosition.North)
        self.setContentsMargins(SPACING, SPACING, SPACING, SPACING)
        bridge.add_fold(self.history)
        self._build_docks(store_path)
        self._build_top()
        self._action("New chat", "Ctrl+N", self._new_chat)
        self._action("Search chats", "Ctrl+K", self._search_chats)
        self._connect_engine()
        self._restore_layout()
        self.chat.composer.setFocus()

    # Building ----------------------------------------------------------------------------------------------------

    def _build_docks(self, store_path: Path) -> None:
        bridge, theme, selection = self.bridge, self.theme, self.selection
        self.chat = ChatWorkspace(bridge, theme, selection, store_path, self)
        self.load_panel = LoadPanel(bridge, theme, selection, self)
        self.panels = {name: panel(self.source, theme, selection, self) for name, panel in PANELS.items()}
        contents: dict[str, tuple[str, QWidget]] = {
            "chats": ("Chats", self.chat.list_panel),
            "chat": ("Chat", self.chat.chat_panel),
            "load": ("Load", self.load_panel),
            **{name: (panel.title, panel) for name, panel in self.panels.items()},
        }
        self.docks = {name: Dock(name, title, content, theme, self) for name, (title, content) in contents.items()}
        for dock in self.docks.values():
            dock.resized_by_hand.connect(self._layout_is_the_users)
            dock.topLevelChanged.connect(self._dock_floated)

    def _build_top(self) -> None:
        self.top_bar = TopBar(self.theme, self.source, self._model_menu(), self._view_menu())
        self.death_banner = DeathBanner(self.theme)
        self.notice = NoticeBar(self.theme)
        top = QWidget()
        column = QVBoxLayout(top)
        column.setContentsMargins(0, 0, 0, SPACING)
        column.setSpacing(SPACING)
        for widget in (self.top_bar, self.death_banner, self.notice):
            column.addWidget(widget)
        self.setMenuWidget(top)
        top.installEventFilter(self)
        self.model_page = ModelPage(self.theme, self)
        self.top_bar.loading.cancelled.connect(self.bridge.shutdown)
        self.top_bar.scheduler.chosen.connect(self._change_scheduler)
        self.death_banner.restart.connect(self.bridge.restart)
        self.model_page.open_folder.connect(self.choose_folder)
        self.model_page.retry.connect(self.bridge.restart)
        self.model_page.starter.connect(lambda: self.open_model(STARTER_MODEL))

    def _action(self, text: str, shortcut: str, slot: object) -> QAction:
        action = QAction(text, self)
        if shortcut:
            action.setShortcut(QKeySequence(shortcut))
        action.triggered.connect(slot)
        self.addAction(action)
        return action

    def _model_menu(self) -> QMenu:
        menu = QMenu(self)
        menu.addAction(self._action("Open a local folder…", "Ctrl+O", self.choose_folder))
        menu.addAction(self._action("Starter model", "", lambda: self.open_model(STARTER_MODEL)))
        menu.addSeparator()
        menu.addAction(self._action("Restart the engine", "Ctrl+Shift+R", self.bridge.restart))
        menu.addAction(self._action("Unload", "", self.bridge.shutdown))
        menu.addSeparator()
        menu.addAction(self._action("Quit", "Ctrl+Q", self.close))
        return menu

    def _view_menu(self) -> QMenu:
        menu = QMenu(self)
        for number, (name, title) in enumerate((("chat", "Chat"), ("monitor", "Monitor"), ("lab", "Lab")), 1):
            menu.addAction(self._action(title, f"Ctrl+{number}", lambda _=False, name=name: self.arrange(name)))
        menu.addSeparator()
        for dock in self.docks.values():
            menu.addAction(dock.toggleViewAction())
        menu.addSeparator()
        schemes = QActionGroup(self)
        for scheme, title in (("system", "Follow the system"), ("light", "Light"), ("dark", "Dark")):
            action = self._action(title, "", lambda _=False, scheme=scheme: self._choose_scheme(scheme))
            action.setCheckable(True)
            action.setChecked(self.theme.scheme == scheme)
            schemes.addAction(action)
            menu.addAction(action)
        return menu

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

    # Models ------------------------------------------------------------------------------------------------------

    def launch(self, config: EngineConfig, *, chosen: bool = False) -> None:
        """Loads the model, unless the last start did not survive that and the user has not ``chosen`` it just now."""
        interrupted = self._guard.interrupted()
        if interrupted is None or chosen:
            self.bridge.start(config)
            return
        self.bridge.config = config
        self._guard.end()
        self.model_page.show_interrupted(model_title(interrupted), starter=config.model == STARTER_MODEL)

    def open_model(self, model: str) -> None:
        """``starter``, or a folder: loads it in a fresh engine with the other options as they are."""
        self.bridge.start(replace(self.bridge.config, model=model))

    def _change_scheduler(self, knob: str, value: str) -> None:
        self.notice.expire()
        self.bridge.reconfigure(replace(self.bridge.config.scheduler, **{knob: value}))

    def _config_changed(self) -> None:
        self.source.scheduler = self.bridge.config.scheduler

    def _scheduler_refused(self, message: str) -> None:
        self.notice.say(f"The scheduler stays as it is: {message}.", is_error=True, action=("Close", lambda: None))

    def choose_folder(self) -> None:
        folder = QFileDialog.getExistingDirectory(self, "Open a folder with a model")
        if folder:
            self.open_model(folder)

    def _engine_state_changed(self, state: str) -> None:
        self._config_changed()
        self.source.live = state == "ready"
        if state == "starting":
            self._guard.begin(self.bridge.config.model)
            self.model_page.hide()
            self.death_banner.hide()
            self.notice.expire()
            self.top_bar.show_model(None, f"Loading {model_title(self.bridge.config.model)}")
        elif state != "loading":
            self._guard.end()
        self.top_bar.show_state(state)
        if state in ("stopped", "failed", "dead"):
            self.top_bar.show_model(None)
            for panel in self.panels.values():
                panel.run_moved()  # what they show is the past now

    def _loading(self, loading: Loading) -> None:
        self.top_bar.loading.show_stage(loading)

    def _ready(self, info: ModelInfo) -> None:
        self.source.block_bytes = info.kv_bytes_per_block
        self.top_bar.show_model(info)

    def _load_failed(self, failure: LoadFailed) -> None:
        self.model_page.setGeometry(self._page_place())
        self.model_page.show_failure(failure, starter=self.bridge.config.model == STARTER_MODEL)

    def _died(self, death: EngineDied) -> None:
        self.death_banner.report(death)

    # Frames ------------------------------------------------------------------------------------------------------

    def _stepped(self) -> None:
        self.top_bar.run_moved()
        for panel in self.panels.values():
            panel.run_moved()
        # A fresh engine, or a gap, moves the run without a step to draw.
        self._step_to_draw = self.source.state.step not in (0, self._drawn_step)
        self._drawn_step = self.source.state.step

    def event(self, event: QEvent) -> bool:
        """Times the painting of frames; everything in the window is painted inside its update request."""
        if event.type() != QEvent.Type.UpdateRequest or not self._step_to_draw:
            return super().event(event)
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        handled = super().event(event)
        self._step_to_draw = False
        self.frame_stats.frames += 1
        self.frame_stats.milliseconds.append(1000 * (self.bridge.frame_seconds + time.perf_counter() - begun))
        self.bridge.pacer.note_cost(self.bridge.frame_cpu_seconds + time.thread_time() - begun_cpu)
        return handled

    # Layout ------------------------------------------------------------------------------------------------------

    def arrange(self, name: ArrangementName) -> None:
        """One of the arrangements that ship."""
        arrange(self, self.docks, ARRANGEMENTS[name])
        self._arranged = name
        # Docks that are moved lose the focus; it belongs where one types.
        (self.chat.composer if name == "chat" else self).setFocus()

    def _choose_scheme(self, scheme: Scheme) -> None:
        self.theme.set_scheme(scheme)

    def _restore_layout(self) -> None:
        settings = self._settings
        geometry = settings.value("geometry") if settings is not None else None
        if not (isinstance(geometry, QByteArray) and self.restoreGeometry(geometry)):
            self.resize(FIRST_SIZE)
        layout = settings.value("layout") if settings is not None else None
        if not (isinstance(layout, QByteArray) and self.restoreState(layout, LAYOUT_VERSION)):
            self.arrange("chat")
            return
        arranged = settings.value("arrangement")
        self._arranged = arranged if arranged in ARRANGEMENTS else None

    def _save_layout(self) -> None:
        if self._settings is not None:
            self._settings.setValue("geometry", self.saveGeometry())
            self._settings.setValue("layout", self.saveState(LAYOUT_VERSION))
            self._settings.setValue("arrangement", self._arranged or "")

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """The top changes its height with its banner."""
        if event.type() == QEvent.Type.Resize and watched is self.menuWidget():
            self.model_page.setGeometry(self._page_place())
            self._settling.start()
        return super().eventFilter(watched, event)

    def _layout_is_the_users(self) -> None:
        self._arranged = None

    def _dock_floated(self, floating: bool) -> None:
        if floating:
            self._layout_is_the_users()

    def _settle(self) -> None:
        """While the layout is one of ours every dock keeps its share, however the room for them changes."""
        if self._arranged is not None:
            set_sizes(self, self.docks, ARRANGEMENTS[self._arranged])

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """What nobody below wanted: Esc stops the answer wherever the focus is."""
        if event.key() == Qt.Key.Key_Escape:
            self.chat.stop()
        else:
            super().keyPressEvent(event)

    def _new_chat(self) -> None:
        self._reveal("chats", "chat")
        self.chat.new_conversation()

    def _search_chats(self) -> None:
        self._reveal("chat", "chats")
        self.chat.list_panel.focus_search()

    def _reveal(self, *names: str) -> None:
        """Shows docks that keys are about; where they are tabs in one place the last is the one seen."""
        for name in names:
            self.docks[name].show()
            self.docks[name].raise_()

    def _page_place(self) -> QRect:
        top = self.menuWidget().geometry().bottom() + 1
        return QRect(0, top, self.width(), self.height() - top)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.model_page.setGeometry(self._page_place())
        self._settling.start()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.model_page.setGeometry(self._page_place())

    def closeEvent(self, event: QCloseEvent) -> None:
        self._settling.stop()
        self._save_layout()
        self.hide()  # at once: the engine may take a moment to end
        self.bridge.shutdown()
        self.chat.shutdown()  # after the engine: its open answers are marked and saved
        self._guard.end()
        event.accept()
