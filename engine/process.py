"""The engine as a process of its own: ``python -m engine.process``, commands on its input, replies on its output.

::

    stdin ──▶ reader thread ──queue──▶ main thread: intake, EngineCore.step() ──queue──▶ writer thread ──▶ stdout
                    │                                                                        │
                    └── end of input: the window is gone, so is this process ◀───────────────┘ nobody reads any more

Whatever is printed by a library goes to the error output: the pipe of messages belongs to this module alone. Nothing
heavy is imported before ``Hello`` has been sent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import queue
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

import psutil

from engine import wire
from engine.config import EngineConfig
from engine.environment import share_cores
from engine.failures import describe, is_out_of_memory, step_failure
from engine.messages import (
    PROTOCOL_VERSION,
    Failed,
    Hello,
    LoadFailed,
    Loading,
    LoadModel,
    Ready,
    Reply,
    Shutdown,
)
from engine.quick_import import quick_import

if TYPE_CHECKING:
    from engine.loader import LoadedEngine

END_GRACE_SECONDS = 0.3
"""How long the main thread may take to end by itself once the window is gone or has asked; it may be in mid-load or
mid-step, where it cannot look."""
FLUSH_SECONDS = 2.0
"""How long the last replies may take to be read before the process ends without that."""
LOADING_INTERVAL_SECONDS = 0.05
"""Shortest time between two progress messages of one stage."""


# The pipes -----------------------------------------------------------------------------------------------------------


class Pipes:
    """Both ends of the wire, each with its thread. Nobody else may write to these descriptors."""

    def __init__(self, read_descriptor: int, write_descriptor: int) -> None:
        self.commands: queue.SimpleQueue[wire.Incoming] = queue.SimpleQueue()
        self._read_descriptor = read_descriptor
        self._write_descriptor = write_descriptor
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="replies", daemon=True)
        self._reader = threading.Thread(target=self._read, name="commands", daemon=True)

    @classmethod
    def take_over(cls) -> Pipes:
        """Move the real standard input and output to descriptors of our own; others get /dev/null and stderr."""
        read_descriptor, write_descriptor = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        return cls(read_descriptor, write_descriptor)

    def start(self) -> None:
        self._writer.start()
        self._reader.start()

    def send(self, *replies: Reply) -> None:
        """Queue replies in order. They are encoded here and now: what they refer to may change with the next step."""
        if replies:
            self._outgoing.put(b"".join(wire.encode(reply) for reply in replies))

    def flush(self, timeout: float) -> None:
        """Wait until everything sent so far is in the pipe, but not longer than ``timeout`` seconds."""
        self._outgoing.put(None)
        self._writer.join(timeout)

    def _write(self) -> None:
        try:
            while (data := self._outgoing.get()) is not None:
                wire.write_all(self._write_descriptor, data)
        except OSError:
            end_process(0)

    def _read(self) -> None:
        code = 0
        try:
            for payload in wire.read_payloads(self._read_descriptor):
                command = wire.read_command(payload)
                if command is None:
                    continue
                self.commands.put(command)
                if isinstance(command, Shutdown):
                    break
            else:
                self.commands.put(Shutdown())
        except wire.WireError as error:
            self.send(Failed(f"The commands cannot be read any more: {error}"))
            self.commands.put(Shutdown())
            code = 1
        time.sleep(END_GRACE_SECONDS)
        end_process(code)


def end_process(code: int) -> NoReturn:
    """End now, from any thread, and with this process whatever it has started (a download)."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    os._exit(code)


# Loading -------------------------------------------------------------------------------------------------------------


class ProgressSender:
    """Turns the loader's progress into ``Loading`` messages: each new stage, then as many as an eye can follow."""

    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes
        self._stage = ""
        self._last = 0.0

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        now = time.perf_counter()
        complete = 0 < total <= done
        if stage == self._stage and not complete and now - self._last < LOADING_INTERVAL_SECONDS:
            return
        self._stage, self._last = stage, now
        self._pipes.send(Loading(stage, done, total))


def load(command: wire.Incoming, pipes: Pipes) -> LoadedEngine | None:
    """Obey the first command. None where nothing could be loaded: the client has been told why."""
    if isinstance(command, wire.BadConfig):
        pipes.send(LoadFailed(command.message, "other"))
        return None
    if not isinstance(command, LoadModel):
        pipes.send(LoadFailed(f"{type(command).__name__} came before LoadModel, the first command", "other"))
        return None
    progress = ProgressSender(pipes)
    progress("Starting the engine")
    try:
        return load_model(command.config, progress)
    except Exception as error:
        pipes.send(load_failure(error))
        return None


def load_model(config: EngineConfig, progress: ProgressSender) -> LoadedEngine:
    with quick_import():
        from engine.loader import load_engine

    return load_engine(config, progress)


def load_failure(error: Exception) -> LoadFailed:
    kind = getattr(error, "kind", None)
    if isinstance(kind, str):
        return LoadFailed(str(error), kind)
    traceback.print_exc()
    if is_out_of_memory(error):
        memory, own = psutil.virtual_memory(), psutil.Process().memory_info().rss
        return LoadFailed(
            f"Memory ran out while the model was loaded ({describe(error)}): it had taken {_gib(own)} of this "
            f"machine's {_gib(memory.total)}, and {_gib(memory.available)} were free. Close other programs, or choose "
            "a smaller model or fewer KV blocks.",
            "memory",
        )
    return LoadFailed(f"The model could not be loaded: {describe(error)}", "other")


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


# The process ---------------------------------------------------------------------------------------------------------


def serve(pipes: Pipes) -> int:
    """Load, then step until the client ends it. Returns the exit code."""
    first = pipes.commands.get()
    if isinstance(first, Shutdown):
        return 0
    loaded = load(first, pipes)
    if loaded is None:
        return 1
    from engine.serving import EngineLoop

    pipes.send(Ready(loaded.info, loaded.core.keyframe()))
    loop = EngineLoop(loaded, pipes.commands, pipes.send)
    try:
        loop.run()
    except Exception as error:
        traceback.print_exc()
        pipes.send(Failed(step_failure(error)))
        return 1
    return 0


def main() -> NoReturn:
    pipes = Pipes.take_over()
    with contextlib.suppress(ValueError):
        # A terminal's Ctrl+C is meant for the window, which ends this process in its own way.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    share_cores(os.environ)
    pipes.start()
    pipes.send(Hello(PROTOCOL_VERSION, os.getpid()))
    code = serve(pipes)
    pipes.flush(FLUSH_SECONDS)
    end_process(code)


if __name__ == "__main__":
    main()
