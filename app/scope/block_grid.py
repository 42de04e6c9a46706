"""The KV block map's model: what each block is, where its cell lies, and its picture as pixels. Qt-free.

A cell is ``pitch`` device pixels wide and high, its gap on the right and at the bottom included. The picture is kept
and only cells whose look has changed are painted again::

    free        cached       reserved      referenced    partly filled   shared         selected
    ▒▒▒▒▒▒      ·    ·       ▞ ▞ ▞ ▞       ██████        ▞ ▞ ▞ ▞         ████◣ ▏        ┏━━━━┓
    ▒▒▒▒▒▒       ▒▒▒▒         ▞ ▞ ▞        ██████        ██████          ██████         ┃████┃
    ▒▒▒▒▒▒      ·    ·       ▞ ▞ ▞ ▞       ██████        ██████          ██████         ┗━━━━┛
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.events import RequestState
from engine.run_state import IN_BATCH, RunState

MAX_PITCH = 64
"""Logical pixels of a cell at most: a small pool does not make tiles."""
SMALLEST_MARKED = 7
"""Device pixels of a cell from which marks and outlines are drawn; below, colours alone tell."""


class BlockLook(enum.IntEnum):
    FREE = 0
    CACHED = 1
    RESERVED = 2
    """A request in the batch holds it and has not begun to fill it."""
    REFERENCED = 3
    SHARED = 4


@dataclass(frozen=True, slots=True)
class GridShape:
    """Where the cells lie in an area of device pixels. With more blocks than pixels a cell stands for several."""

    columns: int
    rows: int
    pitch: int
    gap: int
    cells: int
    blocks_per_cell: int

    @property
    def width(self) -> int:
        return self.columns * self.pitch

    @property
    def height(self) -> int:
        return self.rows * self.pitch

    def cell_at(self, x: int, y: int) -> int | None:
        """The cell at a device pixel, gaps included."""
        column, row = x // self.pitch, y // self.pitch
        cell = row * self.columns + column
        inside = 0 <= column < self.columns and 0 <= row < self.rows and cell < self.cells
        return cell if inside else None


def fit_grid(blocks: int, width: int, height: int, scale: float = 1.0) -> GridShape:
    """The largest square cells with which ``blocks`` fit into ``width`` × ``height`` device pixels."""
    width, height = max(1, width), max(1, height)
    per_cell = max(1, math.ceil(blocks / (width * height)))
    cells = math.ceil(blocks / per_cell)
    pitch = max(1, min(round(MAX_PITCH * scale), math.isqrt(width * height // max(1, cells))))
    while pitch > 1 and math.ceil(cells / max(1, width // pitch)) > height // pitch:
        pitch -= 1
    columns = max(1, width // pitch)
    gap = 0 if pitch < 4 else 1 if pitch < 12 else max(1, round(2 * scale))
    return GridShape(columns, max(1, math.ceil(cells / columns)), pitch, gap, cells, per_cell)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A pool of blocks, ids 1 … n, as arrays [n]."""

    looks: np.ndarray
    """:class:`BlockLook`, uint8."""
    owners: np.ndarray
    """The request that has it or had it last, int64; 0: nobody yet."""
    filled: np.ndarray
    """Tokens in a block that is begun and not full, int16; 0: full, not begun, or not known."""
    block_size: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    referenced: int
    cached: int
    """Without references, but findable."""
    reserved: int
    """Of the referenced ones: held, but not begun."""
    shared: int
    """More than one reference."""
    free: int
    tail_slots: int = 0
    """Empty slots in blocks that are begun."""

    @property
    def total(self) -> int:
        return self.referenced + self.cached + self.free


