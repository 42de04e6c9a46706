"""Docks that look like cards, and the arrangements of them that ship.

::

    Chat                                      Monitor                              Lab
    ┌─────┬──────┬───────────┬───────────┐    ┌──────────┬───────────┬────────┐    ┌────────┬───────────┬────────┐
    │chats│ chat │ occupancy │ block map │    │occupancy │ block map │ queue  │    │ load   │ occupancy │ block  │
    │     │      ├───────────┼───────────┤    ├──────────┼───────────┼────────┤    │ compare├───────────┤ map    │
    │     │      │throughput…│ queue …   │    │through. …│ decisions │ ledger │    │ knobs  │through. … │ queue …│
    ├─────┴──────┴───────────┴───────────┤    ├──────────┴───────────┴────────┤    ├────────┴───────────┴────────┤
    │ timeline                           │    │ timeline                      │    │ timeline                    │
    └────────────────────────────────────┘    └───────────────────────────────┘    └─────────────────────────────┘

Comparison: the comparison wide, so that form and result stand beside each other, with the run in progress at its side.
Focus: the chats and the chat, nothing of the engine.
A window that has not all of the docks has the same places without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from PySide6.QtCore import QPoint, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QGuiApplication, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QDockWidget, QMainWindow, QMenu, QWidget

from app.theme import RADIUS, Theme
from app.translation import tr
from app.widgets import Card, paint_surface

ArrangementName = Literal["chat", "monitor", "lab", "comparison", "focus"]
NARROWEST = QSize(150, 44)
"""What a view can be squeezed to, below its title line, whatever it shows: all of an arrangement have a place in the
smallest window in any font size. What is wider is cut at its own edge, never laid over its neighbour."""


class Dock(QDockWidget):
    """A dock that draws a card; the card's title line is its handle. A right click on it offers more."""

    resized_by_hand = Signal()
    filled = Signal()
    """Its content was made just now."""
    menu_opens = Signal(QMenu)
    """The menu of the title line, for others to add to."""

    def __init__(
        self,
        name: str,
        title: str,
        content: QWidget | Callable[[], QWidget],
        theme: Theme,
        parent: QWidget | None = None,
        *,
        squeezable: bool = False,
    ) -> None:
        """content: what is in it, or what makes that when it is first seen or asked for. squeezable: see
        :data:`NARROWEST`."""
        super().__init__(title, parent)
        self._squeezable = squeezable
        self.setObjectName(name)
        self._theme = theme
        self._make: Callable[[], QWidget] | None = None
        if isinstance(content, QWidget):
            self._put(content)
        else:
            self._put(Card(title))
            self._make = content
            self.visibilityChanged.connect(self._seen)
        theme.changed.connect(self.update)

    @property
    def content(self) -> QWidget:
        if self._make is not None:
            make, self._make = self._make, None
            before = self.titleBarWidget(), self.widget()
            self._put(make())
            for widget in before:
                widget.deleteLater()
            self.filled.emit()
        return self._content

    @property
    def is_made(self) -> bool:
        """Whether there is a content already."""
        return self._make is None

    def _seen(self, visible: bool) -> None:
        if visible:
            _ = self.content

    def _put(self, content: QWidget) -> None:
        self._content = content
        card = content if isinstance(content, Card) else _carded(self.windowTitle(), content)
        header = card.take_header()
        header.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        header.customContextMenuRequested.connect(self._offer)
        if self._squeezable:
            header.narrowest = NARROWEST.width()
            card.setMinimumSize(NARROWEST)
        self.setTitleBarWidget(header)
        self.setWidget(card)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        if QGuiApplication.mouseButtons() & Qt.MouseButton.LeftButton:
            self.resized_by_hand.emit()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        inner = self.rect().adjusted(RADIUS, RADIUS, -RADIUS, -RADIUS)
        if inner.contains(event.rect()):
            painter.fillRect(event.rect(), self._theme.card)
            return
        if self.isFloating():
            painter.fillRect(self.rect(), self._theme.window)
        paint_surface(painter, QRectF(self.rect()), self._theme.card, self._theme.line)

    def _offer(self, position: QPoint) -> None:
        menu = QMenu(self)
        float_action = menu.addAction(tr("Dock") if self.isFloating() else tr("Float"))
        float_action.triggered.connect(lambda: self.setFloating(not self.isFloating()))
        menu.addAction(tr("Hide")).triggered.connect(self.close)
        menu.addSeparator()
        self.menu_opens.emit(menu)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.titleBarWidget().mapToGlobal(position))


def _carded(title: str, content: QWidget) -> Card:
    card = Card(title)
    card.body.addWidget(content)
    return card


@dataclass(frozen=True, slots=True)
class Group:
    """Docks in one place, one above the other as tabs; ``share`` of the column's height."""

    docks: tuple[str, ...]
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Column:
    """``share`` of the window's width, at most ``most`` pixels."""

    groups: tuple[Group, ...]
    share: float
    most: int = 10_000


@dataclass(frozen=True, slots=True)
class Arrangement:
    columns: tuple[Column, ...]
    bottom: tuple[str, ...]
    bottom_share: float


