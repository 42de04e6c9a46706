"""What goes with a bug report: machine, versions, settings and log, without anything that was said in a chat.

Home folders and the user's name are ``~`` everywhere. Everything is text, collected before it is saved, so that the
user sees what is handed on.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import platform
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import msgspec
from PySide6.QtCore import QByteArray, QObject, QProcess, QProcessEnvironment, QSettings, QTimer, Signal, qVersion
from PySide6.QtGui import QGuiApplication

from app import privacy
from app.engine_bridge import EngineBridge
from app.log_file import LogFile
from app.settings.preferences import Preferences
from app.translation import tr
from engine.environment import module_command, module_environment, requirements, version
from engine.output_files import OutputFailure, unwritable

DOCTOR_SECONDS = 90
LAYOUT_KEYS = ("geometry", "layout", "arrangement")
"""Of the window's own file. Other keys may name chats and folders of chats."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the bundle."""

    name: str
    about: str
    """A sentence for the user."""
    text: str

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.text.encode())


class Doctor(QObject):
    """Asks the doctor about this machine, in a process of its own; ``answered`` comes once for every question."""

    answered = Signal(str)
    """Its report as JSON, or JSON that says why there is none."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._process: QProcess | None = None
        self._limit = QTimer(self)
        self._limit.setSingleShot(True)
        self._limit.timeout.connect(lambda: self._give_up(tr("no answer within {s} s", s=DOCTOR_SECONDS)))

    def ask(self, command: Sequence[str] | None = None) -> None:
        """command: what to ask instead, for tests."""
        self.cancel()
        process = self._process = QProcess(self)
        environment = QProcessEnvironment()
        for name, value in module_environment().items():
            environment.insert(name, value)
        process.setProcessEnvironment(environment)
        program, *arguments = command or module_command("engine.doctor", "--json", "-")
        process.finished.connect(lambda *_: self._finished(process))
        process.errorOccurred.connect(lambda error: self._failed(process, error))
        process.start(program, arguments)
        self._limit.start(DOCTOR_SECONDS * 1000)

    def cancel(self) -> None:
        self._limit.stop()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.waitForFinished(2000)
            process.deleteLater()

    def _finished(self, process: QProcess) -> None:
        if process is not self._process:
            return
        text = bytes(process.readAllStandardOutput().data()).decode(errors="replace")
        try:
            json.loads(text)
        except ValueError:
            self._give_up(tr("the doctor ended with code {code}", code=process.exitCode()))
        else:
            self._answer(text)

    def _failed(self, process: QProcess, error: QProcess.ProcessError) -> None:
        if process is self._process and error == QProcess.ProcessError.FailedToStart:
            self._give_up(process.errorString())

    def _give_up(self, reason: str) -> None:
        self._answer(json.dumps({"error": reason}))

    def _answer(self, text: str) -> None:
        self.cancel()
        self.answered.emit(text)


def collect(
    doctor: str, log: LogFile | None, preferences: Preferences, settings: QSettings | None, bridge: EngineBridge
) -> list[Part]:
    """The parts of a bundle, names of people taken out. doctor: what :class:`Doctor` answered."""
    lines = privacy.engine_lines(bridge.last_lines)
    parts = [
        Part("doctor.json", tr("What this machine gives the engine, and what is missing"), doctor),
        Part("versions.json", tr("Versions of Batchscope, Python, Qt and the packages; screens"), _versions()),
        Part("preferences.json", tr("The preferences that differ from those that ship"), _preferences(preferences)),
        Part("window.json", tr("Places and sizes of the window and its docks"), _layout(settings)),
        Part("engine.txt", tr("The engine's last lines, without what might quote a chat"), "\n".join(lines)),
    ]
    for path in log.files() if log is not None else []:
        about = tr("The log: starts, loads, faults; nothing that was said in a chat")
        parts.append(Part(path.name, about, _read(path)))
    return [replace(part, text=privacy.without_names(part.text)) for part in parts]


def save(path: Path, parts: Sequence[Part]) -> None:
    """Writes a zip; one of that name is replaced once it is whole. Raises :class:`OutputFailure`."""
    now = datetime.datetime.now().timetuple()[:6]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as bundle:
        for part in parts:
            bundle.writestr(zipfile.ZipInfo(part.name, now), part.text, zipfile.ZIP_DEFLATED)
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_bytes(packed.getvalue())
        beside.replace(path)
    except OSError as error:
        raise OutputFailure(unwritable(tr("The diagnostics in"), path, error)) from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _versions() -> str:
    packages: dict[str, str | None] = {}
    for requirement in requirements():
        name = requirement.split(";")[0].split("[")[0].strip()
        for mark in "<>=!~ (":
            name = name.split(mark)[0]
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    screens = [
        {"pixels": [screen.size().width(), screen.size().height()], "scale": screen.devicePixelRatio()}
        for screen in QGuiApplication.screens()
    ]
    return json.dumps(
        {
            "batchscope": version(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "qt": qVersion(),
            "qt_platform": QGuiApplication.platformName(),
            "screens": screens,
            "packages": packages,
        },
        indent=2,
    )


def _preferences(values: Preferences) -> str:
    ships = Preferences()
    changed = {
        name: getattr(values, name)
        for name in values.__struct_fields__
        if getattr(values, name) != getattr(ships, name)
    }
    return json.dumps(msgspec.to_builtins(changed), indent=2)


def _layout(settings: QSettings | None) -> str:
    kept: dict[str, str] = {}
    for key in LAYOUT_KEYS:
        value = settings.value(key) if settings is not None else None
        if isinstance(value, QByteArray):
            kept[key] = bytes(value.toBase64().data()).decode()
        elif value is not None:
            kept[key] = str(value)
    return json.dumps(kept, indent=2)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return privacy.failure_words(error)
