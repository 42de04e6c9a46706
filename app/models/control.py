"""Models in one window: the page, the menu, the first run, switching with a question, and the way back from a failure.

::

    menu, page, dialogs ──ask_to_open──▶ requests running? ──yes──▶ notice with a button ──▶ open ──▶ EngineBridge.start
                                              └──no──────────────────────────────────────────▶┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QFileDialog, QMenu

from app.models.catalogue import Catalogue
from app.models.figures import need_of
from app.models.first_run import FirstRunPage
from app.models.kept import KeptModels
from app.models.line_process import LineProcess
from app.models.page import ModelsPage
from app.translation import ntr, tr
from app.words import bytes_label
from engine.client import EngineDied
from engine.config import STARTER_MODEL, EngineConfig
from engine.fetch_events import FetchDone
from engine.messages import LoadFailed, Loading, ModelInfo
from engine.model_catalog import ModelEntry, model_title, starter_folder

if TYPE_CHECKING:
    from app.main_window import MainWindow


class ModelControl(QObject):
    first_chat = Signal()
    """The first run is done: a chat is to be opened."""

    def __init__(self, window: MainWindow, state_folder: Path | None) -> None:
        """state_folder: where it is kept which models were used and fetched; None: nowhere."""
        super().__init__(window)
        self._window = window
        self._bridge = window.bridge
        self._preferences = window.preferences
        self.kept = KeptModels(state_folder / "models.json" if state_folder is not None else None)
        self.catalogue = Catalogue(self)
        self.page = ModelsPage(window.theme, self.catalogue, window)
        self.page.removable = self._is_ours
        self.first_run = FirstRunPage(window.theme, window)
        self.recent_menu = QMenu(tr("Recent models"), window)
        self.before: EngineConfig | None = None
        """What ran last: what a failed load can be gone back from."""
        self._was_loading = False
        self._from_page = False
        """Whether the model that is being loaded was chosen on the page, which has then done its duty."""
        self._question = ""
        """The notice that asks whether answers may end; empty: it asks about something else, or is gone."""
        self._removal = LineProcess("engine.remove_model", self)
        self._removal.ended.connect(self._removed)
        self._removing: ModelEntry | None = None
        self._connect_pages()
        self._connect_engine()
        self._preferences.changed.connect(self._preferences_changed)
        self._preferences_changed()
        self._fill_recent()

    def _connect_pages(self) -> None:
        page, first = self.page, self.first_run
        page.details.load.connect(self._load_entry)
        page.details.unload.connect(self.unload)
        page.details.remove.connect(self._remove)
        page.details.resume.connect(lambda entry: page.download.resume(entry.name, entry.commit or "main"))
        page.add_folder.connect(self.add_folder)
        page.open_gguf.connect(self.choose_gguf)
        page.search_again.connect(lambda: self.search(anew=True))
        page.closed.connect(self._window.focus_chat)
        page.download.fetched.connect(self._fetched)
        page.download.stopped.connect(self.search)
        first.begin.connect(lambda: self.open(STARTER_MODEL))
        first.cancel.connect(self._cancel_first)
        first.choose.connect(self.show_page)

    def _connect_engine(self) -> None:
        self._bridge.state_changed.connect(self._engine_state_changed)
        self._bridge.stepped.connect(self._stepped)
        self._bridge.loading.connect(self._loading)
        self._bridge.ready.connect(self._ready)

    # The pages -------------------------------------------------------------------------------------------------------

    def show_page(self) -> None:
        self.page.setGeometry(self._window.page_place())
        self.page.enter()
        self.search()

    def place(self) -> None:
        """The room for pages is another."""
        for page in (self.page, self.first_run):
            page.setGeometry(self._window.page_place())

    def search(self, *, anew: bool = False) -> None:
        folders = self._preferences.values.model_folders
        self.catalogue.search(folders, engine_pid=self._bridge.engine_pid, anew=anew)

    def show_first_run(self) -> None:
        self.first_run.setGeometry(self._window.page_place())
        self.first_run.enter(is_here=starter_folder().is_dir(), offline=self._preferences.values.offline)

    @property
    def is_first_run(self) -> bool:
        """Whether nobody has used this program here: no preferences were written down, and no starter model is here."""
        path = self._preferences.path
        return path is not None and not path.exists() and not starter_folder().is_dir()

    def close(self) -> None:
        self.catalogue.close()
        self.page.download.end()
        self._removal.cancel()

    # Opening ---------------------------------------------------------------------------------------------------------

    def ask_to_open(self, model: str, dtype: str | None = None) -> None:
        """Loads a model, at once where nothing runs that would end; ``dtype`` None: as before."""
        self._ask(
            tr("Loading {model}", model=model_title(model)),
            tr("Load {model}", model=model_title(model)),
            lambda: self.open(model, dtype),
        )

    def open(self, model: str, dtype: str | None = None) -> None:
        """Loads a model in a fresh engine, with the other options as they are."""
        if model == STARTER_MODEL and self._preferences.values.offline and not starter_folder().is_dir():
            words = tr("Offline mode is on, and the starter model is not on this machine.")
            self.load_failed(LoadFailed(words, "offline"))
            return
        config = replace(self._bridge.config, model=model)
        self._bridge.start(config if dtype is None else replace(config, dtype=dtype))

    def go_back(self) -> None:
        """Loads what ran before a load that failed."""
        if self.before is not None:
            self._bridge.start(replace(self.before, scheduler=self._bridge.config.scheduler))

    def unload(self) -> None:
        if self._bridge.state != "stopped":
            self._ask(tr("Unloading the model"), tr("Unload"), self._bridge.shutdown)

    def _ask(self, what: str, do: str, act: Callable[[], None]) -> None:
        running = len(self._bridge.run_state.requests) if self._bridge.state == "ready" else 0
        if self._bridge.comparing:
            words = tr("{what} ends the comparison that is running.", what=what)
            self._window.notice.say(words, action=(do, act), dismiss=tr("Not now"))
        elif running:
            words = ntr(
                "{what} ends {count:,} answer that is being written; it keeps the text it has.",
                "{what} ends {count:,} answers that are being written; they keep the text they have.",
                running,
                what=what,
            )
            self._question = words
            self._window.notice.say(words, action=(do, act), dismiss=tr("Not now"))
        else:
            act()

    def _stepped(self) -> None:
        """What was asked about answers goes with them."""
        if self._question and not self._bridge.run_state.requests:
            if self._window.notice.text == self._question:
                self._window.notice.expire()
            self._question = ""

    def choose_folder(self) -> None:
        folder = QFileDialog.getExistingDirectory(self._window, tr("Open a folder with a model"))
        if folder:
            self.ask_to_open(folder)

    def choose_gguf(self) -> None:
        path, _ = QFileDialog.getOpenFileName(
            self._window, tr("Open a GGUF file"), "", tr("GGUF files") + " (*.gguf *.GGUF)"
        )
        if path:
            self.ask_to_open(path)

    def add_folder(self) -> None:
        """One more folder in which models are looked for."""
        folder = QFileDialog.getExistingDirectory(self._window, tr("Add a folder in which models are looked for"))
        folders = self._preferences.values.model_folders
        if folder and folder not in folders:
            self._preferences.change(model_folders=(*folders, folder))

    def _load_entry(self, entry: ModelEntry, dtype: str) -> None:
        self._from_page = True
        self.ask_to_open(entry.model, dtype)

    # What the engine says --------------------------------------------------------------------------------------------

    def _engine_state_changed(self, state: str) -> None:
        loading = state in ("starting", "loading")
        self._was_loading = loading
        self.page.show_engine(self._bridge.config.model if loading or state == "ready" else "", busy=loading)
        if state in ("ready", "stopped", "failed", "dead") and self.page.isVisible():
            self.search()  # there is more or less memory than before
        if loading and self.first_run.isVisible():
            self.first_run.show_stage(Loading(tr("Starting the engine")))

    def _loading(self, loading: Loading) -> None:
        if self.first_run.isVisible():
            self.first_run.show_stage(loading)

    def _ready(self, info: ModelInfo) -> None:
        self.before = self._bridge.config
        self.kept.used(self._bridge.config.model)
        self._fill_recent()
        if self.page.isVisible() and self._from_page:
            self.page.leave()
        self._from_page = False
        if self.first_run.isVisible():
            self.first_run.hide()
            self.first_chat.emit()

    def load_failed(self, failure: LoadFailed) -> None:
        """Says why, on the page that is in front, with the ways on."""
        if self.first_run.isVisible():
            self.first_run.show_failure(failure.message)
            return
        page = self._window.model_page
        page.setGeometry(self._window.page_place())
        config, before = self._bridge.config, self.before
        back = model_title(before.model) if before is not None and before.model != config.model else ""
        page.show_failure(failure, starter=config.model == STARTER_MODEL, before=back)

    def died_loading(self, death: EngineDied) -> None:
        """The engine itself did not survive the load."""
        killed = death.exit_code == -9
        message = death.reason.rstrip(". ") + "."
        numbers = self._numbers()
        if killed and numbers:
            message += " " + numbers
        self.load_failed(LoadFailed(message, "memory" if killed else "other"))

    def _numbers(self) -> str:
        """What the model that was being loaded needs, and what there is, as a sentence; empty: not known."""
        entry = self.catalogue.entries.get(self._bridge.config.model)
        wanted = replace(self.page.details.wanted, dtype=self._bridge.config.dtype, device=self._bridge.config.device)
        need = need_of(entry, wanted, self.catalogue.machine) if entry is not None else None
        if need is None:
            return ""
        return tr(
            "{model} needs about {needed} in {dtype}; {room} were free.",
            model=model_title(self._bridge.config.model),
            needed=bytes_label(need.weights + need.working),
            dtype=need.dtype,
            room=bytes_label(need.room),
        )

    def _cancel_first(self) -> None:
        self._bridge.shutdown()
        self.first_run.show_cancelled()

    # The menu --------------------------------------------------------------------------------------------------------

    def _fill_recent(self) -> None:
        self.recent_menu.clear()
        for model in self.kept.recent:
            action = self.recent_menu.addAction(model_title(model).replace("&", "&&"))
            action.setToolTip(model)
            action.triggered.connect(lambda _checked=False, model=model: self.ask_to_open(model))
        self.recent_menu.menuAction().setVisible(bool(self.kept.recent))

    # Preferences, downloads, removal ---------------------------------------------------------------------------------

    def _preferences_changed(self) -> None:
        values = self._preferences.values
        limit = None if values.memory_limit_mb is None else values.memory_limit_mb << 20
        self.page.details.prefer(values.device, values.dtype, values.max_model_len, limit, values.kv_dtype)
        self.page.download.offline = values.offline
        if self.page.isVisible():
            self.search()

    def _fetched(self, done: FetchDone) -> None:
        self.kept.fetched(done.repository, done.commit)
        if self.page.isVisible():
            self.search()
        else:
            words = tr("{repository} is on this machine now.", repository=done.repository)
            action = (
                tr("Load it"),
                lambda: self.ask_to_open(done.repository if done.revision == "main" else done.path),
            )
            self._window.notice.say(words, action=action, dismiss=tr("Not now"))

    def _is_ours(self, entry: ModelEntry) -> bool:
        if entry.source in ("starter", "imported"):
            return entry.state != "absent"
        return entry.source == "hub" and self.kept.was_fetched(entry.name, entry.commit)

    def _remove(self, entry: ModelEntry) -> None:
        self._removing = entry
        if entry.source == "hub":
            self._removal.start(entry.name, "--revision", entry.commit)
        else:
            self._removal.start(entry.path)

    def _removed(self, code: int, errors: str) -> None:
        entry, self._removing = self._removing, None
        if entry is None:
            return
        if code == 0:
            self.kept.forget(entry.model)
            self._fill_recent()
            words = tr("Removed {name}: {size} are free again.", name=entry.name, size=bytes_label(entry.disk_bytes))
            self._window.say(words, False)
        else:
            reason = (errors.splitlines() or [tr("exit code {code}", code=code)])[-1]
            self._window.say(tr("{name} could not be removed: {reason}", name=entry.name, reason=reason), True)
        self.search()
