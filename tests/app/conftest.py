"""Window tests drive the real widgets; a warning of Qt's, or a timer left running, fails them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QObject, QTimer
from PySide6.QtWidgets import QApplication

from app.engine_bridge import EngineBridge
from app.frame_pacer import FramePacer
from app.main_window import MainWindow
from app.theme import Theme
from engine.config import EngineConfig
from engine.request import SamplingParams
from tests.app.scripted import ScriptedClient


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.qt_log_level_fail("WARNING"))
            item.add_marker(pytest.mark.qt_log_ignore("This plugin does not support"))


class Rig:
    """A window on a scripted engine."""

    def __init__(self, qtbot, theme: Theme, folder: Path, client: ScriptedClient) -> None:
        self.qtbot = qtbot
        self.theme = theme
        self.client = client
        self.bridge = EngineBridge(client=client, pacer=FramePacer(cores=64))
        self.window = MainWindow(
            self.bridge, theme, folder / "chats.sqlite3", state_folder=folder, runs_folder=folder / "runs"
        )
        self.state = self.bridge.run_state

    def load(self) -> None:
        self.bridge.start(EngineConfig(scheduler=self.client.scheduler))
        self.client.ready()
        self.wait_for(lambda: self.bridge.state == "ready")

    def add(self, prompt: int = 40, output: int = 30, **given: object) -> int:
        params = SamplingParams(max_tokens=output)
        ids = given.pop("ids", None)
        if ids is not None:
            return self.bridge.add_request(params=params, prompt_token_ids=ids, **given)
        return self.bridge.add_request(params=params, prompt_tokens=prompt, **given)

    def step(self, steps: int = 1) -> None:
        """Takes steps and waits until the window has folded and drawn them."""
        if self.client.step(steps) and self.client.core is not None:
            wanted = self.client.core.keyframe().step
            self.wait_for(lambda: self.state.step == wanted)
            QApplication.processEvents()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        self.qtbot.waitUntil(condition, timeout=5000)

    def settle(self, milliseconds: int = 80) -> None:
        self.qtbot.wait(milliseconds)


def active_timers(parent: QObject) -> list[QTimer]:
    return [timer for timer in parent.findChildren(QTimer) if timer.isActive()]


@pytest.fixture
def theme(qapp: QApplication) -> Iterator[Theme]:
    made = Theme(qapp, "dark")
    yield made
    made.deleteLater()


@pytest.fixture
def make_rig(qtbot, theme: Theme, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(width: int = 1440, height: int = 900, **engine: object) -> Rig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rig = Rig(qtbot, theme, folder, ScriptedClient(**engine))
        rigs.append(rig)
        rig.window.resize(width, height)
        rig.window.show()
        qtbot.waitExposed(rig.window)
        return rig

    yield make
    for rig in rigs:
        rig.window.close()
        rig.window.chat.shutdown()
        assert active_timers(rig.window) == []
        assert active_timers(rig.bridge) == []
        rig.window.deleteLater()
        rig.bridge.deleteLater()
        QApplication.sendPostedEvents(None, 52)  # QEvent.DeferredDelete


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()
