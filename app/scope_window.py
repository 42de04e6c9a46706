"""A window of docks around the views of one run, with the time bar under them. Where the run comes from, an engine or a
file, is its subclasses' affair.

::

    ┌ top: what is shown, menus, notices ─────────┐
    │ docks, in one of the arrangements           │
    ├─────────────────────────────────────────────┤
    │ time bar: pause, step, scrub, record        │
    └─────────────────────────────────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable

from PySide6.QtCore import QByteArray, QEvent, QObject, QSettings, QSize, Qt, QTimer
from PySide6.QtGui import QAction, QActionGroup, QKeyEvent, QResizeEvent
from PySide6.QtWidgets import (
    QApplication,
    QMainWindow,
    QMenu,
    QPushButton,
    QTabWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.chat.notice import NoticeBar
from app.docks import ARRANGEMENTS, ArrangementName, Dock, arrange, set_sizes
from app.scope.block_map import BlockMapPanel
from app.scope.curves import LatencyPanel, ThroughputPanel
from app.scope.decisions import DecisionsPanel
from app.scope.ledger import LedgerPanel
from app.scope.occupancy import OccupancyPanel
from app.scope.panel import ScopePanel, ScopeSource
from app.scope.picture import add_picture_menu
from app.scope.queue_table import QueuePanel
from app.scope.step_time import StepTimePanel
from app.scope.time_travel import TimeTravel
from app.scope.timeline import TimelinePanel
from app.selection import Selection
from app.settings.commands import Commands
from app.settings.preferences import PreferenceStore
from app.theme import SPACING, Scheme, Theme
from app.time_bar import FEW, MANY, TimeBar
from app.translation import mark, tr

LAYOUT_VERSION = 2
"""Raised when docks are added or renamed: a saved layout of another version is not restored."""
FIRST_SIZE = QSize(1440, 900)
SMALLEST = QSize(900, 560)
FRAME_SECONDS = 0.006
"""What refreshing panels may take of a frame; painting comes on top of it."""
FREE_SECONDS = 0.001
"""Less than any refresh: where no more is spent yet, whatever has waited longest is refreshed, however dear it is."""
PANELS: dict[str, type[ScopePanel]] = {
    "occupancy": OccupancyPanel,
    "blocks": BlockMapPanel,
    "throughput": ThroughputPanel,
    "latency": LatencyPanel,
    "steptime": StepTimePanel,
    "queue": QueuePanel,
    "ledger": LedgerPanel,
    "decisions": DecisionsPanel,
    "timeline": TimelinePanel,
}
ARRANGEMENT_TITLES: dict[ArrangementName, str] = {
    "chat": mark("Chat"),
    "monitor": mark("Monitor"),
    "lab": mark("Lab"),
    "comparison": mark("Comparison"),
    "focus": mark("Focus"),
}


class ScopeWindow(QMainWindow):
    arrangements: tuple[ArrangementName, ...] = ("monitor",)
    """Those that its menu offers, by the keys Ctrl+1, Ctrl+2, …; the first is how it opens."""

    def __init__(
        self,
        source: ScopeSource,
        theme: Theme,
        *,
        settings: QSettings | None,
        preferences: PreferenceStore | None = None,
        parent: QWidget | None = None,
    ) -> None:
        """settings: geometry and layout, None: not kept. preferences: None: those that ship with the theme as it is,
        changes not kept."""
        super().__init__(parent)
        self.theme = theme
        if preferences is None:
            preferences = PreferenceStore(parent=self)
            preferences.change(theme=theme.scheme, font_px=theme.font_px)
        self.preferences = preferences
        self.commands = Commands(self.preferences, self)
        theme.follow(self.preferences)
        self.source = source
        self.selection = Selection(self)
        self.travel = TimeTravel(source, self)
        self.settings = settings
        self.panels = {name: panel(source, theme, self.selection, self) for name, panel in PANELS.items()}
        self.docks: dict[str, Dock] = {}
        self.notice = NoticeBar(theme)
        self._arranged: ArrangementName | None = None
        """The arrangement in force; None once the user has made the layout his own."""
        self._key_for: QWidget | None = None
        """Who had the focus when the key went down that is being handled."""
        self._settling = QTimer(self)
        self._settling.setSingleShot(True)
        self._settling.timeout.connect(self._settle)
        self.setMinimumSize(SMALLEST)
        self.setDocumentMode(True)
        self.setDockNestingEnabled(True)
        self.setTabPosition(Qt.DockWidgetArea.AllDockWidgetAreas, QTabWidget.TabPosition.North)
        self.setContentsMargins(SPACING, SPACING, SPACING, SPACING)
        self._build_time_bar()
        self._connect_panels()

    # Building ----------------------------------------------------------------------------------------------------

    def build_docks(self, before: dict[str, tuple[str, QWidget | Callable[[], QWidget]]]) -> None:
        """A dock, with its title, for each of ``before`` and each panel; see :class:`Dock`."""
        contents = {**before, **{name: (panel.title, panel) for name, panel in self.panels.items()}}
        for name, (title, content) in contents.items():
            dock = self.docks[name] = Dock(name, title, content, self.theme, self, squeezable=name in self.panels)
            dock.resized_by_hand.connect(self._layout_is_the_users)
            dock.filled.connect(self.room_changed)
            dock.topLevelChanged.connect(self._dock_floated)
            dock.toggleViewAction().triggered.connect(lambda on, dock=dock: on and dock.raise_())
            self.addAction(dock.toggleViewAction())
            self.commands.add(f"show.{name}", dock.toggleViewAction())
            dock.menu_opens.connect(lambda menu, dock=dock: add_picture_menu(menu, dock.content, self.say))

    def build_top(self, *widgets: QWidget) -> None:
        top = QWidget()
        column = QVBoxLayout(top)
        column.setContentsMargins(0, 0, 0, SPACING)
        column.setSpacing(SPACING)
        for widget in (*widgets, self.notice):
            column.addWidget(widget)
        self.setMenuWidget(top)
        self.preferences.save_problem.connect(self.say_fault)
        if self.preferences.notice:
            self.say_fault(self.preferences.notice)
        top.installEventFilter(self)

    def _build_time_bar(self) -> None:
        self.time_bar = TimeBar(self.theme, self.source, self.travel, self.commands)
        status = self.statusBar()
        status.setSizeGripEnabled(False)
        status.setStyleSheet("QStatusBar { background: transparent; } QStatusBar::item { border: none; }")
        status.setContentsMargins(0, SPACING // 2, 0, 0)
        status.addPermanentWidget(self.time_bar, 1)
        self.travel.moved.connect(self.show_again)
        self.travel.failed.connect(self.say_fault)
        for name, text, key, steps in (
            ("time.back", tr("One step back"), "Alt+Left", -FEW),
            ("time.on", tr("One step on"), "Alt+Right", FEW),
            ("time.far-back", tr("A hundred steps back"), "Alt+PgUp", -MANY),
            ("time.far-on", tr("A hundred steps on"), "Alt+PgDown", MANY),
        ):
            self.action(text, key, lambda _=False, steps=steps: self.travel.move(steps), name=name)
        self.action(tr("The newest step"), "Alt+End", self.travel.show_newest, name="time.newest")

    def _connect_panels(self) -> None:
        """What shows a moment in one place goes there everywhere."""
        for panel in self.panels.values():
            if hasattr(panel, "moment_wanted"):
                panel.moment_wanted.connect(self._show_moment)
            if hasattr(panel, "step_wanted"):
                panel.step_wanted.connect(self.travel.show_step)

    def action(self, text: str, shortcut: str, slot: object, *, name: str) -> QAction:
        """A command of the window: the keys that call it unless the user has chosen others, and the name by which
        those are remembered, which therefore never changes."""
        action = QAction(text, self)
        action.triggered.connect(slot)
        self.addAction(action)
        self.commands.add(name, action, shortcut)
        return action

    def view_menu(self) -> QMenu:
        menu = QMenu(self)
        for number, name in enumerate(self.arrangements, 1):
            show = lambda _=False, name=name: self.arrange(name)  # noqa: E731
            menu.addAction(self.action(tr(ARRANGEMENT_TITLES[name]), f"Ctrl+{number}", show, name=f"arrange.{name}"))
        menu.addSeparator()
        for dock in self.docks.values():
            menu.addAction(dock.toggleViewAction())
        menu.addSeparator()
        schemes = QActionGroup(self)
        actions: dict[str, QAction] = {}
        for scheme, title in (("system", tr("Follow the system")), ("light", tr("Light")), ("dark", tr("Dark"))):
            choose = lambda _=False, scheme=scheme: self._choose_scheme(scheme)  # noqa: E731
            actions[scheme] = action = self.action(title, "", choose, name=f"theme.{scheme}")
            action.setCheckable(True)
            schemes.addAction(action)
            menu.addAction(action)

        def show_scheme() -> None:
            actions[self.preferences.values.theme].setChecked(True)

        self.preferences.changed.connect(show_scheme)
        show_scheme()
        return menu

    def _choose_scheme(self, scheme: Scheme) -> None:
        self.theme.set_scheme(scheme)

    # What is shown -----------------------------------------------------------------------------------------------

    def follow_run(self) -> None:
        """The newest step is another: what is seen is drawn anew, whatever has waited longest first, for as long as a
        frame may take; the rest comes with the next frames."""
        begun = time.perf_counter()
        for panel in sorted(self.panels.values(), key=lambda panel: panel.refreshed_at):
            spent = time.perf_counter() - begun
            panel.run_moved(postponed=spent > FREE_SECONDS and spent + panel.refresh_cost > FRAME_SECONDS)

    def show_again(self) -> None:
        """The shown step is another: everything seen is drawn anew."""
        for panel in self.panels.values():
            panel.run_moved(at_once=True)

    def _show_moment(self, time: float) -> None:
        self.travel.show_time(time)
        self.panels["timeline"].show_time(time)

    def say(self, message: str, is_error: bool) -> None:
        """Tell the user something; what went wrong stays until it is read."""
        self.notice.say(message, is_error=is_error, action=(tr("Close"), lambda: None), seconds=None if is_error else 8)

    def say_fault(self, message: str) -> None:
        self.say(message, True)

    def focusNextPrevChild(self, forward: bool) -> bool:
        """The Tab key goes past what lies behind other tabs: to Qt that is visible, though nobody sees it."""
        passed: list[QWidget] = []
        while super().focusNextPrevChild(forward):
            focused = QApplication.focusWidget()
            if focused is None or focused in passed or not _is_behind(focused):
                return True
            passed.append(focused)
        return False

    def event(self, event: QEvent) -> bool:
        """Remembers whom a key is for: where a field's Enter moves the focus to a button, it is not the button's."""
        if event.type() == QEvent.Type.ShortcutOverride:
            self._key_for = QApplication.focusWidget()
        elif event.type() == QEvent.Type.KeyRelease:
            self._key_for = None
        return super().event(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Enter presses the button that has the focus, which outside dialogs Qt does on some desktops only."""
        focused = QApplication.focusWidget()
        is_enter = event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and not event.isAutoRepeat()
        if not is_enter or focused is not self._key_for or not isinstance(focused, QPushButton | QToolButton):
            super().keyPressEvent(event)
        elif isinstance(focused, QToolButton) and focused.menu() is not None:
            focused.showMenu()
        else:
            focused.click()

    # Layout ------------------------------------------------------------------------------------------------------

    def arrange(self, name: ArrangementName) -> None:
        """One of the arrangements that ship."""
        arrange(self, self.docks, ARRANGEMENTS[name])
        self._arranged = name

    def reveal(self, *names: str) -> None:
        """Shows docks that keys are about; where they are tabs in one place the last is the one seen."""
        for name in names:
            self.docks[name].show()
            self.docks[name].raise_()

    def restore_layout(self) -> None:
        settings = self.settings
        geometry = settings.value("geometry") if settings is not None else None
        if not (isinstance(geometry, QByteArray) and self.restoreGeometry(geometry)):
            self.resize(FIRST_SIZE)
        layout = settings.value("layout") if settings is not None else None
        if not (isinstance(layout, QByteArray) and self.restoreState(layout, LAYOUT_VERSION)):
            self.arrange(self.arrangements[0])
            return
        arranged = settings.value("arrangement")
        self._arranged = arranged if arranged in ARRANGEMENTS else None

    def save_layout(self) -> None:
        if self.settings is not None:
            self.settings.setValue("geometry", self.saveGeometry())
            self.settings.setValue("layout", self.saveState(LAYOUT_VERSION))
            self.settings.setValue("arrangement", self._arranged or "")

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """The top changes its height with its notices."""
        if event.type() == QEvent.Type.Resize and watched is self.menuWidget():
            self.room_changed()
        return super().eventFilter(watched, event)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.room_changed()

    def room_changed(self) -> None:
        """The room for the docks is another."""
        self._settling.start()

    def rest(self) -> None:
        """Nothing happens by itself any more: the window closes."""
        self._settling.stop()
        self.notice.expire()

    def _layout_is_the_users(self) -> None:
        self._arranged = None

    def _dock_floated(self, floating: bool) -> None:
        if floating:
            self._layout_is_the_users()

    def _settle(self) -> None:
        """While the layout is one of ours every dock keeps its share, however the room for them changes."""
        if self._arranged is not None:
            set_sizes(self, self.docks, ARRANGEMENTS[self._arranged])


def _is_behind(widget: QWidget) -> bool:
    """Whether the widget's dock, or the page or bar of the window that it is in, has no place in the window. In one
    that has a place the widget may still be scrolled to."""
    place = widget
    while not isinstance(place, Dock) and (above := place.parentWidget()) is not None and not above.isWindow():
        place = above
    return place.visibleRegion().isEmpty()
