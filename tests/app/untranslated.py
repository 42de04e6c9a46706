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

from PySide6.QtCore import QAbstractItemModel, QAbstractListModel, QModelIndex, Qt  # noqa: E402
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
from engine.config import DISCIPLINES, DTYPES, ORDERS, PREEMPTIONS, EngineConfig  # noqa: E402
from engine.request import SamplingParams  # noqa: E402
from engine.workload import list_scenarios, load_scenario  # noqa: E402
from tests.app.scripted import ScriptedClient  # noqa: E402

NAMES = (
    *DISCIPLINES,
    *ORDERS,
    *PREEMPTIONS,
    "ngram",
    *DTYPES,
    "starter",
    "off",
    "on",
    "row",
    "batch",
    "Ctrl",
    "Alt",
    "Shift",
    "Esc",
    "End",
)
_ANY_NAME = "|".join(map(re.escape, sorted(NAMES, key=len, reverse=True)))
SAME_EVERYWHERE = re.compile(rf"(?<![\w-])({_ANY_NAME})(?![\w-])")
"""Values on the command line, and keys: the same in every language."""
OF_QT = {"Close", "Float", "Scroll Left", "Scroll Right"}
"""Names of Qt's own buttons, which its own catalogues translate."""
GIVEN = ("η: ", "SmolLM2-135M-Instruct")
"""How texts begin that come from elsewhere: definitions of figures, names of models."""
QUESTION = "hello"


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
    columns = 0 if isinstance(model, QAbstractListModel) else model.columnCount(QModelIndex())
    for column in range(columns):
        for role in (Qt.ItemDataRole.DisplayRole, Qt.ItemDataRole.ToolTipRole):
            yield str(model.headerData(column, Qt.Orientation.Horizontal, role) or "")


def _given() -> set[str]:
    scenarios = [load_scenario(name) for name in list_scenarios()]
    return {QUESTION, *(s.title for s in scenarios), *(s.watch for s in scenarios)}


def is_untranslated(text: str) -> bool:
    bare = re.sub(r"<[^>]*>|&\w+;", " ", text)
    if (
        text in OF_QT
        or bare.strip() in _given()
        or text.startswith(GIVEN)
        or ("/" in text and Path(text).is_absolute())
    ):
        return False
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
    window.chat.send(QUESTION)
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
