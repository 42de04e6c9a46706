"""A model from the hub: looked up first, with its size, then fetched with progress; cancelled at any time and gone on
with later."""

from __future__ import annotations

import msgspec
from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QComboBox, QHBoxLayout, QLineEdit, QProgressBar, QVBoxLayout, QWidget

from app.models.line_process import LineProcess
from app.theme import SPACING, Theme
from app.translation import ntr, tr
from app.widgets import Card, button, label, set_role
from app.words import bytes_label
from engine.fetch_events import FetchDone, FetchFailed, FetchPlan, FetchProgress, fetch_events


class Download(Card):
    fetched = Signal(object)
    """:class:`FetchDone`: the model is on the disk."""
    stopped = Signal()
    """A fetch has ended without the model being there."""

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(tr("Download from the Hugging Face hub"), parent=parent)
        self.offline = False
        """Whether the preferences say that nothing is fetched."""
        self._plan: FetchPlan | None = None
        self._is_planning = False
        self._told = False
        self._process = LineProcess("engine.fetch", self)
        self._process.said.connect(self._said)
        self._process.ended.connect(self._ended)
        self.repository = QLineEdit()
        self.repository.setPlaceholderText(tr("org/name"))
        self.repository.setAccessibleName(tr("Repository on the hub"))
        self.revision = QLineEdit()
        self.revision.setPlaceholderText(tr("revision: main"))
        self.revision.setAccessibleName(tr("Revision: branch, tag or commit"))
        self.revision.setMaximumWidth(150)
        self.file = QComboBox()
        self.file.setAccessibleName(tr("GGUF file"))
        self.look_up = button(tr("Look up"), "primary")
        self.begin = button(tr("Download"), "primary")
        self.cancel = button(tr("Cancel"))
        self.close_button = button("✕", "flat", tr("Close the download"))
        self.message = label("", "muted")
        self.message.setWordWrap(True)
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName(tr("Download progress"))
        self.add_trailing(self.close_button)
        self._lay_out()
        self.repository.textEdited.connect(self._edited)
        self.revision.textEdited.connect(self._edited)
        # Once the key is dealt with: a field that is in use gives the focus to Cancel, and Enter would press that.
        for field in (self.repository, self.revision):
            field.returnPressed.connect(self._look_up, Qt.ConnectionType.QueuedConnection)
        self.look_up.clicked.connect(self._look_up)
        self.file.activated.connect(lambda _index: self._look_up())
        self.begin.clicked.connect(self._begin)
        self.cancel.clicked.connect(self.stop)
        self.close_button.clicked.connect(self._dismiss)
        self._edited()
        self.hide()

    def _lay_out(self) -> None:
        row = QHBoxLayout()
        row.setSpacing(SPACING)
        row.addWidget(self.repository, 1)
        row.addWidget(self.revision)
        for each in (self.look_up, self.begin, self.cancel):
            row.addWidget(each)
        column = QVBoxLayout()
        column.setSpacing(SPACING - 2)
        column.addLayout(row)
        for each in (self.file, self.bar, self.message):
            column.addWidget(each)
        self.body.addLayout(column)

    @property
    def is_fetching(self) -> bool:
        return self._process.is_running and not self._is_planning

    def open_for(self, repository: str = "", revision: str = "") -> None:
        """Shows the card; with a repository named, that is looked up at once."""
        self.show()
        if self._process.is_running:
            return
        if repository:
            self.repository.setText(repository)
            self.revision.setText("" if revision == "main" else revision)
            self._edited()
            self._look_up()
        self.repository.setFocus()

    def resume(self, repository: str, revision: str) -> None:
        """Goes on with what was begun, without asking again."""
        self.show()
        if not self._process.is_running:
            self.repository.setText(repository)
            self.revision.setText("" if revision == "main" else revision)
            self._edited()
            self._begin()

    def stop(self) -> None:
        """Ends what is going on; what has come is kept."""
        was_fetching = self.is_fetching
        self._process.cancel()
        self._tell(tr("Cancelled. What has come is kept; it goes on from there.") if was_fetching else "")
        self._show_state()
        if was_fetching:
            self.stopped.emit()

    def end(self) -> None:
        """The window closes."""
        self._process.cancel()

    def _dismiss(self) -> None:
        """A download goes on behind the closed card."""
        self.hide()

    def _edited(self) -> None:
        self._plan = None
        self.file.clear()
        self._tell(
            tr(
                "Only safetensors or GGUF with their configuration are fetched, never pickles or code. A token is "
                "taken from where 'hf auth login' keeps it."
            )
        )
        self._show_state()

    def _look_up(self) -> None:
        self._run(planning=True)

    def _begin(self) -> None:
        self._run(planning=False)

    def _run(self, *, planning: bool) -> None:
        repository = self.repository.text().strip().removeprefix("https://huggingface.co/").strip("/")
        if not repository:
            self._tell(tr("Name a repository: org/name."), is_error=True)
            self.repository.setFocus()
            return
        if self.offline:
            self._tell(
                tr("Offline mode is on in the preferences: nothing is fetched. Turn it off there."), is_error=True
            )
            return
        arguments = [repository, "--revision", self.revision.text().strip() or "main"]
        if self.file.currentData():
            arguments += ["--file", self.file.currentData()]
        self._is_planning, self._told = planning, False
        self._process.start(*arguments, *(["--plan"] if planning else []))
        self._tell(tr("Asking the hub about {repository} …", repository=repository))
        self.bar.setRange(0, 0)
        self._show_state()

    def _said(self, line: bytes) -> None:
        try:
            event = fetch_events.decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return  # a library's own words
        if isinstance(event, FetchPlan):
            self._plan = event
            self._tell(_plan_sentence(event))
        elif isinstance(event, FetchProgress):
            self._progress(event)
        elif isinstance(event, FetchDone):
            self._told = True
            self._tell(tr("{repository} is here.", repository=event.repository))
            self.fetched.emit(event)
        elif isinstance(event, FetchFailed):
            self._told = True
            self._failed(event)

    def _progress(self, event: FetchProgress) -> None:
        self.bar.setRange(0, 1000)
        self.bar.setValue(round(1000 * event.done_bytes / max(1, event.total_bytes)))
        self._tell(
            tr(
                "{done} of {total}: {file}",
                done=bytes_label(event.done_bytes),
                total=bytes_label(event.total_bytes),
                file=event.file,
            )
        )

    def _failed(self, event: FetchFailed) -> None:
        if event.choices:
            self.file.clear()
            self.file.addItem(tr("Choose one of {count:,} files …", count=len(event.choices)), "")
            for choice in event.choices:
                self.file.addItem(f"{choice.name}  ({bytes_label(choice.size)})", choice.name)
        self._tell(event.message, is_error=not event.choices)

    def _ended(self, code: int, errors: str) -> None:
        if not self._told and code != 0:
            last = (errors.splitlines() or [tr("exit code {code}", code=code)])[-1]
            self._tell(tr("The download ended unexpectedly: {reason}", reason=last), is_error=True)
        was_fetching = not self._is_planning
        self._show_state()
        if was_fetching and code != 0:
            self.stopped.emit()

    def _show_state(self) -> None:
        running = self._process.is_running
        self.bar.setVisible(running)
        self.cancel.setVisible(running)
        self.look_up.setVisible(not running and self._plan is None)
        self.begin.setVisible(not running and self._plan is not None)
        self.file.setVisible(self.file.count() > 0)
        for field in (self.repository, self.revision, self.file):
            field.setEnabled(not running)
        if self._plan is not None:
            rest = self._plan.total_bytes - self._plan.here_bytes
            self.begin.setText(tr("Download {size}", size=bytes_label(max(0, rest))))

    def _tell(self, text: str, *, is_error: bool = False) -> None:
        self.message.setText(text)
        set_role(self.message, "error" if is_error else "muted")


def _plan_sentence(plan: FetchPlan) -> str:
    files = ntr("{count:,} file", "{count:,} files", len(plan.files))
    size, free = bytes_label(plan.total_bytes), bytes_label(plan.free_bytes)
    text = tr("{repository}: {files}, {size}; {free} are free on the disk.", repository=plan.repository, files=files,
              size=size, free=free)  # fmt: skip
    if plan.here_bytes:
        text += " " + tr("{here} of it are here already.", here=bytes_label(plan.here_bytes))
    if plan.licence:
        text += " " + tr("Licence: {licence}.", licence=plan.licence)
    return text
