"""The KV block map and the prefix tree: their models, then the panel."""

from __future__ import annotations

import numpy as np
import pytest

from app.scope.block_grid import (
    BlockLook,
    Blocks,
    GridColors,
    GridPicture,
    count_blocks,
    device_blocks,
    fit_grid,
    host_blocks,
)
from app.scope.block_words import block_sentence, host_sentence, waste_sentence
from engine.events import Keyframe, RunTotals
from engine.request import RequestStatus
from engine.run_state import RunState
from tests.app.runs import Run
from tests.app.test_queue import state_of

# Blocks --------------------------------------------------------------------------------------------------------------


def test_the_map_counts_what_the_engine_counts() -> None:
    run = Run(num_blocks=24)
    shared = [5] * 32
    for request_id in range(1, 8):
        run.add(request_id, 0, 30, ids=shared + [request_id] * 20)
        record = run.step(2)
    most_shared = 0
    while record is not None:
        counts = count_blocks(device_blocks(run.state))
        assert counts.free == record.free_blocks and counts.cached == record.cached_blocks
        assert counts.free + counts.cached + counts.referenced == 24
        most_shared = max(most_shared, counts.shared)
        record = run.step()
    assert most_shared >= 2


def test_blocks_that_are_held_and_not_begun_are_reserved() -> None:
    rows = [
        state_of(1, RequestStatus.RUNNING, blocks=[1, 2, 3, 4, 5, 6], num_computed=33),
        state_of(2, RequestStatus.ENDED, blocks=[1, 7, 8], num_computed=32),
        state_of(3, RequestStatus.SWAPPED, blocks=[1, 0, 0], num_computed=40, host_blocks=[2, 4]),
    ]
    state = RunState()
    state.restore(Keyframe(1, 0.0, 10, 16, 32, 64, rows, [9], None, RunTotals(), 5))
    blocks = device_blocks(state)
    assert [BlockLook(look).name[0:3] for look in blocks.looks] == [
        "SHA", "REF", "REF", "RES", "RES", "RES", "REF", "RES", "CAC", "FRE"
    ]  # fmt: skip
    counts = count_blocks(blocks)
    assert (counts.referenced, counts.reserved, counts.cached, counts.shared, counts.free) == (8, 4, 1, 1, 1)
    assert blocks.filled.tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0] and counts.tail_slots == 15
    # 4 reserved blocks of 16 slots and 15 slots of a block that is begun, of 8 blocks held; 100 bytes a slot.
    assert waste_sentence(counts, 16, 1600) == (
        "Held but empty: 7.7 KiB (62 %) · 6.2 KiB reserved, 1.5 KiB in last blocks · 10 % of 10 blocks free"
    )
    assert waste_sentence(counts, 16, 0).startswith("Held but empty: 79 slots (62 %)")
    host = host_blocks(state)
    assert host.looks.tolist() == [0, BlockLook.REFERENCED, 0, BlockLook.REFERENCED, 0]
    assert host.owners.tolist() == [0, 3, 0, 3, 0]
    assert "reserved: not begun" in block_sentence(state, 4)
    assert "number 2 of its 2 blocks here" in host_sentence(state, 4) and host_sentence(state, 1).endswith("free")


@pytest.mark.parametrize("blocks", [1, 20, 72, 999, 16_384, 65_536])
@pytest.mark.parametrize("size", [(1, 1), (100, 60), (371, 255), (1200, 800)])
def test_the_grid_fits_and_finds_its_cells(blocks: int, size: tuple[int, int]) -> None:
    shape = fit_grid(blocks, *size)
    assert shape.width <= size[0] and shape.height <= size[1] + (shape.pitch if size == (1, 1) else 0)
    assert shape.cells * shape.blocks_per_cell >= blocks
    for cell in {0, shape.cells // 2, shape.cells - 1}:
        row, column = divmod(cell, shape.columns)
        assert shape.cell_at(column * shape.pitch, row * shape.pitch) == cell
    assert shape.cell_at(-1, 0) is None and shape.cell_at(0, shape.height) is None
    if blocks <= size[0] * size[1]:
        assert shape.blocks_per_cell == 1


@pytest.mark.parametrize("pitch_area", [(60, 40), (300, 200), (900, 700)])
def test_painting_the_changes_gives_the_whole_picture(pitch_area: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    blocks = 150
    colors = GridColors(*(np.array(c, dtype=np.uint8) for c in ((30, 20, 10), (60, 60, 60), (250, 251, 252))))
    kept = GridPicture(fit_grid(blocks, *pitch_area), colors)
    cells = Blocks(np.zeros(blocks, np.uint8), np.zeros(blocks, np.int64), np.zeros(blocks, np.int16), 16)
    selected = np.zeros(blocks, dtype=np.bool_)
    hues = rng.integers(0, 256, (1000, 3)).astype(np.uint8)
    for _ in range(20):
        some = rng.integers(0, blocks, 9)
        cells.looks[some] = rng.integers(0, len(BlockLook), 9)
        cells.owners[some] = rng.integers(1, 1000, 9)
        cells.filled[some] = np.where(cells.looks[some] == BlockLook.REFERENCED, rng.integers(0, 16, 9), 0)
        selected[some] = rng.integers(0, 2, 9).astype(bool) & (cells.looks[some] >= BlockLook.REFERENCED)
        kept.paint(cells, selected, hues.__getitem__)
        fresh = GridPicture(kept.shape, colors)
        fresh.paint(cells, selected, hues.__getitem__)
        assert np.array_equal(kept.pixels, fresh.pixels)
    assert kept.paint(cells, selected, hues.__getitem__) == 0
