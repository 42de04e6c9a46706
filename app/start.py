"""Starts the window, or has the one that is open come forward. Light until it is clear which: see
:mod:`app.window_run` for the rest."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs
from PySide6.QtCore import QCoreApplication, QEvent, QLocale, QObject, QSocketNotifier
from PySide6.QtWidgets import QApplication

from app.icons import window_icon
from app.settings.preferences import PreferenceStore, default_preferences_path
from app.single_instance import Outcome, SingleInstance, Summons
from app.translation import tr, use_language
from engine.config import EngineConfig
from engine.environment import version


def run_window(configure: Callable[[EngineConfig], EngineConfig], *, model: str | None) -> int:
    """Open the window and run it until it is closed, or have the one that is open come forward; returns the exit code.

    ``configure`` gives what the user named just now precedence over what the preferences say. ``model``: the one that
    was named so, which is loaded even if the last start did not survive that; None: none was.
    """
    application = make_application()
    preferences = PreferenceStore(default_preferences_path())
    use_language(*languages(preferences))
    instance = SingleInstance(_folder("data"))
    outcome = instance.begin(Summons(_from_anywhere(model), os.environ.get("XDG_ACTIVATION_TOKEN", "")))
    if outcome is Outcome.HANDED_OVER:
        print(tr("Batchscope is open already: its window has come forward."))
        return 0
    if outcome is Outcome.SILENT:
        print(tr("Another Batchscope is open and does not answer; this window shows its chats without changing them."))
    # Only now: a start that hands over is done without them.
    from app.window_run import Folders, open_window

    folders = Folders(*(_folder(kind) for kind in ("config", "data", "state", "cache")))
    code = open_window(application, instance, preferences, folders, configure, model)
    instance.close()
    delete_in_order(instance)
    return code


def languages(preferences: PreferenceStore) -> list[str]:
    """What to translate into, the most wanted first."""
    chosen = preferences.values.language
    if chosen:
        return [chosen]
    wanted = [name.replace("-", "_") for name in QLocale.system().uiLanguages()]
    return list(itertools.takewhile(lambda name: name.split("_")[0] != "en", wanted))


def _from_anywhere(model: str | None) -> str:
    """The model as another process, in another folder, finds it."""
    return str(Path(model).absolute()) if model and Path(model).exists() else model or ""


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
    application.setWindowIcon(window_icon())
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
