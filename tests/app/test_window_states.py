"""What the window says when a run, a loading or the window itself ends, and when a queue is very long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget

from app.chat.store import ChatStore
from app.launch_guard import LaunchGuard
from app.scope.reasons import MOST_LISTED
from app.scope.timeline_view import TimelineView
from engine.config import EngineConfig
from engine.saturation import probe_size
from tests.app.conftest import Rig
from tests.app.test_window import crunch

MakeRig = Callable[..., Rig]


def test_the_title_of_an_empty_queue_counts_nothing(rig: Rig) -> None:
    rig.window.arrange("monitor")
    rig.load()
    rig.add(20, 5)
    rig.step(2)
    queue = rig.window.panels["queue"]
    rig.wait_for(lambda: "1 running" in queue._summary.text())
    rig.step(10_000)
    rig.wait_for(lambda: queue.pages.is_empty and queue._summary.text() == "")


def test_after_a_death_figures_are_of_the_past(rig: Rig) -> None:
    rig.window.arrange("monitor")
    rig.load()
    rig.add(20, 50)
    rig.step(30)
    panels = rig.window.panels
    rig.wait_for(lambda: panels["throughput"]._rate.text().endswith("tok/s"))
    rig.client.kill()
    rig.wait_for(lambda: rig.bridge.state == "dead")
    assert panels["queue"]._summary.text() == "when the engine ended: 1 running · 0 waiting"
    assert panels["throughput"]._rate.text() == ""
    assert rig.window.top_bar.model_button.text() == "No model ▾"


def test_a_fresh_engine_has_no_latency_of_the_one_before(rig: Rig) -> None:
    rig.window.arrange("monitor")
    rig.load()
    rig.add(20, 50)
    rig.step(30)
    latency = rig.window.panels["latency"]
    rig.wait_for(lambda: not any("–" in entry.text for entry in latency._legend._entries[:3]))
    rig.client.kill()
    rig.wait_for(lambda: rig.bridge.state == "dead")
    rig.bridge.restart()
    rig.client.ready()
    rig.wait_for(lambda: latency.pages.is_empty)
    assert [entry.text for entry in latency._legend._entries] == ["TTFT –", "ITL –", "p99 –", "E2EL –"]


def test_a_death_while_loading_leaves_nothing_loading(rig: Rig) -> None:
    rig.bridge.start(EngineConfig())
    rig.client.loading("Reading the model", 3, 10)
    rig.wait_for(lambda: rig.bridge.state == "loading")
    assert rig.window.top_bar.model_button.text().startswith("Loading")
    rig.client.die("The engine could not be started: no such file")
    rig.wait_for(lambda: rig.bridge.state == "dead")
    assert rig.window.top_bar.model_button.text() == "No model ▾"
    assert rig.window.top_bar.loading.isHidden()
    assert "no such file. Exit code" in rig.window.death_banner.reason.text()


@pytest.mark.parametrize("arrangement", ["chat", "monitor", "lab"])
def test_the_search_key_shows_the_list_wherever_it_is(rig: Rig, arrangement: str) -> None:
    window = rig.window
    window.arrange(arrangement)
    window.docks["chats"].close()
    window.activateWindow()
    rig.settle()
    focused = window.focusWidget() or window
    rig.qtbot.keyClick(focused, Qt.Key.Key_K, Qt.KeyboardModifier.ControlModifier)
    rig.wait_for(window.chat.list_panel.search.hasFocus)
    assert not window.chat.list_panel.search.visibleRegion().isEmpty()
    rig.qtbot.keyClick(window.chat.list_panel.search, Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    rig.wait_for(window.chat.composer.edit.hasFocus)


def test_closing_saves_the_chats_and_lets_go_of_their_file(rig: Rig) -> None:
    rig.load()
    rig.window.chat.send("hello")
    rig.step(3)
    rig.window.close()
    store = ChatStore.open(rig.window.chat.session.store.path)
    (conversation,) = store.conversations()
    store.load_messages(conversation)
    answer = conversation.path[1]
    assert store.is_kept and answer.text and answer.error == "The engine was stopped before this answer was complete."
    store.close()


def test_of_a_very_long_queue_the_first_are_listed_and_the_chosen_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.window.arrange("monitor")
    rig.load()
    ids = [rig.add(32, 400) for _ in range(MOST_LISTED + 200)]
    rig.step(2)
    queue = rig.window.panels["queue"]
    rig.wait_for(lambda: queue.model.rowCount() > 0)
    waiting = rig.state.num_waiting
    assert queue.model.rowCount() == rig.state.num_running + MOST_LISTED < len(ids)
    assert f"{waiting} waiting, the first {MOST_LISTED} listed" in queue._summary.text()
    rig.window.selection.select(ids[-1])
    assert queue.model.place_of(ids[-1]) == queue.table.currentIndex().row()
    assert queue.sentence.text().startswith(f"Request {ids[-1]}: Behind request")


def test_a_timeline_left_at_an_earlier_run_follows_the_new_one(rig: Rig) -> None:
    rig.load()
    rig.add(20, 50)
    rig.step(10_000)
    view = TimelineView(rig.window.history.lanes)
    view.pan(-2.0)
    assert not view.live
    view.lanes.begin, view.lanes.end = view.lanes.end + 100.0, view.lanes.end + 101.0
    assert view.live and view.window().end == view.lanes.end


def test_what_another_window_is_loading_is_no_interrupted_start(tmp_path: Path) -> None:
    first, second = LaunchGuard(tmp_path / "state"), LaunchGuard(tmp_path / "state")
    assert first.interrupted() is None
    first.begin("bomb")
    assert second.interrupted() is None
    second.end()
    assert (tmp_path / "state" / "loading").read_text() == "bomb"
    first.end()
    assert not (tmp_path / "state" / "loading").exists() and not (tmp_path / "state" / "loading.lock").exists()
    (tmp_path / "state" / "loading").write_text("bomb")  # as a window leaves it that is killed
    assert second.interrupted() == "bomb"


def test_what_was_missed_while_minimised_is_drawn_when_it_is_back(rig: Rig) -> None:
    rig.window.arrange("monitor")
    rig.load()
    rig.add(20, 5)
    rig.step(2)
    rig.wait_for(lambda: not rig.window.panels["queue"].pages.is_empty)
    rig.window.showMinimized()
    rig.settle()
    rig.step(10_000)
    assert not rig.window.panels["queue"].pages.is_empty
    rig.window.showNormal()
    rig.wait_for(lambda: rig.window.panels["queue"].pages.is_empty)


def test_the_ledger_shares_the_selection(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=24, token_budget=48)
    rig.window.arrange("monitor")
    crunch(rig)
    while len({entry.event.request_id for entry in rig.window.history.ledger.until(None)}) < 2:
        rig.step(3)
    ledger, selection = rig.window.panels["ledger"], rig.window.selection
    rig.wait_for(lambda: len(ledger.model.entries) == len(rig.window.history.ledger.until(None)))
    oldest = ledger.model.entries[-1].event
    assert not ledger.table.currentIndex().isValid()
    selection.select(oldest.request_id)
    assert ledger.model.entries[ledger.table.currentIndex().row()].event.request_id == oldest.request_id
    ledger.table.selectRow(len(ledger.model.entries) - 1)
    rig.qtbot.keyClick(ledger.table, Qt.Key.Key_Home, Qt.KeyboardModifier.ControlModifier)
    assert selection.request_id == ledger.model.entries[0].event.request_id
    index = ledger.model.index(len(ledger.model.entries) - 1, 2)
    rig.qtbot.mouseClick(
        ledger.table.viewport(), Qt.MouseButton.LeftButton, pos=ledger.table.visualRect(index).center()
    )
    assert selection.request_id == oldest.beneficiary
    # The click went back to that step, after which nothing else has happened yet.
    assert rig.window.source.moment is not None and [entry.event for entry in ledger.model.entries] == [oldest]
    assert ledger.table.currentIndex().row() == 0
    selection.select(None)
    assert not ledger.table.currentIndex().isValid()


def test_closing_while_everything_runs_leaves_nothing_running(rig: Rig) -> None:
    rig.load()
    window = rig.window
    window.chat.send("first")
    rig.step(200)
    first = window.chat.current
    window.chat.new_conversation()
    window.chat.send("second")
    window.chat.delete_conversations([first.id])
    window.load_panel.clock = lambda: rig.client.runner.now
    window.load_panel.select_scenario("rush-hour")
    window.load_panel.start()
    rig.step(5)
    window.close()  # the fixture asserts that no timer is left
    assert window.load_panel.run.phase == "broken" and not window.chat.undo_notice.isVisible()
    store = ChatStore.open(window.chat.session.store.path)
    assert [each.title for each in store.conversations()] == ["second"]
    store.close()


@pytest.mark.parametrize("name", ["load", "compare", "knobs"])
def test_the_labs_panels_are_made_when_they_are_seen(rig: Rig, name: str) -> None:
    window = rig.window
    dock = window.docks[name]
    widgets = len(window.findChildren(QWidget))
    assert not any(window.docks[each].is_made for each in ("load", "compare", "knobs"))
    window.arrange("monitor")
    assert not dock.is_made
    window.reveal(name)
    rig.wait_for(lambda: dock.is_made)
    assert dock.content.isVisible() and dock.content is dock.widget()
    assert dock.titleBarWidget() is dock.content.header
    assert len(window.findChildren(QWidget)) > widgets + 50


def test_a_load_panel_that_is_made_late_knows_the_engine(rig: Rig) -> None:
    rig.load()
    assert not rig.window.docks["load"].is_made
    assert rig.window.load_panel.rates.probe_requests.value() == probe_size(rig.bridge.info.max_num_seqs)
    assert rig.window.load_panel.start_button.isEnabled()
    assert rig.window.compare_panel.start_button.isEnabled()
