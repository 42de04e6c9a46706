"""A run file beside a run: what cannot be written is told, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.events import Keyframe
from engine.messages import AddRequest
from engine.recording import DEFAULT_LIMIT_BYTES, RecordingError, RunHeader, RunWriter
from engine.request import branch_id

if TYPE_CHECKING:
    from engine.core import StepResult


class RunLog:
    """Writes to one run file at a time. A file that cannot be written is given up; ``failed`` gets the reason, once."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        self._failed = failed
        self._writer: RunWriter | None = None

    @property
    def writes(self) -> bool:
        return self._writer is not None

    def open(
        self, path: str | Path, header: RunHeader, keyframe: Keyframe, limit_bytes: int = DEFAULT_LIMIT_BYTES
    ) -> None:
        """Begin a file with the state as it is. ``header``: with the knobs in force."""
        self.close()
        try:
            self._writer = RunWriter(path, header, limit_bytes=limit_bytes, keyframe=keyframe)
        except RecordingError as error:
            self._failed(str(error))

    def add(self, result: StepResult, keyframe: Callable[[], Keyframe]) -> None:
        """Write a step that has just been taken."""

        def write(writer: RunWriter) -> None:
            if result.record is not None:
                writer.add(result.record, keyframe)
            for output in result.outputs:
                writer.text(branch_id(output.request_id, output.index), "assistant", output.text)

        self._try(write)

    def asked(self, command: AddRequest) -> None:
        """Write what a request asks, where that is text."""

        def write(writer: RunWriter) -> None:
            for message in command.messages or ():
                writer.text(command.request_id, message.role, message.content)
            writer.text(command.request_id, "prompt", command.prompt or "")

        self._try(write)

    def prompt(self, request_id: int, text: str) -> None:
        self._try(lambda writer: writer.text(request_id, "prompt", text))

    def flush(self) -> None:
        """No step may come for a while: let a reader see all that there is."""
        self._try(RunWriter.flush)

    def close(self) -> None:
        self._try(RunWriter.close)
        self._writer = None

    def _try(self, write: Callable[[RunWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except RecordingError as error:
            self._writer = None
            self._failed(str(error))
