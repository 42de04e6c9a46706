"""The two menus of the top bar: the model, and the view with all that belongs to the whole window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtWidgets import QMenu

from app.translation import tr
from engine.config import STARTER_MODEL

if TYPE_CHECKING:
    from app.main_window import MainWindow


def model_menu(window: MainWindow) -> QMenu:
    menu, models, bridge = QMenu(window), window.models, window.bridge

    def add(text: str, keys: str, slot: object, name: str) -> None:
        menu.addAction(window.action(text, keys, slot, name=name))

    add(tr("Models…"), "Ctrl+M", models.show_page, "model.page")
    menu.addMenu(models.recent_menu)
    menu.addSeparator()
    add(tr("Open a local folder…"), "Ctrl+O", models.choose_folder, "model.folder")
    add(tr("Open a GGUF file…"), "", models.choose_gguf, "model.gguf")
    add(tr("Starter model"), "", lambda: models.ask_to_open(STARTER_MODEL), "model.starter")
    menu.addSeparator()
    add(tr("Restart the engine"), "Ctrl+Shift+R", bridge.restart, "engine.restart")
    add(tr("Unload"), "", models.unload, "model.unload")
    menu.addSeparator()
    add(tr("Quit"), "Ctrl+Q", window.close, "window.quit")
    return menu


def view_menu(window: MainWindow) -> QMenu:
    """The views as in every window of a run, then the tour, the pages and the About box."""
    menu = window.view_menu()

    def add(text: str, keys: str, slot: object, name: str) -> None:
        menu.addAction(window.action(text, keys, slot, name=name))

    menu.addSeparator()
    add(tr("Tour"), "", window.tour.begin, "tour")
    add(tr("Welcome page"), "", window.models.show_first_run, "welcome")
    menu.addSeparator()
    add(tr("Settings…"), "Ctrl+,", lambda: window.settings_control.show_page(), "settings")
    add(tr("About Batchscope"), "", lambda: window.settings_control.show_about(), "about")
    return menu
