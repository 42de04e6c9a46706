"""Prints, as JSON, the texts of the window that nobody translated: ``python -m tests.app.untranslated FOLDER``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from app import translation
from tests.app.test_translation import UNITS, Bracketed

# Before anything of the window is imported: its tables are translated on import.
translation.use_catalogue(Bracketed())

from PySide6.QtCore import QAbstractItemModel, QModelIndex, Qt  # noqa: E402
from PySide6.QtGui import QAction  # noqa: E402
from PySide6.QtWidgets import (  # noqa: E402
    QAbstractButton,
    QAbstractItemView,
    QApplication,
    QComboBox,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QTabBar,
    QWidget,
)

from app.engine_bridge import EngineBridge  # noqa: E402
from app.frame_pacer import FramePacer  # noqa: E402
from app.main_window import MainWindow  # noqa: E402
from app.theme import Theme  # noqa: E402
from engine.config import DISCIPLINES, ORDERS, PREEMPTIONS, EngineConfig  # noqa: E402
from engine.request import SamplingParams  # noqa: E402
from tests.app.scripted import ScriptedClient  # noqa: E402

NAMES = (*DISCIPLINES, *ORDERS, *PREEMPTIONS, "ngram", "off", "on", "row", "batch", "Ctrl", "Alt", "Shift", "Esc")
SAME_EVERYWHERE = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(NAMES, key=len, reverse=True)))})(?![\w-])")
"""Values on the command line, and keys: the same in every language."""
FROM_THE_ENGINE = {"η", "Starting the engine"}
"""How texts begin that the window is given: definitions of figures, stages of a load."""


def texts_of(widget: QWidget) -> Iterator[str]:
    yield widget.toolTip()
    yield widget.accessibleName()
    yield widget.windowTitle()
    for action in widget.actions():
        yield from _texts_of_action(action)
    if isinstance(widget, QLabel | QAbstractButton):
        yield widget.text()
    if isinstance(widget, QLineEdit | QPlainTextEdit):
        yield widget.placeholderText()
    if isinstance(widget, QComboBox):
        yield from (widget.itemText(index) for index in range(widget.count()))
    if isinstance(widget, QTabBar):
        yield from (widget.tabText(index) for index in range(widget.count()))
    if isinstance(widget, QAbstractItemView) and widget.model() is not None:
        yield from _texts_of_model(widget.model())


def _texts_of_action(action: QAction) -> Iterator[str]:
    yield action.text()
    # Qt makes a tool tip of the text where there is none.
    if action.toolTip() != action.text().replace("&", ""):
        yield action.toolTip()


def _texts_of_model(model: QAbstractItemModel) -> Iterator[str]:
    for column in range(model.columnCount(QModelIndex())):
        for role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            yield str(model.headerData(column, Qt.Orientation.Horizontal, role) or "")


def is_untranslated(text: str) -> bool:
    bare = re.sub(r"<[^>]*>|&\w+;", " ", text)
    while (inner := re.sub(r"⟦[^⟦⟧]*⟧", " ", bare)) != bare:
        bare = inner
    bare = SAME_EVERYWHERE.sub(" ", bare)
    return bool(re.findall(r"[A-Za-z]{2,}", UNITS.sub(" ", bare)))


def untranslated(folder: Path) -> list[str]:
    application = QApplication.instance() or QApplication([])
    theme = Theme(application, "dark")
    client = ScriptedClient()
    bridge = EngineBridge(client=client, pacer=FramePacer(cores=64))
    window = MainWindow(bridge, theme, folder / "chats.sqlite3", state_folder=folder, runs_folder=folder / "runs")
    window.resize(1440, 900)
    window.show()
    bridge.start(EngineConfig(scheduler=client.scheduler))
    client.ready()
    window.chat.send("hello")
    for _ in range(20):
        bridge.add_request(params=SamplingParams(max_tokens=30), prompt_tokens=60)
        client.step(2)
        application.processEvents()
    for name in window.arrangements:
        window.arrange(name)
        application.processEvents()
    found = set()
    for widget in [window, *window.findChildren(QWidget)]:
        found |= {f"{type(widget).__name__}: {text}" for text in texts_of(widget) if text and is_untranslated(text)}
    window.close()
    window.chat.shutdown()
    return sorted(found)


if __name__ == "__main__":
    print(json.dumps(untranslated(Path(sys.argv[1])), ensure_ascii=False))
