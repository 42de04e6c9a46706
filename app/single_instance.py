"""One window for each user and data folder: a second start hands over to the first, which comes forward.

::

    second start ── connect ──▶ first: answers within two seconds ──▶ second ends
                        │       first: silent (it hangs, or is stopped) ──▶ second opens, chats read-only
                        └ nobody there, or a socket that a killed window left ──▶ second is the first
"""

from __future__ import annotations

import enum
import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

import msgspec
from PySide6.QtCore import QLockFile, QObject, Qt, QThread, Signal
from PySide6.QtNetwork import QLocalServer, QLocalSocket
from PySide6.QtWidgets import QWidget

ANSWER_SECONDS = 2.0
"""How long the first window has to answer."""
MOST_BYTES = 64 * 1024
_LONGEST_PATH = 100
"""Bytes of a socket's path that every system takes."""
_ANSWER = b"here\n"


class Summons(msgspec.Struct, frozen=True):
    """What a second start wants of the first window."""

    model: str = ""
    """A model named on its command line: ``starter``, an absolute folder or a repository; empty: none."""
    activation_token: str = ""
    """With which a Wayland desktop lets another program's window come forward."""


class Outcome(enum.Enum):
    FIRST = enum.auto()
    """There is no other window; whoever starts now is summoned here."""
    HANDED_OVER = enum.auto()
    """The other window has taken it over."""
    SILENT = enum.auto()
    """There is another window, which does not answer."""


class SingleInstance(QObject):
    summoned = Signal(object)
    """Another start wants this window: :class:`Summons`."""

    def __init__(self, data_folder: Path, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.address = _address(data_folder)
        self._lock = QLockFile(self.address + ".lock")
        self._lock.setStaleLockTime(0)  # that of a process that is gone is stale at once, that of a living one never
        self._server = QLocalServer(self)
        self._server.setSocketOptions(QLocalServer.SocketOption.UserAccessOption)
        self._server.newConnection.connect(self._take_connections)

    def begin(self, summons: Summons) -> Outcome:
        """Hands ``summons`` to the window that is there, or becomes it. Takes up to two seconds where that one is
        silent."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            socket = QLocalSocket()
            socket.connectToServer(self.address)
            if socket.waitForConnected(_left(deadline)):
                return _hand_over(socket, summons, deadline)
            if self._become_first():
                return Outcome.FIRST
            if time.monotonic() >= deadline:
                return Outcome.SILENT
            QThread.msleep(50)  # the other one is just starting

    def close(self) -> None:
        self._server.close()
        self._lock.unlock()

    def _become_first(self) -> bool:
        """Not while another process is about to, or where no socket can be made (a window then opens all the same:
        who may write the chats is decided by their own lock)."""
        if not self._lock.tryLock(0):
            return self._lock.error() != QLockFile.LockError.LockFailedError
        QLocalServer.removeServer(self.address)  # the socket of a window that was killed; nobody answered on it
        self._server.listen(self.address)
        return True

    def _take_connections(self) -> None:
        while (socket := self._server.nextPendingConnection()) is not None:
            socket.readyRead.connect(lambda socket=socket: self._read(socket))
            socket.disconnected.connect(socket.deleteLater)
            self._read(socket)

    def _read(self, socket: QLocalSocket) -> None:
        if socket.bytesAvailable() > MOST_BYTES:
            socket.abort()
            return
        if not socket.canReadLine():
            return
        line = bytes(socket.readLine().data())
        try:
            summons = msgspec.json.decode(line, type=Summons)
        except (msgspec.DecodeError, UnicodeDecodeError):
            socket.abort()
            return
        socket.write(_ANSWER)
        socket.flush()
        self.summoned.emit(summons)


def bring_forward(window: QWidget, activation_token: str = "") -> None:
    """Shows a window that may be minimised or behind others."""
    if activation_token:
        os.environ["XDG_ACTIVATION_TOKEN"] = activation_token  # where Qt looks for it, and takes it from
    if window.isMinimized():
        window.setWindowState(window.windowState() & ~Qt.WindowState.WindowMinimized)
    window.show()
    window.raise_()
    window.activateWindow()


def _hand_over(socket: QLocalSocket, summons: Summons, deadline: float) -> Outcome:
    socket.write(msgspec.json.encode(summons) + b"\n")
    socket.flush()
    while not socket.canReadLine():
        if not socket.waitForReadyRead(_left(deadline)) and not socket.canReadLine():
            return Outcome.SILENT
    socket.disconnectFromServer()
    return Outcome.HANDED_OVER


def _left(deadline: float) -> int:
    return max(1, round(1000 * (deadline - time.monotonic())))


def _address(data_folder: Path) -> str:
    """Where the window of this user and data folder listens: in a folder that only this user can write."""
    name = hashlib.sha256(os.fsencode(data_folder.absolute())).hexdigest()[:16]
    for folder in (os.environ.get("XDG_RUNTIME_DIR"), str(data_folder)):
        path = f"{folder}/batchscope-{name}.sock"
        if folder and len(os.fsencode(path)) <= _LONGEST_PATH and _is_ours(Path(folder)):
            return path
    own = Path(tempfile.gettempdir()) / f"batchscope-{os.getuid() if hasattr(os, 'getuid') else os.getlogin()}"
    if not _is_ours(own):
        own = Path(tempfile.mkdtemp(prefix="batchscope-"))
    return f"{own}/{name}.sock"


def _is_ours(folder: Path) -> bool:
    """Made where it is missing; and nobody else may put a socket there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError:
        return False
    if not hasattr(os, "getuid"):
        return True
    return facts.st_uid == os.getuid() and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
