"""The run file that the engine writes while it serves, where it was asked to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.events import Keyframe
from engine.messages import AddRequest, ModelInfo, Record, RecordingFailed
from engine.recording import RecordingError, RunHeader, RunWriter
from engine.request import branch_id

if TYPE_CHECKING:
    from engine.core import StepResult


class RunLog:
    """Writes to one run file at a time. A file that cannot be written is told once and given up."""

    def __init__(self, send: Callable[[RecordingFailed], None]) -> None:
        self._send = send
        self._writer: RunWriter | None = None

    def open(self, command: Record, config: EngineConfig, info: ModelInfo, keyframe: Keyframe) -> None:
        """Begin a file with the state as it is. ``config``: with the knobs in force."""
        self.close()
        header = RunHeader(config=config, info=info, texts=command.texts)
        try:
            self._writer = RunWriter(command.path, header, limit_bytes=command.limit_bytes, keyframe=keyframe)
        except RecordingError as error:
            self._send(RecordingFailed(str(error)))

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
            self._send(RecordingFailed(str(error)))
