"""The window's log: one bounded file in the user's state folder, of loads, deaths, faults and Qt's complaints.

It never holds what was said in a chat (see :mod:`app.privacy`), and a disk that takes none costs nothing but the log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import logging.handlers
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from PySide6.QtCore import QMessageLogContext, QObject, QtMsgType, qInstallMessageHandler, qVersion

from app import privacy
from app.engine_bridge import EngineBridge
from engine.client import EngineDied
from engine.environment import version
from engine.messages import LoadFailed, Loading, ModelInfo

FILE_BYTES = 1_000_000
FILES = 3
NAME = "batchscope.log"
CRASH_NAME = "crash.txt"
MOST_CRASH_BYTES = 20_000

_logger = logging.getLogger("batchscope")
_LEVELS = {
    QtMsgType.QtDebugMsg: logging.DEBUG,
    QtMsgType.QtInfoMsg: logging.INFO,
    QtMsgType.QtWarningMsg: logging.WARNING,
    QtMsgType.QtCriticalMsg: logging.ERROR,
    QtMsgType.QtFatalMsg: logging.CRITICAL,
}


class _Handler(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk is no reason to write to the terminal at every line."""

    def _open(self) -> TextIO:
        stream = super()._open()
        with contextlib.suppress(OSError):
            Path(self.baseFilename).chmod(0o600)
        return stream


