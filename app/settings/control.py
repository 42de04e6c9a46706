"""The settings in one window: the page, what it wipes, resetting with undo, and the About box."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtCore import QObject

from app.about import AboutDialog
from app.chat import files
from app.chat.session import ChatSession
from app.settings.diagnostics_section import DiagnosticsSection
from app.settings.engine_section import EngineSection
from app.settings.folder_section import FolderSection
from app.settings.look_sections import ChatSection, LookSection, RunsSection
from app.settings.page import SettingsPage
from app.settings.preferences import Preferences
from app.settings.privacy_section import PrivacySection, Wipe, files_amount
from app.settings.rows import Fields
from app.settings.shortcut_section import ShortcutSection
from app.settings.storage import Measure, Places, Size
from app.translation import ntr, tr
from app.words import bytes_label

if TYPE_CHECKING:
    from app.main_window import MainWindow


class SettingsControl(QObject):
    def __init__(self, window: MainWindow, places: Places) -> None:
        super().__init__(window)
        self._window = window
        self._places = places
        self._measure = Measure(self)
        self._store = window.preferences
        fields = Fields(self._store, window.theme)
        self.engine = EngineSection(fields, window.bridge)
        self.folders = FolderSection(fields, places, self._measure)
        self.look = LookSection(fields)
        self.runs = RunsSection(fields)
        self.chat = ChatSection(fields)
        self.shortcuts = ShortcutSection(window.commands)
        self.privacy = PrivacySection(window.chat.session, self._wipes(), self._measure)
        self.diagnostics = DiagnosticsSection(window.log, self._store, window.settings, window.bridge)
        sections = [
            self.engine,
            self.folders,
            self.look,
            self.chat,
            self.runs,
            self.shortcuts,
            self.privacy,
            self.diagnostics,
        ]
        self.page = SettingsPage(window.theme, sections, window)
        self.about: AboutDialog | None = None
        self.engine.reload_wanted.connect(self._reload)
        self.folders.problem.connect(lambda words: window.say(words, True))
        self.privacy.said.connect(window.say)
        self.privacy.wiped.connect(self.measure)
        self.diagnostics.said.connect(window.say)
        self.page.closed.connect(window.focus_chat)
        self.page.closed.connect(self.diagnostics.stop)
        self.page.reset_wanted.connect(self.reset)
        self.page.about_wanted.connect(self.show_about)

    def show_page(self) -> None:
        """Or leave it: the same keys open and close it."""
        if self.page.isVisible():
            self.page.leave()
            return
        self.place()
        self.page.enter()
        self.measure()

    def place(self) -> None:
        self.page.setGeometry(self._window.page_place())

    def measure(self) -> None:
        if self.page.isVisible():
            self._measure.begin(self._places.paths())

    def show_about(self) -> None:
        self.about = AboutDialog(self._window)
        self.about.finished.connect(self.about.deleteLater)
        self.about.open()

    def close(self) -> None:
        self.diagnostics.stop()
        self._measure.end()

    def reset(self) -> None:
        """Everything as it ships, until it is undone."""
        before = self._store.values
        self._store.put(Preferences(last_model=before.last_model))
        undo = (tr("Undo"), lambda: self._store.put(before))
        self._window.notice.say(tr("All settings are as they ship."), action=undo, seconds=20)

    def _reload(self) -> None:
        self._window.models.ask_to_open(self._window.bridge.config.model)

    # Wiping --------------------------------------------------------------------------------------------------------

    def _wipes(self) -> list[Wipe]:
        places, window = self._places, self._window
        session = window.chat.session
        wipes = [
            Wipe(
                "chats",
                tr("Chats"),
                tr("All chats with their drafts, and copies that were set aside. Their text is overwritten."),
                lambda size: tr(
                    "{what} ({size})",
                    what=ntr("{count:,} chat", "{count:,} chats", _written(session)),
                    size=bytes_label(size.bytes),
                ),
                lambda _: bool(_written(session)) or bool(files.kept_beside(places.chats)),
                session.wipe,
            )
        ]
        if places.recordings is not None:
            about = tr("Recordings that the window kept when it was closed. Those you saved elsewhere stay.")
            amount = lambda size: files_amount(size, "recording")  # noqa: E731
            wipes.append(Wipe("recordings", tr("Recordings"), about, amount, _any, window.recording.wipe_recordings))
        if places.runs is not None:
            about = tr("What is kept of runs for looking back, without texts unless you asked for them.")
            amount = lambda size: files_amount(size, "run")  # noqa: E731
            wipes.append(Wipe("runs", tr("Runs"), about, amount, _any, window.recording.wipe_runs))
        if window.log is not None:
            about = tr("What the window wrote down about loads and faults.")
            wipes.append(Wipe("logs", tr("Logs"), about, lambda size: files_amount(size, "log"), _any, window.log.wipe))
        about = tr("All settings, shortcuts, the layout of the window and which models were used.")
        wipes.append(
            Wipe(
                "preferences",
                tr("Preferences"),
                about,
                lambda _: tr("all preferences"),
                lambda _: True,
                self._wipe_preferences,
            )
        )
        return wipes

    def _wipe_preferences(self) -> None:
        self._store.put(Preferences())
        if self._window.settings is not None:
            self._window.settings.clear()
        for model in self._window.models.kept.recent:
            self._window.models.kept.forget(model)


def _any(size: Size) -> bool:
    return size.files > 0


def _written(session: ChatSession) -> int:
    """Chats in which there is anything."""
    return sum(not each.is_empty or bool(each.draft.strip()) for each in session.conversations)
