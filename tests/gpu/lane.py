"""The parent's side: items of work one after the other in a process of their own, and another one when that dies.

What a worker writes, a line of JSON each: ``{"begin": item}``, ``{"figure": …}`` and ``{"fact": [name, value]}`` as
they come, then ``{"end": item, "error": null or a traceback}``; ``{"again": item}`` before it leaves a broken context
behind, where a part of its item is still to be done.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

NO_GPU = 3
"""Exit code of a worker that finds no GPU."""
BROKEN = 4
"""Exit code of a worker that leaves a broken context behind, its item ended."""
_ROOT = Path(__file__).parents[2]
_LOG_LINES = 12
_LEAVING_SECONDS = 20.0
"""From the end of one item to the beginning of the next, or to the end of the process."""


class NoGpuError(Exception):
    """There is no GPU that torch can use; the text says what torch said."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one item ended."""

    item: str
    error: str | None
    """None: it ran to its end. What its figures say is another matter."""
    seconds: float


@dataclass
class Lane:
    """Items for one worker at a time."""

    items: list[str]
    limit: Callable[[str], float]
    """Seconds that an item may take from now on; 0 or less: it is not begun."""
    on_figure: Callable[[dict[str, Any]], None]
    on_outcome: Callable[[Outcome], None]
    rehearsal: bool
    facts: dict[str, Any] = field(default_factory=dict)
    """What earlier items found out and later ones need; a new process is given it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "tests.gpu.worker"])

    def run(self) -> None:
        """Raises NoGpuError where the worker says so."""
        while self.items:
            if self.limit(self.items[0]) <= 0:
                self.on_outcome(Outcome(self.items.pop(0), "not begun: there was no time left", 0.0))
                continue
            self._one_worker()

    def _one_worker(self) -> None:
        """Until it has done all items, or died."""
        reading, writing = os.pipe()
        job = {"items": self.items, "rehearsal": self.rehearsal, "facts": self.facts}
        with tempfile.TemporaryFile("w+") as log:
            worker = subprocess.Popen(
                [*self.command, json.dumps(job), str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                cwd=_ROOT,
                env={**os.environ, **self.environment},
            )
            os.close(writing)
            try:
                self._follow(worker, _lines_of(reading), lambda: _tail(log))
            finally:
                worker.kill()
                worker.wait()

    def _follow(self, worker: subprocess.Popen[bytes], lines: queue.Queue[str | None], log: Callable[[], str]) -> None:
        began, ended, again = time.monotonic(), 0, None
        until = began + self.limit(self.items[0])
        while True:
            try:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                self._end(f"ended after {time.monotonic() - began:.0f} s, its limit\n{log()}", began, again)
                return
            if line is None:
                break
            message = json.loads(line)
            if "begin" in message:
                began = time.monotonic()
                until = began + self.limit(message["begin"])
            elif "figure" in message:
                self.on_figure(message["figure"])
            elif "fact" in message:
                self.facts.update([message["fact"]])
            elif "again" in message:
                again = message["again"]
            else:
                self._end(message["error"], began, again)
                if not self.items:
                    return
                began, ended, again = time.monotonic(), ended + 1, None
                until = began + _LEAVING_SECONDS
        code = worker.wait()
        if code == NO_GPU:
            raise NoGpuError(log())
        if code != BROKEN or ended == 0:
            self._end(f"its process ended with {code}\n{log()}", began, again)

    def _end(self, error: str | None, began: float, again: str | None) -> None:
        item = self.items.pop(0)
        if again is not None:
            self.items.insert(0, again)
        self.on_outcome(Outcome(item, error, time.monotonic() - began))


def _lines_of(reading: int) -> queue.Queue[str | None]:
    """What comes through the pipe, read in a thread; None behind the last."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        with os.fdopen(reading) as pipe:
            for line in pipe:
                if line.endswith("\n"):  # else its writer died in the middle of it
                    lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "".join(log.readlines()[-_LOG_LINES:]).rstrip()
