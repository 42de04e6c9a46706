"""The engine process as its owner sees it: start, send, poll, close. Light: no torch, no Qt.

::

    owner's thread            this object's threads                 engine process
    send(command) ──queue──▶  writer  ─────────── stdin  ─────────▶ engine.process
    poll() ◀─────── list ───  reader  ◀────────── stdout ──────────
                              stderr tail ◀────── stderr ──────────

No call blocks on the engine: what is sent goes through a queue, so that an engine that is busy, stopped or gone never
holds up a window. Every end that :meth:`EngineClient.close` did not ask for is reported exactly once: as ``LoadFailed``
where the model could not be loaded, else as :class:`EngineDied`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine import wire
from engine.config import EngineConfig
from engine.environment import module_command, module_environment
from engine.messages import (
    PROTOCOL_VERSION,
    AddRequest,
    AnyReply,
    Command,
    Compare,
    CompareDone,
    Failed,
    Hello,
    LoadFailed,
    LoadModel,
    Output,
    Shutdown,
)
from engine.request import FinishReason

TAIL_LINES = 40
TAIL_LINE_BYTES = 2000
CLOSE_SECONDS = 3.0
"""How long an engine may take to end by itself before it is terminated."""
_REAP_SECONDS = 2.0
"""How long after its last message an engine may take to end before it is killed."""


class EngineDied(msgspec.Struct, frozen=True):
    """The engine process ended although nobody had asked it to."""

    exit_code: int | None
    """As subprocess gives it: negative for a signal; None where it could not even be started."""
    reason: str
    """A sentence for the user."""
    last_lines: list[str]
    """The end of what the process wrote to its error output."""


Arrival = AnyReply | EngineDied


class EngineClient:
    """One engine process at a time; after its end, :meth:`start` starts the next.

    ``on_activity`` is called on the reader thread when something has arrived and nothing was waiting to be polled,
    ``on_end``, where it is set, when the last output of an answer has.
    """

    def __init__(self, on_activity: Callable[[], None] | None = None, *, command: Sequence[str] | None = None) -> None:
        """``command``: what to run that speaks the protocol; None: ``engine.process`` in an interpreter like this."""
        self.on_activity = on_activity
        self.on_end: Callable[[], None] | None = None
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._threads: list[threading.Thread] = []
        self._commands: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._arrived: list[Arrival] = []
        self._something = threading.Condition()
        self._ended = threading.Event()
        self._ended.set()
        self._closing = False
        self._failure = ""
        self._load_failed = False
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._last_request_id = 0

    # The owner's side ------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None while there is none."""
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def last_lines(self) -> list[str]:
        """The end of what the process has written to its error output, also after its end."""
        return list(self._tail)

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def start(self) -> None:
        """Start the process. What the one before left unpolled is forgotten. Raises RuntimeError if one is running."""
        if self.alive:
            raise RuntimeError(f"the engine is running already, as process {self.pid}")
        self._join_threads()
        with self._something:
            self._arrived.clear()
        self._commands = queue.SimpleQueue()
        self._tail.clear()
        self._closing, self._failure, self._load_failed = False, "", False
        try:
            process = subprocess.Popen(
                self._command or module_command("engine.process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=module_environment(),
                **_own_process_group(),
            )
        except OSError as error:
            self._deliver(EngineDied(None, f"The engine could not be started: {error}", []))
            return
        self._process = process
        self._ended.clear()
        self._threads = [
            threading.Thread(target=target, name=f"engine-{name}", daemon=True, args=(process, *extra))
            for name, target, extra in (
                ("reader", self._read, ()),
                ("writer", self._write, (self._commands,)),
                ("stderr", self._read_stderr, ()),
            )
        ]
        for thread in self._threads:
            thread.start()

    def load(self, config: EngineConfig) -> None:
        self.send(LoadModel(config))

    def send(self, command: Command) -> None:
        """Queue a command; never blocks and never raises. One that cannot be sent is refused like any other request."""
        try:
            data = wire.encode(command)
        except wire.WireError as error:
            self._refuse(command, str(error))
            return
        if self.alive:
            self._commands.put(data)

    def _refuse(self, command: Command, reason: str) -> None:
        if isinstance(command, AddRequest):
            now = time.perf_counter()
            self._deliver(Output(command.request_id, now, [], finish_reason=FinishReason.ERROR, error=reason))
        elif isinstance(command, Compare):
            self._deliver(CompareDone(b"", f"The comparison cannot be sent: {reason}"))
        else:
            self._tail.append(f"not sent: {reason}")

    def next_request_id(self) -> int:
        """An id that this client has not given out before, over all its processes."""
        self._last_request_id += 1
        return self._last_request_id

    def poll(self, timeout: float = 0.0) -> list[Arrival]:
        """Everything that has arrived, in order; waits up to ``timeout`` seconds for the first of it."""
        with self._something:
            if timeout > 0 and not self._arrived:
                self._something.wait_for(lambda: bool(self._arrived), timeout)
            arrived, self._arrived = self._arrived, []
        return arrived

    def close(self, timeout: float = CLOSE_SECONDS) -> int | None:
        """End the process: ask, after ``timeout`` seconds terminate, then kill. Returns its exit code.

        No thread and no process is left. What had arrived can still be polled; the end itself is not reported.
        """
        self._closing = True
        if self.alive:
            self.send(Shutdown())
            if not self._ended.wait(timeout):
                self._signal("SIGTERM")
                if not self._ended.wait(1.0):
                    self._signal("SIGKILL")
                    self._ended.wait(5.0)
        self._join_threads()
        return self._process.returncode if self._process is not None else None

    def kill(self) -> None:
        """End the process at once, as a crash would; it is reported as one."""
        if self.alive:
            self._signal("SIGKILL")

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # The threads' side -----------------------------------------------------------------------------------------------

    def _deliver(self, event: Arrival) -> None:
        with self._something:
            first = not self._arrived
            self._arrived.append(event)
            self._something.notify_all()
        if first and self.on_activity is not None:
            self.on_activity()
        if (on_end := self.on_end) is not None and isinstance(event, Output) and event.finish_reason is not None:
            on_end()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        try:
            for payload in wire.read_payloads(process.stdout.fileno()):
                reply = wire.reply_decoder.decode(payload)
                if isinstance(reply, Hello) and reply.protocol != PROTOCOL_VERSION:
                    raise wire.WireError(f"the engine speaks protocol {reply.protocol}, this window {PROTOCOL_VERSION}")
                if isinstance(reply, Failed):
                    self._failure = reply.message
                    continue
                self._load_failed = self._load_failed or isinstance(reply, LoadFailed)
                self._deliver(reply)
        except (wire.WireError, msgspec.ValidationError, msgspec.DecodeError) as error:
            self._failure = f"The engine's messages cannot be read ({error}); restart Batchscope if it was just updated"
            self._signal("SIGKILL")
        self._finish(process)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """After the last message: reap the process, and whatever it had started, and report the end."""
        exit_code = self._reap(process)
        self._commands.put(None)
        stderr_thread = self._threads[-1]
        stderr_thread.join(0.5)
        for stream in (process.stdout, process.stderr if not stderr_thread.is_alive() else None):
            if stream is not None:
                stream.close()
        unasked = not self._closing and not self._load_failed
        self._ended.set()
        if unasked:
            reason = self._failure or _reason(exit_code)
            self._deliver(EngineDied(exit_code, reason, list(self._tail)))

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        if hasattr(os, "waitid"):
            # Its children are ended while the dead leader still holds the group's number: it cannot be another's.
            deadline = time.monotonic() + _REAP_SECONDS
            options = os.WEXITED | os.WNOWAIT | os.WNOHANG
            while time.monotonic() < deadline and os.waitid(os.P_PID, process.pid, options) is None:
                time.sleep(0.005)
            self._signal("SIGKILL")
        try:
            return process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _write(self, process: subprocess.Popen[bytes], commands: queue.SimpleQueue[bytes | None]) -> None:
        assert process.stdin is not None
        # A dead engine: its end is reported by the reader.
        with contextlib.suppress(OSError):
            while (data := commands.get()) is not None:
                wire.write_all(process.stdin.fileno(), data)
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _read_stderr(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        line = b""
        while True:
            try:
                data = os.read(process.stderr.fileno(), 65536)
            except OSError:
                break
            if not data:
                break
            *lines, line = (line + data).split(b"\n")
            line = line[-TAIL_LINE_BYTES:]
            self._tail.extend(_line(text) for text in lines[-TAIL_LINES:])
        if line.strip():
            self._tail.append(_line(line))

    def _signal(self, name: str) -> None:
        """Send a signal to the engine and all it has started."""
        process = self._process
        if process is None or process.returncode is not None:  # once it is reaped, its number may be another's
            return
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, signal.Signals[name])

    def _join_threads(self) -> None:
        current = threading.current_thread()
        for thread in self._threads:
            if thread is not current:
                thread.join(1.0)


def _own_process_group() -> dict[str, Any]:
    """Popen's arguments that keep a terminal's Ctrl+C from the engine: it ends when the window does, not before."""
    if sys.platform == "win32":
        return {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    return {"process_group": 0}


def _line(data: bytes) -> str:
    return data[-TAIL_LINE_BYTES:].decode("utf-8", "replace").rsplit("\r", 1)[-1].rstrip()


_SIGNALS = {
    "SIGKILL": "the system ends a process so when memory runs out",
    "SIGSEGV": "a fault in native code",
    "SIGBUS": "a fault in native code, or a model file that changed while it was in use",
    "SIGILL": "an instruction that this processor does not know",
    "SIGABRT": "native code gave up",
    "SIGTERM": "another program ended it",
}


def _reason(exit_code: int) -> str:
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        hint = _SIGNALS.get(name)
        return f"The engine was ended by {name}" + (f": {hint}." if hint else ".")
    if exit_code == 0:
        return "The engine ended by itself."
    return f"The engine ended with exit code {exit_code}."
