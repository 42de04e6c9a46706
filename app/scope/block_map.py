"""KV block map: a cell per block of the cache, in the hue of the request that owns it; host memory in its own strip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QPoint, QPointF, QRectF, QSize, Qt
from PySide6.QtGui import (
    QColor,
    QImage,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPen,
    QResizeEvent,
)
from PySide6.QtWidgets import (
    QButtonGroup,
    QHBoxLayout,
    QSizePolicy,
    QStackedWidget,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from app.scope.block_grid import (
    BlockCounts,
    BlockLook,
    Blocks,
    GridColors,
    GridPicture,
    GridShape,
    count_blocks,
    device_blocks,
    fit_grid,
    host_blocks,
    per_cell,
)
from app.scope.block_words import block_sentence, host_sentence, waste_sentence
from app.scope.panel import ScopePanel, ScopeSource
from app.scope.prefix_view import PrefixTreeView
from app.scope.tables import FootLine, stacked
from app.selection import Selection
from app.theme import SPACING, Theme, request_rgb
from app.translation import tr
from app.widgets import Legend, LegendEntry, TellingWidget, label
from app.words import count
from engine.events import RequestState
from engine.run_state import RunState

HOST_SHARE = 4
"""The strip of host memory has one part of so many of the map's height."""
TREE_SECONDS = 0.2
"""The tree is laid out anew at most so often."""
SWITCH_HEIGHT = 24
_VIEWS = ((tr("Map"), tr("a cell for each block")), (tr("Tree"), tr("which blocks of the prefix cache follow which")))


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of blocks as the map shows it; ids run from 1."""

    name: str
    blocks: Callable[[RunState], Blocks]
    table_of: Callable[[RequestState], list[int]]
    """Ids; 0 where there is none."""
    sentence: Callable[[RunState, int], str]


class BlockMapView(TellingWidget):
    """Paints the grid. A click selects the block's request, a tooltip tells all that is known of the block; the arrow
    keys move a cursor over the cells, and Enter selects."""

    def __init__(
        self, source: ScopeSource, theme: Theme, selection: Selection, pool: Pool, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._pool = pool
        self._source = source
        self._theme = theme
        self._selection = selection
        self._picture: GridPicture | None = None
        self._image = QImage()
        self._made_for: tuple[int, int, int, float, bool] | None = None
        self._cursor: int | None = None
        """The cell that the keys are at."""
        self.counts = BlockCounts(0, 0, 0, 0, 0)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setAccessibleName(pool.name)

    def minimumSizeHint(self) -> QSize:
        return QSize(100, 60)

    def sizeHint(self) -> QSize:
        return QSize(300, 180)

    @property
    def shape(self) -> GridShape | None:
        return self._picture.shape if self._picture is not None else None

    def refresh(self) -> None:
        state = self._source.state
        blocks = self._pool.blocks(state)
        counts = count_blocks(blocks)
        new = self._prepare(len(blocks.looks))
        picture = self._picture
        if picture is None:
            return
        cells = per_cell(blocks, picture.shape)
        selected = np.zeros(len(cells.looks), dtype=np.bool_)
        chosen = state.requests.get(self._selection.request_id) if self._selection.request_id is not None else None
        if chosen is not None:
            held = np.array(self._pool.table_of(chosen), dtype=np.int64)
            selected[(held[held > 0] - 1) // picture.shape.blocks_per_cell] = True
        changed = picture.paint(cells, selected, self._hues)
        if counts != self.counts:
            self.counts = counts
            self._describe()
        if changed or new:
            self.update()

    def _hues(self, owners: np.ndarray) -> np.ndarray:
        return request_rgb(owners, self._theme.dark)

    def _describe(self) -> None:
        """To those who cannot see it: the block at the cursor, or else how many there are of each kind."""
        counts, block = self.counts, self.block_of(self._cursor)
        text = tr(
            "{referenced} in use, {cached} cached, {free} free",
            referenced=counts.referenced,
            cached=counts.cached,
            free=counts.free,
        )
        if block is not None and self.hasFocus():
            text = self._pool.sentence(self._source.state, block)
        self.setAccessibleDescription(text)

    def _prepare(self, blocks: int) -> bool:
        """Lays the grid out anew where size, scale or theme have changed."""
        scale = self.devicePixelRatioF()
        wanted = (blocks, round(self.width() * scale), round(self.height() * scale), scale, self._theme.dark)
        if wanted == self._made_for:
            return False
        self._made_for = wanted
        if not blocks:
            self._picture = None
            return True
        shape = fit_grid(blocks, wanted[1], wanted[2], scale)
        theme = self._theme
        self._picture = GridPicture(shape, GridColors(_bgr(theme.card), _bgr(theme.raised), _bgr(theme.text)))
        pixels = self._picture.pixels
        self._image = QImage(pixels.data, shape.width, shape.height, shape.width * 4, QImage.Format.Format_RGB32)
        self._image.setDevicePixelRatio(scale)
        return True

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(event.rect(), self._theme.card)
        if self._picture is not None:
            painter.drawImage(QPointF(0, 0), self._image)
            if self.hasFocus() and self._cursor is not None:
                painter.setPen(QPen(self._theme.accent, 2))
                painter.drawRect(self._cell_rect(self._picture.shape, self._cursor))

    def _cell_rect(self, shape: GridShape, cell: int) -> QRectF:
        """A frame around the cell, large enough to be seen."""
        row, column = divmod(cell, shape.columns)
        scale, size = self.devicePixelRatioF(), shape.pitch - shape.gap
        rect = QRectF(column * shape.pitch / scale, row * shape.pitch / scale, size / scale, size / scale)
        more = max(0.0, (8 - rect.width()) / 2)
        return rect.adjusted(-more, -more, more, more)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.refresh()

    # Choosing ----------------------------------------------------------------------------------------------------

    def block_of(self, cell: int | None) -> int | None:
        """The (first) block of a cell; None: there is no such cell."""
        shape = self.shape
        return None if cell is None or shape is None or cell >= shape.cells else cell * shape.blocks_per_cell + 1

    def block_at(self, position: QPoint) -> int | None:
        """The (first) block of the cell at a logical pixel."""
        shape, scale = self.shape, self.devicePixelRatioF()
        if shape is None:
            return None
        return self.block_of(shape.cell_at(int(position.x() * scale), int(position.y() * scale)))

    def _select(self, block: int | None) -> None:
        """The block's request; a free one's: none."""
        blocks = self._pool.blocks(self._source.state)
        owner = 0
        if block is not None and block <= len(blocks.looks) and blocks.looks[block - 1] != BlockLook.FREE:
            owner = int(blocks.owners[block - 1])
        self._selection.select(owner or None)

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() != Qt.MouseButton.LeftButton or self.shape is None:
            return super().mousePressEvent(event)
        block = self.block_at(event.position().toPoint())
        self._cursor = None if block is None else (block - 1) // self.shape.blocks_per_cell
        self._select(block)
        self._describe()
        self.update()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        shape, key = self.shape, event.key()
        if shape is None:
            return super().keyPressEvent(event)
        moves = {
            Qt.Key.Key_Left: -1,
            Qt.Key.Key_Right: 1,
            Qt.Key.Key_Up: -shape.columns,
            Qt.Key.Key_Down: shape.columns,
            Qt.Key.Key_Home: -shape.cells,
            Qt.Key.Key_End: shape.cells,
        }
        if key in moves:
            at = self._cursor if self._cursor is not None else -1 if moves[key] == 1 else 0
            wanted = at + moves[key]
            if key in (Qt.Key.Key_Home, Qt.Key.Key_End):
                wanted = max(0, min(shape.cells - 1, wanted))
            self._cursor = wanted if 0 <= wanted < shape.cells else max(0, at)
            self._describe()
            self.update()
        elif key in (Qt.Key.Key_Return, Qt.Key.Key_Enter, Qt.Key.Key_Space):
            self._select(self.block_of(self._cursor))
        else:
            super().keyPressEvent(event)

    def tip_at(self, position: QPoint) -> str:
        block = self.block_at(position)
        return self._pool.sentence(self._source.state, block) if block is not None else ""


def _bgr(color: QColor) -> np.ndarray:
    return np.array([color.blue(), color.green(), color.red()], dtype=np.uint8)


DEVICE = Pool(tr("KV block map"), device_blocks, lambda request: request.blocks, block_sentence)
HOST = Pool(tr("Blocks in host memory"), host_blocks, lambda request: request.host_blocks, host_sentence)


class BlockMapPanel(ScopePanel):
    """The blocks as cells of a grid, or those of the prefix cache as a tree."""

    empty_text = tr("The block map appears when a model is loaded: one cell for each block of its KV cache.")

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.view = BlockMapView(source, theme, selection, DEVICE)
        self.host_view = BlockMapView(source, theme, selection, HOST)
        self.tree = PrefixTreeView(source, theme, selection)
        self.host_strip = QWidget()
        self._host_title = label("", "muted")
        strip = QVBoxLayout(self.host_strip)
        strip.setContentsMargins(0, 0, 0, 0)
        strip.setSpacing(SPACING // 2)
        strip.addWidget(self._host_title)
        strip.addWidget(self.host_view, 1)
        grid = QWidget()
        column = QVBoxLayout(grid)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING)
        column.addWidget(self.view, HOST_SHARE - 1)
        column.addWidget(self.host_strip, 1)
        self._views = QStackedWidget()
        self._views.addWidget(grid)
        self._views.addWidget(self.tree)
        self.waste = FootLine(theme, tr("KV memory that is held but empty"))
        super().__init__(tr("KV block map"), source, theme, selection, stacked(self._views, self.waste), parent)
        self._legend = Legend(theme, [])
        self.add_trailing(self._legend)
        self.switch = QButtonGroup(self)
        choices = QWidget()
        row = QHBoxLayout(choices)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(2)
        for place, (name, tip) in enumerate(_VIEWS):
            row.addWidget(self._view_button(place, name, tip))
        self.add_trailing(choices)
        self.switch.button(0).setChecked(True)
        self.switch.idToggled.connect(self._show_view)

    def _view_button(self, place: int, name: str, tip: str) -> QToolButton:
        choice = QToolButton()
        choice.setText(name)
        fit = lambda: choice.setFixedHeight(self.theme.pixels(SWITCH_HEIGHT))  # noqa: E731
        self.theme.changed.connect(fit)
        fit()
        choice.setCheckable(True)
        choice.setToolTip(tip)
        choice.setAccessibleName(f"{name}: {tip}")
        self.switch.addButton(choice, place)
        return choice

    @property
    def shows_tree(self) -> bool:
        return self._views.currentWidget() is self.tree

    def _show_view(self, place: int, chosen: bool) -> None:
        if chosen:
            self._views.setCurrentIndex(place)
            self.refresh_seconds = TREE_SECONDS if self.shows_tree else 0.0
            self.show_anew()

    def _entries(self) -> list[LegendEntry]:
        counts = self.view.counts
        entries = [
            LegendEntry(tr("{referenced:,} in use", referenced=counts.referenced), "accent"),
            LegendEntry(tr("{reserved:,} reserved", reserved=counts.reserved), "accent", "hatch"),
            LegendEntry(tr("{cached:,} cached", cached=counts.cached), "padding", "inset"),
            LegendEntry(tr("{shared:,} shared", shared=counts.shared), "accent", "notch"),
            LegendEntry(tr("{free:,} free", free=counts.free), "raised"),
        ]
        seen = (True, counts.reserved, True, counts.shared, True)
        return [entry for entry, number in zip(entries, seen, strict=True) if number]

    def _tree_entries(self) -> list[LegendEntry]:
        tree = self.tree.tree
        blocks = np.bincount(tree.looks, weights=tree.length, minlength=len(BlockLook)).astype(int)
        entries = [
            LegendEntry(tr("{blocks:,} in use", blocks=blocks[BlockLook.REFERENCED]), "accent"),
            LegendEntry(tr("{blocks:,} shared", blocks=blocks[BlockLook.SHARED]), "accent", "notch"),
            LegendEntry(tr("{blocks:,} unused", blocks=blocks[BlockLook.CACHED]), "padding", "inset"),
        ]
        return entries

    def has_content(self) -> bool:
        return self.source.state.num_blocks > 0

    def refresh(self) -> None:
        if self.shows_tree:
            self._refresh_tree()
        else:
            self._refresh_map()

    def _refresh_tree(self) -> None:
        self.tree.refresh()
        self._legend.set_entries(self._tree_entries())
        blocks = int(self.tree.tree.length.sum())
        self.waste.say(
            tr(
                "{blocks} in the prefix cache, {tokens}; below a box lies what follows it",
                blocks=count(blocks, "block"),
                tokens=count(blocks * self.source.state.block_size, "token"),
            )
            if blocks
            else tr("The prefix cache is empty: full blocks of prompts and answers join it, where it is switched on")
        )

    def _refresh_map(self) -> None:
        state = self.source.state
        self.view.refresh()
        self._legend.set_entries(self._entries())
        self.waste.say(waste_sentence(self.view.counts, state.block_size, self.source.block_bytes))
        used = state.host_blocks_used
        self.host_strip.setVisible(state.num_host_blocks > 0 and (used > 0 or state.preemption != "recompute"))
        if not self.host_strip.isHidden():
            self._host_title.setText(
                tr(
                    "Swapped to host memory: {used:,} of {blocks}",
                    used=used,
                    blocks=count(state.num_host_blocks, "block"),
                )
            )
            self.host_view.refresh()