ARRANGEMENTS: dict[ArrangementName, Arrangement] = {
    "chat": Arrangement(
        columns=(
            Column((Group(("chats",)),), 0.16, 260),
            Column((Group(("chat",)),), 0.31),
            Column((Group(("occupancy",)), Group(("throughput", "latency", "steptime"))), 0.265),
            Column((Group(("blocks",)), Group(("queue", "ledger", "decisions"))), 0.265),
        ),
        bottom=("timeline",),
        bottom_share=0.27,
    ),
    "monitor": Arrangement(
        columns=(
            Column((Group(("occupancy",)), Group(("throughput", "steptime"), 1.2), Group(("latency",))), 0.34),
            Column((Group(("blocks",), 1.2), Group(("decisions",))), 0.28),
            Column((Group(("queue",), 1.4), Group(("ledger",))), 0.38),
        ),
        bottom=("timeline",),
        bottom_share=0.32,
    ),
    "lab": Arrangement(
        columns=(
            Column((Group(("load", "compare", "knobs")),), 0.36, 620),
            Column((Group(("occupancy",)), Group(("throughput", "latency", "steptime"))), 0.32),
            Column((Group(("blocks",)), Group(("queue", "ledger", "decisions", "chat"))), 0.32),
        ),
        bottom=("timeline",),
        bottom_share=0.28,
    ),
    "comparison": Arrangement(
        columns=(
            Column((Group(("compare", "load")),), 0.74),
            Column((Group(("occupancy",)), Group(("queue", "chat", "decisions"))), 0.26),
        ),
        bottom=("timeline",),
        bottom_share=0.2,
    ),
    "focus": Arrangement(
        columns=(Column((Group(("chats",)),), 0.2, 280), Column((Group(("chat",)),), 0.8)),
        bottom=(),
        bottom_share=0.0,
    ),
}


def _of_those(arrangement: Arrangement, docks: dict[str, QDockWidget]) -> Arrangement:
    """The arrangement with what there is of its docks."""

    def present(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in docks)

    columns = []
    for column in arrangement.columns:
        groups = tuple(replace(group, docks=names) for group in column.groups if (names := present(group.docks)))
        if groups:
            columns.append(replace(column, groups=groups))
    return replace(arrangement, columns=tuple(columns), bottom=present(arrangement.bottom))


def arrange(window: QMainWindow, docks: dict[str, QDockWidget], arrangement: Arrangement) -> None:
    """Puts the docks where the arrangement has them. The others wait, hidden, as tabs of its last group."""
    arrangement = _of_those(arrangement, docks)
    for dock in docks.values():
        dock.setFloating(False)
        window.removeDockWidget(dock)
    firsts = [docks[column.groups[0].docks[0]] for column in arrangement.columns]
    window.addDockWidget(Qt.DockWidgetArea.TopDockWidgetArea, firsts[0])
    for before, dock in pairwise(firsts):
        window.splitDockWidget(before, dock, Qt.Orientation.Horizontal)
    for column in arrangement.columns:
        for above, group in pairwise(column.groups):
            window.splitDockWidget(docks[above.docks[0]], docks[group.docks[0]], Qt.Orientation.Vertical)
        for group in column.groups:
            _stack(window, [docks[name] for name in group.docks])
    last = arrangement.columns[-1].groups[-1].docks
    for dock in _others(docks, arrangement):
        window.tabifyDockWidget(docks[last[-1]], dock)
        dock.hide()
    docks[last[0]].raise_()
    if arrangement.bottom:
        window.addDockWidget(Qt.DockWidgetArea.BottomDockWidgetArea, docks[arrangement.bottom[0]])
        _stack(window, [docks[name] for name in arrangement.bottom])
    set_sizes(window, docks, arrangement)


def _others(docks: dict[str, QDockWidget], arrangement: Arrangement) -> list[QDockWidget]:
    placed = {name for column in arrangement.columns for group in column.groups for name in group.docks}
    return [dock for name, dock in docks.items() if name not in placed and name not in arrangement.bottom]


def _stack(window: QMainWindow, group: list[QDockWidget]) -> None:
    for dock in group[1:]:
        window.tabifyDockWidget(group[0], dock)
    for dock in group:
        dock.show()
    group[0].raise_()


def set_sizes(window: QMainWindow, docks: dict[str, QDockWidget], arrangement: Arrangement) -> None:
    """Gives every dock its share of the window as it is now; Qt alone gives all that is new to the last ones."""
    arrangement = _of_those(arrangement, docks)
    top = window.menuWidget()
    width, height = window.width(), window.height() - (top.height() if top is not None else 0)
    bottom = round(height * arrangement.bottom_share)
    firsts = [docks[column.groups[0].docks[0]] for column in arrangement.columns]
    spare = width - sum(min(column.most, width * column.share) for column in arrangement.columns)
    growing = sum(column.share for column in arrangement.columns if width * column.share <= column.most)
    widths = [
        column.most if width * column.share > column.most else round(column.share * (width + spare / growing))
        for column in arrangement.columns
    ]
    window.resizeDocks(firsts, widths, Qt.Orientation.Horizontal)
    for column in arrangement.columns:
        total = sum(group.share for group in column.groups)
        groups = [docks[group.docks[0]] for group in column.groups]
        heights = [round((height - bottom) * group.share / total) for group in column.groups]
        window.resizeDocks(groups, heights, Qt.Orientation.Vertical)
    if arrangement.bottom:
        window.resizeDocks([docks[arrangement.bottom[0]]], [bottom], Qt.Orientation.Vertical)
