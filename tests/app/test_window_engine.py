"""The window while its engine loads, cannot load, dies, and ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QLabel, QWidget

from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.theme import Theme
from engine.config import EngineConfig
from engine.messages import PoolShrank
from engine.request import SamplingParams
from tests.app.conftest import Rig
from tests.app.scripted import ScriptedClient

MakeRig = Callable[..., Rig]


def texts(widget: QWidget) -> str:
    return "\n".join(label.text() for label in widget.findChildren(QLabel) if label.isVisible())


def test_loading_is_shown_in_the_window(rig: Rig) -> None:
    strip = rig.window.top_bar.loading
    assert not strip.isVisible()
    rig.bridge.start(EngineConfig())
    assert strip.isVisible()
    rig.client.loading("Downloading the starter model", 34 << 20, 98 << 20)
    rig.wait_for(lambda: "Downloading" in strip.stage.text())
    assert strip.bar.maximum() == 1000 and strip.bar.value() == 347
    assert strip.amount.text() == "34 of 98 MiB"
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert not strip.isVisible()
    assert "SmolLM2-135M-Instruct · float32 · CPU" in rig.window.top_bar.model_button.text()


def test_loading_can_be_stopped(rig: Rig) -> None:
    rig.bridge.start(EngineConfig())
    rig.qtbot.mouseClick(rig.window.top_bar.loading.cancel, Qt.MouseButton.LeftButton)
    assert rig.bridge.state == "stopped" and rig.client.closed >= 1
    assert not rig.window.top_bar.loading.isVisible()


def test_offline_without_a_model_says_so_and_offers_ways_on(rig: Rig, monkeypatch, tmp_path: Path) -> None:
    rig.bridge.start(EngineConfig())
    rig.client.fail_to_load("No network, and no starter model in the cache.", "offline")
    page = rig.window.model_page
    rig.wait_for(page.isVisible)
    assert "No network, and no starter model in the cache." in texts(page)
    assert "none could be fetched" in page.heading.text()
    rig.settle()
    assert 0 <= page.geometry().top() - rig.window.top_bar.geometry().bottom() < 30
    rig.qtbot.mouseClick(page.retry_button, Qt.MouseButton.LeftButton)
    assert len(rig.client.loaded) == 2 and not page.isVisible()
    rig.client.fail_to_load("Still none.", "offline")
    rig.wait_for(page.isVisible)
    monkeypatch.setattr("app.models.control.QFileDialog.getExistingDirectory", lambda *a, **k: str(tmp_path))
    rig.qtbot.mouseClick(page.folder_button, Qt.MouseButton.LeftButton)
    assert rig.client.loaded[-1].model == str(tmp_path) and not page.isVisible()


@pytest.mark.parametrize("kind", ["memory", "unsupported", "damaged", "other", "something new"])
def test_every_kind_of_failure_has_a_page(rig: Rig, kind: str) -> None:
    rig.bridge.start(EngineConfig(model="/models/x"))
    rig.client.fail_to_load("What is wrong, with numbers.", kind)
    rig.wait_for(rig.window.model_page.isVisible)
    assert "What is wrong, with numbers." in texts(rig.window.model_page)
    assert rig.window.model_page.starter_button.isVisible()


def test_a_dead_engine_is_reported_at_once_and_restarted_with_a_click(rig: Rig) -> None:
    rig.load()
    rig.add(20, 100)
    rig.step(5)
    banner = rig.window.death_banner
    height = rig.window.docks["timeline"].height()
    died = time.monotonic()
    rig.client.die("The engine was ended by SIGKILL.", ("loading", "out of memory"))
    rig.wait_for(banner.isVisible)
    assert time.monotonic() - died < 1.0
    assert "SIGKILL" in banner.reason.text()
    rig.qtbot.mouseClick(banner.details, Qt.MouseButton.LeftButton)
    rig.settle()
    assert rig.window.docks["timeline"].height() > 0.75 * height  # all docks give their share of the room
    assert rig.window.top_bar.running.text == "–"
    assert banner.lines.isVisible() and banner.lines.toPlainText() == "loading\nout of memory"
    rig.qtbot.mouseClick(banner.again, Qt.MouseButton.LeftButton)
    assert len(rig.client.loaded) == 2 and not banner.isVisible()
    rig.settle()
    assert abs(rig.window.docks["timeline"].height() - height) <= 2
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert rig.state.requests == {}
    rig.add(20, 5)
    rig.step(10_000)
    assert rig.state.totals.finished == 1


def test_a_start_that_did_not_survive_loading_is_not_repeated_by_itself(make_rig: MakeRig, qtbot) -> None:
    rig = make_rig()
    rig.window.launch(EngineConfig(model="/models/bomb"))
    marker = rig.window._guard._file
    assert marker.read_text() == "/models/bomb"
    marker_text = marker.read_text()
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert not marker.exists()
    marker.write_text(marker_text)  # as if the window had been killed while it loaded
    count = len(rig.client.loaded)
    rig.window.launch(EngineConfig(model="/models/bomb"))
    assert len(rig.client.loaded) == count
    assert rig.window.model_page.isVisible() and "bomb" in texts(rig.window.model_page)
    qtbot.mouseClick(rig.window.model_page.retry_button, Qt.MouseButton.LeftButton)
    assert len(rig.client.loaded) == count + 1
    rig.window.launch(EngineConfig(model="/models/bomb"), chosen=True)
    assert len(rig.client.loaded) == count + 2


def test_closing_ends_the_engine(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.load()
    closed = rig.client.closed
    rig.window.close()
    assert rig.client.closed > closed and rig.bridge.state == "stopped"


def test_a_window_opens_and_closes_many_times(qtbot, theme: Theme, tmp_path: Path) -> None:
    for number in range(8):
        client = ScriptedClient()
        bridge = EngineBridge(client=client)
        window = MainWindow(bridge, theme, tmp_path / f"{number}.sqlite3")
        window.show()
        bridge.start(EngineConfig())
        client.ready()
        bridge.add_request(prompt_tokens=20, params=SamplingParams())
        client.step(3)
        qtbot.wait(5 * (number % 4))
        window.close()
        window.chat.shutdown()
        window.deleteLater()
        bridge.deleteLater()


def test_a_pool_that_had_to_shrink_is_told_and_known(rig: Rig) -> None:
    rig.bridge.start(EngineConfig())
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    smaller = msgspec.structs.replace(rig.client.info(), num_blocks=77)
    rig.client.deliver(PoolShrank("Memory ran out in a step (MemoryError).", smaller))
    rig.wait_for(lambda: "Memory ran out in a step" in texts(rig.window.notice))
    assert rig.bridge.info is not None and rig.bridge.info.num_blocks == 77
    assert "77 blocks" in rig.window.top_bar.model_button.toolTip()