class LogFile:
    """Open from its making until :meth:`close`; one at a time in a process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._crash_path = folder / CRASH_NAME
        self._crash_file: TextIO | None = None
        self._undo: list[Callable[[], object]] = []
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        self._handler = _Handler(
            self.path, maxBytes=FILE_BYTES, backupCount=FILES - 1, encoding="utf-8", errors="replace", delay=True
        )
        self._handler.setFormatter(logging.Formatter("%(asctime)s [%(process)d] %(levelname)s %(message)s"))
        _logger.addHandler(self._handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False
        _logger.info(
            "Batchscope %s begins; Python %s, Qt %s, %s",
            version(),
            platform.python_version(),
            qVersion(),
            platform.platform(),
        )

    def files(self) -> list[Path]:
        """Those there are, the newest first."""
        names = [self.path, *(self.path.with_name(f"{NAME}.{number}") for number in range(1, FILES))]
        return [path for path in names if path.is_file()]

    def wipe(self) -> None:
        """Deletes what is written so far."""
        self._handler.close()
        for path in self.files():
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()
        _logger.info("Batchscope ends")
        _logger.removeHandler(self._handler)
        self._handler.close()

    # What comes by itself ----------------------------------------------------------------------------------------

    def catch_faults(self) -> None:
        """Uncaught exceptions of every thread, Qt's messages and faults in native code, until :meth:`close`. Whoever
        heard of them before still does."""
        self._hook(sys, "excepthook", lambda kind, error, trace: log_failure("uncaught", error, trace))
        self._hook(threading, "excepthook", _thread_failed)
        self._hook(sys, "unraisablehook", _unraisable)
        self._catch_qt()
        self._catch_crashes()

    def _hook(self, owner: Any, name: str, told: Callable[..., None]) -> None:
        before = getattr(owner, name)

        def hook(*arguments: Any) -> None:
            # What fails here would hide the failure that it was called for.
            with contextlib.suppress(Exception):
                told(*arguments)
            before(*arguments)

        setattr(owner, name, hook)
        self._undo.append(lambda: setattr(owner, name, before))

    def _catch_qt(self) -> None:
        before: Any = None

        def tell(kind: QtMsgType, context: QMessageLogContext, message: str) -> None:
            _logger.log(_LEVELS.get(kind, logging.INFO), "Qt: %s", message[: privacy.LONGEST_LINE])
            if before is not None:
                before(kind, context, message)
            else:
                print(message, file=sys.stderr)

        before = qInstallMessageHandler(tell)
        self._undo.append(lambda: qInstallMessageHandler(before))

    def _catch_crashes(self) -> None:
        """The interpreter itself writes where native code failed; the next window puts that into the log."""
        if faulthandler.is_enabled():
            return
        with contextlib.suppress(OSError):
            crash = self._crash_path.read_text(encoding="utf-8", errors="replace")[:MOST_CRASH_BYTES]
            if crash.strip():
                _logger.error("The last window crashed:\n%s", "\n".join(privacy.engine_lines(crash.splitlines())))
        with contextlib.suppress(OSError):
            self._crash_file = self._crash_path.open("w", encoding="utf-8")
            faulthandler.enable(self._crash_file)
            self._undo.append(self._end_crashes)

    def _end_crashes(self) -> None:
        faulthandler.disable()
        if self._crash_file is not None:
            self._crash_file.close()
            with contextlib.suppress(OSError):
                self._crash_path.unlink()


def log_failure(where: str, error: BaseException, trace: TracebackType | None = None) -> None:
    """Writes down a failure, without what it may quote."""
    lines = privacy.failure_lines(error, trace if trace is not None else error.__traceback__)
    _logger.error("%s: %s", where, "\n".join(lines))


def _thread_failed(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
        name = arguments.thread.name if arguments.thread is not None else "a thread"
        log_failure(f"uncaught in {name}", arguments.exc_value, arguments.exc_traceback)


def _unraisable(arguments: Any) -> None:
    if arguments.exc_value is not None:
        log_failure("unraisable", arguments.exc_value, arguments.exc_traceback)


class EngineLog(QObject):
    """Writes down what becomes of the engine: what it loads, how that ends, how it dies."""

    def __init__(self, bridge: EngineBridge, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._bridge = bridge
        self._stage = ""
        bridge.state_changed.connect(self._state_changed)
        bridge.loading.connect(self._loading)
        bridge.ready.connect(self._ready)
        bridge.load_failed.connect(self._load_failed)
        bridge.died.connect(self._died)
        bridge.config_refused.connect(lambda reason: _logger.warning("The scheduler refused: %s", reason))
        bridge.recording_failed.connect(lambda reason: _logger.warning("The run is not kept any more: %s", reason))
        bridge.pool_shrank.connect(lambda message: _logger.warning("%s", message))

    def _state_changed(self, state: str) -> None:
        if state == "starting":
            config, self._stage = self._bridge.config, ""
            _logger.info(
                "Loading %s: device %s, dtype %s, threads %s, context %s, memory limit %s, KV blocks %s",
                config.model,
                config.device,
                config.dtype,
                config.threads,
                config.max_model_len,
                config.memory_limit,
                config.cache.num_blocks,
            )
        elif state == "stopped":
            _logger.info("The engine was ended")

    def _loading(self, loading: Loading) -> None:
        if loading.stage != self._stage:
            self._stage = loading.stage
            _logger.info("Loading: %s", loading.stage)

    def _ready(self, info: ModelInfo) -> None:
        _logger.info(
            "Ready after %.1f s: %s on %s, %s threads, weights %s, KV %s, %d blocks of %d tokens, context %d, %s",
            info.load_seconds,
            info.architecture,
            info.device,
            info.threads,
            info.dtype,
            info.kv_dtype,
            info.num_blocks,
            info.block_size,
            info.max_model_len,
            info.backend_reason,
        )

    def _load_failed(self, failure: LoadFailed) -> None:
        _logger.error("Not loaded (%s): %s", failure.kind, privacy.sentence(failure.message))
        self._last_lines(self._bridge.last_lines)

    def _died(self, death: EngineDied) -> None:
        _logger.error("The engine died, exit code %s: %s", death.exit_code, privacy.sentence(death.reason))
        self._last_lines(death.last_lines)

    def _last_lines(self, lines: list[str]) -> None:
        if lines:
            _logger.error("Its last lines:\n%s", "\n".join(privacy.engine_lines(lines)))
