"""KV block map: a cell per block of the cache, in the hue of the request that owns it; host memory in its own strip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PySide6.QtCore import QEvent, QPoint, QPointF, QSize, Qt
from PySide6.QtGui import QColor, QImage, QMouseEvent, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QSizePolicy, QToolTip, QVBoxLayout, QWidget

from app.scope.block_grid import (
    BlockCounts,
    BlockLook,
    GridColors,
    GridPicture,
    GridShape,
    block_looks,
    count_blocks,
    fit_grid,
    host_looks,
    not_begun,
)
from app.scope.panel import ScopePanel, ScopeSource
from app.selection import Selection
from app.theme import SPACING, Theme, request_rgb
from app.widgets import Legend, LegendEntry, label
from app.words import count
from engine.events import RequestState
from engine.request import request_name
from engine.run_state import RunState

HOST_SHARE = 4
"""The strip of host memory has one part of so many of the map's height."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool of blocks as the map shows it; ids run from 1."""

    name: str
    looks: Callable[[RunState], tuple[np.ndarray, np.ndarray]]
    """:class:`BlockLook` and owner of each block."""
    blocks_of: Callable[[RequestState], list[int]]
    """Ids; 0 where there is none."""
    sentence: Callable[[RunState, int], str]


class BlockMapView(QWidget):
    """Paints the grid. A click selects the block's request, a tooltip tells all that is known of the block."""

    def __init__(
        self, state: RunState, theme: Theme, selection: Selection, pool: Pool, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self._pool = pool
        self._state = state
        self._theme = theme
        self._selection = selection
        self._picture: GridPicture | None = None
        self._image = QImage()
        self._made_for: tuple[int, int, int, float, bool] | None = None
        self.counts = BlockCounts(0, 0, 0, 0, 0)
        self.setAttribute(Qt.WidgetAttribute.WA_OpaquePaintEvent)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Expanding)
        self.setAccessibleName(pool.name)

    def minimumSizeHint(self) -> QSize:
        return QSize(100, 60)

    def sizeHint(self) -> QSize:
        return QSize(300, 180)

    @property
    def shape(self) -> GridShape | None:
        return self._picture.shape if self._picture is not None else None

    def refresh(self) -> None:
        state = self._state
        looks, owners = self._pool.looks(state)
        counts = count_blocks(looks)
        new = self._prepare(len(looks))
        picture = self._picture
        if picture is None:
            return
        looks, owners = _per_cell(looks, owners, picture.shape)
        rgb = np.zeros((len(looks), 3), dtype=np.uint8)
        owned = np.flatnonzero(looks != BlockLook.FREE)
        rgb[owned] = request_rgb(owners[owned], self._theme.dark)
        selected = np.zeros(len(looks), dtype=np.bool_)
        chosen = state.requests.get(self._selection.request_id) if self._selection.request_id is not None else None
        if chosen is not None:
            held = [block - 1 for block in self._pool.blocks_of(chosen) if block]
            selected[np.array(held, dtype=np.int64) // picture.shape.blocks_per_cell] = True
        changed = picture.paint(looks, rgb, selected)
        if counts != self.counts:
            self.counts = counts
            self.setAccessibleDescription(f"{counts.referenced} in use, {counts.cached} cached, {counts.free} free")
        if changed or new:
            self.update()

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

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self.refresh()

    def block_at(self, position: QPoint) -> int | None:
        """The (first) block of the cell at a logical pixel."""
        if self._picture is None:
            return None
        scale = self.devicePixelRatioF()
        shape = self._picture.shape
        cell = shape.cell_at(int(position.x() * scale), int(position.y() * scale))
        return None if cell is None else cell * shape.blocks_per_cell + 1

    def mousePressEvent(self, event: QMouseEvent) -> None:
        if event.button() != Qt.MouseButton.LeftButton:
            return super().mousePressEvent(event)
        block = self.block_at(event.position().toPoint())
        owner = 0
        if block is not None:
            looks, owners = self._pool.looks(self._state)
            owner = int(owners[block - 1]) if looks[block - 1] != BlockLook.FREE else 0
        self._selection.select(owner or None)

    def event(self, event: QEvent) -> bool:
        if event.type() == QEvent.Type.ToolTip:
            block = self.block_at(event.pos())
            if block is not None:
                QToolTip.showText(event.globalPos(), self._pool.sentence(self._state, block), self)
                return True
            QToolTip.hideText()
        return super().event(event)


def _per_cell(looks: np.ndarray, owners: np.ndarray, shape: GridShape) -> tuple[np.ndarray, np.ndarray]:
    """Where a cell stands for several blocks it shows the busiest of them."""
    size = shape.blocks_per_cell
    if size == 1:
        return looks, owners
    padding = shape.cells * size - len(looks)
    grouped = np.pad(looks, (0, padding)).reshape(shape.cells, size)
    busiest = grouped.argmax(axis=1)
    rows = np.arange(shape.cells)
    return grouped[rows, busiest], np.pad(owners, (0, padding)).reshape(shape.cells, size)[rows, busiest]


def _bgr(color: QColor) -> np.ndarray:
    return np.array([color.blue(), color.green(), color.red()], dtype=np.uint8)


def block_sentence(state: RunState, block: int) -> str:
    """All that is known of a block: owner, references, hash, position in the owner's context."""
    refs, hashed, owner = int(state.block_refs[block]), bool(state.block_hashed[block]), int(state.block_owner[block])
    lines = [f"Block {block:,} of {state.num_blocks:,}"]
    if refs:
        name = request_name(owner)
        lines.append(f"owner: request {name}" if refs == 1 else f"last taken by request {name}; {refs:,} references")
        users = [r.request_id for r in state.requests.values() if block in r.blocks]
        if refs > 1:
            more = " …" if len(users) > 8 else ""
            lines.append("shared by requests " + ", ".join(request_name(i) for i in users[:8]) + more)
        holder = state.requests.get(owner) or (state.requests.get(users[0]) if users else None)
        if holder is not None and block in holder.blocks:
            at = holder.blocks.index(block)
            first = at * state.block_size
            filled = min(state.block_size, max(0, holder.num_computed - first))
            lines.append(f"number {at + 1:,} of {len(holder.blocks):,} in its table, from token {first:,} on")
            written = f"{count(filled, 'token')} of {state.block_size} written"
            lines.append("reserved: not begun" if block in not_begun(holder, state.block_size) else written)
        lines.append("full and hashed: others can share it" if hashed else "not hashed")
    elif hashed:
        lines.append(f"cached, last used by request {request_name(owner)}")
        lines.append("no references: found by its hash until it is taken")
    else:
        lines.append("free")
    return "\n".join(lines)


def host_sentence(state: RunState, block: int) -> str:
    """Whose keys and values a block of host memory holds."""
    lines = [f"Block {block:,} of {state.num_host_blocks:,} in host memory"]
    owner = next((r for r in state.requests.values() if block in r.host_blocks), None)
    if owner is None:
        lines.append("free")
    else:
        at = owner.host_blocks.index(block)
        lines.append(f"swapped: request {request_name(owner.request_id)}")
        lines.append(f"number {at + 1:,} of its {count(len(owner.host_blocks), 'block')} here")
    return "\n".join(lines)


DEVICE = Pool(
    "KV block map",
    lambda state: (block_looks(state), state.block_owner[1:]),
    lambda request: request.blocks,
    block_sentence,
)
HOST = Pool("Blocks in host memory", host_looks, lambda request: request.host_blocks, host_sentence)


class BlockMapPanel(ScopePanel):
    empty_text = "The block map appears when a model is loaded: one cell for each block of its KV cache."

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.view = BlockMapView(source.state, theme, selection, DEVICE)
        self.host_view = BlockMapView(source.state, theme, selection, HOST)
        self.host_strip = QWidget()
        self._host_title = label("", "muted")
        strip = QVBoxLayout(self.host_strip)
        strip.setContentsMargins(0, 0, 0, 0)
        strip.setSpacing(SPACING // 2)
        strip.addWidget(self._host_title)
        strip.addWidget(self.host_view, 1)
        content = QWidget()
        column = QVBoxLayout(content)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING)
        column.addWidget(self.view, HOST_SHARE - 1)
        column.addWidget(self.host_strip, 1)
        super().__init__("KV block map", source, theme, selection, content, parent)
        self._legend = Legend(theme, [])
        self.add_trailing(self._legend)

    def _entries(self) -> list[LegendEntry]:
        counts = self.view.counts
        entries = [
            LegendEntry(f"{counts.referenced:,} in use", "accent"),
            LegendEntry(f"{counts.reserved:,} reserved", "accent", "hatch"),
            LegendEntry(f"{counts.cached:,} cached", "padding", "inset"),
            LegendEntry(f"{counts.shared:,} shared", "accent", "notch"),
            LegendEntry(f"{counts.free:,} free", "raised"),
        ]
        seen = (True, counts.reserved, True, counts.shared, True)
        return [entry for entry, number in zip(entries, seen, strict=True) if number]

    def has_content(self) -> bool:
        return self.source.state.num_blocks > 0

    def refresh(self) -> None:
        state = self.source.state
        self.view.refresh()
        self._legend.set_entries(self._entries())
        used = state.host_blocks_used
        self.host_strip.setVisible(state.num_host_blocks > 0 and (used > 0 or state.preemption != "recompute"))
        if not self.host_strip.isHidden():
            self._host_title.setText(f"Swapped to host memory: {used:,} of {count(state.num_host_blocks, 'block')}")
            self.host_view.refresh()
