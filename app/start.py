"""Starts the window: the application, its theme, the engine's bridge and the main window, and ends them in order."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
from PySide6.QtCore import QCoreApplication, QEvent, QObject, QSettings, QSocketNotifier, QTimer
from PySide6.QtWidgets import QApplication

from app.chat.store import default_store_path
from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.theme import Theme
from engine.config import EngineConfig
from engine.environment import version


def run_window(config: EngineConfig, *, chosen: bool) -> int:
    """Open the window and run it until it is closed; returns the exit code.

    ``chosen``: the user named the model just now, so it is loaded even if the last start did not survive that.
    """
    application = make_application()
    theme = Theme(application)
    bridge = EngineBridge()
    settings = QSettings(str(_folder("config") / "window.ini"), QSettings.Format.IniFormat)
    window = MainWindow(
        bridge,
        theme,
        default_store_path(),
        settings=settings,
        state_folder=_folder("state"),
        runs_folder=_folder("cache") / "runs",
        recordings_folder=_folder("data") / "recordings",
    )
    window.show()
    # After the first picture, so that it is there at once.
    QTimer.singleShot(0, window, lambda: window.launch(config, chosen=chosen))
    with signals_close(window.close):
        code = application.exec()
    bridge.shutdown()
    delete_in_order(window, bridge)
    return int(code)


def make_application() -> QApplication:
    """The one QApplication, named so that its windows and its desktop file find each other."""
    existing = QApplication.instance()
    if isinstance(existing, QApplication):
        return existing
    application = QApplication(["batchscope"])
    application.setApplicationName("batchscope")
    application.setApplicationDisplayName("Batchscope")
    application.setApplicationVersion(version())
    application.setDesktopFileName("batchscope")
    return application


def _folder(kind: str) -> Path:
    find = {
        "cache": platformdirs.user_cache_dir,
        "config": platformdirs.user_config_dir,
        "data": platformdirs.user_data_dir,
        "state": platformdirs.user_state_dir,
    }[kind]
    return Path(find("batchscope", appauthor=False))


def delete_in_order(*objects: QObject) -> None:
    """Before Qt itself goes: what a garbage collector deletes after it would be deleted too late."""
    for thing in objects:
        thing.deleteLater()
        QCoreApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


@contextlib.contextmanager
def signals_close(close: Callable[[], object]) -> Iterator[None]:
    """Ctrl+C in the terminal, and its end, close the window as a click does.

    Python runs its signal handlers between two of its own instructions, and Qt's loop executes none while it waits: the
    signal's number comes through a socket that the loop watches.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        handlers = {name: signal.signal(getattr(signal, name), lambda *_: None) for name in names}
        notifier = QSocketNotifier(reader.fileno(), QSocketNotifier.Type.Read)

        def arrived() -> None:
            reader.recv(64)
            close()

        notifier.activated.connect(arrived)
        try:
            yield
        finally:
            notifier.setEnabled(False)
            for name, handler in handlers.items():
                signal.signal(getattr(signal, name), handler)
            signal.set_wakeup_fd(before)
