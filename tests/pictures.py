"""Pictures of the window as a user sees it, with the starter model answering: ``python -m tests.pictures FOLDER``.

Light and dark, 1440×900 and 1100×700: the chat with three answers under way, a new chat, each arrangement, and the
pages over them. ``QT_SCALE_FACTOR=2`` makes them for dense screens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# Before Qt is loaded: no screen is needed, and none is disturbed.
os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

from PySide6.QtWidgets import QApplication, QWidget

from app.engine_bridge import EngineBridge
from app.main_window import MainWindow
from app.settings.preferences import PreferenceStore
from app.start import make_application
from app.theme import Theme
from engine.config import EngineConfig

SIZES = ((1440, 900), (1100, 700))
SCHEMES = ("light", "dark")
LOAD_SECONDS, ANSWER_SECONDS = 300.0, 120.0


class Studio:
    """One window on a fresh chat file, and the means to wait for it and to take its picture."""

    def __init__(self, application: QApplication, folder: Path, out: Path) -> None:
        self.application = application
        self.out = out
        self.theme = Theme(application, "light")
        self.bridge = EngineBridge()
        self.window = MainWindow(
            self.bridge,
            self.theme,
            folder / "chats.sqlite3",
            preferences=PreferenceStore(folder / "preferences.json"),
            state_folder=folder,
            runs_folder=folder / "runs",
            recordings_folder=folder / "recordings",
        )
        self.window.show()
        self.bridge.start(EngineConfig())
        if not self.spin(LOAD_SECONDS, lambda: self.bridge.state == "ready"):
            raise SystemExit(f"The starter model was not loaded; the engine is {self.bridge.state}.")

    def spin(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.application.processEvents()
            if until():
                return True
            time.sleep(0.01)
        return until()

    def ask(self, text: str, *, wait: bool = True) -> None:
        chat = self.window.chat
        chat.send(text)
        if wait:
            self.spin(ANSWER_SECONDS, lambda: chat.current.open_answer is None)

    def take(self, name: str, widget: QWidget | None = None) -> None:
        """In every scheme and size."""
        for scheme in SCHEMES:
            self.theme.set_scheme(scheme)
            for width, height in SIZES:
                self.window.resize(width, height)
                self.spin(0.4)
                path = self.out / f"{name}-{scheme}-{width}.png"
                (widget or self.window).grab().save(str(path))
                print(path)

    def chats(self) -> None:
        chat = self.window.chat
        session = chat.session
        self.ask("What is a KV cache, in two sentences?")
        session.set_folder(chat.current, "Reading")
        chat.new_conversation()
        self.ask("Plan a week of simple dinners.")
        session.set_pinned(chat.current, True)
        chat.new_conversation()
        self.take("new-chat")
        first = chat.current
        self.ask("Write a Python function that finds the longest common prefix of a list of strings.")
        chat.regenerate(first.path[-1].id)
        self.spin(ANSWER_SECONDS, lambda: first.open_answer is None)
        for text in ("Write a long letter to a friend about trains.", "Tell a long story about a lighthouse keeper."):
            chat.new_conversation()
            self.ask(text, wait=False)
        chat.open_conversation(first)
        self.ask("Now explain, line by line and in detail, how it works.", wait=False)
        self.spin(2.0)
        self.take("chat")

    def pages(self) -> None:
        window = self.window
        for name in window.arrangements[1:]:
            window.arrange(name)
            self.take(name)
        window.arrange(window.arrangements[0])
        window.chat.options_button.setChecked(True)
        self.take("options")
        window.chat.options_button.setChecked(False)
        window.models.show_page()
        self.spin(10.0, lambda: not window.models.catalogue.is_searching)
        self.take("models")
        window.models.page.leave()
        window.models.show_first_run()
        self.take("first-run")
        window.models.first_run.hide()
        window.settings_control.show_page()
        self.take("settings")
        window.settings_control.page.leave()
        window.settings_control.show_about()
        self.take("about", window.settings_control.about)
        window.settings_control.about.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.pictures", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pictures go")
    out = parser.parse_args().folder
    out.mkdir(parents=True, exist_ok=True)
    application = make_application()
    with tempfile.TemporaryDirectory() as folder:
        studio = Studio(application, Path(folder), out)
        studio.chats()
        studio.pages()
        studio.window.close()


if __name__ == "__main__":
    main()
