"""The real window on a scripted engine: what it shows, that selecting and colouring agree, what it costs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QEvent, QObject, QPoint, QSettings, Qt, QTimer
from PySide6.QtGui import QImage
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QAbstractButton, QApplication, QLabel, QWidget

from app.chat.chat_menu import ChatMenu
from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.scope.queue_model import WHY
from app.theme import Theme, request_color
from engine.config import SchedulerConfig
from engine.messages import Abort
from tests.app.conftest import Rig
from tests.app.scripted import ScriptedClient

MakeRig = Callable[..., Rig]


def pixels(widget: QWidget) -> np.ndarray:
    """uint8 [height, width, 3], red first."""
    image = widget.grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
    raw = np.frombuffer(image.constBits(), dtype=np.uint8).reshape(image.height(), image.bytesPerLine() // 4, 4)
    return raw[:, : image.width(), 2::-1].copy()


def has_color(picture: np.ndarray, color) -> bool:
    return bool((picture == np.array([color.red(), color.green(), color.blue()])).all(axis=2).any())


class PaintCounter(QObject):
    """Counts paint events under a widget."""

    def __init__(self, root: QWidget) -> None:
        super().__init__()
        self.count = 0
        for widget in (root, *root.findChildren(QWidget)):
            widget.installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        self.count += event.type() == QEvent.Type.Paint
        return False


def crunch(rig: Rig, *, until_preempted: bool = True) -> None:
    """Requests in a pool too small for them, stopped while some run and some wait."""
    rig.load()
    for number in range(6):
        rig.add(60, 120, user="ab"[number % 2])
        rig.step(2)
    while until_preempted and not rig.window.history.ledger:
        rig.step(3)
    rig.step(2)


@pytest.fixture
def busy(make_rig: MakeRig) -> Rig:
    rig = make_rig(num_blocks=24, token_budget=48)
    crunch(rig)
    assert rig.state.num_running and rig.state.num_waiting
    return rig


# What it shows -------------------------------------------------------------------------------------------------------


def test_an_empty_window_says_in_every_panel_what_to_do(rig: Rig) -> None:
    rig.window.arrange("monitor")
    rig.settle()
    for name, panel in rig.window.panels.items():
        rig.window.reveal(name)
        rig.settle(20)
        if name == "knobs":  # there are knobs even before there is a run
            continue
        assert panel.pages.is_empty and panel.is_seen()
        assert len(panel.pages.empty.text) > 30 and panel.pages.empty.text.endswith(".")


def test_an_empty_panel_says_where_a_scenario_is_started(rig: Rig) -> None:
    window = rig.window
    window.arrange("chat")
    for name in ("occupancy", "queue", "ledger"):
        assert "Load panel (View ▸ Load, or Ctrl+3)" in window.panels[name].pages.empty.text, name
    view = {action.text(): action for action in window.top_bar.view_button.menu().actions()}
    assert view["Lab"].shortcut().toString() == "Ctrl+3"
    view["Load"].trigger()
    assert window.load_panel.isVisible()
    window.arrange("chat")
    assert not window.load_panel.isVisible()
    view["Lab"].trigger()
    assert window.load_panel.isVisible()


@pytest.mark.parametrize(("blocks", "shown"), [(16, "6 %"), (100, "1 %"), (1_000, "<1 %")])
def test_blocks_in_use_are_never_zero_percent(make_rig: MakeRig, blocks: int, shown: str) -> None:
    rig = make_rig(num_blocks=blocks)
    rig.load()
    assert rig.window.top_bar.kv.text == "0 %"
    rig.add(10, 5)
    rig.step(1)
    assert rig.state.referenced_blocks == 1
    assert rig.window.top_bar.kv.text == shown


def test_a_run_fills_every_panel(busy: Rig) -> None:
    busy.window.arrange("monitor")
    busy.step(1)
    busy.settle()
    for name, panel in busy.window.panels.items():
        busy.window.reveal(name)
        busy.settle(20)
        assert not panel.pages.is_empty, panel.title
    gauges = busy.window.top_bar
    gauges.refresh()
    assert gauges.running.text == str(busy.state.num_running)
    assert gauges.waiting.text == str(busy.state.num_waiting)
    assert gauges.preempted.text == str(busy.state.totals.preemptions)
    assert gauges.output.text.endswith("tok/s") and not gauges.output.text.startswith("0")


@pytest.mark.parametrize("arrangement", ["chat", "monitor", "lab"])
def test_the_queue_shows_whole_reasons(busy: Rig, arrangement: str) -> None:
    busy.window.arrange(arrangement)
    busy.settle()
    panel = busy.window.panels["queue"]
    rows = panel.model.rows
    assert {row.request_id for row in rows} == set(busy.state.requests)
    waiting = [row for row in rows if row.phase in ("waiting", "preempted")]
    width = panel.table.columnWidth(WHY)
    assert width >= 150
    for row in waiting:
        place = panel.model.place_of(row.request_id)
        box = panel.table.fontMetrics().boundingRect(0, 0, width - 8, 10_000, Qt.TextFlag.TextWordWrap, row.why)
        assert panel.table.rowHeight(place) >= box.height()
        assert panel.model.index(place, WHY).data(Qt.ItemDataRole.ToolTipRole).endswith(row.why)
    # With nothing selected the sentence is that of the head of the queue.
    assert waiting[0].why in panel.sentence.text()


def test_the_queue_ends_with_a_whole_line(busy: Rig) -> None:
    busy.window.arrange("chat")
    for _ in range(8):
        busy.add(60, 120)
    busy.step(1)
    busy.settle()
    table = busy.window.panels["queue"].table
    card = np.array(busy.theme.card.getRgb()[:3])
    gaps = set()
    for scrolled in range(30):
        table.verticalScrollBar().setValue(scrolled)
        picture, height = pixels(table.viewport()), table.viewport().height()
        line = table.fontMetrics().lineSpacing()
        edges = {0} | {table.rowViewportPosition(row) for row in range(table.model().rowCount())}
        row = table.rowAt(height - 1)
        top, size = table.rowViewportPosition(row), table.rowHeight(row)
        edges |= {top + 3 + n * line for n in range(1, size // line)} if size > 24 else set()
        end = height if top + size == height else max(edge for edge in edges if edge <= height)
        assert (picture[end:] == card).all(), scrolled
        assert not (picture[max(0, end - line) : end] == card).all(), scrolled
        gaps.add(height - end)
    assert len(gaps) > 5


def test_ticks_of_a_menu_keep_off_its_edge(rig: Rig) -> None:
    menu = rig.window.top_bar.view_button.menu()
    ticked = next(action for action in menu.actions() if action.isChecked())
    menu.ensurePolished()
    menu.resize(menu.sizeHint())
    place = menu.actionGeometry(ticked)
    row = pixels(menu)[place.top() : place.bottom(), place.left() : place.left() + 24]
    drawn = np.flatnonzero((row != row[0, 0]).any(axis=(0, 2)))
    assert len(drawn) > 4 and drawn.min() >= 6


def test_the_ledger_tells_who_for_whom_and_the_cost(busy: Rig) -> None:
    busy.window.arrange("monitor")
    busy.settle()
    model = busy.window.panels["ledger"].model
    ledger = busy.window.history.ledger
    entry = ledger.until(None)[-1]
    cells = [model.index(0, column).data() for column in range(6)]
    assert cells[0] == f"{entry.step:,}" and cells[1] == str(entry.event.request_id)
    assert cells[2] in (str(entry.event.beneficiary), "itself")
    assert f"{entry.event.tokens:,} token" in cells[3] and cells[5] == entry.event.rule
    assert cells[4] == "…"
    while entry.outcome == "open":
        busy.step(1)
    recovered = next(e for e in ledger.until(None) if e.outcome == "recovered")
    busy.wait_for(lambda: model.index(model.entries.index(recovered), 4).data() != "…")
    tip = model.index(model.entries.index(recovered), 4).data(Qt.ItemDataRole.ToolTipRole)
    assert f"{recovered.recovered.recomputed_tokens} token" in tip and "Back where it was after" in tip


def test_a_request_has_its_hue_in_map_and_timeline(busy: Rig) -> None:
    busy.window.arrange("monitor")
    busy.settle()
    blocks = pixels(busy.window.panels["blocks"].view)
    for request in busy.state.requests.values():
        if request.blocks:
            assert has_color(blocks, request_color(request.request_id, busy.theme))
    lanes = pixels(busy.window.panels["timeline"].plot)
    for state in (busy.theme.decode, busy.theme.prefill, busy.theme.preempted):
        assert has_color(lanes, state)


def test_bars_do_not_alias(busy: Rig) -> None:
    busy.window.arrange("monitor")
    busy.settle()
    plot = busy.window.panels["occupancy"].plot
    picture = pixels(plot)
    row = picture[plot.area.bottom() - 1, plot.area.left() : plot.area.right() + 1]
    theme = busy.theme
    allowed = {c.getRgb()[:3] for c in (theme.decode, theme.prefill, theme.preempted, theme.card)}
    assert {tuple(int(v) for v in pixel) for pixel in row} <= allowed  # no blended column
    filled = (row != np.array(theme.card.getRgb()[:3])).any(axis=1)
    starts = np.flatnonzero(filled[1:] & ~filled[:-1])
    assert len(starts) > 10 and set(np.diff(starts)) == {3}


def test_what_a_block_is_can_be_read(busy: Rig) -> None:
    from app.scope.block_words import block_sentence

    request = next(r for r in busy.state.requests.values() if len(r.blocks) > 1)
    text = block_sentence(busy.state, request.blocks[1])
    assert f"request {request.request_id}" in text and "from token 16 on" in text and "16 tokens of 16 written" in text
    free = next((b for b in range(1, 25) if not busy.state.block_refs[b] and not busy.state.block_hashed[b]), None)
    if free is not None:
        assert block_sentence(busy.state, free).endswith("free")


# Selecting -----------------------------------------------------------------------------------------------------------


def test_a_click_anywhere_selects_everywhere(busy: Rig) -> None:
    window = busy.window
    window.arrange("monitor")
    busy.settle()
    request = [r for r in busy.state.requests.values() if r.blocks][-1]
    view = window.panels["blocks"].view
    cell = request.blocks[0] - 1
    row, column = divmod(cell, view.shape.columns)
    middle = QPoint(column * view.shape.pitch + 3, row * view.shape.pitch + 3)
    assert view.block_at(middle) == request.blocks[0]
    busy.qtbot.mouseClick(view, Qt.MouseButton.LeftButton, pos=middle)
    assert window.selection.request_id == request.request_id
    queue = window.panels["queue"]
    assert queue.model.rows[queue.table.currentIndex().row()].request_id == request.request_id
    assert queue.sentence.text().startswith(f"Request {request.request_id}:")
    assert has_color(pixels(view), busy.theme.text)  # the frame of selected cells

    timeline = window.panels["timeline"].plot
    other = next(i for i in timeline.shown_requests() if i != request.request_id)
    busy.qtbot.mouseClick(timeline, Qt.MouseButton.LeftButton, pos=timeline.row_of(other).center())
    assert window.selection.request_id == other

    queue.table.selectRow(0)
    queue.table.setCurrentIndex(queue.model.index(0, 0))
    assert window.selection.request_id == queue.model.rows[0].request_id

    ledger = window.panels["ledger"]
    ledger.table.clicked.emit(ledger.model.index(0, 1))
    assert window.selection.request_id == window.history.ledger.until(None)[-1].event.request_id


def test_a_selection_outlives_its_request(busy: Rig) -> None:
    busy.window.arrange("monitor")
    chosen = next(iter(busy.state.requests))
    busy.window.selection.select(chosen)
    busy.bridge.abort(chosen)
    assert Abort(chosen) in busy.client.sent
    busy.step(2)
    assert chosen not in busy.state.requests
    busy.wait_for(lambda: busy.window.panels["queue"].model.place_of(chosen) is None)


def test_the_timeline_zooms_pans_and_returns(busy: Rig) -> None:
    busy.window.arrange("monitor")
    busy.settle()
    panel = busy.window.panels["timeline"]
    view = panel.plot.view
    whole = view.window()
    assert view.live and whole.begin <= view.lanes.begin + 1e-6
    busy.qtbot.keyClick(panel.plot, Qt.Key.Key_Plus)
    assert view.live and view.window().end - view.window().begin < whole.end - whole.begin
    busy.qtbot.keyClick(panel.plot, Qt.Key.Key_Left)
    assert not view.live and panel.live_button.isVisible()
    moved = view.window()
    busy.step(3)
    assert view.window() == moved  # looking back, nothing slides away
    busy.qtbot.mouseClick(panel.live_button, Qt.MouseButton.LeftButton)
    assert view.live and not panel.live_button.isVisible()


def test_the_timeline_follows_the_running_lanes_until_it_is_scrolled(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=400, token_budget=256, scheduler=SchedulerConfig(max_num_seqs=40))
    rig.window.arrange("chat")
    rig.load()
    for _ in range(100):
        rig.add(16, 300)
    rig.step(30)
    rig.settle(600)
    panel = rig.window.panels["timeline"]
    plot = panel.plot
    shown = plot.shown_requests()
    assert len(shown) < 100 and 40 in shown and plot._scroll.isVisible()
    plot._scroll.setValue(0)
    assert plot.shown_requests()[0] == 1 and panel.live_button.isVisible()
    rig.step(5)
    rig.settle(200)
    assert plot.shown_requests()[0] == 1
    rig.qtbot.keyClick(plot, Qt.Key.Key_End)
    assert 40 in plot.shown_requests() and not panel.live_button.isVisible()


def test_keys_work_wherever_the_focus_is(busy: Rig) -> None:
    window = busy.window
    window.arrange("chat")
    window.chat.send("hello")
    busy.wait_for(lambda: window.chat.current.open_answer is not None)
    window.panels["timeline"].plot.setFocus()
    busy.qtbot.keyClick(window.panels["timeline"].plot, Qt.Key.Key_Escape)
    assert any(isinstance(command, Abort) for command in busy.client.sent)
    window.arrange("monitor")
    assert not window.docks["chat"].isVisible()
    busy.qtbot.keyClick(window.panels["queue"].table, Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    assert window.docks["chat"].isVisible() and window.docks["chats"].isVisible()
    assert window.chat.current.path == []


# What it costs -------------------------------------------------------------------------------------------------------


def test_an_idle_window_paints_nothing(busy: Rig) -> None:
    busy.window.arrange("monitor")
    busy.step(10_000)
    busy.settle(300)
    counter = PaintCounter(busy.window)
    busy.settle(600)
    assert counter.count == 0


def test_hidden_panels_do_no_work_and_catch_up(busy: Rig) -> None:
    window = busy.window
    window.arrange("chat")
    window.docks["queue"].close()
    busy.settle()
    refreshed: list[str] = []
    for name, panel in window.panels.items():
        panel.refreshed.connect(lambda name=name: refreshed.append(name))
    busy.step(3)
    busy.settle()
    assert "occupancy" in refreshed and "queue" not in refreshed and "latency" not in refreshed
    before = list(busy.window.panels["queue"].model.rows)
    busy.step(1)
    window.reveal("queue")
    busy.settle()
    assert "queue" in refreshed and busy.window.panels["queue"].model.rows != before


def test_frames_are_counted_only_when_a_step_was_drawn(busy: Rig) -> None:
    stats = busy.window.frame_stats
    before = stats.frames
    busy.window.update()
    busy.settle()
    assert stats.frames == before
    busy.step(1)
    busy.settle()
    assert stats.frames == before + 1
    assert len(stats.milliseconds) == stats.frames and all(0 < ms < 5000 for ms in stats.milliseconds)


def test_the_window_needs_neither_torch_nor_a_second_plotting_library() -> None:
    code = (
        "import sys, app.main_window; "
        "bad = [m for m in ('torch', 'triton', 'transformers', 'gguf', 'pyqtgraph') if m in sys.modules]; "
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_five_hundred_requests_and_many_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=16_384, token_budget=512, scheduler=SchedulerConfig(max_num_seqs=256))
    rig.window.arrange("monitor")
    rig.load()
    for _ in range(500):
        rig.add(32, 400)
    begun = time.thread_time()
    rig.step(40)
    for _ in range(20):
        rig.step(1)
    assert (time.thread_time() - begun) / 60 < 0.25  # steps of the engine included, on a slow and shared machine
    assert rig.window.panels["queue"].model.rowCount() == len(rig.state.requests) == 500
    assert rig.window.panels["blocks"].view.shape.cells == 16_384


# Light and dark, sizes, arrangements ---------------------------------------------------------------------------------


def test_the_scheme_changes_while_it_runs(busy: Rig) -> None:
    busy.window.arrange("monitor")
    busy.settle()
    for scheme in ("light", "dark", "light"):
        busy.theme.set_scheme(scheme)
        busy.settle()
        for name in ("occupancy", "blocks", "timeline", "throughput", "queue"):
            picture = pixels(busy.window.panels[name].content)
            assert has_color(picture, busy.theme.card), (scheme, name)
        assert has_color(pixels(busy.window.panels["occupancy"].content), busy.theme.decode)
        assert has_color(pixels(busy.window), busy.theme.window)


@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [
        ("chat", {"chats", "chat", "occupancy", "blocks", "queue", "throughput", "timeline"}, {"load"}),
        ("monitor", {"occupancy", "blocks", "queue", "ledger", "throughput", "latency", "timeline"}, {"chats", "load"}),
        ("lab", {"load", "occupancy", "blocks", "queue", "timeline"}, {"chats"}),
    ],
)
@pytest.mark.parametrize("size", [(1100, 700), (1440, 900)])
def test_the_arrangements(
    make_rig: MakeRig, name: str, shown: set[str], hidden: set[str], size: tuple[int, int]
) -> None:
    rig = make_rig(*size)
    rig.window.arrange(name)
    rig.settle()
    assert (rig.window.width(), rig.window.height()) == size  # nothing forces it larger
    for dock in shown:
        place = rig.window.docks[dock]
        assert place.isVisible() and not place.visibleRegion().isEmpty(), dock
        corner = place.mapTo(rig.window, QPoint(place.width(), place.height()))
        assert corner.x() <= size[0] and corner.y() <= size[1], dock
        assert place.width() >= 100 and place.height() >= 100, dock
    for dock in hidden:
        assert not rig.window.docks[dock].isVisible()


def test_the_layout_is_kept(qtbot, theme: Theme, tmp_path: Path) -> None:
    def window() -> MainWindow:
        settings = QSettings(str(tmp_path / "window.ini"), QSettings.Format.IniFormat)
        bridge = EngineBridge(client=ScriptedClient())
        made = MainWindow(bridge, theme, tmp_path / "chats.sqlite3", settings=settings)
        made.show()
        qtbot.waitExposed(made)
        return made

    first = window()
    first.arrange("lab")
    qtbot.wait(50)
    first.close()
    first.chat.shutdown()
    second = window()
    qtbot.wait(50)
    assert second.docks["load"].isVisible() and not second.docks["chats"].isVisible()
    second.close()
    second.chat.shutdown()
    for each in (first, second):
        each.deleteLater()


def test_everything_has_a_name_for_a_screen_reader(busy: Rig) -> None:
    for panel in busy.window.panels.values():
        assert panel.accessibleName()
        assert panel.content.accessibleName() or any(c.accessibleName() for c in panel.content.findChildren(QWidget))
    for each in busy.window.findChildren(QAbstractButton):
        if each.isVisible():
            assert each.accessibleName() or each.text(), each


# Behind other tabs ---------------------------------------------------------------------------------------------------


def test_what_lies_behind_another_tab_costs_nothing_and_is_drawn_when_it_comes_to_the_front(rig: Rig) -> None:
    window = rig.window
    window.arrange("monitor")
    rig.load()
    window.reveal("throughput")
    rig.settle()
    behind, refreshed = window.panels["steptime"], []
    behind.refreshed.connect(lambda: refreshed.append(rig.state.step))
    rig.add(output=20)
    for _ in range(5):
        rig.step(2)
    rig.settle(400)
    assert not behind.is_seen() and refreshed == []
    window.reveal("steptime")
    rig.wait_for(lambda: bool(refreshed))
    assert set(refreshed) == {10}
    assert behind.is_seen() and not window.panels["throughput"].is_seen()


@pytest.mark.parametrize("arrangement", ["chat", "monitor", "lab"])
def test_a_panel_that_the_menu_shows_is_in_front(rig: Rig, arrangement: str) -> None:
    window = rig.window
    window.arrange(arrangement)
    rig.settle()
    for name, dock in window.docks.items():
        dock.close()
        dock.toggleViewAction().trigger()
        rig.settle(20)
        assert not dock.visibleRegion().isEmpty(), name


@pytest.mark.parametrize("key", [Qt.Key.Key_Tab, Qt.Key.Key_Backtab])
def test_the_tab_key_goes_only_where_one_can_see_it(rig: Rig, key: Qt.Key) -> None:
    window = rig.window
    rig.load()
    for name in ("monitor", "lab"):  # Qt leaves the tab bars of an earlier arrangement, empty
        window.arrange(name)
        rig.settle()
    window.reveal("load", "queue")
    window.activateWindow()
    window.setFocus()
    rig.settle()
    visited = set()
    for _ in range(60):
        QTest.keyClick(QApplication.focusWidget() or window, key)
        focused = QApplication.focusWidget()
        assert window.rect().contains(focused.mapTo(window, focused.rect().center())), focused.accessibleName()
        visited.add(focused.accessibleName())
    assert {"Model menu", "Start the load"} <= visited


def test_enter_presses_the_button_that_has_the_focus(rig: Rig) -> None:
    window = rig.window
    rig.load()
    window.activateWindow()
    button = window.chat.list_panel.new_button
    window.chat.send("hello")
    button.setFocus()
    rig.qtbot.keyClick(button, Qt.Key.Key_Return)
    assert window.chat.current.path == []
    menu = window.top_bar.view_button.menu()
    window.top_bar.view_button.setFocus()
    QTimer.singleShot(50, menu.close)
    seen: list[bool] = []
    menu.aboutToShow.connect(lambda: seen.append(True))
    rig.qtbot.keyClick(window.top_bar.view_button, Qt.Key.Key_Enter)
    assert seen and not menu.isVisible()


def test_enter_in_a_field_is_not_for_the_button_that_it_moves_the_focus_to(rig: Rig) -> None:
    rig.window.activateWindow()
    search, button = rig.window.chat.list_panel.search, rig.window.chat.options_button
    search.returnPressed.connect(button.setFocus)
    search.setFocus()
    rig.wait_for(search.hasFocus)
    rig.qtbot.keyClick(search, Qt.Key.Key_Return)
    assert button.hasFocus() and not button.isChecked()


def test_keys_go_from_chat_to_chat_in_the_order_of_the_list(rig: Rig) -> None:
    window = rig.window
    rig.load()
    chats = []
    for words in ("one", "two", "three"):
        chats.append(window.chat.new_conversation())
        window.chat.send(words)
    window.activateWindow()
    edit, control = window.chat.composer.edit, Qt.KeyboardModifier.ControlModifier
    edit.setFocus()
    order = [row for row in window.chat.list_panel.model.rows if isinstance(row, str)]
    assert {each.id for each in chats} == set(order) and window.chat.current is chats[-1]
    for expected in (order[1], order[2], order[2]):  # the end is the end
        rig.qtbot.keyClick(edit, Qt.Key.Key_PageDown, control)
        assert window.chat.current.id == expected and edit.hasFocus()
    for expected in (order[1], order[0], order[0]):
        rig.qtbot.keyClick(edit, Qt.Key.Key_PageUp, control)
        assert window.chat.current.id == expected


def test_the_chats_menu_tells_the_keys_in_force(rig: Rig) -> None:
    panel = rig.window.chat.list_panel

    def told() -> str:
        panel.menu_button.click()
        menu = panel.findChildren(ChatMenu)[-1]
        words = next(action.text() for action in menu.actions() if action.text().startswith("New chat"))
        menu.close()
        return words.partition("\t")[2]

    assert told() == panel.new_button.toolTip() == "Ctrl+N"
    rig.window.commands.bind("chat.new", "Ctrl+J")
    assert told() == panel.new_button.toolTip() == "Ctrl+J"


@pytest.mark.parametrize("font_px", [13, 22])
def test_no_dock_lies_over_another_in_the_smallest_window(rig: Rig, font_px: int) -> None:
    window = rig.window
    window.preferences.change(font_px=font_px)
    window.resize(900, 560)
    for name in ("chat", "monitor", "focus"):
        window.arrange(name)
        rig.settle()
        seen = [dock for dock in window.docks.values() if not dock.visibleRegion().isEmpty()]
        crossed = [
            (one.objectName(), other.objectName())
            for one, other in combinations(seen, 2)
            if one.geometry().intersects(other.geometry())
        ]
        assert not crossed, name
        button = window.chat.list_panel.new_button
        assert button.isHidden() or button.width() >= button.sizeHint().width() or name == "monitor"
    window.preferences.change(font_px=13)


def test_the_chat_alone_is_an_arrangement_and_is_kept(qtbot, theme: Theme, tmp_path: Path) -> None:
    settings = QSettings(str(tmp_path / "window.ini"), QSettings.Format.IniFormat)

    def opened() -> MainWindow:
        bridge = EngineBridge(client=ScriptedClient())
        made = MainWindow(bridge, theme, tmp_path / "chats.sqlite3", settings=settings)
        qtbot.addWidget(made)
        made.show()
        qtbot.waitExposed(made)
        return made

    window = opened()
    assert window.commands.keys("arrange.focus") == "Ctrl+5"
    window.commands["arrange.focus"].action.trigger()
    assert {name for name, dock in window.docks.items() if dock.isVisible()} == {"chats", "chat"}
    window.close()
    again = opened()
    assert {name for name, dock in again.docks.items() if dock.isVisible()} == {"chats", "chat"}
    again.commands["arrange.chat"].action.trigger()
    assert again.docks["timeline"].isVisible()
    again.close()


def test_a_title_has_its_room_before_the_legend_beside_it(make_rig) -> None:
    rig = make_rig(1440, 900)
    rig.load()
    for _ in range(4):
        rig.add()
    rig.step(3)
    header = rig.window.panels["blocks"].header
    title = header.findChild(QLabel)
    assert title.width() >= title.fontMetrics().horizontalAdvance(title.text()) > 0
    narrow = header.minimumSizeHint().width()
    assert narrow < title.width() + 200, "a dock can become narrower than its title line is"
