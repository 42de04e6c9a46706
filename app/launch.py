"""Opens the window and runs Qt until it closes."""

from __future__ import annotations

import signal
import sys

from platformdirs import user_state_path
from PySide6.QtCore import QSettings, QTimer
from PySide6.QtWidgets import QApplication

from app.chat.store import default_store_path
from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.theme import Theme
from engine.config import EngineConfig

APPLICATION = "batchscope"


def make_application() -> QApplication:
    """The one QApplication, named so that its settings and its windows are found."""
    existing = QApplication.instance()
    if isinstance(existing, QApplication):
        return existing
    application = QApplication(sys.argv[:1])
    application.setApplicationName(APPLICATION)
    application.setApplicationDisplayName("Batchscope")
    application.setOrganizationName(APPLICATION)
    application.setDesktopFileName(APPLICATION)
    return application


def run_window(config: EngineConfig, *, chosen: bool = False) -> int:
    """The window, on the screen before its engine is started. ``chosen``: the user named the model just now."""
    application = make_application()
    window = MainWindow(
        EngineBridge(),
        Theme(application),
        default_store_path(),
        settings=QSettings(),
        state_folder=user_state_path(APPLICATION, appauthor=False),
    )
    window.show()
    QTimer.singleShot(0, window, lambda: window.launch(config, chosen=chosen))
    # Ctrl+C in the terminal closes the window as its button does; Python looks for signals when a timer fires.
    signal.signal(signal.SIGINT, lambda *_: window.close())
    signal.signal(signal.SIGTERM, lambda *_: window.close())
    return application.exec()
