"""The chat on real widgets, with a bridge that the test answers for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QSettings
from PySide6.QtWidgets import QApplication, QSplitter

from app.chat.workspace import ChatWorkspace
from app.selection import Selection
from app.theme import Theme
from tests.app.chat.fake_bridge import FakeBridge

MakeWorkspace = Callable[..., ChatWorkspace]


@pytest.fixture
def theme(qapp: QApplication) -> Theme:
    return Theme(qapp, "dark")


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "chats.sqlite3"


@pytest.fixture
def make_workspace(qtbot, theme: Theme, store_path: Path) -> Iterator[MakeWorkspace]:
    """Makes workspaces in a shown window of 900 × 700; closes what the test leaves open."""
    made: list[tuple[ChatWorkspace, QSplitter]] = []

    def make(
        bridge: FakeBridge,
        *,
        selection: Selection | None = None,
        path: Path | None = None,
        settings: QSettings | None = None,
    ) -> ChatWorkspace:
        workspace = ChatWorkspace(bridge, theme, selection or Selection(), path or store_path, settings=settings)
        window = QSplitter()
        window.addWidget(workspace.list_panel)
        window.addWidget(workspace.chat_panel)
        window.resize(900, 700)
        window.show()
        qtbot.waitExposed(window)
        window.activateWindow()
        made.append((workspace, window))
        return workspace

    yield make
    for workspace, window in made:
        workspace.shutdown()
        workspace.deleteLater()
        window.close()
        window.deleteLater()
    # Outside an event loop nobody else does: every test would style the widgets of all tests before it again.
    QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


@pytest.fixture
def bridge(qapp: QApplication) -> FakeBridge:
    return FakeBridge()


@pytest.fixture
def workspace(make_workspace: MakeWorkspace, bridge: FakeBridge) -> ChatWorkspace:
    return make_workspace(bridge)
