"""The window from its making to its end: theme, log, the engine's bridge and the main window, ended in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QSettings, QTimer
from PySide6.QtWidgets import QApplication

from app.engine_bridge import EngineBridge
from app.log_file import EngineLog, LogFile
from app.main_window import MainWindow, model_title
from app.settings.preferences import PreferenceStore
from app.single_instance import SingleInstance, Summons, bring_forward
from app.start import delete_in_order, signals_close
from app.theme import Theme
from app.translation import tr
from engine.config import STARTER_MODEL, ConfigError, EngineConfig


@dataclass(frozen=True, slots=True)
class Folders:
    """Of the user, each for what its name says; see :mod:`platformdirs`."""

    config: Path
    data: Path
    state: Path
    cache: Path


def open_window(
    application: QApplication,
    instance: SingleInstance,
    preferences: PreferenceStore,
    folders: Folders,
    configure: Callable[[EngineConfig], EngineConfig],
    model: str | None,
) -> int:
    """Run the window until it is closed; returns the exit code. ``configure`` and ``model``: see
    :func:`app.start.run_window`."""
    log = LogFile(folders.state)
    log.catch_faults()
    theme = Theme(application)
    bridge = EngineBridge()
    engine_log = EngineLog(bridge)
    settings = QSettings(str(folders.config / "window.ini"), QSettings.Format.IniFormat)
    adopt(settings, preferences)
    window = MainWindow(
        bridge,
        theme,
        folders.data / "chats.sqlite3",
        settings=settings,
        preferences=preferences,
        state_folder=folders.state,
        runs_folder=folders.cache / "runs",
        recordings_folder=folders.data / "recordings",
        log=log,
    )
    instance.summoned.connect(lambda summons: answer(window, summons))
    window.show()
    # After the first picture, so that it is there at once.
    QTimer.singleShot(0, window, lambda: _launch(window, configure, model))
    with signals_close(window.close):
        code = application.exec()
    bridge.shutdown()
    log.close()
    delete_in_order(window, engine_log, bridge)
    return int(code)


def adopt(settings: QSettings, preferences: PreferenceStore) -> None:
    """What a window's file held before there were preferences."""
    limit, texts = settings.value("runs/limit_bytes"), settings.value("runs/texts")
    if limit is None and texts is None:
        return
    with contextlib.suppress(ConfigError):
        if str(limit).isdecimal():
            preferences.change(runs_limit_mb=int(limit) >> 20)
        preferences.change(record_texts=texts == "yes")
    settings.remove("runs/limit_bytes")
    settings.remove("runs/texts")


def answer(window: MainWindow, summons: Summons) -> None:
    """Another start was made: the window comes forward, with the model that was named there."""
    bring_forward(window, summons.activation_token)
    if not summons.model:
        return
    if not window.bridge.run_state.requests:
        window.open_model(summons.model)
        return
    words = tr(
        "Another start asked for {model}. Loading it ends the answers that are being written.",
        model=model_title(summons.model),
    )
    window.notice.say(words, action=(tr("Load it"), lambda: window.open_model(summons.model)), dismiss=tr("Not now"))


def _launch(window: MainWindow, configure: Callable[[EngineConfig], EngineConfig], model: str | None) -> None:
    values = window.preferences.values
    last = values.last_model if values.start_with == "last" else ""
    config = configure(values.engine_config(model or last or STARTER_MODEL))
    if model is None and values.start_with == "nothing":
        window.bridge.config = config
    else:
        window.launch(config, chosen=model is not None)
