"""The KV block map and the prefix tree: their models, then the panel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from PySide6.QtCore import Qt

from app.scope.block_grid import (
    BlockLook,
    Blocks,
    GridColors,
    GridPicture,
    count_blocks,
    device_blocks,
    fit_grid,
    host_blocks,
    per_cell,
)
from app.scope.block_map import BlockMapPanel
from app.scope.block_words import block_sentence, host_sentence, waste_sentence
from app.scope.panel import Moment, RunHistory, ScopeSource
from app.scope.prefix_tree import lay_out, prefix_tree, run_sentence
from app.selection import Selection
from app.theme import Theme, request_color
from engine.events import BlocksEvicted, Finished, Keyframe, RequestState, RunTotals
from engine.request import RequestStatus
from engine.run_state import RunState
from tests.app.conftest import Rig
from tests.app.runs import Run, record_of
from tests.app.test_queue import state_of
from tests.app.test_window import has_color, pixels

MakeRig = Callable[..., Rig]

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


def test_a_last_block_is_filled_from_below_as_far_as_it_is_written() -> None:
    colors = GridColors(*(np.array(c, dtype=np.uint8) for c in ((30, 20, 10), (60, 60, 60), (250, 251, 252))))
    hue = np.array([[200, 100, 50]], dtype=np.uint8)
    shape = fit_grid(1, 32, 32)
    size = shape.pitch - shape.gap
    for filled in (0, 1, 4, 8, 15):
        looks = np.array([BlockLook.REFERENCED], np.uint8)
        cells = Blocks(looks, np.array([7]), np.array([filled], np.int16), 16)
        picture = GridPicture(shape, colors)
        picture.paint(cells, np.zeros(1, np.bool_), lambda owners: hue)
        solid = (picture.pixels[:size, :size, :3] == hue[0, ::-1]).all(axis=(1, 2))
        rows = -(-filled * size // 16) if filled else size
        assert solid[size - rows :].all() and not solid[: size - rows].any(), filled


def test_with_more_blocks_than_pixels_a_cell_shows_the_busiest() -> None:
    shape = fit_grid(100, 5, 10)
    assert shape.blocks_per_cell == 2
    looks = np.zeros(100, np.uint8)
    owners, filled = np.zeros(100, np.int64), np.zeros(100, np.int16)
    looks[[3, 4, 5]] = BlockLook.CACHED, BlockLook.CACHED, BlockLook.REFERENCED
    owners[[3, 4, 5]], filled[5] = (8, 9, 10), 3
    cells = per_cell(Blocks(looks, owners, filled, 16), shape)
    assert len(cells.looks) == 50
    assert cells.looks[:4].tolist() == [BlockLook.FREE, BlockLook.CACHED, BlockLook.REFERENCED, BlockLook.FREE]
    assert (cells.owners[1], cells.owners[2], cells.filled[2]) == (8, 10, 3)


def test_the_waste_is_what_the_engine_counts() -> None:
    run = Run(num_blocks=60)
    for request_id in range(1, 5):
        run.add(request_id, 21 + request_id, 40)
    met = 0
    while (record := run.step()) is not None:
        if any(isinstance(event, Finished) for event in record.events):
            continue  # the engine counts while the step runs
        counts = count_blocks(device_blocks(run.state))
        assert counts.tail_slots == record.tail_tokens and counts.reserved * 16 == record.reserved_tokens
        met += counts.tail_slots > 0
    assert met > 20


# The prefix tree -----------------------------------------------------------------------------------------------------


def cache_of(parents: dict[int, int], rows: Sequence[RequestState] = (), blocks: int = 40) -> RunState:
    """A prefix cache of these blocks, each after its parent."""
    state = RunState()
    cached = list(parents)
    state.restore(
        Keyframe(1, 0.0, blocks, 16, 32, 64, list(rows), cached, None, RunTotals(), cached_parents=[*parents.values()])
    )
    return state


def test_chains_of_one_look_are_one_run() -> None:
    rows = [state_of(7, RequestStatus.RUNNING, blocks=[1, 2, 3, 4, 20], num_computed=70)]
    state = cache_of({1: 0, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5, 9: 0}, rows)
    tree = prefix_tree(state)
    runs = {int(first): place for place, first in enumerate(tree.first)}
    assert set(runs) == {1, 3, 5, 9}
    assert [int(tree.length[runs[first]]) for first in (1, 3, 5, 9)] == [2, 2, 2, 1]
    assert [int(tree.under[runs[first]]) for first in (1, 3, 5, 9)] == [6, 2, 2, 1]
    assert tree.parent[runs[3]] == tree.parent[runs[5]] == runs[1] and tree.parent[runs[1]] == -1
    assert [int(tree.start[runs[first]]) for first in (1, 3, 5, 9)] == [0, 2, 2, 0]
    assert tree.looks[runs[3]] == BlockLook.REFERENCED and tree.looks[runs[5]] == BlockLook.CACHED
    assert tree.owners[runs[3]] == 7 and tree.levels == 2
    assert tree.run_of[[1, 2, 3, 4, 5, 6, 9, 20]].tolist() == [runs[i] for i in (1, 1, 3, 3, 5, 5, 9)] + [-1]
    root = runs[1]
    assert tree.right[root] - tree.left[root] == pytest.approx(6 / 7)
    text = run_sentence(state, tree, runs[3])
    assert "2 blocks of the prefix cache, 32 tokens" in text and "follows 32 tokens" in text
    assert "referred to by request 7" in text
    assert "2 continuations with 4 blocks below it" in run_sentence(state, tree, root)
    assert "no references" in run_sentence(state, tree, runs[9])


def test_a_part_of_the_tree_whose_root_is_gone_begins_anew() -> None:
    state = cache_of({2: 0, 3: 2, 4: 3})
    evicted = record_of(2, time=0.1, seconds=0.1, events=[BlocksEvicted(9, [2])])
    state.apply(evicted)
    tree = prefix_tree(state)
    assert tree.first.tolist() == [3] and tree.length.tolist() == [2] and tree.parent.tolist() == [-1]


@pytest.mark.parametrize("seed", range(4))
def test_boxes_lie_within_their_parents_and_cover_every_block(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = {block: int(rng.integers(0, block)) if rng.random() < 0.9 else 0 for block in range(1, 400)}
    tree = prefix_tree(cache_of(parents, blocks=400))
    assert tree.length.sum() == 399 and (tree.run_of[1:400] >= 0).all()
    assert tree.under[tree.parent < 0].sum() == 399
    below = np.flatnonzero(tree.parent >= 0)
    up = tree.parent[below]
    assert (tree.depth[below] == tree.depth[up] + 1).all()
    assert (tree.left[below] >= tree.left[up] - 1e-9).all() and (tree.right[below] <= tree.right[up] + 1e-9).all()
    for level in range(tree.levels):
        row = np.flatnonzero(tree.depth == level)
        assert (tree.left[row][1:] >= tree.right[row][:-1] - 1e-9).all()
    for width, rows in ((300, 30), (40, 3), (1, 1)):
        boxes = lay_out(tree, width, rows)
        assert boxes.blocks.sum() == 399 and (boxes.width > 0).all()
        for box in range(len(boxes)):
            middle = int(boxes.x[box] + boxes.width[box] // 2)
            found = boxes.at(middle, int(boxes.row[box]))
            assert found is not None and boxes.row[found] == boxes.row[box]


def test_many_narrow_chains_are_drawn_as_few_boxes() -> None:
    tree = prefix_tree(cache_of(dict.fromkeys(range(1, 16_385), 0), blocks=16_384))
    assert len(tree) == 16_384
    boxes = lay_out(tree, 280, 10)
    assert len(boxes) <= 80 and boxes.runs.sum() == boxes.blocks.sum() == 16_384
    empty = prefix_tree(RunState())
    assert len(empty) == 0 and len(lay_out(empty, 100, 3)) == 0


# The panel -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(make_rig: MakeRig) -> Rig:
    """Requests whose prompts begin alike."""
    rig = make_rig(num_blocks=72, token_budget=96)
    rig.window.arrange("monitor")
    rig.load()
    for number in range(1, 6):
        rig.add(ids=[5] * 40 + [number] * 20, output=60)
        rig.step(3)
    rig.settle()
    return rig


def test_the_panel_tells_what_is_wasted(shared: Rig) -> None:
    panel = shared.window.panels["blocks"]
    counts = panel.view.counts
    assert counts.tail_slots > 0
    assert panel.waste.text.startswith("Held but empty: ") and "in last blocks" in panel.waste.text
    assert "of 72 blocks free" in panel.waste.text and panel.waste.toolTip() == panel.waste.text


def test_keys_move_over_the_cells_and_select(shared: Rig) -> None:
    panel, selection = shared.window.panels["blocks"], shared.window.selection
    view = panel.view
    view.setFocus()
    shared.qtbot.keyClick(view, Qt.Key.Key_Right)
    assert view.accessibleDescription().startswith("Block 1 of 72")
    shared.qtbot.keyClick(view, Qt.Key.Key_Down)
    assert view.accessibleDescription().startswith(f"Block {1 + view.shape.columns} of 72")
    shared.qtbot.keyClick(view, Qt.Key.Key_End)
    shared.qtbot.keyClick(view, Qt.Key.Key_Right)
    assert view.accessibleDescription().startswith("Block 72 of 72")
    shared.qtbot.keyClick(view, Qt.Key.Key_Return)
    assert selection.request_id is None  # it is free
    shared.qtbot.keyClick(view, Qt.Key.Key_Home)
    shared.qtbot.keyClick(view, Qt.Key.Key_Return)
    assert selection.request_id == int(shared.state.block_owner[1]) != 0


def test_the_tree_shows_what_the_prompts_share_and_selects(shared: Rig) -> None:
    panel, selection = shared.window.panels["blocks"], shared.window.selection
    panel.switch.button(1).click()
    tree = panel.tree.tree
    assert panel.shows_tree and tree is not None and len(panel.tree.boxes) >= 5
    assert "in the prefix cache" in panel.waste.text
    first = int(np.flatnonzero(tree.looks == BlockLook.SHARED)[0])
    assert tree.under[first] > tree.length[first]
    box = int(np.flatnonzero(panel.tree.boxes.run == first)[0])
    assert "referred to by requests" in panel.tree.sentence(box)
    seen = set()
    for _ in range(8):
        shared.qtbot.mouseClick(panel.tree, Qt.MouseButton.LeftButton, pos=panel.tree.box_rect(box).center())
        seen.add(selection.request_id)
    users = {r.request_id for r in shared.state.requests.values() if int(tree.first[first]) in r.blocks}
    assert len(users) > 1 and seen == users
    panel.tree.setFocus()
    shared.qtbot.keyClick(panel.tree, Qt.Key.Key_Down)
    below = panel.tree.cursor
    assert below is not None and panel.tree.boxes.row[below] == panel.tree.boxes.row[box] + 1
    assert panel.tree.accessibleDescription() == panel.tree.sentence(below)
    shared.qtbot.keyClick(panel.tree, Qt.Key.Key_Up)
    assert panel.tree.cursor == box
    picture = pixels(panel.tree)
    assert has_color(picture, request_color(int(tree.owners[first]), shared.theme))
    panel.switch.button(0).click()
    assert not panel.shows_tree and "Held but empty" in panel.waste.text


def test_a_moment_is_shown_in_map_and_tree(shared: Rig) -> None:
    panel = shared.window.panels["blocks"]
    past = RunState()
    past.restore(Keyframe(1, 0.0, 30, 16, 32, 64, [], [1, 2], None, RunTotals(), cached_parents=[0, 1]))
    shared.window.source.moment = Moment(past, 0.0)
    panel.run_moved()
    assert (panel.view.counts.cached, panel.view.counts.free) == (2, 28)
    panel.switch.button(1).click()
    assert panel.tree.tree.length.tolist() == [2]
    shared.window.source.moment = None
    panel._refresh_now()
    assert len(panel.tree.tree) > 1


@pytest.mark.parametrize("blocks", [16_384, 65_536])
def test_a_refresh_of_a_large_pool_is_cheap(qtbot, theme: Theme, blocks: int) -> None:
    each = blocks // 600
    rows = [
        state_of(i, RequestStatus.RUNNING, blocks=list(range(1 + each * (i - 1), 1 + each * i)), num_computed=each * 15)
        for i in range(1, 501)
    ]
    cached = list(range(blocks - 2000, blocks))
    state = RunState()
    state.restore(Keyframe(1, 0.0, blocks, 16, 500, 64, rows, cached, None, RunTotals(), cached_parents=[0] * 2000))
    source = ScopeSource(state, RunHistory())
    panel = BlockMapPanel(source, theme, Selection())
    qtbot.addWidget(panel)
    panel.resize(500, 400)
    panel.show()
    spent = []
    for _ in range(6):
        for request in state.requests.values():
            request.num_computed += 1
        begun = time.thread_time()
        panel.refresh()
        spent.append(time.thread_time() - begun)
    assert min(spent) < 0.016