def device_blocks(state: RunState) -> Blocks:
    """The blocks of the KV cache."""
    refs, size = state.block_refs[1:], state.block_size
    looks = np.zeros(len(refs), dtype=np.uint8)
    looks[state.block_hashed[1:]] = BlockLook.CACHED
    looks[refs > 0] = BlockLook.REFERENCED
    filled = np.zeros(len(refs) + 1, dtype=np.int16)
    reserved: list[int] = []
    last: list[int] = []
    tokens: list[int] = []
    for request in state.requests.values():
        if request.status not in IN_BATCH:
            continue
        table, computed = request.blocks, request.num_computed
        begun = -(-computed // size)
        if begun < len(table):
            reserved += table[begun:]
        if computed % size and begun <= len(table):
            last.append(table[begun - 1])
            tokens.append(computed % size)
    looks[np.array(reserved, dtype=np.int64) - 1] = BlockLook.RESERVED
    looks[refs > 1] = BlockLook.SHARED
    filled[last] = tokens
    return Blocks(looks, state.block_owner[1:], filled[1:], size)


def host_blocks(state: RunState) -> Blocks:
    """The blocks of host memory."""
    looks = np.zeros(state.num_host_blocks, dtype=np.uint8)
    owners = np.zeros(state.num_host_blocks, dtype=np.int64)
    for request in state.requests.values():
        if request.host_blocks:
            places = np.array(request.host_blocks) - 1
            looks[places], owners[places] = BlockLook.REFERENCED, request.request_id
    return Blocks(looks, owners, np.zeros(len(looks), dtype=np.int16), state.block_size)


def not_begun(request: RequestState, block_size: int) -> list[int]:
    """Blocks that a request in the batch holds and has not begun to fill."""
    if request.status not in IN_BATCH:
        return []
    return request.blocks[-(-request.num_computed // block_size) :]


def count_blocks(blocks: Blocks) -> BlockCounts:
    free, cached, reserved, owned, shared = (int(n) for n in np.bincount(blocks.looks, minlength=len(BlockLook)))
    tails = blocks.filled[blocks.filled > 0]
    return BlockCounts(
        referenced=reserved + owned + shared,
        cached=cached,
        reserved=reserved,
        shared=shared,
        free=free,
        tail_slots=len(tails) * blocks.block_size - int(tails.sum()),
    )


def per_cell(blocks: Blocks, shape: GridShape) -> Blocks:
    """Where a cell stands for several blocks it shows the busiest of them."""
    size = shape.blocks_per_cell
    if size == 1:
        return blocks
    padding = shape.cells * size - len(blocks.looks)
    grouped = np.pad(blocks.looks, (0, padding)).reshape(shape.cells, size)
    place = np.arange(shape.cells) * size + grouped.argmax(axis=1)
    return Blocks(blocks.looks[place], blocks.owners[place], blocks.filled[place], blocks.block_size)


@dataclass(frozen=True, slots=True)
class GridColors:
    """What the cells are painted with, as uint8 [3] in the order blue, green, red."""

    ground: np.ndarray
    free: np.ndarray
    mark: np.ndarray


class GridPicture:
    """The pixels of the map: uint8 [height, width, 4], blue, green, red, unused."""

    def __init__(self, shape: GridShape, colors: GridColors) -> None:
        self.shape = shape
        self.pixels = np.empty((shape.height, shape.width, 4), dtype=np.uint8)
        self.pixels[:] = (*colors.ground, 255)
        self._colors = colors
        self._stencils = _stencils(shape)
        # The pixels as one number each, by row, column, row in the cell, column in the cell.
        split = self.pixels.view(np.uint32).reshape(shape.rows, shape.pitch, shape.columns, shape.pitch)
        self._tiles = split.transpose(0, 2, 1, 3)
        self._painted = np.full(shape.cells, -1, dtype=np.int64)

    def paint(self, cells: Blocks, selected: np.ndarray, hues: Callable[[np.ndarray], np.ndarray]) -> int:
        """Brings the picture up to date; returns how many cells changed.

        cells: as :func:`per_cell` gives them. selected: bool [cells]. hues: requests, int64 [n] -> uint8 [n, 3], red
        first.
        """
        looks, size = cells.looks, self.shape.pitch - self.shape.gap
        levels = -(-cells.filled.astype(np.int64) * size // cells.block_size)  # pixels from below, at least one
        levels[looks != BlockLook.REFERENCED] = 0
        keys = (cells.owners << 12) | (levels << 4) | (selected.astype(np.int64) << 3) | looks
        keys[looks == BlockLook.FREE] &= 0xF
        changed = np.flatnonzero(keys != self._painted)
        if len(changed):
            self._painted[changed] = keys[changed]
            rgb = hues(cells.owners[changed])
            self._fill(changed, looks[changed], levels[changed], selected[changed], rgb)
        return len(changed)

    def _fill(
        self, cells: np.ndarray, looks: np.ndarray, levels: np.ndarray, selected: np.ndarray, rgb: np.ndarray
    ) -> None:
        colors = self._colors
        fill = rgb[:, ::-1].astype(np.uint8)
        dim = (0.62 * colors.ground + 0.38 * fill).astype(np.uint8)
        fill = np.where((looks == BlockLook.CACHED)[:, None], dim, fill)
        fill = np.where((looks == BlockLook.FREE)[:, None], colors.free, fill)
        marks = np.broadcast_to(colors.mark, fill.shape)
        pitch, size = self.shape.pitch, self.shape.pitch - self.shape.gap
        if pitch < SMALLEST_MARKED:
            # Too small for marks: a shared block is blended with the mark's colour, a selected one has it.
            shared = (0.6 * fill + 0.4 * colors.mark).astype(np.uint8)
            fill = np.where((looks == BlockLook.SHARED)[:, None], shared, fill)
            empty = np.where(levels > 0, 1 - levels / size, looks == BlockLook.RESERVED)[:, None]
            fill = ((1 - 0.5 * empty) * fill + 0.5 * empty * colors.free).astype(np.uint8)
            fill = np.where(selected[:, None], marks, fill)
        stencils = self._stencils[looks + len(BlockLook) * selected.astype(np.uint8)]
        partly = np.flatnonzero((levels > 0) & (levels < size))
        if len(partly) and pitch >= SMALLEST_MARKED:
            hatched = self._stencils[BlockLook.RESERVED + len(BlockLook) * selected[partly].astype(np.uint8)]
            above = np.arange(pitch)[None, :, None] < (size - levels[partly])[:, None, None]
            stencils[partly] = np.where(above, hatched, stencils[partly])
        # Palette per cell: ground, fill, mark; the stencil of its look says which pixel takes which.
        palette = np.full((len(cells), 3, 4), 255, dtype=np.uint8)
        palette[:, 0, :3], palette[:, 1, :3], palette[:, 2, :3] = colors.ground, fill, marks
        tiles = np.take_along_axis(palette.view(np.uint32)[:, :, 0], stencils.reshape(len(cells), -1), axis=1)
        rows, columns = np.divmod(cells, self.shape.columns)
        self._tiles[rows, columns] = tiles.reshape(len(cells), pitch, pitch)


def _stencils(shape: GridShape) -> np.ndarray:
    """intp [looks, pitch, pitch] of 0 ground, 1 fill, 2 mark; by :class:`BlockLook`, then again for selected ones."""
    pitch, size = shape.pitch, shape.pitch - shape.gap
    stencils = np.zeros((2 * len(BlockLook), pitch, pitch), dtype=np.intp)
    stencils[:, :size, :size] = 1
    if pitch < SMALLEST_MARKED:
        return stencils
    inset = max(1, size // 5)
    stripe = max(2, size // 6)
    rows, columns = np.ogrid[:size, :size]
    for selected in (0, len(BlockLook)):
        cached = stencils[BlockLook.CACHED + selected]
        cached[:size, :size] = 0
        cached[inset : size - inset, inset : size - inset] = 1
        stencils[BlockLook.RESERVED + selected, :size, :size] = (rows + columns) // stripe % 2 == 0
        notch = max(3, size // 2)
        for row in range(notch):
            stencils[BlockLook.SHARED + selected, row, size - notch + row : size] = 2
    edge = 1 if size < 14 else 2
    for look in BlockLook:
        frame = stencils[look + len(BlockLook)]
        frame[:edge, :size] = frame[size - edge : size, :size] = 2
        frame[:size, :edge] = frame[:size, size - edge : size] = 2
    return stencils
