"""Chats to files and back, a slice at a time, with progress and a way to stop."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from PySide6.QtCore import QObject, QThread, QTimer, Signal
from PySide6.QtWidgets import QApplication, QFileDialog

from app.chat.chat_list_model import title_words
from app.chat.conversation import Conversation
from app.chat.exchange import ExchangeError, export_markdown, import_json, json_parts
from app.chat.notice import NoticeBar
from app.chat.session import ChatSession
from app.chat.store import StoreError
from app.theme import Theme
from app.translation import mark, ntr, tr
from engine.output_files import OutputFailure, writing

SLICE_SECONDS = 0.03
TELL_SECONDS = 0.3
DONE_SECONDS = 10.0
NAME_CHARACTERS = 60


class Format(NamedTuple):
    title: str
    suffix: str


FORMATS = {"json": Format(mark("JSON"), ".json"), "markdown": Format(mark("Markdown"), ".md")}


class ChatFiles(QObject):
    """One job at a time; what it does stands in ``notice``."""

    imported = Signal(list, str)
    """Ids of the conversations that came, and a sentence that says so."""

    def __init__(self, session: ChatSession, theme: Theme, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self.notice = NoticeBar(theme)
        self.hold: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """Within it the list does not follow every single change."""
        self._job: Iterator[str] | None = None
        """Yields what to say of its progress."""
        self._said_at = 0.0
        self._timer = QTimer(self)
        self._timer.setInterval(0)
        self._timer.timeout.connect(self._work)
        self._reader: _Reader | None = None

    def cancel(self) -> None:
        """Ends the job. A file that was not written to its end is none; chats that were read stay."""
        job, self._job = self._job, None
        self._timer.stop()
        if job is not None:
            job.close()
        if self._reader is not None:
            self._reader.wait()
            self._reader = None
        self.notice.expire()

    # Export ----------------------------------------------------------------------------------------------------------

    def export(self, ids: list[str] | None = None, kind: str = "json") -> None:
        """Asks where to and writes these conversations, None: all in which something was written."""
        known = self._session.conversations
        chats = list(known) if ids is None else [chat for chat in map(known.get, ids) if chat is not None]
        chats = [each for each in chats if not each.is_empty or each.draft.strip()]
        if not chats:
            self._end(tr("There is nothing to export: no message was written yet."))
            return
        form = FORMATS[kind]
        title = ntr("Export {count:,} chat", "Export {count:,} chats", len(chats))
        name = _file_name(title_words(chats[0])) if len(chats) == 1 else tr("chats")
        filters = f"{tr(form.title)} (*{form.suffix})"
        target, _ = QFileDialog.getSaveFileName(
            QApplication.activeWindow(), title, str(Path.home() / f"{name}{form.suffix}"), filters
        )
        if target:
            path = Path(target)
            self._begin(self._export(chats, path if path.suffix else path.with_suffix(form.suffix), kind))

    def _export(self, chats: list[Conversation], path: Path, kind: str) -> Iterator[str]:
        try:
            with writing(tr("The file"), path) as file:
                done = 0
                for part in _parts(self._loaded(chats), kind):
                    file.write(part)
                    done = min(done + 1, len(chats))
                    yield tr("Exporting: {done:,} of {all:,} chats", done=done, all=len(chats))
        except (OutputFailure, StoreError) as error:
            self._end(tr("Nothing was exported. {reason}", reason=str(error)), is_error=True)
            return
        damaged = sum(bool(each.damage) for each in chats)
        text = ntr("Exported {count:,} chat to {path}.", "Exported {count:,} chats to {path}.", len(chats), path=path)
        if damaged:
            text += " " + ntr(
                "{count:,} of them could not be read whole.", "{count:,} of them could not be read whole.", damaged
            )
        self._end(text)

    def _loaded(self, chats: list[Conversation]) -> Iterator[Conversation]:
        """What was on disk is read for this and not kept in memory."""
        for chat in chats:
            if not chat.is_loaded:
                chat = replace(chat)
                self._session.store.load_messages(chat)
            yield chat

    # Import ----------------------------------------------------------------------------------------------------------

    def choose_to_read(self) -> None:
        filters = f"{tr('Exported chats')} (*.json);;{tr('All files')} (*)"
        paths, _ = QFileDialog.getOpenFileNames(
            QApplication.activeWindow(), tr("Import chats"), str(Path.home()), filters
        )
        if paths:
            self.read(paths)

    def read(self, paths: list[str]) -> None:
        """Adds the conversations of exported files to those there are."""
        if self._is_busy():
            return
        self._reader = _Reader([Path(each) for each in paths], self)
        self._reader.finished.connect(self._read)
        self._say(tr("Reading {name}…", name=Path(paths[0]).name))
        self._reader.start()

    def _read(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.deleteLater()
            self._begin(self._import(reader.chats, reader.failures, [path.name for path in reader.paths]))

    def _import(self, chats: list[Conversation], failures: list[str], names: list[str]) -> Iterator[str]:
        came: list[str] = []
        try:
            for chat in chats:
                with self.hold():
                    self._session.add_imported([chat])
                came.append(chat.id)
                yield tr("Importing: {done:,} of {all:,} chats", done=len(came), all=len(chats))
        except StoreError as error:
            failures = [*failures, tr("Not every chat was imported. {reason}", reason=str(error))]
        finally:
            if came:
                self.imported.emit(came, _imported_words(len(came), names))
        if failures:
            self._end("\n".join(failures), is_error=True)
        elif not came:
            self._end(tr("{name} holds no chats.", name=", ".join(names)))
        else:
            self._end("")

    # The job ---------------------------------------------------------------------------------------------------------

    def _is_busy(self) -> bool:
        busy = self._job is not None or self._reader is not None
        if busy:
            self.notice.set_text(tr("One thing after the other: {what}", what=self.notice.text))
        return busy

    def _begin(self, job: Iterator[str]) -> None:
        if not self._is_busy():
            self._job = job
            self._said_at = time.perf_counter()
            self._timer.start()

    def _work(self) -> None:
        """A slice of the job; the window goes on between two of them."""
        begun = time.perf_counter()
        words = ""
        while self._job is not None and time.perf_counter() - begun < SLICE_SECONDS:
            words = next(self._job, "")
            if not words:
                self._job = None
                self._timer.stop()
                return
        if time.perf_counter() - self._said_at > TELL_SECONDS:
            self._said_at = time.perf_counter()
            self._say(words)

    def _say(self, words: str) -> None:
        if self.notice.text:
            self.notice.set_text(words)
        else:
            self.notice.say(words, action=(tr("Cancel"), self.cancel))

    def _end(self, words: str, *, is_error: bool = False) -> None:
        """The last word; what went wrong stays until it is read."""
        self.notice.expire()
        if words:
            seconds = None if is_error else DONE_SECONDS
            self.notice.say(words, is_error=is_error, action=(tr("Close"), lambda: None), seconds=seconds)


class _Reader(QThread):
    """Reads files without holding the window up."""

    def __init__(self, paths: list[Path], parent: QObject) -> None:
        super().__init__(parent)
        self.paths = paths
        self.chats: list[Conversation] = []
        self.failures: list[str] = []
        """Sentences."""

    def run(self) -> None:
        for path in self.paths:
            try:
                self.chats += import_json(path.read_bytes())
            except OSError as error:
                self.failures.append(
                    tr("{name} cannot be read: {reason}.", name=path.name, reason=error.strerror or error)
                )
            except ExchangeError as error:
                self.failures.append(tr("{name}: {reason}", name=path.name, reason=str(error)))


def _parts(chats: Iterator[Conversation], kind: str) -> Iterator[str]:
    if kind == "json":
        return (part.decode() for part in json_parts(chats))
    return (("\n---\n\n" if number else "") + export_markdown(chat) for number, chat in enumerate(chats))


def _imported_words(count: int, names: list[str]) -> str:
    name = names[0] if len(names) == 1 else ntr("{count:,} file", "{count:,} files", len(names))
    return ntr("Imported {count:,} chat from {name}.", "Imported {count:,} chats from {name}.", count, name=name)


def _file_name(title: str) -> str:
    """A title as a file's name, whatever system it goes to."""
    plain = re.sub(r'[<>:"/\\|?*\x00-\x1f]+', " ", title)
    return " ".join(plain.split())[:NAME_CHARACTERS].strip(" .") or tr("chat")
